"""The agent of configs/agent-calculator, its demonstrator and its data."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.samples.response import Response, Task
from rollout.samples.session import Session
from rollout.samples.tokenizer import Tokenizer
from slimebus.hooks import hooks

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "agent-calculator"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import subprocess

    out = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, str(RECIPE / "make.py"), "--out", str(out)], check=True, timeout=60)
    return out


class Policy:
    """Says one text after another."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self.tokenizer, self.texts, self.seen = tokenizer, list(texts), list[str]()

    async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
        (task,) = tasks
        self.seen.append(self.tokenizer.decode(task.prompt_ids, skip_special_tokens=False))
        assert self.tokenizer.eos_token_id is not None
        ids = np.append(self.tokenizer.encode(self.texts.pop(0)), self.tokenizer.eos_token_id).astype(np.int32)
        return [Response(task=task, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), versions=[(0, len(ids))], text="")]


def session(made: Path, *texts: str, label: str = ">1776") -> tuple[Session, Policy]:
    tokenizer = Tokenizer(made / "model", apply_chat_template=True)
    prompt = [{"role": "user", "content": "37*48"}]
    policy = Policy(tokenizer, *texts)
    task = Task(prompt=prompt, prompt_ids=tokenizer.encode_prompt(prompt), sampling={}, label=label)
    return Session(task, policy, tokenizer), policy  # type: ignore[arg-type]


def hook(name: str) -> Any:
    return hooks.load(f"calculator.py:{name}", base=RECIPE)


@pytest.mark.parametrize(
    ("texts", "answers"),
    [([">12"], []), ([":37*48", ">1776"], ["(1776)"]), ([":37+48", ":1*1", ":2*2", ":3*3"], ["(?)", "(1)", "(4)"])],
)
def test_the_agent_answers_up_to_three_calls(made: Path, texts: list[str], answers: list[str]) -> None:
    session_, policy = session(made, *texts)
    asyncio.run(hook("Agent")().generate(session_))
    assert not policy.texts
    assert [seen.rpartition("<|user|>")[2].partition("<|assistant|>")[0] for seen in policy.seen[1:]] == answers
    (response,) = session_.responses()
    assert response.text == texts[-1]


def test_a_demonstrated_call_trains_both_replies_and_not_the_tools_answer(made: Path) -> None:
    session_, _ = session(made, label=":37*48")
    hook("demonstration")(session_)
    (response,) = session_.responses()
    assert response.loss_mask is not None
    decode = session_.tokenizer.decode
    assert decode(response.token_ids, skip_special_tokens=False) == ":37*48<|end|><|user|>(1776)<|assistant|>>1776<|end|>"
    assert decode(response.token_ids[response.loss_mask == 1], skip_special_tokens=False) == ":37*48<|end|>>1776<|end|>"


def test_a_demonstrator_guesses_mostly_and_no_product_is_in_two_files(made: Path) -> None:
    rows = {name: [json.loads(line) for line in (made / f"{name}.jsonl").read_text().splitlines()] for name in ("sft", "rl", "heldout")}
    prompts = {name: {row["prompt"][0]["content"] for row in found} for name, found in rows.items()}
    assert {name: len(found) for name, found in prompts.items()} == {"sft": 4000, "rl": 3800, "heldout": 256}
    assert len(set.union(*prompts.values())) == 4000 + 3800 + 256
    assert 0.2 < sum(row["label"].startswith(":") for row in rows["sft"]) / 4000 < 0.3
    assert all(row["label"] == f">{product(row['prompt'][0]['content'])}" for row in rows["rl"])


def product(text: str) -> int:
    a, b = text.split("*")
    return int(a) * int(b)

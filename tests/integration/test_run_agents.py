"""Agents of three kinds in one run of real processes: the trainer trains what they said, token by token, and recomputes its logprobs."""

import itertools
import json
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import SHAPE, TEMPLATES, save_tokenizer
from live_run import Run
from openai import OpenAI
from tiny_model import save_model

from rollout.samples.tokenizer import Tokenizer
from slimebus.bus.messages import NO_VERSION
from slimebus.bus.samples import Sample
from slimebus.client.consumer import Consumer

pytestmark = pytest.mark.integration

TURNS, REPLY = 10, 12
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
STYLES = dict(zip("abc", TEMPLATES.values(), strict=True))
"""The template of a conversation, by its first letter."""
TEMPLATE = "".join(f"{{% if messages[0].content[0] == '{letter}' %}}{text}{{% endif %}}" for letter, text in STYLES.items())
SERVER = Path(__file__).parents[1] / "fixtures" / "mcp_server.py"
HOOKS = f"""
import sys
from pathlib import Path

from openai import AsyncOpenAI
from rollout.endpoint import Agent, OutsideAgents
from rollout.tools import McpAgent

class Started(Agent):
    async def run(self, task, base_url, api_key):
        messages = list(task.prompt)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for turn in range({TURNS}):
                stream = await client.chat.completions.create(model="any", messages=messages, tools={TOOLS}, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                messages += [{{"role": "assistant", "content": said}}, {{"role": "tool", "tool_call_id": "1", "content": str(turn)}}]
        return 0.25

class Mcp(McpAgent):
    servers = [[sys.executable, {str(SERVER)!r}]]

    async def generate(self, session):  # a policy of random weights calls no tool
        for turn in range({TURNS}):
            await session.generate(tools=self.tools)
            session.observe(await self.answers([{{"id": "1", "function": {{"name": "add", "arguments": {{"a": turn, "b": 1}}}}}}]))

class Outside(OutsideAgents):
    bind = "127.0.0.1:0"

class Kinds:
    def __init__(self):
        self.kinds = {{"started": Started(), "mcp": Mcp(), "outside": Outside()}}

    async def setup(self):
        for agent in self.kinds.values():
            await agent.setup()

    async def generate(self, session):
        session.metadata["kind"] = session.task.metadata["kind"]
        await self.kinds[session.task.metadata["kind"]].generate(session)

    async def teardown(self):
        for agent in self.kinds.values():
            await agent.teardown()
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A model with bfloat16 weights in the trainer too, and a prompt of each kind in each style."""
    folder = tmp_path / "task"
    save_model(folder / "model", **SHAPE)
    save_tokenizer(folder / "model", TEMPLATE)
    pairs = itertools.product(("started", "mcp", "outside"), STYLES)
    rows = [{"prompt": [{"role": "user", "content": f"{style} begins"}], "metadata": {"kind": kind}} for kind, style in pairs]
    (folder / "rl.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def converse(base_url: str, style: str) -> list[str]:
    """What the policy says in the turns of an unmodified client that somebody else runs."""
    messages: list[Any] = [{"role": "user", "content": f"{style} is mine"}]
    with OpenAI(base_url=base_url, api_key="any", default_headers={"X-Session-Id": style}) as client:
        for turn in range(TURNS):
            reply = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0].message
            messages += [reply, {"role": "user", "content": f"go on, {turn}"}]
    body = json.dumps({"reward": 0.5}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/sessions/{style}/reward", body), timeout=60).close()
    return [reply.content for reply in messages[1::2]]


def turns_of(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0))
    return [tokenizer.decode(sample.tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def test_what_agents_say_is_trained_as_it_was_sampled(tmp_path: Path, task: Path) -> None:
    (tmp_path / "agents.py").write_text(HOOKS)
    changes = {
        "data__prompt_data": [f"{task}/rl.jsonl"],
        "data__rollout_shuffle": False,
        "rollout__num_rollout": 1,
        "rollout__rollout_batch_size": 9,  # all of them in one step: three with the same reward would train nothing
        "rollout__n_samples_per_prompt": 1,
        "rollout__rollout_max_response_len": REPLY,
        "rollout__max_running_groups": 9,
        "rollout__custom_generate_function_path": "agents.py:Kinds",
        "algorithm__advantage_estimator": "reinforce_plus_plus",
        "trainer__save_interval": 0,
    }
    samples: list[Sample] = []

    def read() -> None:
        with Consumer(run.address, name="reader") as reader:
            samples.extend(sample for group in reader.groups() for sample in group.samples)

    with Run(tmp_path, task, **changes) as run:
        run.start("broker")
        reading = threading.Thread(target=read)
        reading.start()
        run.wait_for("a reader", lambda status: status["consumers"])
        run.start("trainer")
        worker = run.start("rollout", name="w1")
        run.wait_for("an endpoint for agents", lambda status: len(re.findall(r"policy at (\S+)", worker.text())) == 2)
        address = re.findall(r"policy at (\S+)", worker.text())[-1]
        said = {style: converse(address, style) for style in STYLES}
        run.complete(1, 9)
        reading.join(30)
        rows = run.rows("trainer")

    (row,) = rows
    assert row["logprob_mismatch_max"] < 1e-4
    assert row["grad_norm"] > 0
    tokenizer = Tokenizer(task / "model", apply_chat_template=True)
    assert sorted(sample.metadata["kind"] for sample in samples) == ["mcp"] * 3 + ["outside"] * 3 + ["started"] * 3
    for sample in samples:
        text, turns = tokenizer.decode(sample.tokens, skip_special_tokens=False), turns_of(sample, tokenizer)
        assert (len(turns), sample.turn) == (TURNS, TURNS - 1)
        versions = np.repeat([version for version, _ in sample.versions], [length for _, length in sample.versions])
        assert ((versions == NO_VERSION) == (sample.loss_mask == 0)).all()
        assert (sample.rollout_logprobs[sample.loss_mask == 1] < 0).all()
        assert not sample.rollout_logprobs[sample.loss_mask == 0].any()
        if sample.metadata["kind"] == "outside":
            assert turns == said[next(style for style in STYLES if f"{style} is mine" in text)]
            assert sample.reward == 0.5
        elif sample.metadata["kind"] == "started":
            assert sample.reward == 0.25

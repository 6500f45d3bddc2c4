"""Ten turns through chat templates of several kinds: the record holds what was sampled, and is what the template would write."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import save_tokenizer

from rollout.samples.response import Response, Task
from rollout.samples.session import Session
from rollout.samples.tokenizer import Tokenizer
from slimebus.bus.errors import UsageError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if no_think %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or '</think>' in m.content) %}"
    "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content }}\n</think>\n\n{{ said }}"
    "{% else %}{{ said }}{% endif %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% for c in m.tool_calls %}\n<tool_call>{{ c.name }}</tool_call>{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "[{{ m.role }}]{% if m.tool_calls %}{{ m.tool_calls[0].name }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
UPPER = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}"


def tokenizer(folder: Path, template: str, **kwargs: Any) -> Tokenizer:
    save_tokenizer(folder, template)
    return Tokenizer(folder, apply_chat_template=True, template_kwargs=kwargs)


class Speaker:
    """Says the n-th text, and ends it by the end token."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], *, reason: str = "stop") -> None:
        self.tokenizer, self.texts, self.reason = tokenizer, texts, reason
        self.sampled: list[list[int]] = []

    async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
        text = self.texts[len(self.sampled)]
        ids = self.tokenizer.encode(text + ("<|im_end|>" if self.reason == "stop" else ""))
        self.sampled.append(ids.tolist())
        ones = np.ones(len(ids), np.float32)
        return [Response(task=tasks[0], token_ids=ids, logprobs=-ones, versions=[(3, len(ids))], text="", finish_reason=self.reason)]


def talk(made: Tokenizer, replies: list[str], *, follow: str = "user", reason: str = "stop") -> tuple[Session, Speaker]:
    """A conversation of so many turns, each answered by a message of this role."""
    prompt = [{"role": "user", "content": "question 0"}]
    speaker = Speaker(made, replies, reason=reason)
    session = Session(Task(prompt=prompt, prompt_ids=made.encode_prompt(prompt), sampling={}), speaker, made)  # type: ignore[arg-type]

    async def run() -> None:
        for number in range(len(replies)):
            await session.generate()
            session.observe([{"role": follow, "content": f"{follow} {number}"}])

    asyncio.run(run())
    return session, speaker


REPLIES = [f"<think>why {n}</think>answer {n}" for n in range(10)]


@pytest.mark.parametrize("template", [CHATML, QWEN3])
@pytest.mark.parametrize("follow", ["user", "tool"])
def test_ten_turns_are_recorded_as_sampled_and_each_token_belongs_to_one_of_them(tmp_path: Path, template: str, follow: str) -> None:
    made = tokenizer(tmp_path, template)
    session, speaker = talk(made, REPLIES, follow=follow)
    (response,) = session.responses()
    assert response.loss_mask is not None
    assert response.token_ids[response.loss_mask == 1].tolist() == list(itertools.chain(*speaker.sampled))
    between = f"\n<|im_start|>{follow}\n{follow} 0<|im_end|>\n<|im_start|>assistant\n"
    text = made.decode(response.token_ids, skip_special_tokens=False)
    assert text.startswith(f"{REPLIES[0]}<|im_end|>{between}{REPLIES[1]}<|im_end|>\n")
    assert text.count("<|im_end|>") == 19


def test_where_the_template_keeps_replies_the_record_is_its_rendering(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, CHATML)
    session, _ = talk(made, REPLIES)
    whole = made.encode_prompt(session.messages[:-1])
    record = session.token_ids
    assert record.tolist() == whole[: len(record)].tolist()
    assert made.decode(whole[len(record) :], skip_special_tokens=False) == "\n<|im_start|>assistant\n"


def test_a_reply_that_was_cut_off_gets_its_end_as_context(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, CHATML)
    session, _ = talk(made, ["half", "more"], reason="length")
    (response,) = session.responses()
    assert response.loss_mask is not None
    observed = response.token_ids[response.loss_mask == 0]
    assert made.decode(observed, skip_special_tokens=False) == "<|im_end|>\n<|im_start|>user\nuser 0<|im_end|>\n<|im_start|>assistant\n"


def test_settings_of_the_template_reach_it(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, CHATML, no_think=True)
    session, _ = talk(made, ["a", "b"])
    text = made.decode(session.token_ids, skip_special_tokens=False)
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2


def test_a_template_that_wants_a_call_before_a_tools_answer_gets_the_parsed_one(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, STRICT)
    prompt = [{"role": "user", "content": "q"}]
    speaker = Speaker(made, ["add", "done"])
    session = Session(Task(prompt=prompt, prompt_ids=made.encode_prompt(prompt), sampling={}), speaker, made)  # type: ignore[arg-type]

    async def run() -> None:
        await session.generate()
        session.messages[-1] = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
        await session.generate([*session.messages, {"role": "tool", "content": "7"}])

    asyncio.run(run())
    assert (
        made.decode(session.token_ids, skip_special_tokens=False)
        == "[user]q<|im_end|>[assistant]add<|im_end|>[tool]7<|im_end|>[assistant]done<|im_end|>"
    )
    assert len(session.responses()) == 1


def test_a_template_that_writes_replies_otherwise_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the chat template changes a reply .* give generate.. the whole context"):
        talk(tokenizer(tmp_path, UPPER), ["a", "b"])

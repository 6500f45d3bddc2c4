"""The agent, and the demonstrator that it is warmed up with. A reply `:37*48` asks the calculator, `>1776` is the answer."""

import re
from typing import Any

MOST_CALLS = 3
PRODUCT = re.compile(r":(\d{1,4})\*(\d{1,4})")


class Agent:
    """Lets the policy ask the calculator as often as it likes, up to three times, and ends with its answer."""

    async def generate(self, session: Any) -> None:
        """The samples' metadata counts the calls."""
        for calls in range(MOST_CALLS + 1):
            session.metadata["calls"] = calls
            reply = await session.generate()
            if not reply.text.startswith(":") or reply.finish_reason == "length":
                return
            session.observe([{"role": "tool", "content": calculate(reply.text)}])


def calculate(call: str) -> str:
    """The product, or `?` for what is none."""
    found = PRODUCT.fullmatch(call)
    return str(int(found[1]) * int(found[2])) if found else "?"


def demonstration(session: Any) -> None:
    """The label as if it had been sampled; behind a call the tool's answer, and that copied."""
    first = session.task.label
    say(session, first)
    if first.startswith(":"):
        session.observe([{"role": "tool", "content": calculate(first)}])
        say(session, f">{calculate(first)}")


def say(session: Any, text: str) -> None:
    """A reply with its end token, trained."""
    session.observe([*session.tokenizer.encode(text).tolist(), session.tokenizer.eos_token_id], is_trained=True)

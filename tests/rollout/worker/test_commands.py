"""What a worker is told to do is answered, whatever becomes of it; an engine that is attached by URL belongs to one worker of a host."""

import asyncio
from typing import Any

import pytest

from rollout.engines.engine import claim
from rollout.worker.worker import Commands
from slimebus.bus.errors import UsageError
from slimebus.bus.messages import Command, CommandReply


class Pool:
    """Attaches with a real claim; `failure` is raised behind it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    async def attach(self, url: str) -> str:
        (await claim(url)).close()
        if self.failure:
            raise self.failure
        return "attached"


def outcome_of(url: str, failure: Exception | None = None) -> CommandReply:
    pool: Any = Pool(failure)

    async def told() -> CommandReply:
        answered = asyncio.Event()
        commands = Commands(pool, drain=lambda: None, on_outcome=answered.set)
        commands.start_commands([Command(key="k", action="attach", url=url)])
        await asyncio.wait_for(answered.wait(), 10)
        assert not commands._running
        return commands.outcomes["k"]

    return asyncio.run(told())


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[", "http://h:abc", f"http://{'a' * 70}"])
def test_what_is_no_address_is_refused_in_words(url: str) -> None:
    outcome = outcome_of(url)
    assert outcome.failed
    assert "expected http://HOST:PORT" in outcome.text


def test_a_command_that_fails_in_any_way_is_answered() -> None:
    assert outcome_of("http://127.0.0.1:7") == CommandReply(done=True, text="attached")
    assert outcome_of("http://127.0.0.1:7", RuntimeError("no such thing")) == CommandReply(done=True, failed=True, text="no such thing")


def test_an_engine_is_one_workers_however_its_address_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.engine.CLAIM_WAIT_S", 0.0)
    first, other = asyncio.run(claim("http://127.0.0.1:7")), asyncio.run(claim("http://127.0.0.1:8"))
    with first, other, pytest.raises(UsageError, match=r"engine at http://localhost:7/ is another worker's"):
        asyncio.run(claim("http://localhost:7/"))
    asyncio.run(claim("http://localhost:7")).close()

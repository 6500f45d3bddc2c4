"""An engine that is attached by URL belongs to one worker of a host."""

import asyncio

import pytest

from rollout.engines.engine import claim
from slimebus.bus.errors import UsageError


def test_an_engine_is_one_workers_however_its_address_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.engine.CLAIM_WAIT_S", 0.0)
    first, other = asyncio.run(claim("http://127.0.0.1:7")), asyncio.run(claim("http://127.0.0.1:8"))
    with first, other, pytest.raises(UsageError, match=r"engine at http://localhost:7/ is another worker's"):
        asyncio.run(claim("http://localhost:7/"))
    asyncio.run(claim("http://localhost:7")).close()

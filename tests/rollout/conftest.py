"""Rewards that fail are tried again at once here."""

import pytest


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.worker.groups.REWARD_PAUSES_S", (0.0, 0.0))

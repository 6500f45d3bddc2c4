"""What a publishing rank checks and follows beside its publisher."""

import threading

import pytest

from slimebus.bus.errors import ConfigError
from slimebus.bus.security.pull_keyring import PullKeyring
from trainer.publish.publication import check_reach


def test_a_rank_on_another_host_must_not_serve_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "0")
    check_reach("tcp://127.0.0.1:0")
    monkeypatch.setenv("GROUP_RANK", "1")
    check_reach("tcp://0.0.0.0:5600")
    with pytest.raises(ConfigError, match=r"weights.weights_bind tcp://127.0.0.1:0 can only be reached from this host"):
        check_reach("tcp://127.0.0.1:0")


def test_a_rank_without_a_heartbeat_keeps_asking_whom_it_lets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoKeys:
        credentials = None

    asked = threading.Semaphore(0)
    monkeypatch.setattr(PullKeyring, "refresh", lambda self: asked.release())
    pullers = PullKeyring(NoKeys())  # type: ignore[arg-type]
    pullers.follow(0.01)
    assert all(asked.acquire(timeout=10) for _ in range(3))
    pullers.close()
    while asked.acquire(timeout=0.2):
        pass
    assert not asked.acquire(timeout=0.1), "closed, it asks no more"

"""Where a weight server is reached by others."""

import gc
import threading

import pytest

from slimebus.security import exposure
from slimebus.security.exposure import OUTSIDE, advertised, own_host
from slimebus.weights.pull.connection import WeightServerConnection


def test_the_own_address_is_the_one_on_the_way_to_the_peer() -> None:
    assert own_host("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert own_host("tcp://localhost:5555") == "127.0.0.1"
    assert own_host("tcp://[::1]:5555") == "[::1]"


def test_an_address_bound_everywhere_is_told_by_the_way_to_the_broker_unless_a_host_is_given() -> None:
    broker = "tcp://127.0.0.2:5555"
    assert advertised("tcp://0.0.0.0:7000", "node3", broker) == "tcp://node3:7000"
    assert advertised("tcp://10.0.0.4:7000", "", broker) == "tcp://10.0.0.4:7000"


def test_beside_the_broker_an_address_bound_everywhere_is_told_by_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on other machines would look for 127.0.0.1 at home."""
    ways = {"tcp://127.0.0.1:5555": "127.0.0.1", "tcp://10.0.0.9:5555": "10.0.0.4", OUTSIDE: "192.168.0.4"}

    def way(peer: str) -> str:
        if peer not in ways:
            raise OSError("Network is unreachable")
        return ways[peer]

    monkeypatch.setattr(exposure, "own_host", way)
    assert advertised("tcp://0.0.0.0:7000", "", "tcp://10.0.0.9:5555") == "tcp://10.0.0.4:7000"
    assert advertised("tcp://0.0.0.0:7000", "", "tcp://127.0.0.1:5555") == "tcp://192.168.0.4:7000"
    del ways[OUTSIDE]
    assert advertised("tcp://0.0.0.0:7000", "", "tcp://127.0.0.1:5555") == "tcp://127.0.0.1:7000"


def test_a_link_that_nobody_closed_holds_up_no_thread_that_collects_it() -> None:
    loop = [WeightServerConnection("tcp://127.0.0.1:9", name="left", stall_s=1.0)]
    loop.append(loop)  # type: ignore[arg-type]
    del loop
    collector = threading.Thread(target=gc.collect, daemon=True)
    collector.start()
    collector.join(10)
    assert not collector.is_alive()

"""Where a weight server is reached by others."""

from slimebus.weights.link import advertised, own_host


def test_the_own_address_is_the_one_on_the_way_to_the_peer() -> None:
    assert own_host("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert own_host("tcp://localhost:5555") == "127.0.0.1"
    assert own_host("tcp://[::1]:5555") == "[::1]"


def test_an_address_bound_everywhere_is_told_by_the_way_to_the_broker_unless_a_host_is_given() -> None:
    broker = "tcp://127.0.0.1:5555"
    assert advertised("tcp://0.0.0.0:7000", "", broker) == "tcp://127.0.0.1:7000"
    assert advertised("tcp://[::]:7000", "", "tcp://[::1]:5555") == "tcp://[::1]:7000"
    assert advertised("tcp://0.0.0.0:7000", "node3", broker) == "tcp://node3:7000"
    assert advertised("tcp://10.0.0.4:7000", "", broker) == "tcp://10.0.0.4:7000"

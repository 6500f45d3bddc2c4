"""Where a worker that passes weights on is reached."""

from rollout.relay import own_host


def test_the_own_address_is_the_one_on_the_way_to_the_peer() -> None:
    assert own_host("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert own_host("tcp://localhost:5555") == "127.0.0.1"
    assert own_host("tcp://[::1]:5555") == "[::1]"

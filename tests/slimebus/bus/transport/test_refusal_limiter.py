"""A peer that sends nothing but nonsense is not listened to for a while; nobody else is affected."""

from slimebus.bus.transport.server import MAX_PEERS, MAX_REFUSALS, RefusalLimiter


def test_a_peer_refused_too_often_is_not_listened_to_until_the_window_ends() -> None:
    now = [0.0]
    limiter = RefusalLimiter(lambda: now[0])
    assert [limiter.refused(b"evil") for _ in range(MAX_REFUSALS + 1)] == [False] * (MAX_REFUSALS - 1) + [True, False]
    assert limiter.is_silenced(b"evil")
    assert not limiter.is_silenced(b"good")
    now[0] = 5.1
    assert not limiter.is_silenced(b"evil")
    assert not limiter.refused(b"evil"), "it begins anew"


def test_a_refusal_now_and_then_is_forgiven() -> None:
    now = [0.0]
    limiter = RefusalLimiter(lambda: now[0])
    for second in range(0, 100, 4):
        now[0] = float(second)
        for _ in range(MAX_REFUSALS // 2 - 1):
            limiter.refused(b"good")
        assert not limiter.is_silenced(b"good")


def test_peers_that_come_and_go_do_not_grow_the_table() -> None:
    limiter = RefusalLimiter(lambda: 0.0)
    for i in range(2 * MAX_PEERS):
        limiter.refused(b"%d" % i)
    assert len(limiter._refusals) <= MAX_PEERS

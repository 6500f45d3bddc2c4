"""A peer that sends nothing but nonsense is not listened to for a while; nobody else is affected."""

from slimebus.transport.patience import Patience


def test_a_peer_refused_too_often_is_not_listened_to_until_the_window_ends() -> None:
    now = [0.0]
    patience = Patience(limit=3, window_s=5.0, clock=lambda: now[0])
    assert [patience.refused(b"evil") for _ in range(4)] == [False, False, True, False]
    assert patience.is_lost_with(b"evil")
    assert not patience.is_lost_with(b"good")
    now[0] = 5.1
    assert not patience.is_lost_with(b"evil")
    assert not patience.refused(b"evil"), "it begins anew"


def test_a_refusal_now_and_then_is_forgiven() -> None:
    now = [0.0]
    patience = Patience(limit=3, window_s=5.0, clock=lambda: now[0])
    for second in range(0, 100, 4):
        now[0] = float(second)
        patience.refused(b"good")
        assert not patience.is_lost_with(b"good")


def test_peers_that_come_and_go_do_not_grow_the_table() -> None:
    patience = Patience(limit=3, window_s=1e9, max_peers=10, clock=lambda: 0.0)
    for i in range(1000):
        patience.refused(b"%d" % i)
    assert len(patience._refusals) <= 10

"""What a role may do is said for every message, and for nothing else."""

from slimebus.bus import messages as m
from slimebus.security.roles import JOINS_AS, MAY, ROLES, SENDERS
from slimebus.weights import messages as w

REQUESTS = {m.wire_name(cls) for cls in (*m.REQUESTS, w.ManifestRequest, w.ChunkRequest)}


def test_every_request_may_be_sent_by_some_role_and_every_permission_is_a_request() -> None:
    assert set().union(*MAY.values()) == REQUESTS


def test_only_a_trainer_changes_the_timeline_and_only_workers_make_samples() -> None:
    only = {"trainer": ("commit", "resume"), "rollout": ("put", "lease"), "client": ("push", "set", "evaluate")}
    assert SENDERS["keys"] == ("rollout", "trainer")
    assert all(SENDERS[what] == (role,) for role, requests in only.items() for what in requests)
    assert MAY["viewer"] == {"status"}


def test_nobody_joins_as_trainer_or_worker_with_another_key() -> None:
    for joined in ("trainer", "rollout", "consumer"):
        assert {role for role in ROLES if joined in JOINS_AS[role]} == {joined}

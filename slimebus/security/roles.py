"""What the holder of a key of each role may ask for. What is not listed is refused.

rollout    lease, put, give back; pull weights, and learn the allow-list to pass them on
trainer    resume, batch, fetch, reject, commit, publish, finish; learn the allow-list; pull weights
client     a person or a tool: evaluate, change settings, push prompts, change the buffer, command workers
consumer   read groups, put late fields; pull weights
viewer     look at the status
"""

MEMBERSHIP = frozenset({"hello", "heartbeat", "goodbye", "status"})
"""Every role but the viewer, who has no name in the run, may join, be alive, leave and look."""

PULL = frozenset({"manifest_request", "chunk_request"})

MAY: dict[str, frozenset[str]] = {
    "rollout": MEMBERSHIP | PULL | {"lease", "put", "give_back", "keys"},
    "trainer": MEMBERSHIP | PULL | {"resume", "publish", "batch", "fetch", "reject", "commit", "finish", "keys"},
    "client": MEMBERSHIP | {"evaluate", "set", "push", "edit", "import", "command"},
    "consumer": MEMBERSHIP | PULL | {"read", "put_fields"},
    "viewer": frozenset({"status"}),
}
"""Role of a key -> message types that it may send."""

SENDERS = {what: tuple(role for role, may in MAY.items() if what in may) for what in sorted(set().union(*MAY.values()))}
"""Message type -> roles that may send it."""

ROLES = tuple(MAY)

JOINS_AS: dict[str, frozenset[str]] = {role: frozenset({role, "client"}) if role != "viewer" else frozenset() for role in ROLES}
"""Role of a key -> roles that its hello may name. Whoever joins as a client gains nothing by it: the key's role decides."""

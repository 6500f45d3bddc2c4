"""What the holder of a key of each role may ask for. What is not listed is refused.

rollout    lease, put, give back; pull weights, and learn the allow-list to pass them on
trainer    resume, batch, fetch, commit, publish, finish; learn the allow-list; pull weights
client     a person or a tool: evaluate, change settings, push prompts, change the buffer
consumer   read groups, put late fields; pull weights
viewer     look at the status
"""

MEMBERSHIP = frozenset({"hello", "heartbeat", "goodbye", "status"})
"""Every role may join, be alive, leave and look."""

PULL = frozenset({"manifest_request", "chunk_request"})

MAY: dict[str, frozenset[str]] = {
    "rollout": MEMBERSHIP | PULL | {"lease", "put", "give_back", "keys"},
    "trainer": MEMBERSHIP | PULL | {"resume", "publish", "batch", "fetch", "commit", "finish", "keys"},
    "client": MEMBERSHIP | {"evaluate", "set", "push", "edit", "import"},
    "consumer": MEMBERSHIP | PULL | {"read", "put_fields"},
    "viewer": MEMBERSHIP,
}
"""Role of a key -> message types that it may send."""

ROLES = tuple(MAY)

JOINS_AS: dict[str, frozenset[str]] = {role: frozenset({role, "client"} - {"viewer"}) for role in ROLES}
"""Role of a key -> roles that its hello may name. Whoever joins as a client gains nothing by it: the key's role decides."""

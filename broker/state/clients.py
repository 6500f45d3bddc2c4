"""Who takes part: joining, epochs, fencing, silence.

Each joining process gets an epoch that rises over the whole run. A request with an epoch that is no longer the newest of its
name is refused as `fenced`; so is every trainer but the newest, whatever its name.
"""

from collections.abc import Collection

from broker.state import bounds, evaluation, hedging
from broker.state.effects import Event
from broker.state.groups import EVAL, Group
from broker.state.records import Client
from broker.state.table import State
from slimebus import messages as m
from slimebus import protocol
from slimebus.envelope import error_reply
from slimebus.errors import Fenced, ProtocolError, SlimebusError
from slimebus.messages import NO_VERSION, PROTOCOL_VERSION

ROLES = ("rollout", "trainer", "consumer", "client")
NEEDS_ROLE: dict[type[m.Message], str] = {
    **dict.fromkeys((m.Lease, m.Put, m.GiveBack), "rollout"),
    **dict.fromkeys((m.Read, m.PutFields), "consumer"),
    **dict.fromkeys((m.Resume, m.Publish, m.Batch, m.Fetch, m.Commit, m.Finish), "trainer"),
    m.Push: "client",
}
MAX_NAME_CHARS = 128
MAX_FORMER = 16
SILENT_BEATS = 3
FORGET_S = 3600.0
"""A gone client is forgotten after this long; should it come back, it joins anew."""


def check_run(state: State, event: Event) -> None:
    """Raise SlimebusError `wrong_run` for a message of another run."""
    if event.run == state.meta.run:
        return
    asks_first = m.Hello | m.Status | m.Evaluate | m.Set | m.Edit | m.Import  # these come before anyone knows the run
    if event.run or not isinstance(event.message, asks_first):
        raise SlimebusError(
            f"{event.sender[:64]!r} speaks of run {event.run[:64]!r}, this broker serves run {state.meta.run!r}; check the address",
            code="wrong_run",
        )


def sender_of(state: State, event: Event, now: float) -> Client:
    """The client that speaks. Raises SlimebusError: `fenced`, `not_joined` or `role`."""
    client = state.clients.get(event.sender)
    if client is None or event.epoch > client.epoch:
        raise SlimebusError(f"{event.sender[:64]!r} has not joined this broker; say hello first", code="not_joined")
    if event.key != client.key:
        _refuse_other_key(event, client)
    if event.epoch < client.epoch or client.is_fenced:
        raise Fenced(f"a newer {client.role} has taken the place of {event.sender!r} (epoch {event.epoch}); stop this process")
    needed = NEEDS_ROLE.get(type(event.message))
    if needed is not None and client.role != needed:
        raise SlimebusError(f"{event.sender!r} joined as {client.role}; only a {needed} may ask for this", code="role")
    heard(state, client, now)
    return client


def check_is_client(state: State, event: Event, what: str) -> None:
    """Raise SlimebusError `role` for a sender that joined as anything else: it may not change this."""
    known = state.clients.get(event.sender)
    if known is not None and known.role != "client":
        raise SlimebusError(f"{event.sender!r} joined as {known.role}; only a client may change {what}", code="role")


def heard(state: State, client: Client, now: float) -> None:
    """A sign of life."""
    client.heard_at, client.is_gone = now, False
    state.timers.set(("client", client.name), now + state.rules.client_timeout_s)


def welcome(state: State, client: Client, hello: m.Hello, hints: str, max_message_bytes: int) -> m.Welcome:
    """What a client must know to take part."""
    meta = state.meta
    return m.Welcome(
        run=meta.run,
        epoch=client.epoch,
        heartbeat_s=state.rules.heartbeat_s,
        lineage=meta.lineage,
        version=meta.version,
        publishers=meta.publishers,
        digest=meta.digest,
        hints=hints,
        max_message_bytes=max_message_bytes,
        protocol=min(hello.protocol, PROTOCOL_VERSION),
    )


def join(state: State, event: Event, hello: m.Hello, now: float) -> Client:
    """Take in a client; the same instance keeps its epoch, another of the same name takes the place of the older one."""
    _check_hello(event, hello)
    known = state.clients.get(event.sender)
    if known is not None and (hello.instance in known.former or (known.is_fenced and known.instance == hello.instance)):
        raise Fenced(f"a newer process has taken the place of this {event.sender!r}; stop this one")
    _check_key(state, event, hello, known)
    _check_born(state, hello, known)
    if known is not None and known.instance == hello.instance and known.role == hello.role and known.key == event.key:
        heard(state, known, now)
        return known
    _make_room(state, known)
    former = [] if known is None else [*known.former, known.instance][-MAX_FORMER:]
    if known is not None:
        state.note(f"{event.sender} was restarted; its older process is fenced")
        leave(state, known, "its worker was restarted", has_failed=True)
    client = Client(
        name=event.sender,
        role=hello.role,
        epoch=state.meta.next_epoch,
        instance=hello.instance,
        former=former,
        born=hello.born,
        key=event.key,
    )
    state.meta.next_epoch += 1
    state.clients[client.name] = client
    if client.role == "trainer":
        _fence_other_trainers(state, client)
    if client.role != "client":
        state.had_members = True
        state.pace.num_joined += client.role != "consumer"
        state.changed("clients", client.name)
        state.note(f"{client.role} {client.name} joined (epoch {client.epoch})")
    heard(state, client, now)
    return client


def _make_room(state: State, known: Client | None) -> None:
    """Of more names than there may be, those that are gone are forgotten first. Raises SlimebusError `busy` when all are alive."""
    if known is not None or len(state.clients) < state.rules.max_clients:
        return
    for client in [c for c in state.clients.values() if c.is_gone and not c.is_fenced]:
        _forget(state, client)
    if len(state.clients) >= state.rules.max_clients:
        raise bounds.hit(state, "max_clients", f"{len(state.clients)} processes have joined")


def _refuse_other_key(event: Event, client: Client) -> None:
    if not event.key or not client.key:
        raise SlimebusError(f"{event.sender!r} joined before this broker had its keys; say hello again", code="not_joined")
    raise SlimebusError(
        f"{event.sender!r} joined with another key than {event.key!r}; say hello under a name of your own", code="forbidden"
    )


def _check_key(state: State, event: Event, hello: m.Hello, known: Client | None) -> None:
    """A name belongs to the key that joined under it while it is heard. Among trainers the newest takes over, whatever its key."""
    if known is None or known.key == event.key or known.is_gone or known.is_fenced or known.role == hello.role == "trainer":
        return
    if not known.key or not event.key:  # one of both is from a time when the broker had no keys
        return
    raise SlimebusError(
        f"the name {event.sender!r} belongs to the key {known.key!r} while its process is alive; choose another name (--worker-name)",
        code="forbidden",
    )


def expel(state: State, keys: Collection[str]) -> None:
    """Take out everyone who joined with one of these keys: they may speak no more."""
    for client in [c for c in state.clients.values() if c.key in keys]:
        leave(state, client, "its key was revoked")
        for step in [step for step, parked in state.parked_batches.items() if parked.client == client.name]:
            del state.parked_batches[step]
            state.timers.cancel(("parked batch", step))
        _forget(state, client)
        state.note(f"{client.role} {client.name} is out: its key {client.key} was revoked", is_warning=True)


def _check_born(state: State, hello: m.Hello, known: Client | None) -> None:
    """Refuse a process that started before the one whose place it would take: its hello is a late one."""
    rivals = [c for c in state.clients.values() if c.role == hello.role == "trainer" and not c.is_fenced]
    for rival in [*rivals, *([] if known is None else [known])]:
        if 0 < hello.born < rival.born and rival.instance != hello.instance:
            raise Fenced(
                f"{rival.role} {rival.name!r} started {rival.born - hello.born:.1f} s after this one and has its place; stop this one "
                "(or set the clocks of both machines)"
            )


def _check_hello(event: Event, hello: m.Hello) -> None:
    protocol.choose(hello.oldest, hello.protocol, who=repr(event.sender[:64]), their_release=hello.release)
    if hello.role not in ROLES:
        raise ProtocolError(f"hello: role {hello.role[:64]!r}; expected one of {', '.join(ROLES)}")
    if not 0 < len(event.sender) <= MAX_NAME_CHARS or not 0 < len(hello.instance) <= MAX_NAME_CHARS:
        raise ProtocolError(f"hello: sender and instance must have 1 to {MAX_NAME_CHARS} characters")


def _fence_other_trainers(state: State, newest: Client) -> None:
    if not 0 < newest.born <= state.meta.finisher_born:  # else a late hello: its process finished the run, or ended before that
        state.meta.finishing, state.finished_said = False, False  # a trainer that joins has more to train, or will finish again
    for client in state.clients.values():
        if client.role == "trainer" and client is not newest and not client.is_fenced:
            client.is_fenced = True
            state.changed("clients", client.name)
            state.note(f"trainer {client.name} is fenced: {newest.name} has taken its place", is_warning=True)
    for step, parked in state.parked_batches.items():
        state.timers.cancel(("parked batch", step))
        state.reply(parked.to, fenced_error(parked.client))
    state.parked_batches.clear()


def fenced_error(name: str) -> m.Message:
    """The answer to a request that waits while its sender is fenced."""
    return error_reply(Fenced(f"a newer process has taken the place of {name!r}; stop this one"))


def heartbeat(state: State, client: Client, beat: m.Heartbeat, now: float) -> m.HeartbeatReply:
    """Extend the listed leases and answer with the truth."""
    client.state, client.lineage, client.serving = beat.state[:64], beat.lineage, beat.serving
    client.metrics = dict(list(beat.metrics.items())[:64])
    lost = [lease for lease in beat.leases if not _extend(state, client, lease, now)]
    meta = state.meta
    return m.HeartbeatReply(
        lineage=meta.lineage, version=meta.version, publishers=meta.publishers, digest=meta.digest, lost=lost, finished=state.is_finished
    )


def _extend(state: State, client: Client, lease: int, now: float) -> bool:
    group = state.groups.by_lease.get(lease)
    if group is None or group.holder_of(lease) != client.name:
        return False
    state.lease_deadlines[lease] = now + state.rules.lease_s
    state.timers.set(("lease", lease), now + state.rules.lease_s)
    return True


def keep_alive(state: State, event: Event, leases: list[int], now: float) -> bool:
    """Extend what a heartbeat lists and decide nothing; False for a sender that has no say."""
    client = state.clients.get(event.sender)
    if client is None or client.epoch != event.epoch or client.is_fenced or event.run != state.meta.run:
        return False
    heard(state, client, now)
    for lease in leases:
        _extend(state, client, lease, now)
    return True


def leave(state: State, client: Client, reason: str, *, has_failed: bool = False) -> None:
    """Take back what a client holds and waits for. has_failed: it died, maybe of one of its groups, so each attempt counts."""
    for group in state.groups.leased_by(client.name):
        if not hedging.end_one(state, group, group.lease_of(client.name)[0], reason, counts=has_failed):
            take_back(state, group, reason, has_failed=has_failed)
    for key in [key for key in state.parked_leases if key[0] == client.name]:
        del state.parked_leases[key]
        state.timers.cancel(("parked lease", *key))
    if state.parked_reads.pop(client.name, None) is not None:
        state.timers.cancel(("parked read", client.name))


def take_back(state: State, group: Group, reason: str, *, has_failed: bool) -> None:
    """End the only lease of a group without samples: another attempt. has_failed: this one counts."""
    if group.kind == EVAL:
        evaluation.retry(state, group, reason, counts=has_failed)
    elif has_failed:
        state.fail(group, reason)
    else:
        state.requeue(group, reason)


def goodbye(state: State, event: Event) -> m.Ok:
    """Let a client go. One that is unknown or fenced is let go too."""
    client = state.clients.get(event.sender)
    if client is not None and client.epoch == event.epoch and client.key == event.key and not client.is_fenced:
        leave(state, client, "its worker left")
        _forget(state, client)
        if client.role != "client":
            state.note(f"{client.role} {client.name} left")
    return m.Ok()


def silent(state: State, name: str, now: float) -> None:
    """A client was silent for its timeout: say so once, forget it much later."""
    client = state.clients.get(name)
    if client is None:
        return
    silence_s = now - client.heard_at
    if client.role == "client" or silence_s >= FORGET_S + state.rules.client_timeout_s:
        if not client.is_fenced:
            _forget(state, client)
        return
    if not client.is_gone:
        client.is_gone, client.serving = True, NO_VERSION
        state.note(f"{client.role} {client.name} has been silent for {silence_s:.0f} s", is_warning=True)
    state.timers.set(("client", name), client.heard_at + FORGET_S + state.rules.client_timeout_s)


def _forget(state: State, client: Client) -> None:
    del state.clients[client.name]
    state.timers.cancel(("client", client.name))
    if client.role != "client":
        state.changed("clients", client.name)


def is_present(client: Client) -> bool:
    """True for a client that is heard and has a say."""
    return not client.is_gone and not client.is_fenced


def is_silent(state: State, client: Client, now: float) -> bool:
    """True when a client has missed its last heartbeats."""
    return now - client.heard_at > SILENT_BEATS * state.rules.heartbeat_s


def has_everyone_left(state: State) -> bool:
    """True when no worker and no trainer takes part any more."""
    return not any(is_present(c) for c in state.clients.values() if c.role in ("rollout", "trainer"))

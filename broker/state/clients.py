"""Who takes part: joining, epochs, fencing, silence.

Each joining process gets an epoch that rises over the whole run. It gets none while a living process holds its place, the name or, of a
trainer, the run, unless it says `take_over`. A holder lives while its connection stands and it is heard; so a newcomer waits for a sign:

    hello -> the holder's connection is gone, or it was silent for SILENT_BEATS -> welcome
          -> it was heard after the newcomer's first hello                      -> name_in_use
          -> neither                                                            -> name_in_doubt: ask again

A hello alone fences nobody, for it may have been on its way while its process ended: a process takes the place of an older one of its
name with its first request under its own epoch, which only a living one can know. The older one's requests are then `fenced`; so are
those of every older trainer, of any name, once a newer one resumes.
"""

import itertools
import math
from collections.abc import Collection, Iterator

import msgspec

from broker.state import evaluation, transitions
from broker.state.broker_state import State
from broker.state.effects import Event
from broker.state.groups import EVAL, Group
from broker.state.records import ClientRecord
from slimebus.bus import messages as m
from slimebus.bus import protocol
from slimebus.bus.envelope import check_name, error_reply, one_line
from slimebus.bus.errors import ConfigError, Fenced, ProtocolError, SlimebusError
from slimebus.bus.messages import NO_VERSION, PROTOCOL_VERSION
from slimebus.bus.protocol import MAX_RELEASE_CHARS
from slimebus.security.roles import SENDERS

ROLES = ("rollout", "trainer", "consumer", "client")
WITHOUT_HELLO = frozenset({m.Hello, m.Goodbye, m.Status, m.Evaluate, m.Set, m.Edit, m.Import, m.Command})
"""Requests of anybody; a sender that has joined must be of a role that may send them all the same."""
ABLE: dict[type[m.Message], tuple[str, ...]] = {kind: SENDERS.get(m.wire_name(kind), ()) for kind in m.REQUESTS}
"""Request -> roles that may send it."""
BEFORE_RUN_IS_KNOWN = WITHOUT_HELLO - {m.Goodbye}
MAX_PREVIOUS = 16
MAX_SUCCESSORS = 8
"""Processes of one name that have said hello and nothing else."""
TRAINER_PLACES = 8
"""For trainers alone, beside the names that may be joined: clients with a worker's key cannot keep them out."""
LAST_SHARE = 8
"""An eighth of the names."""
SILENT_BEATS = 3
RECONNECT_S = 2.0
"""Once the broker is restarted, a living process is heard within this and a heartbeat: libzmq connects anew at least every second."""
FORGET_S = 3600.0
"""A gone client is forgotten after this long; should it come back, it joins anew."""

MAX_NAME_CHARS, MAX_ENGINE_CHARS = 64, 256
"""Of a metric's name and of each text about an engine: every status has those of all clients."""
MAX_METRICS, MAX_METRIC = 64, 1e100
"""Of a heartbeat; NaN and larger ones are left out: JSON has no word for them, nor for their sum."""
MAX_PLACE_CHARS = 200
"""Of `blocked_at`: the end of a path says more than its beginning."""
MAX_COMMANDS = 64
"""Outcomes remembered, and commands outstanding, of a worker."""

MODEL = "model.hf_checkpoint"
WITH_EACH_LEASE = (
    *("rollout.n_samples_per_prompt", "rollout.rollout_batch_size"),
    *("rollout.rollout_temperature", "rollout.rollout_top", "rollout.rollout_max", "rollout.rollout_stop"),
)
"""How the names begin of what the broker decides with each lease; of all else a process follows its own setting."""
MAX_SETTINGS, MAX_CHARS = 64, 512

# --- who may ask ---


def check_sender(state: State, event: Event) -> None:
    """Raise SlimebusError where this sender may not ask this: `wrong_run`, `fenced`, `not_joined`, `forbidden`, `role`, `not_resumed`."""
    kind = type(event.message)
    if not event.run and kind not in BEFORE_RUN_IS_KNOWN:
        text = f"{event.sender[:64]!r} names no run; say hello first, and put the run of its answer into every header"
        raise SlimebusError(text, code="not_joined")
    if event.run and event.run != state.meta.run:
        text = f"{event.sender[:64]!r} names run {event.run[:64]!r}, this broker serves run {state.meta.run!r}"
        raise SlimebusError(f"{text}; give --name, or the address of its own broker", code="wrong_run")
    client = state.clients.get(event.sender) if kind in WITHOUT_HELLO else sender_of(state, event)
    able = ABLE.get(kind, ())
    if client is not None and client.role not in able:
        text = f"{event.sender!r} joined as {client.role}; only a {' or '.join(able) or 'nobody'} may send {m.wire_name(kind)!r}"
        raise SlimebusError(text, code="role")
    if able != ("trainer",) or kind is m.Resume:
        return
    if client is None or (client.name, client.instance) != state.meta.trainer:
        text = f"{m.wire_name(kind)} before resume; tell the broker first which step this trainer trains next"
        raise SlimebusError(text, code="not_resumed")


def sender_of(state: State, event: Event) -> ClientRecord:
    """The client that sends this, alive by it. Raises SlimebusError: `not_joined`, `forbidden` or `fenced`."""
    client = state.clients.get(event.sender)
    if client is not None and event.epoch > client.epoch:
        client = _replace_with_successor(state, client, event)
    if client is None or event.epoch > client.epoch:
        raise SlimebusError(f"{event.sender[:64]!r} has not joined this broker; say hello first", code="not_joined")
    if event.key != client.key:
        if not event.key or not client.key:
            raise SlimebusError(f"{event.sender!r} joined before this broker had its keys; say hello again", code="not_joined")
        text = f"{event.sender!r} joined with another key than {event.key!r}; say hello under a name of your own"
        raise SlimebusError(text, code="forbidden")
    if event.epoch < client.epoch or client.is_fenced:
        raise Fenced(f"a newer {client.role} has taken the place of {event.sender!r} (epoch {event.epoch}); stop this process")
    touch(state, client, event.to.peer)
    return client


def touch(state: State, client: ClientRecord, peer: bytes = b"") -> None:
    """A sign of life, heard from `peer`."""
    if not state.finish_is_confirmed and (client.name, client.instance) in state.members_at_restart:
        state.confirm_finish()
    client.heard_at, client.is_gone, client.peer = state.now, False, peer
    state.timers.set(("client", client.name), state.now + state.rules.client_timeout_s)


def restart(state: State) -> None:
    """After a restart of the broker: everyone has a full deadline, and a place is free only once its process is silent anew."""
    state.had_members = any(not client.is_fenced for client in state.clients.values())
    for client in state.clients.values():
        touch(state, client)
        client.newcomers = {}
        for successor in client.successors:
            successor.heard_at = state.now
    members = [c for c in state.clients.values() if c.role in ("rollout", "trainer") and not c.is_fenced]
    state.members_at_restart = {(c.name, c.instance) for c in members}
    state.last_trainer = next((c.name for c in members if c.role == "trainer"), "")


# --- joining ---


def hello(state: State, event: Event, request: m.Hello) -> None:
    """Take in a client and answer with what it must know to take part."""
    client = join(state, event, request)
    welcome = m.Welcome(run=state.meta.run, epoch=client.epoch, heartbeat_s=state.rules.heartbeat_s, **state.meta.newest())
    welcome.hints, welcome.max_message_bytes = state.hints_address, state.max_message_bytes
    welcome.protocol, welcome.differences = min(request.protocol, PROTOCOL_VERSION), list(differences(state, client).values())
    state.reply(event.to, welcome)


def join(state: State, event: Event, request: m.Hello) -> ClientRecord:
    """The same instance keeps its epoch; another of the same name gets a new one, and may take the place of the older one."""
    _check_hello(state, event, request)
    known = state.clients.get(event.sender)
    if known is not None:
        _drop_silent_successors(state, known)
    same_name = [known, *known.successors] if known is not None else []
    if known is not None and request.instance in {*known.previous_instances, *(c.instance for c in same_name if c.is_fenced)}:
        raise Fenced(f"a newer process has taken the place of this {event.sender!r}; stop this one")
    _check_key(event, request, known)
    for client in same_name:
        if (client.instance, client.role, client.key) == (request.instance, request.role, event.key):
            client.settings, client.heard_at = request.settings, state.now
            if client is known:
                touch(state, client, event.to.peer)
            return client
    _check_place_is_free(state, event.sender, request)
    if known is None:
        _make_room(state, request.role, event.key)
    epoch, state.meta.next_epoch = state.meta.next_epoch, state.meta.next_epoch + 1
    client = ClientRecord(
        name=event.sender, role=request.role, epoch=epoch, instance=request.instance, key=event.key, settings=request.settings
    )
    client.host, client.pid, client.release = request.host, request.pid, one_line(request.release[:MAX_RELEASE_CHARS])
    client.heard_at = state.now
    if known is None:
        _add_client(state, client)
        touch(state, client, event.to.peer)
    else:
        known.successors = [*known.successors, client][-MAX_SUCCESSORS:]
        _save_record(state, known)
    return client


def _check_hello(state: State, event: Event, request: m.Hello) -> None:
    protocol.choose(request.oldest, request.protocol, who=repr(event.sender[:64]), their_release=request.release)
    if request.role not in ROLES:
        raise ProtocolError(f"hello: role {request.role[:64]!r}; expected one of {', '.join(ROLES)}")
    check_name("hello: sender", event.sender)
    check_name("hello: instance", request.instance)
    check_settings(state, event.sender, request)


def _check_key(event: Event, request: m.Hello, known: ClientRecord | None) -> None:
    """A name belongs to the key that joined under it while it is alive. No key keeps out a trainer, which only a trainer's key may be."""
    if known is None or not is_present(known) or request.role == "trainer":
        return
    if known.key != event.key and known.key and event.key:  # without one of both, it is from a time when the broker had no keys
        text = f"the name {event.sender!r} belongs to the key {known.key!r} while its process is alive; choose another name (--worker-name)"
        raise SlimebusError(text, code="forbidden")


def conflicting_clients(state: State, name: str, request: m.Hello) -> list[ClientRecord]:
    """Who is where this hello asks to be: of a trainer every other trainer, of others the process that has their name."""
    among = [c for c in state.clients.values() if c.role == "trainer"] if request.role == "trainer" else [state.clients.get(name)]
    return [c for c in among if c is not None and is_present(c) and (c.name, c.instance) != (name, request.instance)]


def _check_place_is_free(state: State, name: str, request: m.Hello) -> None:
    """Raise SlimebusError while a process holds the place: `name_in_doubt` until it is heard and so lives, then `name_in_use`."""
    for holder in conflicting_clients(state, name, request):
        may_replace = request.take_over and holder.role == request.role
        limit_s = SILENT_BEATS * state.rules.heartbeat_s if holder.peer else RECONNECT_S + state.rules.heartbeat_s
        silent_s = state.now - holder.heard_at
        if may_replace or holder.peer in state.lost_peers or silent_s > limit_s:
            continue
        who = f"{holder.title} (process {holder.pid or 'unknown'} on host {holder.host or 'unknown'}, last heard {silent_s:.1f} s ago)"
        remedies = ["--take-over replaces it"] if holder.role == request.role else []
        remedies += ["--worker-name gives this one another name"] if holder.name == name and request.role == "rollout" else []
        remedy = "; ".join([*remedies, "or stop it first"])
        if holder.heard_at > holder.newcomers.get(request.instance, state.now):
            del holder.newcomers[request.instance]
            raise SlimebusError(f"{name!r} may not join: {who} is alive; {remedy}", code="name_in_use")
        newcomers = {request.instance: state.now} | holder.newcomers
        holder.newcomers = dict(list(newcomers.items())[:MAX_SUCCESSORS])
        text = f"{name!r} waits for a sign of {who}, which counts as gone after {limit_s:g} s of silence; {remedy}"
        raise SlimebusError(text, code="name_in_doubt", retryable=True)


def _make_room(state: State, role: str, key: str) -> None:
    """Of more names than there may be, those that are gone are forgotten first. Raises SlimebusError `busy` when all are alive.

    The last places are not for a key that has most of the others: its holder keeps nobody else out.
    """
    most = state.rules.max_clients + (TRAINER_PLACES if role == "trainer" else 0)
    shared = most - most // LAST_SHARE if key and role != "trainer" else most
    if len(state.clients) < shared:
        return
    for client in [c for c in state.clients.values() if c.is_gone]:
        _forget(state, client)
    mine = sum(client.key == key for client in state.clients.values()) if key else 0
    if len(state.clients) >= most or (len(state.clients) >= shared and 2 * mine > shared):
        whose = f", {mine} with the key {key!r}" if key else ""
        raise state.busy("max_clients", f"{len(state.clients)} processes have joined{whose}")


def _save_record(state: State, client: ClientRecord) -> None:
    """Have the record of a client written; those of people and tools are not kept."""
    if client.role != "client":
        state.changed("clients", client.name)


def _add_client(state: State, client: ClientRecord) -> None:
    state.clients[client.name] = client
    _save_record(state, client)
    if client.role != "client":
        state.had_members = True
        state.num_joined += client.role != "consumer"
        if client.role == "trainer":
            state.last_trainer, state.trainer_left_at = client.name, math.inf
            state.num_trainers_joined += 1
        state.note(f"{client.title} joined (epoch {client.epoch})")
        for kind, difference in differences(state, client).items():
            count = state.tally(state.differing, kind)
            if count.bit_count() == 1:  # thousands of workers may differ alike
                state.note(f"{difference} ({count} times so far)" if count > 1 else difference, is_warning=True)


# --- fencing and leaving ---


def _replace_with_successor(state: State, old: ClientRecord, event: Event) -> ClientRecord:
    """A living process of this name, newer than `old`, asks for the first time: it goes on, the older ones are fenced."""
    _drop_silent_successors(state, old)
    new = next((c for c in old.successors if (c.epoch, c.key) == (event.epoch, event.key)), None)
    if new is None:
        return old
    older = [c.instance for c in old.successors if c.epoch < new.epoch]
    new.previous_instances = [*old.previous_instances, old.instance, *older][-MAX_PREVIOUS:]
    new.successors = [c for c in old.successors if c.epoch > new.epoch]
    state.note(f"{new.name} was restarted; its older process is fenced")
    leave(state, old, "its worker was restarted", cause="worker lost")
    _add_client(state, new)
    return new


def _drop_silent_successors(state: State, holder: ClientRecord) -> None:
    """While its holder lives, the place is no longer open to those who were welcomed and then silent: they count as dead like any other."""
    earliest = state.now - SILENT_BEATS * state.rules.heartbeat_s
    in_time = [c for c in holder.successors if c.heard_at >= earliest]
    if len(in_time) < len(holder.successors) and is_present(holder) and holder.heard_at >= earliest:
        holder.successors = in_time
        _save_record(state, holder)


def fence_older_trainers(state: State, newest: ClientRecord) -> None:
    """A trainer resumes: every trainer that joined before it has to stop, also one that has said hello and nothing else."""
    for client in [c for known in state.clients.values() for c in (known, *known.successors)]:
        if client.role == "trainer" and client.epoch < newest.epoch and not client.is_fenced:
            client.is_fenced = True
            state.changed("clients", client.name)
            state.note(f"{client.title} is fenced: {newest.name} has taken its place", is_warning=True)
            _answer_fenced(state, client)


def _answer_fenced(state: State, client: ClientRecord) -> None:
    """Answer the batch requests of a fenced client that wait."""
    fenced = error_reply(Fenced(f"a newer process has taken the place of {client.name!r}; stop this one"))
    for step in state.waiting_batches.asked_by(client.name):
        state.answer(state.waiting_batches, step, fenced)


def revoke_keys(state: State, keys: Collection[str]) -> None:
    """Take out everyone who joined with one of these keys."""
    for client in [c for c in state.clients.values() if c.key in keys]:
        leave(state, client, "its key was revoked")
        _forget(state, client)
        state.note(f"{client.title} is out: its key {client.key} was revoked", is_warning=True)


def goodbye(state: State, event: Event, request: m.Goodbye) -> None:
    """Let a client go. One that is unknown or fenced is let go too."""
    client = state.clients.get(event.sender)
    if client is not None and client.epoch == event.epoch and client.key == event.key and not client.is_fenced:
        leave(state, client, "its worker left")
        _forget(state, client)
        if client.role != "client":
            state.note(f"{client.title} left")
    state.reply(event.to, m.Ok())


def leave(state: State, client: ClientRecord, reason: str, *, cause: str = "worker left") -> None:
    """Take back what a client holds and waits for."""
    for group in state.groups.leased_by(client.name):
        end_lease(state, group, cause, reason)
    _cancel_waiting_requests(state, client)


def _cancel_waiting_requests(state: State, client: ClientRecord) -> None:
    for key in state.waiting_leases.asked_by(client.name):
        state.waiting_leases.take_out(key)
    state.waiting_reads.take_out(client.name)
    for step in state.waiting_batches.asked_by(client.name):
        state.waiting_batches.take_out(step)


def end_lease(state: State, group: Group, cause: str, reason: str) -> None:
    """End the lease of a group without samples: another attempt, unless there were too many."""
    if group.kind == EVAL:
        evaluation.retry(state, group, cause, reason)
    else:
        transitions.apply_transition(state, group, cause, reason)


def set_serving(state: State, client: ClientRecord, lineage: str, version: int) -> None:
    """A worker serves this version."""
    client.lineage, client.serving = lineage, version
    state.waiting_leases.change_version(client.name, lineage, version)


def on_silence(state: State, name: str) -> None:
    """A client was silent for its timeout: say so once, forget it much later."""
    client = state.clients.get(name)
    if client is None:
        return
    forget_at = client.heard_at + (FORGET_S + state.rules.client_timeout_s)
    if client.role == "client" or state.now >= forget_at:  # as the timer is set: rounded alike, or it would fall due again at once
        _forget(state, client)
        return
    if not client.is_gone:
        client.is_gone = True
        set_serving(state, client, client.lineage, NO_VERSION)
        state.note(f"{client.title} has been silent for {state.now - client.heard_at:.0f} s", is_warning=True)
    state.timers.set(("client", name), forget_at)


def _forget(state: State, client: ClientRecord) -> None:
    del state.clients[client.name]
    _cancel_waiting_requests(state, client)
    state.timers.cancel(("client", client.name))
    _save_record(state, client)
    if client.name == state.last_trainer:
        state.trainer_left_at = state.now


# --- questions ---


def is_present(client: ClientRecord) -> bool:
    """True for a client that is alive and not fenced."""
    return not client.is_gone and not client.is_fenced


def is_silent(state: State, client: ClientRecord) -> bool:
    """True when a client has missed its last heartbeats."""
    return state.now - client.heard_at > SILENT_BEATS * state.rules.heartbeat_s


def describe_blocked(state: State, client: ClientRecord) -> str:
    """How long and where a client that is alive has been blocked, in words; empty when it is not."""
    at = f" at {client.blocked_at}" if client.blocked_at else ""
    return f"blocked for {client.blocked_s + state.now - client.heard_at:.0f} s{at}" if client.blocked_s and is_present(client) else ""


def is_starting(client: ClientRecord) -> bool:
    """True from its welcome until its engine or model is ready, if it says so; meanwhile it may be too busy for heartbeats."""
    return client.state.startswith("starting")


def clients_awaited_at_end(state: State) -> list[ClientRecord]:
    """Of a finished run, those that the broker waits for: workers and trainers, and consumers that may not know of the end."""
    everyone = state.clients.values()
    return [c for c in everyone if is_present(c) and (c.role in ("rollout", "trainer") or (c.role == "consumer" and not c.knows_end))]


def note_end_told(client: ClientRecord, request: int, *, is_finished: bool) -> None:
    """An answer that says whether the run is finished leaves for `client`. It may be lost with the connection, and its broker, which leaves
    with the run, would not be there when the client asks again: the client knows of the end when another request of it has come.
    """
    client.knows_end = is_finished and client.told_in not in (0, request)
    client.told_in = (client.told_in or request) if is_finished else 0


# --- what a client says of itself, and what it has to do ---


def record_report(client: ClientRecord, beat: m.Heartbeat) -> None:
    """How a client is and what its engines do, cut to what every status may hold of it."""
    client.state = one_line(beat.state[:64])
    metrics = itertools.islice(((name, value) for name, value in beat.metrics.items() if len(name) <= MAX_NAME_CHARS), MAX_METRICS)
    client.metrics = {name: value for name, value in metrics if abs(value) <= MAX_METRIC}
    client.engines = [msgspec.structs.replace(one, **_bounded(one)) for one in beat.engines]
    client.blocked_s, client.blocked_at = beat.blocked_s, one_line(beat.blocked_at[-MAX_PLACE_CHARS:])


def _bounded(engine: m.EngineReport) -> dict[str, str]:
    return {name: one_line(getattr(engine, name)[:MAX_ENGINE_CHARS]) for name in ("url", "model", "state")}


def add_command(client: ClientRecord, request: m.Command) -> None:
    """A worker has to do something."""
    client.commands = {**client.commands, request.key: request}


def record_outcomes(client: ClientRecord, outcomes: dict[str, m.CommandReply]) -> list[m.Command]:
    """What became of commands; those that the worker is still to be told of, or is at."""
    if outcomes:
        for one in outcomes.values():
            one.text, one.worker = one_line(one.text), one_line(one.worker)
        client.outcomes = dict(list({**client.outcomes, **outcomes}.items())[-MAX_COMMANDS:])
        client.commands = {key: request for key, request in client.commands.items() if key not in outcomes}
    return list(client.commands.values())


# --- settings that the processes of a run agree on ---


def check_settings(state: State, name: str, hello: m.Hello) -> None:
    """Raise SlimebusError for settings with which this process cannot take part: another run's name, more steps than the broker counts."""
    said = hello.settings
    if len(said) > MAX_SETTINGS or any(len(key) + len(value) > MAX_CHARS for key, value in said.items()):
        raise ProtocolError(f"hello: settings of more than {MAX_SETTINGS} names, or one of more than {MAX_CHARS} characters")
    ours = state.rules.agreed
    if said.get("name", ours.get("name")) != ours.get("name"):
        text = f"{name[:64]!r} is of run {said['name']}, this broker serves run {ours['name']}"
        raise SlimebusError(f"{text}; give --name, or the address of its own broker", code="wrong_run")
    steps, counted = (_integer(settings.get("rollout.num_rollout", "")) for settings in (said, ours))
    if hello.role == "trainer" and steps is not None and counted is not None and steps > counted:
        text = f"rollout.num_rollout: trainer {name[:64]!r} has {steps}, the broker {counted}"
        raise ConfigError(f"{text}: steps beyond it would never get a batch; start both with the same value")


def differences(state: State, client: ClientRecord) -> dict[str, str]:
    """What of the settings of a process differs from the run's -> a sentence with both values and which of them holds."""
    ours = state.rules.agreed
    differing = {key: value for key, value in client.settings.items() if ours.get(key, value) != value}
    found = {
        f"{key} {value}": f"{key}: {client.name} has {value}, the run has {ours[key]}; {_describe_value_in_force(key, client)}"
        for key, value in differing.items()
    }
    return {kind: one_line(sentence) for kind, sentence in (*found.items(), *_other_models(state, client))}


def _describe_value_in_force(key: str, client: ClientRecord) -> str:
    return "the run's value holds" if key.startswith(WITH_EACH_LEASE) else f"{client.name} follows its own"


def _other_models(state: State, client: ClientRecord) -> Iterator[tuple[str, str]]:
    """Between the trainer and each worker: the broker itself has no model."""
    mine, trainer = client.settings.get(MODEL), state.clients.get(state.last_trainer)
    for other in state.clients.values() if client.role == "trainer" else [trainer] if trainer else []:  # thousands of workers may join
        theirs = other.settings.get(MODEL)
        is_peer = {client.role, other.role} == {"trainer", "rollout"} and not other.is_gone and not other.is_fenced
        if is_peer and mine and theirs and mine != theirs:
            what = f"config.json or tokenizer.json of {client.name} (hash {mine}) differs from that of {other.title}"
            sentence = f"{what} (hash {theirs}); samples mean something else to each, give both the same model directory"
            yield f"{MODEL} {mine} {theirs}", f"{MODEL}: {sentence}"


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() else None

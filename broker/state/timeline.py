"""Resume, publish, finish: the trainer's timeline.

A trainer that restarts from a checkpoint begins a new lineage at the step it will train next. What the broker holds is brought
back to that moment: steps before it are trained, samples that only the abandoned timeline could have made become prompts again.
"""

from broker.state import archive, evaluation, partials, prompts
from broker.state.effects import Event
from broker.state.groups import ASSIGNED, COMMITTED, READY, Group
from broker.state.records import StepRecord
from broker.state.table import State
from slimebus.errors import ProtocolError, SlimebusError
from slimebus.messages import NO_VERSION, BatchReply, Finish, Ok, Publish, Resume

MAX_LINEAGE_CHARS = 128
MAX_NUMBER = 1 << 40
MAX_PUBLISHERS = 1024
MAX_DIGEST_CHARS = 128


# --- resume ---


def resume(state: State, event: Event, ask: Resume) -> None:
    """Begin `lineage` at `step` with `version`. The same request repeated changes nothing."""
    meta = state.meta
    if not 0 <= ask.step <= MAX_NUMBER or not 0 <= ask.version <= MAX_NUMBER or not 0 < len(ask.lineage) <= MAX_LINEAGE_CHARS:
        raise ProtocolError(
            f"resume: step {ask.step}, version {ask.version}; expected both from 0 to 2^40, a lineage of 1 to 128 characters"
        )
    if ask.lineage != meta.lineage:
        _begin(state, ask)
    elif (ask.step, ask.version) != (meta.base_step, meta.base_version):
        raise SlimebusError("resume to another step needs a new lineage", code="lineage")
    state.reply(event.to, Ok())


def _begin(state: State, ask: Resume) -> None:
    meta = state.meta
    was_at, had_lineage = meta.next_step, bool(meta.lineage)
    for step in list(state.parked_batches):
        parked = state.parked_batches.pop(step)
        state.timers.cancel(("parked batch", step))
        state.reply(parked.to, BatchReply(step=step, reason="the trainer resumed from another step"))
    _accept_trained(state, ask.step)
    _rewind(state, ask)
    _revoke_leases(state)
    partials.rewind(state, ask.step, ask.version)
    evaluation.cancel_running(state, "the trainer resumed from an earlier step")
    meta.lineage, meta.version, meta.publishers, meta.digest = ask.lineage, NO_VERSION, [], ""
    meta.base_step, meta.base_version = meta.pace_step, meta.pace_version = ask.step, ask.version
    meta.next_step, meta.floor, meta.finishing = ask.step, min(meta.floor, ask.step), False
    state.swept, state.finished_said, meta.filtered_in_a_row = None, False, 0
    state.end_wait()
    verb = f"resumes (broker was at step {was_at})" if had_lineage or ask.step else "begins"
    state.note(f"trainer {verb} at step {ask.step}, version {ask.version}, lineage {ask.lineage[:8]}")


def _accept_trained(state: State, step: int) -> None:
    """Steps that the trainer has behind it and the broker not yet committed are trained."""
    known = [record for s, record in state.steps.items() if state.meta.next_step <= s < step]
    for record in known:
        record.is_committed = True
        state.changed("steps", record.step)
        for group in _groups_of(state, record, ASSIGNED):
            state.move(group, COMMITTED, "trained, says the resumed trainer")
            state.tell(group, "trained", "", record.step)
    num_unknown = step - state.meta.next_step - len(known)
    if num_unknown > 0:
        _skip_unknown(state, num_unknown)


def _skip_unknown(state: State, num_steps: int) -> None:
    """The broker has no record of steps that were trained: it is new, or lost its last moments."""
    num_groups = num_steps * state.rules.batch_size
    if state.meta.cursor == 0:
        state.meta.cursor = num_groups
        text = f"this broker has no record of the {num_steps} steps trained so far; skipping the first {num_groups} prompts of the source"
    else:
        text = f"this broker has no record of {num_steps} of the trained steps; up to {num_groups} prompts may be trained twice"
    state.note(text, is_warning=True)


def _rewind(state: State, ask: Resume) -> None:
    archive.recall(state, ask.step)
    for step in sorted(s for s in state.steps if s >= ask.step):
        record = state.steps.pop(step)
        state.changed("steps", step)
        for group_id in record.groups:
            group = state.groups.by_id.get(group_id)
            if group is None and prompts.is_forgotten(state, group_id, step):
                _lose(state, group_id)
            elif group is None:
                _restore_freed(state, group_id)
            elif group.step == step and group.phase in (ASSIGNED, COMMITTED):
                group.step = -1
                state.move(group, READY, "rewound")
    for group in state.groups.every_ready():
        if group.newest_version > ask.version or group.steps_behind > ask.step:
            state.requeue(group, "made by a version of the abandoned timeline")


def _restore_freed(state: State, group_id: str) -> None:
    """A group whose samples were freed under a checkpoint that the trainer now goes behind: its prompt is queued again."""
    if not prompts.bring_back(state, group_id):
        _lose(state, group_id)


def _lose(state: State, group_id: str) -> None:
    state.tally(state.meta.counted, "prompts lost in a rewind")
    state.note(f"group {group_id} was freed and its prompt is known no more; it will not be trained again", is_warning=True)


def _revoke_leases(state: State) -> None:
    for group in state.groups.leased_for_training():
        if group.lineage:
            state.requeue(group, "lease of the abandoned timeline")


def _groups_of(state: State, record: StepRecord, phase: str) -> list[Group]:
    groups = [state.groups.by_id.get(group_id) for group_id in record.groups]
    return [g for g in groups if g is not None and g.phase == phase and g.step == record.step]


# --- publish and finish ---


def publish(state: State, event: Event, news: Publish) -> None:
    """A version can be pulled. Repeats are acknowledged; versions only rise, at the pace of the rules."""
    meta = state.meta
    if news.lineage != meta.lineage:
        raise SlimebusError(f"publish of lineage {news.lineage[:8]!r}; the broker is on {meta.lineage[:8]!r}, resume first", code="lineage")
    if len(news.publishers) > MAX_PUBLISHERS:
        raise ProtocolError(f"publish: {len(news.publishers)} publishers; at most {MAX_PUBLISHERS}")
    if len(news.digest) > MAX_DIGEST_CHARS:
        raise ProtocolError(f"publish: a digest of {len(news.digest)} characters; at most {MAX_DIGEST_CHARS}")
    if meta.base_version <= news.version < meta.version:  # a late repetition of what has been published
        state.reply(event.to, Ok())
        return
    newest = state.version_of(meta.next_step + 1)
    first = meta.base_version if meta.version == NO_VERSION else meta.version
    if not first <= news.version <= newest:
        raise SlimebusError(
            f"publish of version {news.version} at step {meta.next_step}; expected {first} to {newest} "
            f"(one version every {state.rules.publish_interval} steps)",
            code="version",
        )
    is_new = news.version != meta.version
    meta.version, meta.publishers, meta.digest = news.version, list(news.publishers), news.digest
    if is_new:
        evaluation.start_if_due(state)
    state.notify()
    state.reply(event.to, Ok())


def finish(state: State, event: Event, ask: Finish, now: float) -> None:
    """The last step is trained; workers leave once the last evaluation is done."""
    if not state.meta.finishing:
        state.meta.finishing, state.meta.finisher_born = True, state.clients[event.sender].born
        evaluation.start_automatic(state)
        state.timers.set(("finish",), now + state.rules.client_timeout_s)
        state.note(f"the trainer has finished{': ' + ask.reason if ask.reason else ''}")
    state.reply(event.to, Ok())


def check_finish(state: State, now: float) -> None:
    """Do not wait for an evaluation that no worker is left to make."""
    if not state.meta.finishing or not state.is_evaluating:
        return
    if any(c.role == "rollout" and not c.is_gone for c in state.clients.values()):
        state.timers.set(("finish",), now + state.rules.client_timeout_s)
    else:
        evaluation.cancel_running(state, "no worker is left to evaluate")

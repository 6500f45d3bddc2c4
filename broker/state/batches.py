"""Batch, fetch, commit: what the trainer does with groups.

The groups of a step are chosen once and stay chosen until the step is committed.
"""

import math

from broker.state import admission, archive, choice, consumers, prompts, staleness
from broker.state.clients import is_silent
from broker.state.effects import Event
from broker.state.groups import ASSIGNED, COMMITTED, LEASED, QUEUED, READY, Group
from broker.state.records import Client, Parked, StepRecord
from broker.state.table import FILTERED, RECENT_STEPS, State
from broker.state.timers import bounded_wait
from slimebus.errors import ProtocolError, SlimebusError
from slimebus.messages import NO_VERSION, Batch, BatchGroup, BatchReply, Commit, Error, Fetch, FetchReply, Message, Ok

# --- batch ---


def batch(state: State, event: Event, client: Client, ask: Batch, now: float) -> None:
    """Answer with the groups of a step, now or when there are enough; the same step gives the same groups."""
    if not state.meta.lineage:
        raise SlimebusError("batch before resume; tell the broker which step is trained next", code="not_resumed")
    if ask.step < state.meta.next_step:
        raise SlimebusError(f"step {ask.step} is committed; the next is {state.meta.next_step}", code="step")
    if ask.trained > state.meta.next_step:
        raise SlimebusError(
            f"the trainer has committed the steps before {ask.trained}, this broker knows of those before {state.meta.next_step}: it lost "
            "its last moments (broker.durability); start the trainer again, it goes on from its newest checkpoint",
            code="step",
        )
    earlier = state.parked_batches.get(ask.step)
    if earlier is not None and earlier.to != event.to:
        give_up(state, ask.step, now)
    state.parked_batches[ask.step] = Parked(to=event.to, client=client.name, message=ask)
    state.timers.set(("parked batch", ask.step), now + bounded_wait(ask.wait_s))
    assign(state, now)
    if ask.step in state.parked_batches and not ask.wait_s > 0:
        give_up(state, ask.step, now)


def assign(state: State, now: float) -> None:
    """Answer every parked batch request that can be answered."""
    while state.parked_batches:
        step = state.next_unassigned
        for earlier in [s for s in state.parked_batches if s < step]:
            _answer(state, earlier, _reply(state, earlier))
        if step not in state.parked_batches:
            return
        if _choose(state, step, now):
            continue
        if state.meta.filtered_in_a_row >= state.rules.max_filtered:
            _answer(state, step, Error(code="all_filtered", text=admission.all_filtered(state)))
        elif can_never_fill(state):
            _answer(state, step, _end_of_source(state, step))
        return


def _answer(state: State, step: int, message: Message) -> None:
    parked = state.parked_batches.pop(step)
    state.timers.cancel(("parked batch", step))
    state.reply(parked.to, message)


def _reply(state: State, step: int) -> BatchReply:
    record = state.steps[step]
    groups = [state.groups.by_id[group_id] for group_id in record.groups]
    named = [BatchGroup(group=g.id, num_samples=g.num_samples, num_tokens=g.num_tokens, oldest_version=g.oldest_version) for g in groups]
    bound = None if record.max_staleness == math.inf else int(record.max_staleness)
    return BatchReply(step=step, version=record.version, groups=named, next_version=state.version_of(step + 1), max_staleness=bound)


def give_up(state: State, step: int, now: float) -> None:
    """Answer a parked batch request whose wait ran out: nothing, and who waits for whom."""
    if step in state.parked_batches:
        _answer(state, step, BatchReply(step=step, version=state.version_of(step), reason=reason_for(state, step, now)))


def _choose(state: State, step: int, now: float) -> bool:
    staleness.sweep(state, step)
    chosen = choice.choose(state, step, now)
    if not chosen:
        return False
    state.steps[step] = StepRecord(
        step=step, version=state.version_of(step), groups=[g.id for g in chosen], max_staleness=state.rules.max_staleness
    )
    state.changed("steps", step)
    for group in chosen:
        group.step = step
        state.move(group, ASSIGNED, "assigned")
    _end_surplus(state)
    return True


def _end_surplus(state: State) -> None:
    """With over-sampling, groups in flight that can be in no batch any more are taken back from their workers."""
    if state.rules.over_sampling:
        staleness.take_back(state, state.next_unassigned, "surplus")


def can_never_fill(state: State) -> bool:
    """True when the source has ended and what is left is less than a batch."""
    if not prompts.has_ended(state):
        return False
    waiting = state.groups.count(QUEUED) + state.groups.count(LEASED)
    if waiting and (state.rules.batch_tokens or state.stateful is not None):
        return False  # what becomes of them may make a stateful source give more
    if state.rules.batch_tokens:
        return not state.groups.held
    return waiting + state.groups.count(READY) < state.rules.batch_size


def _end_of_source(state: State, step: int) -> Message:
    left = state.groups.every_ready()
    for group in left:
        state.drop(group, "the source ended within a batch")
    filtered = state.meta.counted.get(FILTERED, 0)
    why = f" ({filtered} groups were dropped by the dynamic sampling filter)" if filtered else ""
    text = f"the prompt source has ended: {choice.so_far(state, len(left))} for step {step}{why}; train for more epochs or stop"
    return Error(code="source_ended", text=text)


def reason_for(state: State, step: int, now: float) -> str:
    """Who waits for whom, in one line."""
    if step > state.next_unassigned:
        return f"the trainer waits for batch {step}, but step {state.next_unassigned} has not been asked for"
    parts = [f"trainer waits for batch {step}: {choice.so_far(state, len(state.groups.ready))} ready"]
    if state.wait is not None:
        parts.append(f"it is full and waits {max(0.0, state.wait[1] - now):.0f} s more for groups that would grow too old (on_stale: wait)")
    holders: dict[str, int] = {}
    for group in state.groups.leased_for_training():
        holders[group.worker] = holders.get(group.worker, 0) + 1
    for name, count in sorted(holders.items(), key=lambda item: -item[1])[:4]:
        client = state.clients.get(name)
        silence = f", silent for {now - client.heard_at:.0f} s" if client and is_silent(state, client, now) else ""
        parts.append(f"{count} leased by {name}{silence}")
    if held := consumers.why_held(state, now):
        parts.append(held)
    elif not holders:
        parts.append(_why_no_leases(state))
    return "; ".join(parts)


def _why_no_leases(state: State) -> str:
    workers = [c for c in state.clients.values() if c.role == "rollout" and not c.is_gone]
    if not workers:
        return "no rollout worker is connected"
    if state.meta.version == NO_VERSION and not state.parked_leases:
        return "no weights are published yet"
    if state.parked_leases:
        parked = next(iter(state.parked_leases.values()))
        return f"{parked.client} waits: {admission.why_parked(state, parked)}"
    return f"none leased; {len(workers)} workers are connected and ask for nothing"


# --- fetch ---


def fetch(state: State, event: Event, ask: Fetch, max_message_bytes: int) -> None:
    """Answer with the stored samples of assigned groups."""
    groups = [state.groups.by_id.get(name) for name in ask.groups]
    for name, group in zip(ask.groups, groups, strict=True):
        if group is None or group.phase not in (ASSIGNED, COMMITTED):
            was = "unknown" if group is None else group.phase
            raise SlimebusError(f"fetch: group {name[:64]} is {was}; only groups of a batch can be fetched", code="not_assigned")
    found = [g for g in groups if g is not None]
    size_bytes = sum(g.size_bytes for g in found)
    if max_message_bytes and size_bytes > max_message_bytes:
        raise SlimebusError(f"fetch: {len(found)} groups of {size_bytes} bytes, at most {max_message_bytes}", code="too_large")
    state.reply(event.to, FetchReply(num_frames=[consumers.num_frames(g) for g in found]), [consumers.payload_of(g) for g in found])


# --- commit ---


def commit(state: State, event: Event, done: Commit) -> None:
    """A step was trained. Repeats are acknowledged; samples of steps before `checkpoint` are freed."""
    meta = state.meta
    if done.step > meta.next_step or (done.step == meta.next_step and done.step not in state.steps):
        raise SlimebusError(f"commit of step {done.step}, but the next to commit is {meta.next_step} and needs its batch", code="step")
    if done.step < 0:
        raise ProtocolError(f"commit: step {done.step}; expected 0 or more")
    if done.step == meta.next_step:
        _commit(state, state.steps[done.step], done)
    free(state, min(done.checkpoint, meta.next_step))
    state.reply(event.to, Ok())


def _commit(state: State, record: StepRecord, done: Commit) -> None:
    groups = [state.groups.by_id[group_id] for group_id in record.groups]
    lags = [max(0, record.version - g.oldest_version) if g.oldest_version != NO_VERSION else 0 for g in groups]
    for group, lag in zip(groups, lags, strict=True):
        state.move(group, COMMITTED, "trained")
        state.tell(group, "trained", "", record.step)
        state.meta.lags[lag] = state.meta.lags.get(lag, 0) + 1
    for reason in done.unused.values():
        state.tally(state.meta.counted, f"unused: {reason}")
    record.is_committed, record.metrics = True, done.metrics
    state.meta.next_step = record.step + 1
    state.changed("steps", record.step)
    row = step_row(state, record, groups, lags)
    state.recent.append(row)
    state.record(row)


def step_row(state: State, record: StepRecord, groups: list[Group], lags: list[int]) -> dict[str, object]:
    """One line of the metrics file for a trained step."""
    return {
        "step": record.step,
        "version": record.version,
        "groups": len(groups),
        "samples": sum(g.num_samples for g in groups),
        "tokens": sum(g.num_tokens for g in groups),
        "lag_mean": sum(lags) / max(1, len(lags)),
        "lag_max": max(lags, default=0),
        "ready": state.groups.count(READY),
        "leased": state.groups.count(LEASED),
        "queued": state.groups.count(QUEUED),
        "wasted_groups": sum(groups for groups, _ in state.meta.waste.values()),
        "wasted_tokens": sum(tokens for _, tokens in state.meta.waste.values()),
        "metrics": record.metrics,
    }


def free(state: State, checkpoint: int) -> None:
    """Let go of the samples of every step before `checkpoint`; which groups they were stays known."""
    floor = state.meta.floor
    if checkpoint <= floor:
        return
    for step in sorted(s for s in state.steps if floor <= s < checkpoint):
        for group_id in state.steps[step].groups:
            group = state.groups.by_id.get(group_id)
            if group is not None and group.phase == COMMITTED and group.step == step:
                state.forget_payload(group)
                state.groups.remove(group)
                state.tally(state.meta.moves, "committed>freed under a checkpoint")
                state.changed("groups", group_id)
                prompts.free(state, group_id)
    prompts.forget_old(state, floor, checkpoint)
    for step in sorted(s for s in state.steps if s < checkpoint - RECENT_STEPS) if state.records else ():
        archive.put(state, state.steps[step])
    state.meta.floor = checkpoint

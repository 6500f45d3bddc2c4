"""Batch, fetch, commit: what the trainer does with groups.

The groups of a step are chosen once and stay chosen until the step is committed.
"""

import math

from broker.state import admission, autopilot, choice, consumers, diagnosis, prompts, staleness, transitions
from broker.state.broker_state import FILTERED, State
from broker.state.effects import Event
from broker.state.groups import ASSIGNED, COMMITTED, LEASED, QUEUED, READY, Group, Phase
from broker.state.records import StepRecord
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import NO_VERSION, Batch, BatchGroup, BatchReply, Commit, Error, Fetch, FetchReply, Message, Ok

WARN_KEPT_STEPS = 128
"""Trained steps with kept samples from which on a warning is due at each doubling."""
FREE_PAUSE_S = 0.001
"""Between two transactions that free samples: requests that have come meanwhile go first."""
MAX_LAG = 1024
"""The last bar of the histogram of staleness: so many versions, or more."""

# --- batch ---


def batch(state: State, event: Event, request: Batch) -> None:
    """Answer with the groups of a step, now or when there are enough; the same step gives the same groups."""
    if not state.meta.lineage:
        raise SlimebusError("batch before resume; tell the broker which step is trained next", code="not_resumed")
    if request.step < state.meta.next_step:
        raise SlimebusError(f"step {request.step} is committed; the next is {state.meta.next_step}", code="step")
    if request.trained > state.meta.next_step:
        known = f"the trainer has committed the steps before {request.trained}, this broker knows of those before {state.meta.next_step}"
        remedy = "start the trainer again, it goes on from its newest checkpoint"
        raise SlimebusError(f"{known}: it lost its last moments (broker.durability); {remedy}", code="step")
    earlier = state.waiting_batches.get(request.step)
    if earlier is not None and earlier.to != event.to:
        answer_timed_out(state, request.step)
    if request.step not in state.waiting_batches:
        state.check_may_wait(state.waiting_batches, event.sender)
    state.waiting_batches.park(request.step, event, request, state.now)
    assign(state)
    if request.wait_s == 0:
        answer_timed_out(state, request.step)


def assign(state: State) -> None:
    """Answer every waiting batch request that can be answered."""
    while state.waiting_batches:
        step = state.next_unassigned
        for earlier in [s for s in state.waiting_batches if s < step]:
            state.answer(state.waiting_batches, earlier, _batch_reply(state, earlier))
        if step not in state.waiting_batches:
            return
        if _choose_groups(state, step):
            continue
        if state.meta.filtered_in_a_row >= state.rules.max_filtered:
            state.answer(state.waiting_batches, step, Error(code="all_filtered", text=admission.all_filtered(state)))
        elif choice.can_never_fill(state):
            state.answer(state.waiting_batches, step, _end_of_source(state, step))
        return


def _batch_reply(state: State, step: int) -> BatchReply:
    record = state.steps[step]
    groups = [state.groups.by_id[group_id] for group_id in record.groups]
    named = [BatchGroup(group=g.id, num_samples=g.num_samples, num_tokens=g.num_tokens, oldest_version=g.oldest_version) for g in groups]
    bound = None if record.max_staleness == math.inf else int(record.max_staleness)
    return BatchReply(step=step, version=record.version, groups=named, next_version=state.version_of(step + 1), max_staleness=bound)


def answer_timed_out(state: State, step: int) -> None:
    """Answer a batch request that waited to its end: nothing, and what it waited for."""
    if step in state.waiting_batches:
        reason = diagnosis.reason_for(state, step)
        state.answer(state.waiting_batches, step, BatchReply(step=step, version=state.version_of(step), reason=reason))


def _choose_groups(state: State, step: int) -> bool:
    staleness.remove_stale_ready_groups(state, step)
    chosen = choice.choose_groups(state, step)
    if not chosen:
        return False
    names, version, bound = [group.id for group in chosen], state.version_of(step), state.rules.max_staleness
    state.steps[step] = StepRecord(step=step, version=version, groups=names, max_staleness=bound)
    state.changed("steps", step)
    for group in chosen:
        state.groups.set_step(group, step)
        transitions.apply_transition(state, group, "assigned")
    if state.rules.over_sampling:  # groups in flight that can be in no batch any more
        staleness.end_stale_leases(state, state.next_unassigned, "surplus")
    return True


def _end_of_source(state: State, step: int) -> Message:
    left = state.groups.every_ready()
    for group in left:
        transitions.apply_transition(state, group, "dropped", "the source ended within a batch")
    filtered = state.meta.counted.get(FILTERED, 0)
    why = f" ({filtered} groups were dropped by the dynamic sampling filter)" if filtered else ""
    text = f"the prompt source has ended: {choice.describe_ready(state, len(left))} for step {step}{why}; train for more epochs or stop"
    return Error(code="source_ended", text=text)


# --- fetch ---


def fetch(state: State, event: Event, request: Fetch) -> None:
    """Answer with the stored samples of assigned groups: the first ones, as many as one answer holds."""
    groups = [state.groups.by_id.get(name) for name in request.groups]
    for name, group in zip(request.groups, groups, strict=True):
        if group is None or group.phase not in (ASSIGNED, COMMITTED):
            was = "unknown" if group is None else group.phase
            raise SlimebusError(f"fetch: group {name[:64]} is {was}; only groups of a batch can be fetched", code="not_assigned")
    found = consumers.within_one_answer(g for g in groups if g is not None)
    state.fetched_steps |= {g.step: state.now for g in found if g.phase == ASSIGNED}
    state.reply(event.to, FetchReply(num_frames=[consumers.num_frames(g) for g in found]), [consumers.payload_of(g) for g in found])


# --- commit ---


def commit(state: State, event: Event, done: Commit) -> None:
    """A step was trained; samples of steps before `checkpoint` are freed. Repeats are acknowledged and do nothing."""
    meta = state.meta
    if done.step > meta.next_step or (done.step == meta.next_step and done.step not in state.steps):
        raise SlimebusError(f"commit of step {done.step}, but the next to commit is {meta.next_step} and needs its batch", code="step")
    if done.step == meta.next_step:
        _commit(state, state.steps[done.step], done)
        meta.oldest_kept_step = max(meta.oldest_kept_step, min(done.checkpoint, meta.next_step))
        free(state)
    state.reply(event.to, Ok())


def _commit(state: State, record: StepRecord, done: Commit) -> None:
    groups = [state.groups.by_id[group_id] for group_id in record.groups]
    lags = [max(0, record.version - g.oldest_version) if g.oldest_version != NO_VERSION else 0 for g in groups]
    for group, lag in zip(groups, lags, strict=True):
        transitions.apply_transition(state, group, "trained")
        state.meta.lags[min(lag, MAX_LAG)] = state.meta.lags.get(min(lag, MAX_LAG), 0) + 1
    for reason in done.unused.values():
        state.tally(state.meta.counted, f"unused: {reason}")
    record.is_committed, record.size_bytes = True, sum(g.size_bytes for g in groups)
    state.fetched_steps.pop(record.step, None)
    state.meta.next_step = record.step + 1
    state.changed("steps", record.step)
    metrics = {name: value for name, value in done.metrics.items() if math.isfinite(value)}  # no JSON has the others
    row = step_row(state, record, groups, lags) | {"metrics": metrics}
    _warn_of_kept(state)
    state.recent.append(row)
    state.record(row)
    state.record_history(record.step, groups, metrics)
    autopilot.adjust_bound(state)


def _warn_of_kept(state: State) -> None:
    """Say so each time that the trained steps with kept samples have doubled: only a checkpoint frees them."""
    kept = [record for record in state.steps.values() if record.is_committed]
    if len(kept) >= WARN_KEPT_STEPS and len(kept).bit_count() == 1:
        size = sum(record.size_bytes for record in kept) / 2**30
        text = f"the samples of {len(kept)} trained steps ({size:.2f} GiB) are kept, for the oldest checkpoint kept would train step"
        state.note(
            f"{text} {state.meta.oldest_kept_step} next; save more often (trainer.save_interval), or keep fewer checkpoints",
            is_warning=True,
        )


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
        **{phase: state.groups.count(phase) for phase in (READY, LEASED, QUEUED)},
        "workers": sum(1 for c in state.clients.values() if c.role == "rollout" and not c.is_gone),
        "rollout_tokens": sum(c.metrics.get("tokens", 0.0) for c in state.clients.values() if c.role == "rollout"),
        "wasted_groups": sum(num_groups for num_groups, _ in state.meta.waste.values()),
        "wasted_tokens": sum(num_tokens for _, num_tokens in state.meta.waste.values()),
    }


def accept_trained(state: State, before: int, reason: str) -> int:
    """The chosen steps before this one that are not committed are trained all the same; how many they are."""
    records = [record for step, record in state.steps.items() if state.meta.next_step <= step < before]
    for record in records:
        record.is_committed = True
        state.changed("steps", record.step)
        for group in state.groups_of(record, ASSIGNED):
            transitions.apply_transition(state, group, "trained", reason)
    return len(records)


def begin_at(state: State, step: int) -> None:
    """The steps before this one are trained, and none later."""
    state.meta.next_step, state.meta.oldest_kept_step = step, min(state.meta.oldest_kept_step, step)
    state.fetched_steps.clear()
    while state.recent and state.recent[-1]["step"] >= step:
        state.recent.pop()


def recover_step(state: State, key: str) -> None:
    """The record of a step is lost: it is made again from its groups, where it has some."""
    groups = [g for g in state.groups.by_id.values() if g.phase in (ASSIGNED, COMMITTED) and str(g.step) == key]
    if groups:
        step, names = groups[0].step, [g.id for g in sorted(groups, key=lambda g: g.lease.id)]
        record = StepRecord(step=step, version=state.version_of(step), groups=names, max_staleness=state.rules.max_staleness)
        if groups[0].phase == COMMITTED:
            record.is_committed, record.size_bytes = True, sum(g.size_bytes for g in groups)
        state.steps[step] = record
        state.fetched_steps[step] = state.now
        state.changed("steps", step)


def reopen(state: State, first: int, reason: str, *phases: Phase) -> None:
    """The groups of the steps from `first` on that are in these phases are ready again, and the steps are chosen anew."""
    for step in sorted(s for s in state.steps if s >= first):
        record = state.steps.pop(step)
        state.fetched_steps.pop(step, None)
        state.changed("steps", step)
        for group in state.groups_of(record, *phases):
            transitions.apply_transition(state, group, "rewound", reason)


def free(state: State, max_bytes: float | None = None) -> None:
    """Let go of the steps before the oldest checkpoint, of their samples and prompts: no trainer can go back there.

    A transaction that frees 100 GB takes seconds: this one frees `max_bytes` (None: rules.max_freed_bytes), later turns the rest.
    """
    left = state.rules.max_freed_bytes if max_bytes is None else max_bytes
    for step in sorted(s for s in state.steps if s < state.meta.oldest_kept_step):
        for group in state.groups_of(state.steps[step], COMMITTED):
            if left <= 0:
                state.timers.set(("free", None), state.now + FREE_PAUSE_S)
                return
            left -= group.size_bytes
            state.delete_samples(group)
            state.groups.remove(group)
            state.tally(state.meta.moves, "committed>freed under a checkpoint")
            state.changed("groups", group.id)
            prompts.free_prompt(state, group.id)
        del state.steps[step]
        state.changed("steps", step)

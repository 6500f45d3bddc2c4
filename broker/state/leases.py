"""Lease, put, give back, expiry: what workers do with groups.

A lease request that nothing can be given for is parked and answered when capacity appears or its wait runs out. Capacity is
dealt one group at a time around the waiting requests, the one that waits longest first.
"""

import math
from collections import deque

import msgspec

from broker.state import admission, evaluation, prompts, staleness, transitions
from broker.state.broker_state import FILTERED, State
from broker.state.clients import end_lease, is_present, set_serving
from broker.state.effects import Address, EvalPrompt, Event, StoredPayload, StoredPrompt
from broker.state.groups import EVAL, LEASED, TRAIN, Group, LeaseRecord, Partial, version_range
from broker.state.records import ClientRecord
from broker.state.rules import Sampling
from broker.state.waiting import Kind, Waiting
from slimebus.bus.messages import NO_VERSION, GiveBack, Lease, LeasedGroup, LeaseReply, Ok, Put, PutReply
from slimebus.bus.sample_table import BadSamples, CheckedGroup, check_group

NO_SPREAD = "filtered: no reward spread"
MAX_REWARDS = 4096
EVAL_SHARE = 0.5
"""Samples of an evaluation that may be made for each training sample."""
REPLY_BYTES = 48 * 1024
"""Of the groups that a lease reply names: it has one header."""
MEAN_OVER = 256
"""Groups in the mean size that says how many fill a batch of tokens."""

Refused = dict[Kind, bool]
"""May requests of a kind start no training group now?"""

# --- lease ---


def lease(state: State, event: Event, request: Lease) -> None:
    """Grant up to `want` groups, now or when capacity appears. The same request repeated gets the same groups."""
    key, waiting, rules = (event.sender, event.to.request), state.waiting_leases, state.rules
    set_serving(state, state.clients[event.sender], request.lineage, request.serving)
    if granted := state.groups.leased_at(*key):
        _send_groups(state, event.to, granted)
        return
    if key not in waiting and (len(waiting) >= rules.max_parked or len(waiting.asked_by(event.sender)) >= rules.max_parked_per_client):
        deal(state)  # those before it in the same burst may have their groups now
        state.check_may_wait(waiting, event.sender)
    waiting.park(key, event, request, state.now, (request.lineage, request.serving, request.needs_weights))
    if request.wait_s == 0 or state.is_finished:
        deal(state)
        answer_timed_out(state, key)


def answer_timed_out(state: State, key: tuple[str, int]) -> None:
    """Answer a lease request that waited to its end: nothing, and why."""
    if (waiting := state.waiting_leases.take_out(key)) is not None:
        state.reply(waiting.to, LeaseReply(reason=admission.why_waiting(state, waiting), finished=state.is_finished))


def deal(state: State) -> None:
    """Deal what capacity there is around the waiting requests."""
    refused: Refused = {}
    kinds = _open_kinds(state, refused)
    if not kinds:
        return
    waits = (w for w in list(state.waiting_leases.values()) if w.kind in kinds and _can_begin(state.clients[w.client]))
    line = ((waiting, waiting.message.want * state.rules.samples_per_prompt) for waiting in waits)
    wants_more: deque[tuple[Waiting[Lease], int]] = deque()
    granted: dict[Address, list[Group]] = {}
    while turn := next(line, None) or (wants_more.popleft() if wants_more else None):
        waiting, num_wanted = turn
        group = _next_group_for(state, waiting, refused)
        if group is None:
            if not _open_kinds(state, refused):  # nobody behind it gets anything; thousands may wait
                break
            continue
        _grant(state, group, waiting)
        refused.clear()
        groups = granted.setdefault(waiting.to, [])
        groups.append(group)
        num_wanted -= num_samples_of(state, group)
        if num_wanted > 0 and _fits_one_more(state, groups):
            wants_more.append((waiting, num_wanted))
        else:
            state.waiting_leases.take_out((waiting.client, waiting.to.request))
    for to, groups in granted.items():
        state.waiting_leases.take_out((groups[0].lease.worker, to.request))
        _send_groups(state, to, groups)


def _can_begin(client: ClientRecord) -> bool:
    return is_present(client) and not client.blocked_s


def _open_kinds(state: State, refused: Refused) -> set[Kind]:
    """The kinds of waiting requests that can be granted a group. One of each is looked at: thousands may wait, of a few kinds."""
    if not state.waiting_leases:
        return set()
    has_prompt = state.groups.first_queued(TRAIN) is not None or prompts.may_draw(state)
    return {
        waiting.kind
        for waiting in state.waiting_leases.one_of_each_kind()
        if _next_evaluated(state, waiting) is not None or (has_prompt and not _is_refused(state, waiting, refused))
    }


def _fits_one_more(state: State, groups: list[Group]) -> bool:
    """True while the answer that names these groups has room for another in its header."""
    size_bytes = 256 + len(msgspec.msgpack.encode(_sampling(state, groups[-1])))
    return (len(groups) + 1) * size_bytes <= REPLY_BYTES


def _is_refused(state: State, waiting: Waiting[Lease], refused: Refused) -> bool:
    if waiting.kind not in refused:
        client = state.clients[waiting.client]
        refused[waiting.kind] = bool(admission.refusal_for(state, client, needs_weights=waiting.message.needs_weights))
    return refused[waiting.kind]


def _next_group_for(state: State, waiting: Waiting[Lease], refused: Refused) -> Group | None:
    evaluated = _next_evaluated(state, waiting)
    if evaluated is not None and _is_turn_of(state, evaluated):
        return evaluated
    if _is_refused(state, waiting, refused):
        return evaluated
    group = state.groups.first_queued(TRAIN)
    if group is not None and _is_suspect(state, group) and any(_is_suspect(state, g) for g in state.groups.leased_by(waiting.client)):
        group = None
    return group or prompts.draw_group(state) or evaluated


def _is_suspect(state: State, group: Group) -> bool:
    """True for a group with which so many workers vanished that it may be why. A worker gets one of them at a time, so that others,
    which were only leased beside it, are done before they are taken for it."""
    return group.losses >= state.rules.max_attempts


def _next_evaluated(state: State, waiting: Waiting[Lease]) -> Group | None:
    group, client = state.groups.first_queued(EVAL), state.clients[waiting.client]
    if group is None or not waiting.message.needs_weights or admission.unready_weights(state, client):
        return None
    return group if client.serving >= state.evaluations[group.evaluation].version else None


def _is_turn_of(state: State, evaluated: Group) -> bool:
    """Evaluation must not starve the trainer, nor training the evaluation.

    That of the initial weights goes first before anything is trained; any other may hold EVAL_SHARE samples for each one being made for
    training, and what workers could not use for training.
    """
    num_samples = state.groups.count(LEASED, EVAL) * num_samples_of(state, evaluated)
    is_first = state.meta.next_step == 0 and evaluated.evaluation.startswith(evaluation.AUTOMATIC)
    return is_first or num_samples < EVAL_SHARE * state.groups.count(LEASED) * state.rules.samples_per_prompt


def num_samples_of(state: State, group: Group) -> int:
    """Samples that a group asks for."""
    if group.kind == EVAL:
        return state.rules.eval_datasets[group.dataset].num_samples
    return (group.phase == LEASED and group.lease.num_samples) or state.rules.samples_per_prompt


def _grant(state: State, group: Group, waiting: Waiting[Lease]) -> None:
    client = state.clients[waiting.client]
    made_by = (client.lineage, client.serving) if waiting.message.needs_weights else ("", NO_VERSION)
    lease = LeaseRecord(next_number(state), client.name, waiting.to.request, *made_by, state.rules.samples_per_prompt)
    state.groups.set_lease(group, lease)
    _offer_partial(state, group, is_wanted=waiting.message.takes_partials)
    transitions.apply_transition(state, group, "leased")
    state.leases.grant(group, state.now, state.now + state.rules.lease_s)


def next_number(state: State) -> int:
    """A number for a lease, larger than those before."""
    state.meta.next_lease += 1
    return state.meta.next_lease - 1


def _send_groups(state: State, to: Address, groups: list[Group]) -> None:
    records = [EvalPrompt(g.dataset, g.row) if g.kind == EVAL else StoredPrompt(g.id) for g in groups]
    begun = [frame for g in groups for frame in _partial_frames(g)]
    state.reply(to, LeaseReply(groups=[_describe_lease(state, g) for g in groups]), [*records, *begun])


def _describe_lease(state: State, group: Group) -> LeasedGroup:
    lease, num_samples = group.lease, num_samples_of(state, group)
    left_s = max(0.0, state.leases.deadline_of(group) - state.now)
    return LeasedGroup(
        group=group.id,
        lease=lease.id,
        num_samples=num_samples,
        deadline_s=left_s,
        sampling=_sampling(state, group),
        kind=group.kind,
        dataset=group.dataset,
        partial_frames=group.partial.num_frames,
        lineage=lease.lineage,
        version=lease.version,
    )


def _sampling(state: State, group: Group) -> Sampling:
    return state.rules.sampling | (state.rules.eval_datasets[group.dataset].sampling if group.kind == EVAL else {})


def expire_unconfirmed(state: State, lease: int) -> None:
    """No heartbeat named a lease: its worker died with it, or never got it."""
    group = state.groups.by_lease[lease]
    state.note(f"lease of group {group.id} by {group.lease.worker} expired", is_warning=True)
    end_lease(state, group, "worker lost", "lease expired")


def expire_worker(state: State, worker: str) -> None:
    """A worker has sent no heartbeat for its leases for `lease_s`."""
    leases = state.groups.by_worker[worker]
    expired = [group for lease, group in leases.groups.items() if lease not in leases.unconfirmed]
    if expired:
        state.note(f"{len(expired)} leases of {worker} expired", is_warning=True)
    for group in expired:
        end_lease(state, group, "worker lost", "lease expired")


# --- put and give back ---


def put(state: State, event: Event, done: Put) -> None:
    """Take the samples of a leased group. A repeat is acknowledged; what came too late is discarded and counted."""
    group, before = state.groups.by_id.get(done.group), state.leases.results.get(done.lease)
    if before == "accepted" or (group is not None and group.put_lease == done.lease):
        state.reply(event.to, PutReply(result="duplicate"))
        return
    lost = _why_lost(group, event.sender, done)
    leased = None if lost else group
    is_foreign = leased is not None and _is_foreign(leased, done.lineage)
    try:
        made = check_samples(state, event, None if is_foreign else leased)
    except BadSamples as bad:
        text = f"put of group {done.group[:64]} by {event.sender}: {bad.text}"
        state.note(text, is_warning=True)
        if leased is not None:
            end_lease(state, leased, "failed", f"put refused: {bad.text}")
        raise BadSamples(text) from None
    num_tokens = sum(made.table.num_tokens)
    if leased is None:
        if before != "discarded":
            state.count_waste("put after the lease was lost", 1, num_tokens)
        reply = PutReply(result="discarded", reason=lost)
    elif is_foreign:
        lost = f"its samples are of lineage {done.lineage[:8]!r}, its lease is of {leased.lease.lineage[:8]!r}"
        state.count_waste("put of another lineage", 1, num_tokens)
        end_lease(state, leased, "failed", f"put refused: {lost}")
        reply = PutReply(result="discarded", reason=lost)
    else:
        reply = PutReply(result="accepted", reason=_accept_samples(state, leased, made))
    state.leases.remember(done.lease, reply.result)
    state.reply(event.to, reply)


def _why_lost(group: Group | None, worker: str, done: Put) -> str:
    if group is None:
        return f"group {done.group[:64]} is not in play: trained, dropped, or of another run"
    if group.phase != LEASED or (group.lease.id, group.lease.worker) != (done.lease, worker):
        now = f"lease {group.lease.id} of {group.lease.worker}" if group.phase == LEASED else f"{group.phase}, {group.reason or 'new'}"
        return f"lease {done.lease} of group {done.group} is no longer held (now: {now})"
    return ""


def _is_foreign(group: Group, lineage: str) -> bool:
    """Samples of another lineage than the lease's: their versions say nothing beside the newest of this one."""
    return group.lease.lineage not in ("", lineage)


def check_samples(state: State, event: Event, group: Group | None) -> CheckedGroup:
    """The samples of a put or a partial; group: they are made for its lease. Raises BadSamples."""
    num_samples, newest = (None, None) if group is None else (num_samples_of(state, group), state.meta.version)
    return check_group(event.bulk, num_samples=num_samples, newest=newest, max_bytes=state.max_message_bytes)


def _accept_samples(state: State, group: Group, made: CheckedGroup) -> str:
    """Take samples in; why they are not kept, or nothing."""
    samples = made.samples
    good = [s for s in samples if not s.has_failed]
    state.groups.mark_put(group)
    if group.kind == EVAL:
        evaluation.score_group(state, group, made)
        return ""
    state.tally(state.meta.counted, "samples put", len(samples))
    state.tally(state.meta.counted, "samples failed", len(samples) - len(good))
    if wasted := sum(made.table.num_tokens) - sum(s.num_tokens for s in good):
        state.count_waste("failed samples", 0, wasted)
    if state.stateful is not None:
        state.groups.record_rewards(group, [s.reward for s in samples])
    if not good:
        transitions.apply_transition(state, group, "failed", "every sample failed")
        return "every sample failed"
    _, newest = version_range(good)
    made_after = state.steps_behind(newest) if newest != NO_VERSION else 0
    state.groups.describe(group, made, max(made_after, group.partial.steps_behind))
    _update_mean_tokens(state, group.num_tokens)
    if state.rules.needs_spread and group.reward_std == 0.0:
        state.count_waste(NO_SPREAD, 1, group.num_tokens)
        _drop_filtered(state, group, NO_SPREAD)
        return NO_SPREAD
    state.meta.filtered_in_a_row = 0
    state.leases.record_put(group, state.now)
    _used_partial(state, group)
    transitions.apply_transition(state, group, "put")
    state.make_readable(group)
    if staleness.is_stale(state, group, state.next_unassigned):
        staleness.apply_on_stale(state, group)
    else:
        state.save("payloads", group.id, made.frames)
    return ""


def _update_mean_tokens(state: State, num_tokens: int) -> None:
    """Take the size of a group into the running mean of the last ones."""
    meta = state.meta
    meta.num_measured = min(meta.num_measured + 1, MEAN_OVER)
    meta.mean_tokens += (num_tokens - meta.mean_tokens) / meta.num_measured


def forget_filtered(state: State) -> None:
    """A trainer begins: what was filtered before does not stop it."""
    state.meta.filtered_in_a_row = 0


def _drop_filtered(state: State, group: Group, reason: str) -> None:
    """Drop a group that gives no gradient; admission lets another prompt take its place."""
    state.tally(state.meta.counted, FILTERED)
    state.meta.filtered_in_a_row += 1
    if state.meta.filtered_in_a_row == state.rules.max_filtered:
        state.note(f"{state.rules.max_filtered} groups in a row were dropped by the dynamic sampling filter", is_warning=True)
    transitions.apply_transition(state, group, "dropped", reason)


def give_back(state: State, event: Event, back: GiveBack) -> None:
    """End a lease without samples; one that is no longer held is acknowledged."""
    group = state.groups.by_lease.get(back.lease)
    if group is not None and group.id == back.group and group.lease.worker == event.sender:
        outcome, reason = back.outcome, f"returned: {back.reason}"
        if outcome == "partial" and (refusal := _take_partial(state, event, group, back)):
            outcome, reason = "fail", f"partial refused: {refusal}"
        if back.num_tokens:
            state.count_waste("failed attempts" if outcome == "fail" else reason, 1, back.num_tokens)  # each has words of its own
        if state.stateful is not None and outcome in ("drop", "fail"):
            rewards = [r if r is not None and math.isfinite(r) else None for r in back.rewards[:MAX_REWARDS]]
            state.groups.record_rewards(group, rewards)
        if outcome == "drop" and group.kind != EVAL:
            _drop_filtered(state, group, reason)
        else:
            end_lease(state, group, "failed" if outcome in ("drop", "fail") else "returned", reason)
    state.reply(event.to, Ok())


def _take_partial(state: State, event: Event, group: Group, back: GiveBack) -> str:
    """Keep a partial; what is wrong with it, or nothing."""
    try:
        made = check_samples(state, event, None if _is_foreign(group, back.lineage) else group)
    except BadSamples as bad:
        state.note(f"partial of group {group.id} by {group.lease.worker}: {bad.text}", is_warning=True)
        return bad.text
    if group.kind != EVAL and back.lineage == group.lease.lineage:
        _keep_partial(state, group, made)
    return ""


# --- partials: what a worker had made of a group when it left, was out of time or was asked for it, kept for its next worker ---
#
# A partial is a group's samples, some finished and some cut off, in the frames of a put. It lives beside the prompt from the give-back
# until samples of the group are accepted, the group ends, or it can no longer be trained: then its tokens are wasted.


def _keep_partial(state: State, group: Group, made: CheckedGroup) -> None:
    """Store what a worker made of a group it holds, in place of an older partial."""
    oldest, newest = version_range(made.samples)
    behind = state.steps_behind(newest) if newest != NO_VERSION else 0
    state.groups.keep_partial(group, Partial(len(made.frames), sum(made.table.num_tokens), oldest, newest, behind))
    state.save("partials", group.id, made.frames)
    state.tally(state.meta.counted, "partials kept")


def _offer_partial(state: State, group: Group, *, is_wanted: bool) -> None:
    """Before a lease: let go of a partial that its taker cannot continue, or that would be too stale when it is trained."""
    oldest = group.partial.oldest_version
    if not is_wanted:
        state.waste_partial(group, "partial for a worker that continues none")
    elif (
        oldest != NO_VERSION
        and not state.rules.masks_offpolicy
        and state.version_of(admission.step_of_next(state)) - oldest > state.rules.max_staleness
    ):
        state.waste_partial(group, "partial grew too stale")


def _partial_frames(group: Group) -> list[StoredPayload]:
    """The bulk part of a lease reply that carries the partial of a group; empty when it has none."""
    return [StoredPayload(group.id, group.partial.num_frames, table="partials")] if group.partial.num_frames else []


def _used_partial(state: State, group: Group) -> None:
    """Samples of the group were accepted: they hold what the partial had."""
    if group.partial.num_frames:
        state.tally(state.meta.counted, "partials continued")
        state.delete_partial(group)


def rewind_partials(state: State, step: int, version: int) -> None:
    """Let go of every partial with tokens of a version that the new timeline never had: newer, or of its number and trained further."""
    for group in state.groups.by_id.values():
        if group.partial.newest_version > version or group.partial.steps_behind > step:
            state.waste_partial(group, "partial of the abandoned timeline")

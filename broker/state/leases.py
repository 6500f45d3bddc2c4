"""Lease, put, give back, expiry: what workers do with groups.

A lease request that nothing can be given for is parked and answered when capacity appears or its wait runs out. Capacity is
dealt one group at a time around the parked requests, the one that waits longest first.
"""

import math
from collections.abc import Sequence

import msgspec

from broker.state import admission, bounds, evaluation, hedging, partials, prompts, staleness
from broker.state.buffer_filter import spread
from broker.state.clients import is_present, take_back
from broker.state.consumers import TOKEN_FIELDS
from broker.state.effects import EvalPrompt, Event, StoredPrompt
from broker.state.groups import EVAL, LEASED, READY, TRAIN, Group
from broker.state.records import Client, Parked
from broker.state.rules import Sampling
from broker.state.table import State
from broker.state.timers import bounded_wait
from slimebus.errors import ProtocolError
from slimebus.messages import (
    NO_VERSION,
    GiveBack,
    Lease,
    LeasedGroup,
    LeaseReply,
    Ok,
    Put,
    PutReply,
    SampleHeader,
    has_failed,
)

NO_SPREAD = "filtered: no reward spread"
MAX_TOKENS = 1 << 31
MAX_REWARDS = 4096
EVAL_SHARE = 0.5
"""Samples of an evaluation that may be made for each training sample."""
REPLY_BYTES = 48 * 1024
"""A lease reply names its groups in one header of at most 64 KiB."""


# --- lease ---


def lease(state: State, event: Event, client: Client, ask: Lease, now: float) -> None:
    """Grant up to `want` groups, now or when capacity appears. The same request repeated gets the same groups."""
    if ask.want < 1:
        raise ProtocolError(f"lease: want is {ask.want}; expected at least 1")
    client.lineage, client.serving = ask.lineage, ask.serving
    held = state.groups.leased_at(client.name, event.to.request)
    if held:
        _answer(state, Parked(to=event.to, client=client.name, message=ask), held, now)
        return
    key = (client.name, event.to.request)
    if key not in state.parked_leases:
        _check_parked(state, client.name, now)
    state.parked_leases[key] = Parked(to=event.to, client=client.name, message=ask)
    state.newly_parked[key] = now + bounded_wait(ask.wait_s)
    if not ask.wait_s > 0:
        deal(state, now)
        give_up(state, client.name, event.to.request)


def _check_parked(state: State, name: str, now: float) -> None:
    """Raise SlimebusError `busy` when one more request may not wait."""
    rules = state.rules
    if state.newly_parked and (len(state.parked_leases) >= rules.max_parked or bounds.has_too_many_parked(state, name)):
        deal(state, now)  # those before it in the same burst may have their groups now
        watch_waits(state)
    if len(state.parked_leases) >= rules.max_parked:
        raise bounds.hit(state, "max_parked", f"{len(state.parked_leases)} lease requests wait already")
    if bounds.has_too_many_parked(state, name):
        raise bounds.hit(state, "max_parked_per_client", f"{rules.max_parked_per_client} lease requests of {name} wait already")


def watch_waits(state: State) -> None:
    """Set the deadlines of the requests that are parked since the last look; most have their answer by now and need none."""
    for key, deadline in state.newly_parked.items():
        if key in state.parked_leases:
            state.timers.set(("parked lease", *key), deadline)
    state.newly_parked.clear()


def give_up(state: State, name: str, request: int) -> None:
    """Answer a parked lease request whose wait ran out: nothing, and why."""
    parked = state.parked_leases.pop((name, request), None)
    if parked is not None:
        state.timers.cancel(("parked lease", name, request))
        state.reply(parked.to, LeaseReply(reason=admission.why_parked(state, parked)))


def deal(state: State, now: float) -> None:
    """Deal what capacity there is around the parked requests; who then still waits may help out with a slow group."""
    if not state.parked_leases:
        return
    if _has_something(state):
        _deal(state, now)
    for parked, group in hedging.offer(state, now):
        _answer_parked(state, (parked.client, parked.to.request), [group], now)


def _deal(state: State, now: float) -> None:
    waiting = [(key, parked) for key, parked in state.parked_leases.items() if _is_live(state, parked)]
    granted: dict[tuple[str, int], list[Group]] = {}
    refused: Refused = {}
    while waiting:
        still = []
        for key, parked in waiting:
            group = _next_for(state, parked, refused)
            if group is None:
                continue
            _grant(state, group, parked, now)
            refused.clear()
            granted.setdefault(key, []).append(group)
            samples = sum(num_samples_of(state, g) for g in granted[key])
            has_want = samples < parked.message.want * state.rules.samples_per_prompt
            if has_want and len(granted[key]) < _reply_limit(group, state):
                still.append((key, parked))
        waiting = still
    for key, groups in granted.items():
        _answer_parked(state, key, groups, now)


def _answer_parked(state: State, key: tuple[str, int], groups: list[Group], now: float) -> None:
    state.timers.cancel(("parked lease", *key))
    _answer(state, state.parked_leases.pop(key), groups, now)


def _has_something(state: State) -> bool:
    if state.groups.first_queued(EVAL) is not None:
        return True
    if admission.has_room(state, state.meta.version):
        return True
    return admission.has_room(state, float("inf")) and not all(p.message.needs_weights for p in state.parked_leases.values())


def _is_live(state: State, parked: Parked[Lease]) -> bool:
    client = state.clients.get(parked.client)
    return client is not None and is_present(client)


def _reply_limit(group: Group, state: State) -> int:
    size = 256 + len(msgspec.msgpack.encode(_sampling(state, group)))
    return max(1, REPLY_BYTES // size)


Refused = dict[tuple[str, int, bool], bool]
"""By what a worker serves and whether that matters: may it start no training group now? Workers that serve the same have one answer,
and hundreds of them may wait."""


def _is_refused(state: State, parked: Parked[Lease], refused: Refused) -> bool:
    client, needs_weights = state.clients[parked.client], parked.message.needs_weights
    kind = (client.lineage, client.serving, needs_weights)
    found = refused.get(kind)
    if found is None:
        found = refused[kind] = bool(admission.refusal_for(state, client, needs_weights=needs_weights))
    return found


def _next_for(state: State, parked: Parked[Lease], refused: Refused) -> Group | None:
    evaluated = _next_evaluated(state, state.clients[parked.client], parked)
    if evaluated is not None and _is_turn_of(state, evaluated):
        return evaluated
    if _is_refused(state, parked, refused):
        return evaluated
    return state.groups.first_queued(TRAIN) or prompts.draw(state) or evaluated


def _next_evaluated(state: State, client: Client, parked: Parked[Lease]) -> Group | None:
    group = state.groups.first_queued(EVAL)
    if group is None or not parked.message.needs_weights or admission.unready_weights(state, client):
        return None
    return group if client.serving >= state.evaluations[group.evaluation].version else None


def _is_turn_of(state: State, evaluated: Group) -> bool:
    """Evaluation must not starve the trainer, nor training the evaluation.

    It goes first before anything is trained; later it may hold EVAL_SHARE samples for each one being made for training, and
    whatever workers could not use for training.
    """
    if state.meta.next_step == 0:
        return True
    held = state.groups.count(LEASED, EVAL) * num_samples_of(state, evaluated)
    return held < EVAL_SHARE * state.groups.count(LEASED) * state.rules.samples_per_prompt


def num_samples_of(state: State, group: Group) -> int:
    """Samples that a group asks for."""
    if group.kind == EVAL:
        return state.rules.eval_datasets[group.dataset].num_samples
    return (group.phase == LEASED and group.lease_samples) or state.rules.samples_per_prompt


def _grant(state: State, group: Group, parked: Parked[Lease], now: float) -> None:
    meta, client = state.meta, state.clients[parked.client]
    group.lease, group.admitted = meta.next_lease, meta.next_admitted
    meta.next_lease += 1
    meta.next_admitted += 1
    group.attempt = max(group.attempt, group.hedge_attempt) + 1
    group.lease_samples = state.rules.samples_per_prompt
    group.worker, group.request = client.name, parked.to.request
    needs_weights = parked.message.needs_weights
    group.lineage, group.lease_version = (client.lineage, client.serving) if needs_weights else ("", NO_VERSION)
    partials.offer(state, group, is_wanted=parked.message.takes_partials)
    state.move(group, LEASED, "leased")
    state.lease_deadlines[group.lease] = now + state.rules.lease_s
    state.lease_since[group.lease] = now
    state.pace.granted[client.name] = meta.next_step
    state.timers.set(("lease", group.lease), now + state.rules.lease_s)


def _answer(state: State, parked: Parked[Lease], groups: list[Group], now: float) -> None:
    prompts = [EvalPrompt(g.dataset, g.row) if g.kind == EVAL else StoredPrompt(g.id) for g in groups]
    begun = [frame for g in groups for frame in partials.frames(g)]
    state.reply(parked.to, LeaseReply(groups=[_leased(state, g, parked.client, now) for g in groups]), [*prompts, *begun])


def _leased(state: State, group: Group, worker: str, now: float) -> LeasedGroup:
    lease, attempt = group.lease_of(worker)
    return LeasedGroup(
        group=group.id,
        lease=lease,
        attempt=attempt,
        num_samples=num_samples_of(state, group),
        deadline_s=max(0.0, state.lease_deadlines[lease] - now),
        kind=group.kind,
        dataset=group.dataset,
        sampling=_sampling(state, group),
        partial_frames=group.partial_frames,
    )


def _sampling(state: State, group: Group) -> Sampling:
    if group.kind == EVAL:
        return {**state.rules.sampling, **state.rules.eval_datasets[group.dataset].sampling}
    return dict(state.rules.sampling)


def expire(state: State, lease_id: int) -> None:
    """A lease was not extended in time."""
    group = state.groups.by_lease.get(lease_id)
    if group is None:
        return
    state.note(f"lease of group {group.id} by {group.holder_of(lease_id)} expired", is_warning=True)
    if not hedging.end_one(state, group, lease_id, "lease expired", counts=True):
        take_back(state, group, "lease expired", has_failed=True)


# --- put and give back ---


def put(state: State, event: Event, client: Client, done: Put) -> None:
    """Take the samples of a leased group. A repeat is acknowledged; what came too late is discarded and counted."""
    check_samples(done, len(event.bulk))
    group = state.groups.by_id.get(done.group)
    seen = state.recent_puts.get(done.lease)
    if seen == "accepted" or (group is not None and group.put_attempt == done.attempt):
        state.reply(event.to, PutReply(result="duplicate"))
        return
    if group is not None and group.holder_of(done.lease) == client.name:
        hedging.bring_forward(group, done.lease)
    refusal = _put_refusal(state, group, client, done)
    if refusal or group is None:
        num_tokens = sum(s.num_tokens for s in done.samples)
        if seen is None and not hedging.count_late(state, done.lease, num_tokens):
            state.wasted("put after the lease was lost", 1, num_tokens)
        reply = PutReply(result="discarded", reason=refusal)
    else:
        reply = _accept(state, event, group, done)
    state.remember_put(done.lease, reply.result)
    state.reply(event.to, reply)


def _put_refusal(state: State, group: Group | None, client: Client, done: Put) -> str:
    if group is None:
        return f"group {done.group[:64]} is not in play: trained, dropped, or of another run"
    if group.phase != LEASED or group.lease != done.lease or group.attempt != done.attempt or group.worker != client.name:
        return f"lease {done.lease} of group {done.group} is no longer held (now: {group.phase}, {group.reason or 'new'})"
    if group.lineage and done.lineage != group.lineage:
        return f"lineage {done.lineage[:8]} is not that of the lease, {group.lineage[:8]}"
    newest = max((v for s in done.samples for v, _ in s.versions), default=NO_VERSION)
    if newest > state.meta.version:
        raise ProtocolError(f"put of group {group.id}: tokens of version {newest}, but {state.meta.version} is the newest published")
    return ""


def check_samples(done: Put | GiveBack, num_frames: int) -> None:
    """Raise ProtocolError unless frames, fields and headers agree with each other."""
    where = f"{'put' if isinstance(done, Put) else 'give_back'} of group {done.group[:64]}"
    if num_frames != len(done.fields):
        raise ProtocolError(f"{where}: {num_frames} bulk frames for {len(done.fields)} fields")
    for i, sample in enumerate(done.samples):
        problem = _problem_of(sample)
        if problem:
            raise ProtocolError(f"{where}, sample {i}: {problem}")


def _problem_of(sample: SampleHeader) -> str:
    runs, is_sound, has_oldest = 0, True, sample.oldest_version == NO_VERSION
    for version, length in sample.versions:
        runs += length
        is_sound = is_sound and length >= 0 and version >= NO_VERSION
        has_oldest = has_oldest or version == sample.oldest_version
    if sample.num_tokens > MAX_TOKENS:
        return f"{sample.num_tokens} tokens; at most {MAX_TOKENS}"
    if runs != sample.num_tokens or not is_sound:
        return f"version runs cover {runs} of {sample.num_tokens} tokens"
    if not 0 <= sample.num_trainable <= sample.num_tokens:
        return f"{sample.num_trainable} trained of {sample.num_tokens} tokens"
    return "" if has_oldest else f"no run of its oldest version {sample.oldest_version}"


def good_of(samples: Sequence[SampleHeader]) -> list[SampleHeader]:
    """Those that have not failed."""
    return [s for s in samples if not has_failed(s.status, s.reward, s.oldest_version)]


def _accept(state: State, event: Event, group: Group, done: Put) -> PutReply:
    good = good_of(done.samples)
    group.put_attempt = done.attempt
    if group.kind == EVAL:
        evaluation.score(state, group, good, num_failed=len(done.samples) - len(good))
        return PutReply(result="accepted")
    state.tally(state.meta.counted, "samples put", len(done.samples))
    state.tally(state.meta.counted, "samples failed", len(done.samples) - len(good))
    if state.stateful is not None:
        group.rewards = [s.reward if s.reward is not None and math.isfinite(s.reward) else None for s in done.samples]
    if not good:
        if not hedging.end_one(state, group, done.lease, "every sample failed", counts=True):
            state.fail(group, "every sample failed")
        return PutReply(result="accepted", reason="every sample failed")
    describe(group, done)
    group.steps_behind = _steps_behind(state, group)
    if group.second is not None and staleness.is_stale(state, group, state.next_unassigned):
        state.wasted("stale", 1, group.num_tokens)
        hedging.end_one(state, group, done.lease, "stale")
        return PutReply(result="accepted", reason="too stale; another worker still makes this group")
    hedging.decide(state, group)
    state.measured(group.num_tokens)
    if state.rules.needs_spread and group.reward_std == 0.0:
        _filter_out(state, group)
        return PutReply(result="accepted", reason=NO_SPREAD)
    state.meta.filtered_in_a_row = 0
    state.pace.group_seconds.append(state.now - state.lease_since[group.lease])
    state.pace.concurrency.append(state.groups.num_leased_by(group.worker))
    group.num_frames = 1 + len(event.bulk)
    group.size_bytes = len(event.body) + sum(len(frame) for frame in event.bulk)
    partials.used(state, group)
    state.move(group, READY, "put")
    state.groups.arrive(group, state.meta.next_arrival)
    state.meta.next_arrival += 1
    if staleness.is_stale(state, group, state.next_unassigned):
        staleness.remove_stale(state, group)
    else:
        state.save("payloads", group.id, [event.body, *event.bulk])
    return PutReply(result="accepted")


def _steps_behind(state: State, group: Group) -> int:
    made_after = state.steps_behind(group.newest_version) if group.newest_version != NO_VERSION else 0
    return max(made_after, group.partial_steps)


def describe(group: Group, done: Put) -> None:
    """Note on a group what the broker must know of its samples; failed ones are only counted."""
    good = good_of(done.samples)
    group.num_samples, group.num_failed = len(good), len(done.samples) - len(good)
    group.num_tokens = sum(s.num_tokens for s in good)
    group.lengths = [s.num_tokens for s in done.samples]
    group.fields = [f.name for f in done.fields if f.name not in TOKEN_FIELDS]
    group.oldest_version = min((s.oldest_version for s in good if s.oldest_version != NO_VERSION), default=NO_VERSION)
    group.newest_version = max((version for s in good for version, _ in s.versions), default=NO_VERSION)
    group.reward_mean, group.reward_std = spread([s.reward or 0.0 for s in good])


def _filter_out(state: State, group: Group) -> None:
    """Drop a group that gives no gradient; admission lets another prompt take its place."""
    state.wasted(NO_SPREAD, 1, group.num_tokens)
    state.filtered()
    state.drop(group, NO_SPREAD)


def give_back(state: State, event: Event, client: Client, back: GiveBack) -> None:
    """End a lease without samples; one that is no longer held is acknowledged."""
    if back.outcome not in ("requeue", "drop", "fail", "partial"):
        raise ProtocolError(f"give_back: outcome {back.outcome[:64]!r}; expected requeue, drop, fail or partial")
    check_samples(back, len(event.bulk))
    group = state.groups.by_lease.get(back.lease)
    if group is not None and group.id == back.group and group.holder_of(back.lease) == client.name:
        hedging.bring_forward(group, back.lease)
        if back.num_tokens > 0:
            state.wasted(f"returned: {back.reason}", 1, min(back.num_tokens, MAX_TOKENS))
        if group.second is not None and back.outcome != "drop":
            hedging.end_one(state, group, back.lease, f"returned: {back.reason}", counts=back.outcome == "fail")
            state.reply(event.to, Ok())
            return
        if back.outcome == "partial" and group.kind != EVAL and back.lineage == group.lineage:
            partials.keep(state, event, group, back)
        if state.stateful is not None and back.outcome in ("drop", "fail"):
            group.rewards = [r if r is not None and math.isfinite(r) else None for r in back.rewards[:MAX_REWARDS]]
        _give_back(state, group, back.outcome, f"returned: {back.reason}")
    state.reply(event.to, Ok())


def _give_back(state: State, group: Group, outcome: str, reason: str) -> None:
    if outcome == "drop" and group.kind != EVAL:
        state.filtered()
        state.drop(group, reason)
    else:
        take_back(state, group, reason, has_failed=outcome in ("drop", "fail"))

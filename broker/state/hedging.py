"""Straggler hedging: a second lease for a group that takes much longer than usual, for a worker that nothing else can be given to.

    leased by w1 ----------------------------- put (too late: discarded, counted)
          `-- usual x hedge_after --> also by w2 ------ put: accepted, w1 loses its lease and hears of it with its next heartbeat

The group stays one group: admission counts it once and the first put decides. Of two leases either may end (expired, given back, its worker
gone, every sample failed) without harm to the other: it counts as a failed attempt where it would alone, but only the last one decides
what becomes of the group, except for `drop`: what a filter refused is refused. Never hedged: evaluations, groups that would be too
stale, groups whose worker serves a newer version than the one that asks, and groups with one attempt left (a prompt that
kills its workers must come to an end).
"""

from broker.state import admission
from broker.state.groups import TRAIN, Group, SecondLease
from broker.state.pace import quantile
from broker.state.records import Client, Parked
from broker.state.table import State
from slimebus.messages import NO_VERSION, Lease

MIN_MEASURED = 8
"""Groups that must have been put before it is known what is usual."""
MAX_LOSERS = 4096
WASTE = "hedged: another put came first"
TIMER = ("hedge",)


# --- granting ---


def offer(state: State, now: float) -> list[tuple[Parked[Lease], Group]]:
    """Second leases for requests that wait, one each, the slowest groups first. The caller answers them."""
    after_s = threshold_s(state)
    if not after_s or not state.parked_leases or state.meta.finishing or state.disk_full:
        return []
    slow = _slow(state, now, after_s)
    granted = []
    for parked in list(state.parked_leases.values()):
        client = state.clients.get(parked.client)
        if client is None or client.is_gone or client.is_fenced:
            continue
        group = next((g for g in slow if _may_take(state, client, parked, g)), None)
        if group is not None:
            slow.remove(group)
            _grant(state, client, parked, group, now)
            granted.append((parked, group))
    _look_again(state, now, after_s)
    return granted


def threshold_s(state: State) -> float:
    """Seconds after which a group is slow; 0 when hedging is off or it is not known yet what is usual."""
    if not state.rules.hedge_after or len(state.pace.group_seconds) < MIN_MEASURED:
        return 0.0
    return state.rules.hedge_after * quantile(state.pace.group_seconds, 0.5)


def _is_slow(since: float, now: float, after_s: float) -> bool:
    """One expression for both questions below: asked at the time that the timer was set for, the answer must be yes."""
    return since + after_s <= now


def _slow(state: State, now: float, after_s: float) -> list[Group]:
    """Groups leased once, so long ago or longer, oldest lease first."""
    found = []
    for lease, group in state.groups.by_lease.items():
        if not _is_slow(state.lease_since[lease], now, after_s):
            break  # leases stand in the order in which they were granted
        if group.kind == TRAIN and group.second is None:
            found.append(group)
    return found


def _may_take(state: State, client: Client, parked: Parked[Lease], group: Group) -> bool:
    needs_weights = parked.message.needs_weights
    if group.failures + 1 >= state.rules.max_attempts:
        return False
    if group.worker == client.name or needs_weights != bool(group.lineage) or (group.partial_frames and not parked.message.takes_partials):
        return False
    if not needs_weights:
        return True
    is_fresh = state.version_of(state.next_unassigned) <= client.serving + state.rules.max_staleness
    return is_fresh and client.serving >= group.lease_version and not admission.unready_weights(state, client)


def _grant(state: State, client: Client, parked: Parked[Lease], group: Group, now: float) -> None:
    needs_weights = parked.message.needs_weights
    second = SecondLease(
        lease=state.meta.next_lease,
        worker=client.name,
        request=parked.to.request,
        attempt=max(group.attempt, group.hedge_attempt) + 1,
        lineage=client.lineage if needs_weights else "",
        version=client.serving if needs_weights else NO_VERSION,
    )
    state.meta.next_lease += 1
    group.hedge_attempt = second.attempt
    state.groups.lease_again(group, second)
    state.lease_deadlines[second.lease] = now + state.rules.lease_s
    state.lease_since[second.lease] = now
    state.timers.set(("lease", second.lease), now + state.rules.lease_s)
    state.tally(state.meta.counted, "hedges begun")
    state.changed("groups", group.id)


def _look_again(state: State, now: float, after_s: float) -> None:
    """When the next group becomes slow, while somebody waits."""
    young = (
        since
        for lease, since in state.lease_since.items()
        if not _is_slow(since, now, after_s) and state.groups.by_lease[lease].second is None
    )
    next_at = next(young, None)
    if next_at is not None and state.parked_leases:
        state.timers.set(TIMER, next_at + after_s)


# --- one of two leases ---


def bring_forward(group: Group, lease: int) -> None:
    """Have this lease be the first of its group's two; nothing changes but which of them stands in front."""
    second = group.second
    if second is None or second.lease != lease:
        return
    group.second = SecondLease(
        lease=group.lease,
        worker=group.worker,
        request=group.request,
        attempt=group.attempt,
        lineage=group.lineage,
        version=group.lease_version,
    )
    group.lease, group.worker, group.request, group.attempt = second.lease, second.worker, second.request, second.attempt
    group.lineage, group.lease_version = second.lineage, second.version


def end_one(state: State, group: Group, lease: int, reason: str, *, counts: bool = False) -> bool:
    """End one of two leases, the group stays leased by the other; False when it has only this one. counts: as a failed attempt."""
    if group.second is None:
        return False
    group.failures += counts
    if lease == group.lease:
        bring_forward(group, group.second.lease)
    ended = group.second
    state.groups.end_second(group)
    state.forget_lease(ended.lease)
    state.tally(state.meta.counted, "hedges ended early")
    state.tally(state.meta.moves, f"leased>leased {reason}")
    state.changed("groups", group.id)
    return True


def decide(state: State, group: Group) -> None:
    """The first lease of a hedged group has put its samples; the other one has lost."""
    if group.second is None:
        return
    state.tally(state.meta.counted, "hedges won" if group.lease > group.second.lease else "hedges lost")
    state.wasted(WASTE, 1, 0)
    state.hedge_losers[group.second.lease] = None
    while len(state.hedge_losers) > MAX_LOSERS:
        del state.hedge_losers[next(iter(state.hedge_losers))]


def count_late(state: State, lease: int, num_tokens: int) -> bool:
    """The tokens of a put that came second, whose group is counted already; False for any other late put."""
    if lease not in state.hedge_losers:
        return False
    del state.hedge_losers[lease]
    state.wasted(WASTE, 0, num_tokens)
    return True

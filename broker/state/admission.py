"""When a worker may start a group: paced so that what it makes is still fresh when its turn comes.

Of the groups leased and ready, the next one would be trained `(leased + ready) // B` steps after the first step whose batch is
not chosen yet. It is admitted while the version trained then is at most `max_staleness` ahead of what the worker serves:
with N groups admitted so far and B groups a step this is `version(N // B) <= serving + max_staleness`.

With over-sampling B is the number of groups started for each step. With batches of tokens a group counts as the tokens it has, or as
the mean of the last groups while it is in flight. These are estimates: they pace, the bound itself is enforced when a batch is chosen.
"""

from broker.state import prompts
from broker.state.groups import LEASED, READY
from broker.state.records import Client, Parked
from broker.state.rules import MAX_BATCH_SIZE
from broker.state.table import State
from slimebus.messages import NO_VERSION, Lease


def step_of_next(state: State, extra: int = 0) -> int:
    """The step that a group admitted now, behind `extra` others, would be trained in."""
    rules, leased, ready = state.rules, state.groups.count(LEASED) + extra, state.groups.count(READY)
    if not rules.batch_tokens:
        return state.next_unassigned + (leased + ready) // (rules.over_sampling or rules.batch_size)
    tokens = state.groups.ready_tokens + (leased + len(state.groups.held)) * mean_tokens(state)
    return state.next_unassigned + int(tokens / (rules.batch_tokens * rules.width))


def mean_tokens(state: State) -> float:
    """Tokens of a group, as the last ones were; before the first one, what `batch_size` groups a batch come to."""
    return max(1.0, state.meta.mean_tokens if state.meta.num_measured else state.rules.batch_tokens / state.rules.batch_size)


def groups_per_batch(state: State) -> float:
    """Groups of a batch; an estimate where batches are filled by tokens."""
    rules = state.rules
    return min(MAX_BATCH_SIZE, max(1.0, rules.batch_tokens / mean_tokens(state))) if rules.batch_tokens else rules.batch_size


def capacity(state: State) -> int:
    """Most groups leased, ready or assigned at once."""
    return state.rules.capacity_for(groups_per_batch(state))


def has_room(state: State, serving: float, extra: int = 0) -> bool:
    """True when a worker that serves this version could start a training group now, behind `extra` others."""
    step, rules = step_of_next(state, extra), state.rules
    if state.disk_full or state.meta.filtered_in_a_row >= rules.max_filtered:
        return False
    if state.meta.finishing or state.num_held + extra >= capacity(state) or (rules.num_steps is not None and step >= rules.num_steps):
        return False
    return state.version_of(step) <= serving + rules.max_staleness


def why_parked(state: State, parked: Parked[Lease]) -> str:
    """Why a parked request waits."""
    client = state.clients.get(parked.client)
    if client is None:
        return "its worker left"
    refusal = refusal_for(state, client, needs_weights=parked.message.needs_weights)
    return refusal or prompts.why_none(state) or "waiting its turn"


def refusal_for(state: State, client: Client, *, needs_weights: bool) -> str:
    """Why this worker may not start a training group now; empty when it may."""
    if state.meta.finishing:
        return "the run is finished"
    if state.disk_full:
        return state.disk_full
    if state.meta.filtered_in_a_row >= state.rules.max_filtered:
        return all_filtered(state)
    if needs_weights and (unready := unready_weights(state, client)):
        return unready
    step = step_of_next(state)
    if state.rules.num_steps is not None and step >= state.rules.num_steps:
        return f"every group of the run's {state.rules.num_steps} steps is leased, ready or trained"
    if state.num_held >= capacity(state):
        return f"the buffer holds {state.num_held} of {capacity(state)} groups; waiting for the trainer to commit a step"
    if needs_weights and state.version_of(step) > client.serving + state.rules.max_staleness:
        return (
            f"a group started now would train in step {step} (version {state.version_of(step)}), more than "
            f"{state.rules.max_staleness:g} ahead of the served version {client.serving}; waiting for the trainer to publish "
            f"version {state.version_of(step) - int(state.rules.max_staleness)}"
        )
    return ""


def all_filtered(state: State) -> str:
    """Why a run in which every group is filtered out goes no further."""
    return (
        f"the last {state.meta.filtered_in_a_row} groups were all dropped by the dynamic sampling filter and none was kept: "
        "every prompt is too easy or too hard for this model, or the reward is constant; give other data, or raise dynamic_sampling_limit"
    )


def unready_weights(state: State, client: Client) -> str:
    """Why the worker's weights cannot make samples for this timeline; empty when they can."""
    meta = state.meta
    if not meta.lineage or meta.version == NO_VERSION:
        return "no weights are published yet; waiting for the trainer"
    if client.lineage != meta.lineage or client.serving == NO_VERSION:
        return f"{client.name} serves no verified version of lineage {meta.lineage[:8]}; it must pull version {meta.version} first"
    if client.serving > meta.version:
        return f"{client.name} says it serves version {client.serving}, but {meta.version} is the newest published"
    return ""

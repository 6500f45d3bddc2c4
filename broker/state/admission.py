"""When a worker may start a group: paced so that what it makes is still fresh when its turn comes.

Of the groups leased and ready, the next one would be trained `(leased + ready) // B` steps after the first step with a batch that is
not chosen yet. It is admitted while the version trained then is at most `max_staleness` ahead of what the worker serves:
with N groups admitted so far and B groups a step this is `version(N // B) <= serving + max_staleness`.

With over-sampling B is the number of groups started for each step. With batches of tokens a group counts as the tokens it has, or as
the mean of the last groups while it is in flight. These are estimates: they pace, the bound itself is enforced when a batch is chosen.
"""

from broker.state import prompts
from broker.state.broker_state import State
from broker.state.groups import LEASED, READY
from broker.state.records import Cause, ClientRecord
from broker.state.waiting import Waiting
from slimebus.bus.messages import MAX_BATCH_SIZE, NO_VERSION, Lease


def step_of_next(state: State) -> int:
    """The step that a group admitted now would be trained in."""
    rules, leased, ready = state.rules, state.groups.count(LEASED), state.groups.count(READY)
    if not rules.batch_tokens:
        return state.next_unassigned + (leased + ready) // (rules.over_sampling or rules.batch_size)
    tokens = state.groups.ready_tokens + (leased + len(state.groups.awaiting_fields)) * mean_tokens(state)
    return state.next_unassigned + int(tokens / (rules.batch_tokens * rules.width))


def mean_tokens(state: State) -> float:
    """Tokens of a group, as the last ones were; before the first one, what `batch_size` groups a batch come to."""
    return max(1.0, state.meta.mean_tokens if state.meta.num_measured else state.rules.batch_tokens / state.rules.batch_size)


def capacity(state: State) -> int:
    """Most groups leased, ready or assigned at once; an estimate where batches are filled by tokens."""
    rules = state.rules
    if not rules.batch_tokens:
        return rules.capacity
    return rules.capacity_for(min(MAX_BATCH_SIZE, max(1.0, rules.batch_tokens / mean_tokens(state))))


def why_waiting(state: State, waiting: Waiting[Lease]) -> str:
    """Why a waiting request waits."""
    client = state.clients.get(waiting.client)
    if client is None:
        return "its worker left"
    refusal = refusal_for(state, client, needs_weights=waiting.message.needs_weights)
    return refusal.reason if refusal is not None else prompts.why_none(state) or "waiting its turn"


def refusal_for(state: State, client: ClientRecord, *, needs_weights: bool) -> Cause | None:
    """Why this worker may not start a training group now, and which process that waits for; None when it may."""
    rules, num_in_flight = state.rules, state.num_in_flight
    if state.meta.finishing:
        text = "the run is finished" if state.is_finishing else "the run had finished; waiting for a trainer to go on"
        return Cause("trainer", [], text)
    if state.store_problem:
        return Cause("broker", ["store"], state.store_problem)
    if state.meta.filtered_in_a_row >= rules.max_filtered:
        return Cause("broker", ["filter"], all_filtered(state))
    if needs_weights and (unready := unready_weights(state, client)):
        return unready
    step = step_of_next(state)
    if rules.num_steps is not None and step >= rules.num_steps:
        return Cause("trainer", [], f"every group of the run's {rules.num_steps} steps is leased, ready or trained")
    if num_in_flight >= (most := capacity(state)):
        text = f"the buffer holds {num_in_flight} of {most} groups; waiting for the trainer to commit a step"
        return Cause("broker", ["buffer"], text)
    version = state.version_of(step)
    if needs_weights and version > client.serving + rules.max_staleness:
        what = f"a group started now would train in step {step} (version {version})"
        bound = f"more than {rules.max_staleness:g} ahead of the served version {client.serving}"
        text = f"{what}, {bound}; waiting for the trainer to publish version {version - int(rules.max_staleness)}"
        return Cause("trainer", [], text)
    return None


def all_filtered(state: State) -> str:
    """Why a run in which every group is filtered out goes no further."""
    what = f"the last {state.meta.filtered_in_a_row} groups were all dropped by the dynamic sampling filter and none was kept"
    why = "every prompt is too easy or too hard for this model, or the reward is constant"
    return f"{what}: {why}; give other data, or raise dynamic_sampling_limit"


def unready_weights(state: State, client: ClientRecord) -> Cause | None:
    """Why the worker's weights cannot make samples for this timeline; None when they can."""
    meta = state.meta
    if not meta.lineage or meta.version == NO_VERSION:
        return Cause("trainer", [], "no weights are published yet; waiting for the trainer")
    if client.lineage != meta.lineage or client.serving == NO_VERSION:
        text = f"the worker serves no verified version of lineage {meta.lineage[:8]}; it must pull version {meta.version} first"
        return Cause("rollout", [client.name], text)
    if client.serving > meta.version:
        text = f"the worker says it serves version {client.serving}, but {meta.version} is the newest published"
        return Cause("rollout", [client.name], text)
    return None

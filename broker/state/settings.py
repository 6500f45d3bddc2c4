"""Settings that can be changed while the run goes on, by the names of the config, and how the bound holds through a change.

A batch that is chosen keeps its groups, its version and the bound it was chosen under; everything after it obeys the new settings.
What is ready and too old under a lower bound leaves the buffer at once. A change outlives the broker: it holds until the config
itself says something else than it said when the change was made.
"""

import contextlib
import difflib
import math

import msgspec

from broker.state import staleness
from broker.state.broker_state import State
from broker.state.effects import Event
from broker.state.records import SettingsChange
from broker.state.rules import Rules
from slimebus.bus.envelope import check_name
from slimebus.bus.errors import ConfigError
from slimebus.bus.messages import Scalar, Set, SetReply
from slimebus.config.convert import describe

MAX_CHANGES = 4096
"""Changes kept, by which a repeat of a request is known."""
UNBOUNDED = "unbounded"
"""What an infinite max_staleness is called where infinity cannot be written (JSON)."""


RULES = {
    "broker.max_staleness": "max_staleness",
    "broker.on_stale": "on_stale",
    "rollout.rollout_batch_size": "batch_size",
    "rollout.n_samples_per_prompt": "samples_per_prompt",
    "weights.update_weights_interval": "publish_interval",
    "rollout.over_sampling_batch_size": "over_sampling",
    "rollout.dynamic_sampling_limit": "max_filtered",
    "broker.batch_tokens": "batch_tokens",
    "broker.buffer_capacity": "buffer_capacity",
    "broker.lease_s": "lease_s",
    "broker.max_attempts": "max_attempts",
    "eval.eval_interval": "eval_interval",
}
"""Name of each setting in the config -> its name in Rules."""
SETTINGS = {config.rpartition(".")[2]: rule for config, rule in RULES.items()}
"""The same by the last part of the config's name, by which they are known here."""
TYPES = {field.name: field.type for field in msgspec.structs.fields(Rules)}


def current_values(rules: Rules) -> dict[str, Scalar]:
    """Every setting by name, as it is in force."""
    return {name: getattr(rules, rule) for name, rule in SETTINGS.items()}


def values_for_json(rules: Rules) -> dict[str, Scalar]:
    """The same for JSON, which has no infinity."""
    return {name: UNBOUNDED if value == math.inf else value for name, value in current_values(rules).items()}


# --- changing ---


def change(state: State, event: Event, request: Set) -> None:
    """Put new settings in force, all or none, and answer with old and new. The same key again gets the first answer."""
    check_name("set: key", request.key)
    made = state.changes.get(request.key) or apply_change(state, event.who, request)
    state.reply(event.to, SetReply(step=made.step, changed=made.changed, settings=current_values(state.rules)))


def apply_change(state: State, by: str, request: Set) -> SettingsChange:
    """The change that is asked for, made. by: who asks, as the log and the status name it. Raises ConfigError."""
    wanted = {setting_of(name): convert_value(name, value) for name, value in request.settings.items()}
    if len(wanted) < len(request.settings):
        raise ConfigError("set: a setting is given twice, with and without its section")
    old = current_values(state.rules)
    changed = {name: (old[name], value) for name, value in wanted.items() if value != old[name]}
    made = SettingsChange(key=request.key, serial=state.meta.num_changes + 1, by=by, step=state.next_unassigned, changed=changed)
    if not wanted:
        return made
    rules = with_values(state.rules, wanted)  # raises before anything is changed
    state.meta.num_changes += 1
    state.keep_latest("changes", made, MAX_CHANGES)
    if not changed:
        return made
    configured = {name: state.meta.overrides[name][0] if name in state.meta.overrides else old[name] for name in changed}
    put_in_force(state, rules)
    state.meta.overrides |= {name: [configured[name], new] for name, (_, new) in changed.items()}
    staleness.remove_stale_ready_groups(state, made.step)
    staleness.end_stale_leases(state, made.step, "too old under a new bound")
    state.note(f"{by} changed {describe_change(made)}")
    state.record({"settings": values_for_json(state.rules), "from_step": made.step})
    return made


def describe_change(change: SettingsChange) -> str:
    """`max_staleness from 1 to 4, from step 17 on`."""
    pairs = ", ".join(f"{name} from {_value_text(old)} to {_value_text(new)}" for name, (old, new) in change.changed.items())
    return f"{pairs}, from step {change.step} on"


def _value_text(value: Scalar) -> str:
    return UNBOUNDED if value == math.inf else f"{value:g}" if isinstance(value, float) else str(value)


def setting_of(name: str) -> str:
    """The setting of a name, with or without its section. Raises ConfigError for one that cannot be changed."""
    last = name.rpartition(".")[2]
    if name not in RULES and name not in SETTINGS:
        near = difflib.get_close_matches(last, SETTINGS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"set: {name[:64]!r} cannot be changed while the run goes on; {hint}what can: {', '.join(SETTINGS)}")
    return last


def convert_value(name: str, value: Scalar) -> Scalar:
    """The value in the setting's own type. Raises ConfigError."""
    kind = TYPES[SETTINGS[setting_of(name)]]
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    for given in (value, whole):
        with contextlib.suppress(msgspec.ValidationError):
            made: Scalar = msgspec.convert(given, kind)
            return made
    raise ConfigError(f"set: {name[:64]} is {value!r:.64}; expected {describe(kind)}")


def with_values(rules: Rules, wanted: dict[str, Scalar]) -> Rules:
    """The rules with other settings. Raises ConfigError when they contradict each other."""
    try:
        return msgspec.structs.replace(rules, **{SETTINGS[name]: value for name, value in wanted.items()})
    except ConfigError as bad:
        raise ConfigError(f"set: {bad.text}") from None


def put_in_force(state: State, rules: Rules) -> None:
    """Obey other rules from the first step without chosen groups on."""
    step = state.next_unassigned
    if rules.publish_interval != state.rules.publish_interval:
        state.set_pace(step, state.version_of(step))
    state.rules = rules
    state.meta.settings = current_values(rules)


def rewind(state: State, step: int) -> None:
    """What was set from a later step on holds for the steps from this one on, which are trained again."""
    for change in state.changes.values():
        if change.step > step:
            change.step = step
            state.changed("changes", change.key)


# --- after a restart ---


def restore(state: State) -> None:
    """Take up what was set before: it holds unless the config says something else than when it was set."""
    meta, configured = state.meta, current_values(state.rules)
    rules = state.rules
    kept: dict[str, list[Scalar]] = {}
    for name, (said, chosen) in meta.overrides.items():
        if name in SETTINGS and configured[name] == said:
            kept[name] = [said, chosen]
        elif name in SETTINGS:
            now, then = _value_text(configured[name]), _value_text(said)
            state.note(f"{name} is {now}, as the config says now (it said {then} when {_value_text(chosen)} was set)")
    try:
        rules = with_values(rules, {name: chosen for name, (_, chosen) in kept.items()})
    except ConfigError as bad:
        state.note(f"settings that were changed no longer fit the config, which holds alone: {bad.text}", is_warning=True)
        kept = {}
    interval = meta.settings.get("update_weights_interval", rules.publish_interval)
    state.rules = msgspec.structs.replace(state.rules, publish_interval=interval)  # the pace until now
    meta.overrides = kept
    put_in_force(state, rules)
    for name, (_, chosen) in kept.items():
        state.note(f"{name} is {_value_text(chosen)}, as set while the run went on")
    if rules.is_unbounded:
        state.note("max_staleness is unbounded: samples of any age are trained")

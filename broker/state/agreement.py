"""Whether a process that joins has the settings of the run: what cannot go together is refused, other differences are told once."""

from collections.abc import Iterator

from broker.state.broker_state import State
from broker.state.records import Client
from slimebus.bus import messages as m
from slimebus.bus.errors import ConfigError, ProtocolError, SlimebusError

MODEL = "model.hf_checkpoint"
WITH_EACH_LEASE = (
    *("rollout.n_samples_per_prompt", "rollout.rollout_batch_size"),
    *("rollout.rollout_temperature", "rollout.rollout_top", "rollout.rollout_max", "rollout.rollout_stop"),
)
"""How the names begin of what the broker decides with each lease; of all else a process follows its own setting."""
MAX_SETTINGS, MAX_CHARS = 64, 512


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


def differences(state: State, client: Client) -> list[str]:
    """A sentence for each setting of a process that differs from the run's, with both values and which of them holds."""
    ours = state.rules.agreed
    differing = {key: value for key, value in client.settings.items() if ours.get(key, value) != value}
    found = [f"{key}: {client.name} has {value}, the run has {ours[key]}; {_which_holds(key, client)}" for key, value in differing.items()]
    return [*found, *_other_models(state, client)]


def _which_holds(key: str, client: Client) -> str:
    return "the run's value holds" if key.startswith(WITH_EACH_LEASE) else f"{client.name} follows its own"


def _other_models(state: State, client: Client) -> Iterator[str]:
    """Between the trainer and each worker: the broker itself has no model."""
    mine, trainer = client.settings.get(MODEL), state.clients.get(state.pace.trainer)
    for other in state.clients.values() if client.role == "trainer" else [trainer] if trainer else []:  # thousands of workers may join
        theirs = other.settings.get(MODEL)
        is_peer = {client.role, other.role} == {"trainer", "rollout"} and not other.is_gone and not other.is_fenced
        if is_peer and mine and theirs and mine != theirs:
            what = f"config.json or tokenizer.json of {client.name} (hash {mine}) differs from that of {other.title}"
            yield f"{MODEL}: {what} (hash {theirs}); samples mean something else to each, give both the same model directory"


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() else None

"""`slimebus weights check`: an engine's weights against the trainer's."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slimebus.errors import UsageError, WeightsError

if TYPE_CHECKING:
    from slimebus.config.load import Resolved
    from slimebus.messages import Welcome
    from slimebus.security.key_file import KeyPair
    from slimebus.weights.disk_chain import DiskPuller
    from slimebus.weights.engine_sums import EngineSums
    from slimebus.weights.puller import WeightPuller
    from slimebus.weights.tensors import Weights

SHOWN = 20
ANSWER_S = 5.0
"""A broker, publisher or engine that answers nothing at all for so long is taken for absent."""
SETTLE_S, SETTLE_PAUSE_S = 10.0, 0.1


class Source(NamedTuple):
    """Where the right weights are: exactly one of a directory, publishers, or a broker that knows them."""

    model_dir: Path | None
    trainer: tuple[str, ...]
    broker: str | None
    run: Path | None
    timeout_s: float

    @property
    def asks_broker(self) -> bool:
        """Whether the broker says who publishes."""
        return self.broker is not None or (self.run is not None and not self.trainer)

    def check(self) -> None:
        """Raises UsageError unless it is exactly one."""
        if (self.model_dir is not None) + bool(self.trainer) + self.asks_broker != 1:
            raise UsageError("give one of MODEL_DIR, --trainer and --broker (or --run): what the engine is compared with")

    @contextlib.contextmanager
    def newest(self) -> "Iterator[tuple[str, Callable[[], Weights]]]":
        """What to call them, and what gives the newest verified version each time. Raises Unreachable, WeightsError."""
        if self.model_dir is not None:
            from slimebus.weights.safetensors_file import read_weights

            read = read_weights(self.model_dir)
            yield str(self.model_dir), lambda: read
            return
        puller, publishers = self._puller()
        have: Weights | None = None

        def pull() -> "Weights":
            nonlocal have
            have = puller.pull(have, deadline_s=self.timeout_s)
            return have

        with contextlib.closing(puller):
            yield f"trainer at {', '.join(publishers)}", pull

    def _puller(self) -> "tuple[WeightPuller | DiskPuller, Sequence[str]]":
        from slimebus.config.load import resolve
        from slimebus.security.credentials import credentials_of
        from slimebus.weights.disk_chain import SCHEME, DiskPuller, chain_dir
        from slimebus.weights.puller import WeightPuller

        resolved = resolve(self.run)
        welcome = self._welcome(resolved) if self.asks_broker else None
        publishers = welcome.publishers if welcome else self.trainer
        if welcome and publishers[0].startswith(SCHEME):
            folder = chain_dir(resolved.weights_dir or Path(publishers[0].removeprefix(SCHEME)).parent, welcome.lineage)
            if not folder.is_dir():
                raise WeightsError(f"{folder}, where the trainer writes its weights, is not here; name the directory with --run RUN.yaml")
            return DiskPuller(folder), publishers
        credentials = credentials_of(resolved, "rollout")
        pair = credentials.pair if credentials else None
        for publisher in publishers:
            _hear(publisher, pair, min(ANSWER_S, self.timeout_s))
        return WeightPuller(publishers, name="check", pair=pair), publishers

    def _welcome(self, resolved: "Resolved") -> "Welcome":
        from slimebus.joining import client_of, join, process_name

        client = client_of(resolved, self.broker, role="rollout", name=process_name("check"))
        try:
            welcome = join(client, "client", min(ANSWER_S, self.timeout_s))
        finally:
            client.close()
        if not welcome.publishers:
            raise WeightsError(f"the broker at {client.address} knows of no published weights yet")
        return welcome


def found(engine_url: str, source: Source) -> dict[str, Any]:
    """Both sides' names and versions, and every tensor under same, different or uncompared.

    In a run that goes on the two are seldom at one version at once: they are asked again until they are, for SETTLE_S seconds.
    """
    from slimebus.weights.engine_sums import compare, version_of

    source.check()
    version_of(engine_url, min(ANSWER_S, source.timeout_s))  # is it there at all?
    with source.newest() as (name, newest):
        engine, weights = _at_one_version(engine_url, newest, source.timeout_s)
    verdict = compare(engine, weights)
    return {
        "engine": {"url": engine.url, "version": engine.version},
        "source": {"name": name, "version": tag_of(weights), "digest": weights.digest},
        "is_same": verdict.is_same,
        "same": verdict.same,
        "different": verdict.different,
        "uncompared": verdict.uncompared,
        "held_as": list(verdict.held_as),
    }


def _at_one_version(url: str, newest: "Callable[[], Weights]", timeout_s: float) -> "tuple[EngineSums, Weights]":
    from slimebus.weights.engine_sums import sums_of, version_of

    deadline = time.monotonic() + SETTLE_S
    while True:
        weights, is_last = newest(), time.monotonic() >= deadline
        if is_last or tag_of(weights) in ("", version_of(url, timeout_s)):
            engine = sums_of(url, timeout_s)
            if is_last or tag_of(weights) in ("", engine.version):
                return engine, weights
        time.sleep(SETTLE_PAUSE_S)


def _hear(publisher: str, pair: "KeyPair | None", timeout_s: float) -> None:
    """Raises Unreachable for a publisher that does not answer, or what it answers when it has no version yet."""
    from slimebus.weights.link import Link
    from slimebus.weights.messages import ManifestRequest

    with contextlib.closing(Link(publisher, name="check", stall_s=timeout_s / 10, pair=pair)) as link:
        link.ask(ManifestRequest(), time.monotonic() + timeout_s, threading.Event())


def tag_of(weights: "Weights") -> str:
    """What an engine that has this version says it has; "" for a directory's."""
    return f"{weights.lineage}:{weights.version}" if weights.lineage else ""


def lines(found: dict[str, Any]) -> list[str]:
    """For a person: what was compared, every difference up to SHOWN, the verdict."""
    engine, source = found["engine"], found["source"]
    shown = [
        f"engine {engine['url']}: version {engine['version']}",
        f"{source['name']}: {source['version'] or 'digest ' + source['digest']}",
        *_relation(engine["version"], source["version"]),
    ]
    shown += _some([f"different: {name}" for name in found["different"]])
    shown += _some([f"not compared: {name}: {why}" for name, why in found["uncompared"].items()])
    counts = f"{len(found['same'])} tensors same, {len(found['different'])} different, {len(found['uncompared'])} not compared"
    rounded = f"; it holds them as {', '.join(found['held_as'])}" if set(found["held_as"]) - {"bfloat16"} else ""
    verdict = ": the engine has exactly these weights" + rounded if found["is_same"] else ""
    if found["different"] and not found["same"]:
        verdict = ": another model, another version, or another release of SGLang than 0.5.23?"
    return [*shown, counts + verdict]


def _relation(engine: str, trainer: str) -> list[str]:
    """In words, where an engine is not at the trainer's version."""
    if engine == trainer or not trainer:
        return []
    (lineage, _, version), (of_trainer, _, newest) = engine.rpartition(":"), trainer.rpartition(":")
    if lineage != of_trainer or not version.isdigit():
        what = "of another lineage of the trainer" if lineage else "the ones it was started with, or somebody else's"
        return [f"the engine's weights are {what}"]
    lag = int(newest) - int(version)
    return [f"the engine is {abs(lag)} version{'s' * (abs(lag) != 1)} {'behind' if lag > 0 else 'ahead'}"]


def _some(said: list[str]) -> list[str]:
    return said if len(said) <= SHOWN else [*said[:SHOWN], f"... and {len(said) - SHOWN} more (--json lists all)"]

"""`slimebus weights check`: an engine's weights against the trainer's."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slimebus.errors import UsageError, WeightsError

if TYPE_CHECKING:
    from slimebus.security.key_file import KeyPair
    from slimebus.weights.tensors import Weights

SHOWN = 20


class Source(NamedTuple):
    """Where the right weights are: exactly one of a directory, publishers, or a broker that knows them."""

    model_dir: Path | None
    trainer: tuple[str, ...]
    broker: str | None
    run: Path | None
    timeout_s: float

    def weights(self) -> tuple[str, "Weights"]:
        """What to call them, and a verified version. Raises UsageError, Unreachable, WeightsError."""
        asks_broker = self.broker is not None or (self.run is not None and not self.trainer)
        if (self.model_dir is not None) + bool(self.trainer) + asks_broker != 1:
            raise UsageError("give one of MODEL_DIR, --trainer and --broker (or --run): what the engine is compared with")
        if self.model_dir is not None:
            from slimebus.weights.safetensors_file import read_weights

            return str(self.model_dir), read_weights(self.model_dir)
        publishers, pair = self._publishers(asks_broker)
        return f"trainer at {', '.join(publishers)}", self._pulled(publishers, pair)

    def _publishers(self, asks_broker: bool) -> tuple[list[str], "KeyPair | None"]:
        from slimebus.config.load import resolve
        from slimebus.joining import client_of, process_name
        from slimebus.security.credentials import credentials_of

        resolved = resolve(self.run)
        if not asks_broker:
            credentials = credentials_of(resolved, "rollout")
            return list(self.trainer), credentials.pair if credentials else None
        client = client_of(resolved, self.broker, role="rollout", name=process_name("check"))
        try:
            welcome = client.join("client", timeout_s=self.timeout_s)
        finally:
            client.close()
        if not welcome.publishers:
            raise WeightsError(f"the broker at {client.address} knows of no published weights yet")
        return welcome.publishers, client.credentials.pair if client.credentials else None

    def _pulled(self, publishers: list[str], pair: "KeyPair | None") -> "Weights":
        from slimebus.weights.puller import WeightPuller

        puller = WeightPuller(publishers, name="check", pair=pair)
        try:
            return puller.pull(deadline_s=self.timeout_s)
        finally:
            puller.close()


def found(engine_url: str, source: Source) -> dict[str, Any]:
    """Both sides' names and versions, and every tensor under same, different or uncompared."""
    from slimebus.weights.engine_sums import compare, sums_of

    name, weights = source.weights()
    engine = sums_of(engine_url, source.timeout_s)
    verdict = compare(engine, weights)
    return {
        "engine": {"url": engine.url, "version": engine.version},
        "source": {"name": name, "version": f"{weights.lineage}:{weights.version}" if weights.lineage else "", "digest": weights.digest},
        "is_same": verdict.is_same,
        "same": verdict.same,
        "different": verdict.different,
        "uncompared": verdict.uncompared,
        "held_as": list(verdict.held_as),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """For a person: what was compared, every difference up to SHOWN, the verdict."""
    engine, source = found["engine"], found["source"]
    shown = [
        f"engine {engine['url']}: version {engine['version']}",
        f"{source['name']}: {source['version'] or 'digest ' + source['digest']}",
    ]
    shown += _some([f"different: {name}" for name in found["different"]])
    shown += _some([f"not compared: {name}: {why}" for name, why in found["uncompared"].items()])
    counts = f"{len(found['same'])} tensors same, {len(found['different'])} different, {len(found['uncompared'])} not compared"
    rounded = f"; it holds them as {', '.join(found['held_as'])}" if set(found["held_as"]) - {"bfloat16"} else ""
    return [*shown, counts + (": the engine has exactly these weights" + rounded if found["is_same"] else "")]


def _some(said: list[str]) -> list[str]:
    return said if len(said) <= SHOWN else [*said[:SHOWN], f"... and {len(said) - SHOWN} more (--json lists all)"]

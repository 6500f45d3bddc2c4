"""What others of the run measure, told to the trainer's TensorBoard and W&B: queues and waste, workers, evaluations."""

import threading
from collections import defaultdict
from statistics import fmean
from typing import Any

from slimebus.bus.errors import SlimebusError
from slimebus.bus.transport.client import Client
from slimebus.telemetry.metrics import MetricsWriter, grouped
from slimebus.view.run_status import ask_status

TRACK_S = 10.0
ANSWER_S = 5.0
OF_EVALUATION = ("mean_reward", "low", "high", "num_samples", "num_failed")


class Tracker:
    """Asks the broker every TRACK_S seconds from a thread of its own, from `start` to `close`, which asks once more."""

    def __init__(self, client: Client, writer: MetricsWriter) -> None:
        self.client, self.writer = client, writer
        self._told: set[tuple[str, str]] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tracker", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(TRACK_S)
            try:
                status = ask_status(self.client, ANSWER_S)
            except SlimebusError:
                continue  # the broker is away: the run's own patience is elsewhere
            self.track(status)

    def track(self, status: dict[str, Any]) -> None:
        """Tell what a status says, and each evaluation that is done once, at the step it was made in."""
        for row in status["evaluations"]:
            if row["done"] and (row["key"], row["dataset"]) not in self._told:
                self._told.add((row["key"], row["dataset"]))
                self.writer.track(row["step"], {f"eval/{row['dataset']}/{name}": row[name] for name in OF_EVALUATION})
        self.writer.track(status["step"], scalars(status))

    def close(self) -> None:
        """The last status is forwarded too."""
        self._closing.set()
        self._thread.join(2 * ANSWER_S)


def scalars(status: dict[str, Any]) -> dict[str, float]:
    """Of a status: groups by phase, waste; over all workers sums, and means of what is measured in seconds."""
    found = {f"broker/{phase}": count for phase, count in status["groups"].items()}
    found |= {f"broker/wasted_{what}": sum(waste[what] for waste in status["waste"].values()) for what in ("groups", "tokens")}
    workers = defaultdict[str, list[float]](list)
    for client in status["clients"]:
        for name, value in client["metrics"].items() if client["role"] == "rollout" else ():
            workers[name].append(value)
    found["rollout/workers"] = status["pace"]["workers"]
    return found | {grouped("rollout", name): fmean(values) if name.endswith("_s") else sum(values) for name, values in workers.items()}

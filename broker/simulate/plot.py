"""The picture of simulated runs: throughput, idle time and lag against what was varied."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimebus.bus.errors import UsageError

if TYPE_CHECKING:
    from broker.simulate.simulated_run import Outcome
    from broker.simulate.workload import Workload


def draw(path: Path, varied: Sequence[str], played: "Sequence[tuple[Workload, Outcome, float]]") -> None:
    """Write a PNG: the first of `varied` is the horizontal axis, each combination of the others a line. Raises UsageError without any."""
    import matplotlib.pyplot as plt

    if not varied:
        raise UsageError("--plot needs an option with several values, such as --max-staleness 0,1,2,4")
    axis, *others = varied
    lines: dict[str, list[tuple[float, Outcome]]] = {}
    for workload, outcome, _ in played:
        name = ", ".join(f"{other.replace('_', ' ')} {getattr(workload, other):g}" for other in others)
        lines.setdefault(name, []).append((getattr(workload, axis), outcome))
    figure, panels = plt.subplots(1, 4, figsize=(16, 4), layout="constrained")
    for panel, title, of in zip(panels, ("steps/s", "trainer idle", "workers idle", "mean lag (versions)"), FIELDS, strict=True):
        for name, points in lines.items():
            panel.plot([x for x, _ in points], [getattr(outcome, of) for _, outcome in points], marker="o", label=name or None)
        panel.set(title=title, xlabel=axis.replace("_", " "), ylim=(0, None))
        panel.grid(alpha=0.3)
    if others:
        panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


FIELDS = ("steps_per_s", "trainer_idle", "worker_idle", "lag_mean")

"""How many bfloat16 values an AdamW step changes, and what its delta takes, at several learning rates.

    .venv/bin/python tests/bench/weight_density.py --steps 24 --out docs/images/weight-density.png

Real GRPO steps of the quick start's model, from its warmed-up weights: run `bin/quickstart` first. Each run is a `slimebus up` of
configs/quickstart with one constant learning rate; the numbers are those that the trainer writes for every version.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[2]
INK, GREY, RULE = "#1f2933", "#6b7785", "#dde2e7"
COLOURS = ("#0b6e8a", "#d9822b", "#7a4f9a")
Points = list[tuple[int, float, float]]


@click.command()
@click.option("--steps", default=24, show_default=True, help="[steps] Of each run.")
@click.option("--rates", default="1e-6,1e-5,1e-4", show_default=True, help="[per step] Learning rates, separated by commas.")
@click.option("--out", type=click.Path(path_type=Path), help="[path] Draw here.")
@click.option("--from", "folder", type=click.Path(path_type=Path), help="[path] Read runs made before from here: one folder for each rate.")
def density(steps: int, rates: str, out: Path | None, folder: Path | None) -> None:
    """Run the quick start's GRPO at several learning rates; print, and draw, how many values each version changes."""
    found: dict[str, Points] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rate in rates.split(","):
            run_dir = (folder or Path(scratch)) / rate
            if folder is None:
                run(rate, steps, run_dir)
            found[rate] = points(run_dir / "metrics" / "trainer.jsonl")
    for line in table(found):
        click.echo(line)
    if out is not None:
        draw(found, out)


def run(rate: str, steps: int, run_dir: Path) -> None:
    """One run at a constant learning rate. Exits with its output when it fails."""
    flags = {"run-dir": run_dir, "name": f"density-{rate}", "bind": "tcp://127.0.0.1:0", "lr": rate, "num-rollout": steps}
    flags |= {"min-lr": 0, "lr-decay-style": "constant", "lr-warmup-iters": 0, "eval-interval": 0, "save-hf": ""}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "slimebus", "up", str(ROOT / "configs/quickstart/run.yaml"), *words, "--skip-eval-before-train"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the run at lr {rate} failed; has bin/quickstart made the model?\n{done.stdout[-2000:]}")


def points(file: Path) -> Points:
    """(version, fraction of the values that changed, delta as a fraction of the model) of each version after the first."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    by_version = {int(row["weights_version"]): row for row in rows if row.get("weights_version", 0) > 0}
    return [(v, r["weights_changed_fraction"], r["weights_delta_bytes"] / r["weights_total_bytes"]) for v, r in sorted(by_version.items())]


def table(found: dict[str, Points]) -> list[str]:
    """Rows of a markdown table: smallest, median and largest over the versions."""
    rows = ["| lr | values changed a step | delta, % of the model | delta / changed |", "|---|---|---|---|"]
    for rate, made in found.items():
        changed, size = sorted(p[1] for p in made), sorted(p[2] for p in made)
        middle = len(made) // 2
        spans = " | ".join(f"{sizes[middle]:.2%} ({sizes[0]:.2%} to {sizes[-1]:.2%})" for sizes in (changed, size))
        rows.append(f"| {rate} | {spans} | {size[middle] / changed[middle]:.2f} |")
    return rows


def draw(found: dict[str, Points], out: Path) -> None:
    """Values changed (line) and size of the delta (dashed) of each version."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), dpi=120)
    for (rate, made), colour in zip(found.items(), COLOURS, strict=False):
        versions = [p[0] for p in made]
        axes.plot(versions, [100 * p[1] for p in made], color=colour, linewidth=2)
        axes.plot(versions, [100 * p[2] for p in made], color=colour, linewidth=1.5, linestyle=(0, (4, 2)))
        axes.annotate(f"lr {rate}", (versions[-1], 100 * made[-1][1]), (8, -3), textcoords="offset points", color=colour)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}%"))
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("version", color=GREY)
    axes.set_title("Values that one AdamW step changes, and (dashed) its delta in % of the model", loc="left", fontsize=10.5, color=INK)
    axes.tick_params(colors=GREY)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.02)
    figure.subplots_adjust(right=0.88, left=0.08, bottom=0.13, top=0.9)
    figure.savefig(out)


if __name__ == "__main__":
    density()

"""The quick start: data and a tiny model, a warm-up by SFT, asynchronous GRPO, and what came of it.

`bin/quickstart` installs what it needs and runs this. Three kinds of process over ZeroMQ, as on a cluster: a broker, a trainer, a
rollout worker with its engine.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console

from slimebus.bus.errors import DataError, SlimebusError, UsageError
from slimebus.config import resolve
from slimebus.process.supervisor import Supervisor, describe_exit
from slimebus.view import report
from slimebus.view.report import result_table

HERE = Path(__file__).parent
LAYOUT_GOAL = 0.95
"""Below this share of right answers without any carry, copying errors drown the reward signal and RL learns slowly."""
MAX_EXTRA_WARM_UPS = 4
EXTRA_STEPS = 50
TAIL_LINES = 20

console = Console(highlight=False)


@click.command()
@click.option(
    "--seed", default=0, show_default=True, help="[number] Of model, data order and sampling; the held-out problems never change."
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("runs/quickstart"),
    show_default=True,
    help="[path] Folder of all results; one that is there is kept as DIR-1, DIR-2, ...",
)
@click.option(
    "--engine", type=click.Choice(["cpu", "sglang"]), default="cpu", show_default=True, help="The embedded engine, or real SGLang."
)
@click.option("--engine-python", default="", help="[path] The Python that has SGLang, for --engine sglang.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same directory.")
@click.option("--steps", type=click.IntRange(min=1), help="[steps] Of RL, instead of the recipe's.")
@click.option(
    "--warm-up-steps",
    type=click.IntRange(min=1),
    help="[steps] Of SFT, instead of the recipe's; 50 more follow, up to four times, while its check fails.",
)
@click.option("--max-staleness", type=click.IntRange(min=0), help="[versions] Instead of the recipe's.")
def quickstart(
    seed: int,
    run_dir: Path,
    engine: str,
    engine_python: str,
    resume: bool,
    steps: int | None,
    warm_up_steps: int | None,
    max_staleness: int | None,
) -> None:
    """Teach a tiny model of random weights to add, on this machine."""
    prepare(run_dir, seed, resume=resume)
    if engine == "sglang" and not Path("/proc/driver/nvidia/version").exists():
        console.print(
            "[yellow]SGLang samples 10 to 50 times slower than the embedded engine without a GPU; --steps 5 is enough for a look[/]"
        )
    changes: dict[str, Any] = {"engine.engine": engine, "engine.engine_python": engine_python}
    changes |= {} if steps is None else {"rollout.num_rollout": steps}
    changes |= {} if max_staleness is None else {"broker.max_staleness": max_staleness}
    with counted(run_dir / "seconds"):
        warm = warm_up(run_dir, seed, warm_up_steps)
        learn(run_dir, seed, warm, changes)
    finish(run_dir, seed)


@contextlib.contextmanager
def counted(file: Path) -> Iterator[None]:
    """Adds the seconds spent inside to those in the file, so that a resumed run counts all of its time."""
    before, started = seconds_in(file), time.monotonic()
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{before + time.monotonic() - started:.1f}")


def seconds_in(file: Path) -> float:
    """What `counted` wrote; 0 without a file."""
    return float(file.read_text()) if file.is_file() else 0.0


def prepare(run_dir: Path, seed: int, *, resume: bool) -> None:
    """Data and model under RUN_DIR/task; a fresh directory unless the run is resumed: one of before is kept as RUN_DIR-1, -2, ...

    Raises UsageError for a resumed run of another seed.
    """
    mark = run_dir / "seed"
    if resume and mark.is_file() and mark.read_text() != str(seed):
        raise UsageError(
            f"{run_dir} holds a run of seed {mark.read_text()}; resume it with --seed {mark.read_text()}, or give another --run-dir"
        )
    if resume and mark.is_file():
        return
    if mark.is_file():
        kept = next(path for i in itertools.count(1) if not (path := run_dir.with_name(f"{run_dir.name}-{i}")).exists())
        run_dir.rename(kept)
        console.print(f"[dim]kept[/] the run of before as {kept}", soft_wrap=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    with console.status("making data and a tiny Qwen3 with random weights"):
        made = subprocess.run([sys.executable, str(HERE / "make.py"), "--out", str(run_dir / "task"), "--seed", str(seed)], check=False)
    if made.returncode:
        raise DataError(f"{HERE / 'make.py'} failed with code {made.returncode}")
    mark.write_text(str(seed))
    console.print(f"[dim]made[/] {run_dir / 'task'}: a Qwen3 of 448,320 random weights, its tokenizer, 4 files of problems", soft_wrap=True)


def warm_up(run_dir: Path, seed: int, steps: int | None) -> Path:
    """The model after SFT on the careless teacher's work, trained until it has the layout of the work."""
    model, folder = run_dir / "task" / "model", run_dir / "warm-up"
    changes: dict[str, Any] = {} if steps is None else {"rollout.num_rollout": steps, "weights.update_weights_interval": steps}
    for extra in range(MAX_EXTRA_WARM_UPS + 1):
        if not (folder / "hf" / "config.json").is_file():
            file = write_run("sft.yaml", folder, run_dir, {"seed": seed + extra, "model.hf_checkpoint": model, **changes})
            run_stage("warm-up", file)
        model = folder / "hf"
        rows = report.read_report(folder).evaluations("layout")
        layout = rows[-1]["mean_reward"] if rows else 0.0
        console.print(f"[dim]warm-up[/] problems without a carry: {layout:.3f} right")
        if layout >= LAYOUT_GOAL:
            break
        changes = {"rollout.num_rollout": EXTRA_STEPS, "weights.update_weights_interval": EXTRA_STEPS, "optimizer.lr": 5e-4}
        folder = run_dir / f"warm-up-{extra + 2}"
    else:
        console.print(f"[yellow]the warm-up did not reach {LAYOUT_GOAL}; RL will learn more slowly[/]")
    return offer(model, run_dir / "warm-up" / "hf")


def offer(model: Path, place: Path) -> Path:
    """The newest warm model, also at the place that run.yaml names; what was there, of fewer steps, stays beside it."""
    if model != place and not place.is_symlink():
        place.rename(place.with_name("hf-first"))
        place.symlink_to(os.path.relpath(model, place.parent))
    return model


def learn(run_dir: Path, seed: int, model: Path, changes: dict[str, Any]) -> None:
    """GRPO from the warm model; RUN_DIR/rl/seconds is how long it took, from starting its processes to their end."""
    file = write_run("run.yaml", run_dir / "rl", run_dir, {"seed": seed, "model.hf_checkpoint": model, **changes})
    if (run_dir / "rl" / "hf" / "config.json").is_file():
        return
    with counted(run_dir / "rl" / "seconds"):
        run_stage("GRPO", file)


def write_run(recipe: str, folder: Path, run_dir: Path, changes: dict[str, Any]) -> Path:
    """The recipe with its paths in this run directory and these changes, as FOLDER/run.yaml: what `slimebus up` would take."""
    tree = yaml.safe_load((HERE / recipe).read_text())
    task = (run_dir / "task").resolve()
    tree["run_dir"] = str(folder.resolve())
    tree["broker"]["bind"] = "tcp://127.0.0.1:0"
    tree["data"]["prompt_data"] = [str(task / Path(name).name) for name in tree["data"]["prompt_data"]]
    for dataset in tree.get("eval", {}).get("datasets", {}).values():
        dataset["path"] = str(task / Path(dataset["path"]).name)
        if dataset.get("custom_rm_path"):
            dataset["custom_rm_path"] = str(HERE.resolve() / dataset["custom_rm_path"])
    if tree["rollout"].get("custom_rm_path"):
        tree["rollout"]["custom_rm_path"] = str(HERE.resolve() / tree["rollout"]["custom_rm_path"])
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        (tree[section] if section else tree)[field] = str(value.resolve()) if isinstance(value, Path) else value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file


def run_stage(title: str, file: Path) -> None:
    """Run broker, trainer and worker of a run.yaml to their end, showing how it goes. Raises SlimebusError if one fails."""
    stage = Supervisor(resolve(file), [str(file)], title=title, quiet=True)
    code = stage.run()
    if stage.failed is not None:
        raise SlimebusError(f"{describe_exit(stage.failed)}\n{tail_of(stage.failed.log_file)}")
    if code:
        raise KeyboardInterrupt


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]) if log.is_file() else ""


def finish(run_dir: Path, seed: int) -> None:
    """result.json, curve.png, the table, three solved problems and what to try next."""
    from chart import draw_curve  # beside this file, where a script finds it

    found = report.read_report(run_dir / "rl")
    config = resolve(run_dir / "rl" / "run.yaml").config
    times = {"rl_s": seconds_in(run_dir / "rl" / "seconds"), "total_s": seconds_in(run_dir / "seconds")}
    result = report.make_result(found, "heldout", config) | times | {"seed": seed}
    if "accuracy_after" not in result:
        raise DataError(f"{run_dir / 'rl'}: fewer than two evaluations on record; expected one before training and one after")
    (run_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw_curve(
        *(found, run_dir / "curve.png"),
        dataset="heldout",
        max_staleness=config.broker.most_stale,
        rl_s=result["rl_s"],
        machine=f"{os.cpu_count()} CPU cores",
    )
    console.print(result_table(result))
    console.print("\n".join(found.status.get("advice", [])), soft_wrap=True, markup=False)
    console.print("[dim]held-out problems, solved by the exported model with transformers alone:[/]")
    places = ["--model", str(run_dir / "rl" / "hf"), "--problems", str(run_dir / "task" / "heldout.jsonl")]
    if subprocess.run([sys.executable, str(HERE / "solve.py"), *places], check=False).returncode:
        raise SlimebusError(f"the exported model in {run_dir / 'rl' / 'hf'} could not be used by transformers (see above)")
    console.print(f"picture  {run_dir / 'curve.png'}\nresult   {run_dir / 'result.json'}\nmodel    {run_dir / 'rl' / 'hf'}", soft_wrap=True)
    console.print(
        f"next     [bold]bin/quickstart --max-staleness 8 --run-dir {run_dir}-lag8[/]   (what does more lag cost?)", soft_wrap=True
    )


def main() -> None:
    """Run it; a failure is one message, and Ctrl-C ends every process."""
    try:
        quickstart.main(prog_name="bin/quickstart", standalone_mode=False)
    except click.ClickException as bad:
        bad.show()
        sys.exit(bad.exit_code)
    except (click.Abort, KeyboardInterrupt):
        words = [word for word in sys.argv[1:] if word != "--resume"]
        console.print(f"interrupted; `{' '.join(['bin/quickstart', *words, '--resume'])}` goes on", soft_wrap=True)
        sys.exit(130)
    except SlimebusError as bad:
        console.print(f"quickstart: {bad.text}", markup=False)
        sys.exit(2 if isinstance(bad, UsageError) else 1)


if __name__ == "__main__":
    main()

"""`slimebus eval`: evaluate the newest version of a running run."""

import importlib
import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from slimebus.bus.errors import SlimebusError, Unreachable, UsageError
from slimebus.bus.messages import Evaluate, EvaluateReply
from slimebus.client.connect import RESTART_S, connect_without_joining
from slimebus.config.file_checks import worker_problems
from slimebus.config.flags import META, OF_RUN, ConfigCommand, config_argument, from_context
from slimebus.config.load import raise_all
from slimebus.config.saved import saved_config
from slimebus.config.schema import EvalDataset
from slimebus.process.launch import SLIMEBUS
from slimebus.telemetry.formatting import align_columns

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

WAIT_S = 10.0
CHECKPOINT = re.compile(r"step_[0-9]+")


@click.command("eval", cls=ConfigCommand)
@config_argument
@click.option("--broker", help=f"[address] Of the broker, tcp://HOST:PORT; default: {OF_RUN}.")
@click.option("--dataset", "datasets", multiple=True, help="[name] Of eval.datasets, may be repeated; default: all.")
@click.option(
    "--model",
    metavar="DIR",
    help="[path] Evaluate this model in Hugging Face layout, or this checkpoint of a run, with an engine of one's own; no run is asked.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.pass_context
def evaluate(
    ctx: click.Context, run_yaml: Path | None, broker: str | None, datasets: tuple[str, ...], model: str | None, as_json: bool
) -> None:
    """Evaluate the newest published version on the run's own workers; training goes on meanwhile.

    With --model: evaluate a model on this machine. The held-out sets are those of RUN.yaml, or --prompt-data, sampled as in training.
    """
    try:
        results = _evaluate_here(ctx, run_yaml, model, datasets) if model else _evaluate_there(ctx, run_yaml, broker, datasets)
    except Unreachable as bad:
        raise bad if model else Unreachable(f"{bad.text}; a model is evaluated without a run: --model DIR") from None
    click.echo(json.dumps(results, indent=2) if as_json else "\n".join(_table(results)))
    if all(row["mean_reward"] is None for row in results):
        why = next((row["reason"] for row in results if row.get("reason")), "")
        raise SlimebusError(why or "every sample failed; the log above, or that of the workers, says why")


def _evaluate_there(ctx: click.Context, run_yaml: Path | None, broker: str | None, datasets: Sequence[str]) -> list[dict[str, Any]]:
    request, said = Evaluate(key=secrets.token_hex(8), datasets=list(datasets), wait_s=WAIT_S), ""
    with connect_without_joining(from_context(ctx, run_yaml), broker, what="eval", patience_s=RESTART_S) as client:
        while isinstance(results := _ask(client, request), str):
            if results != said:
                said = results
                click.echo(said, err=True)
    return results


def _evaluate_here(ctx: click.Context, run_yaml: Path | None, model: str, names: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(model).resolve()
        found = _exported(path, Path(folder)) if CHECKPOINT.fullmatch(path.name) else path
        results = _evaluate_folder(ctx, run_yaml, found, names)
    return [row | {"model": model} for row in results]


def _exported(checkpoint: Path, folder: Path) -> Path:
    """The model of RUN_DIR/checkpoints/step_*, in Hugging Face layout, made in this folder by the trainer's command."""
    saved = saved_config(checkpoint.parents[1])
    model = msgspec.structs.replace(saved.config.model, hf_checkpoint=str(saved.model_dir.resolve()))
    parts = {"run_dir": str(saved.run_dir.resolve()), "model": model, "trainer": saved.config.trainer, "megatron": saved.config.megatron}
    (folder / "run.yaml").write_bytes(msgspec.json.encode(parts))
    words = ["export", str(folder / "run.yaml"), "--step", checkpoint.name.removeprefix("step_"), "--out", str(folder / checkpoint.name)]
    if subprocess.run([*SLIMEBUS, *words], check=False, stdout=sys.stderr).returncode:
        raise SlimebusError(f"{checkpoint} could not be exported; the lines above say why")
    return folder / checkpoint.name


def _evaluate_folder(ctx: click.Context, run_yaml: Path | None, model: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    ctx.meta.setdefault(META, {})["model.hf_checkpoint"] = str(model)
    resolved = from_context(ctx, run_yaml)
    config, r = resolved.config, resolved.config.rollout
    known = config.eval.datasets
    if not known:
        n, temperature = r.n_samples_per_prompt, r.rollout_temperature
        files = config.data.prompt_data
        known = {Path(e).name: EvalDataset(path=e, n_samples_per_eval_prompt=n, temperature=temperature) for e in files}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        what = f"no held-out set {unknown[0]!r}" if unknown else "no held-out set: give eval.datasets in RUN.yaml, or --prompt-data"
        raise UsageError(f"{what}; known: {', '.join(known) or 'none'}")
    config = msgspec.structs.replace(config, eval=msgspec.structs.replace(config.eval, datasets=known))
    resolved = msgspec.structs.replace(resolved, config=config)
    raise_all(worker_problems(resolved))
    return list(importlib.import_module("rollout.local").evaluate(resolved, names or list(known)))


def _ask(client: "Client", request: Evaluate) -> list[dict[str, Any]] | str:
    """The results, or why there are none yet."""
    try:
        reply = client.call(request, timeout_s=WAIT_S + 20)
    except SlimebusError as not_yet:
        if not not_yet.retryable or isinstance(not_yet, Unreachable):
            raise
        return not_yet.text
    answer = reply.expect(EvaluateReply)
    return list(json.loads(bytes(reply.bulk[0]))) if answer.done else answer.reason


def _table(results: list[dict[str, Any]]) -> list[str]:
    """A line for each held-out set, with 95% intervals."""
    ks = sorted({int(k) for row in results for k in row["pass_at"]})
    rows = []
    for row in results:
        reward = _with_interval(row["mean_reward"], row["low"], row["high"])
        passed = [_with_interval(*row["pass_at"][str(k)]) if str(k) in row["pass_at"] else "" for k in ks]
        version = row.get("version", Path(row.get("model", "")).name)
        rows.append((row["dataset"], version, reward, *passed, row["num_samples"], row["num_failed"], row.get("reason", "")))
    return align_columns(rows, ("dataset", "version", "reward", *(f"pass@{k}" for k in ks), "samples", "failed", ""))


def _with_interval(mean: float | None, low: float | None, high: float | None) -> str:
    return "no score" if mean is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"

"""A recorded run in which training, pulls and sampling overlap: does a step take longer while workers pull?

    .venv/bin/python bin/overlap_trace.py --out docs/images/overlap.png

A random model of 55 million parameters, a trainer, two workers, and between them a link of limited rate, so that pulls take a good part of
a step. Every second step publishes: the steps between, with no pull in flight, are the control. It prints what `slimebus trace` prints;
`--run-dir` keeps the run, to look at it again.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
import yaml
from bench_fanout import Relays

from slimebus.launch import free_port

ROOT = Path(__file__).parents[1]
LINK = "127.0.0.2"
"""The address of this machine at which the relay stands in for the trainer, port for port."""
SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
}
WORKERS, MIB = 2, 1 << 20


@click.command()
@click.option("--steps", default=40, show_default=True, help="[steps] Of the run.")
@click.option(
    "--rate", default=4.0, show_default=True, help="[MiB/s] Of the link from the trainer, once each worker has the first version."
)
@click.option("--out", type=click.Path(path_type=Path), help="[path] Draw four steps here (PNG).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="[path] Keep the run here; an empty or new folder. Default: not kept.")
def overlap_trace(steps: int, rate: float, out: Path | None, run_dir: Path | None) -> None:
    """Record a run and say how its steps, pulls and sampling lie to each other."""
    with ExitStack() as stack:
        folder = (run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        size_bytes = make_model(folder / "model")
        port = free_port()
        relays = stack.enter_context(Relays(int(rate * MIB)))
        relays.in_front_of(f"tcp://127.0.0.1:{port}", f"{LINK}:{port}", free_bytes=WORKERS * size_bytes)
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run_of(folder, steps, port)))
        slimebus("up", file, "--workers", WORKERS)
        click.echo(slimebus("trace", folder, *(["--plot", out] if out else [])).strip())


def make_model(folder: Path) -> int:
    """A random Qwen3 with the quick start's tokenizer and prompts; the bytes of a published version."""
    sys.path.insert(0, str(ROOT / "configs" / "quickstart"))
    import make
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    folder.mkdir(parents=True)
    make.write_data(folder, seed=0)
    make.write_tokenizer(folder)
    model = AutoModelForCausalLM.from_config(Qwen3Config.from_dict(make.CONFIG | SIZES))
    model.save_pretrained(folder)
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def run_of(folder: Path, steps: int, port: int) -> dict[str, object]:
    """The run.yaml. Without a staleness bound workers sample as many groups beside a step with a new version as beside one without."""
    return {
        "name": "overlap",
        "run_dir": str(folder),
        "broker": {"bind": "tcp://127.0.0.1:0", "max_staleness": float("inf"), "buffer_capacity": 8, "durability": "os"},
        "data": {"prompt_data": [str(folder / "model" / "rl.jsonl")]},
        "model": {"hf_checkpoint": str(folder / "model")},
        "rollout": {
            "num_rollout": steps,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 24,
            "rm_type": "random",
            "max_running_groups": 2,
        },
        "weights": {"update_weights_interval": 2, "weights_bind": f"tcp://127.0.0.1:{port}", "weights_advertise": LINK},
        "optimizer": {"lr": 1e-5},
        "trainer": {"max_tokens_per_gpu": 4096, "save_interval": 0, "tensorboard": False},
    }


def slimebus(*words: object) -> str:
    """What a command prints. Raises ClickException with the end of it when it fails."""
    done = subprocess.run([sys.executable, "-m", "slimebus", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"slimebus {words[0]} ended with {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    overlap_trace()

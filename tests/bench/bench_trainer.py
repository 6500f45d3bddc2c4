"""The trainer against bare megatron-core: `bin/bench trainer`. Wants an otherwise idle machine.

A real broker and `slimebus trainer` with one rank of one thread; samples are put ahead of it, so that it never has to wait for them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import zmq
from bench_load import Peer
from bench_process import ENVIRONMENT, measured, write_prompts
from bench_row import Row, row, within
from bench_trainer_samples import BUDGET, GROUPS, SAMPLES, SHAPE, made_group, step_tokens

from slimebus.bus import envelope
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import Lease, LeaseReply, Put
from slimebus.bus.samples import encode_group
from slimebus.process.launch import free_port

STEPS, QUICK_STEPS = 30, 8
ROUNDS, QUICK_ROUNDS = 9, 3
WARM = 3
"""Steps of the trainer that do not count: Adam's state is made, and samples come ahead of it."""
DEADLINE_S = 600.0
READY = "training from step"


def rows(quick: bool) -> list[Row]:
    """All measurements. quick: fewer steps, for a look."""
    steps, rounds = (QUICK_STEPS, QUICK_ROUNDS) if quick else (STEPS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="slimebus-bench-") as scratch:
        model = write_model(Path(scratch) / "model")
        before = loop("bare", model, steps)["step_s"]
        start_s, records = run_trainer(Path(scratch), model, WARM + steps)
        after = loop("bare", model, steps)["step_s"]
        packing, passes = loop("packing", model, rounds), loop("passes", model, rounds)
    return [*step_rows(records[WARM:], before + after), *loop_rows(packing, passes), within("start_s", start_s, "s", "<=", 12)]


def step_rows(records: list[dict[str, Any]], bare_s: list[float]) -> list[Row]:
    """Of the trainer's own records of each step, and the bare loop's seconds before and after it."""
    whole = [r["wait_s"] + r["train_s"] + r["publish_s"] + r["save_s"] for r in records]
    ends = [r["time"] for r in records]
    step_s = median(later - earlier for earlier, later in pairwise(ends))
    tokens = step_tokens()
    return [
        row("trainer_vs_bare", tokens / step_s, "tokens/s", tokens / median(bare_s), ">= 0.95"),
        row("trainer_idle", sum(r["wait_s"] for r in records), "s", sum(whole), "<= 0.05"),
        row("publish_stall", sum(r["publish_s"] for r in records), "s", sum(whole), "<= 0.02"),
    ]


def loop_rows(packing: dict[str, float], passes: dict[str, float]) -> list[Row]:
    """Of megatron-core alone on the same samples, packed and padded; and of the forward pass that one optimizer step does without."""
    return [
        row("packing_gain", packing["packed"], "tokens/s", packing["padded"], ">= 1.8"),
        row("packing_gain_sorted", packing["packed"], "tokens/s", packing["sorted"], ">= 1.0"),
        row("packing_fill", packing["fewest"], "rows", packing["rows"], ">= 0.95"),
        row("old_pass_saved", passes["without"], "s", passes["with"], ""),
    ]


def loop(kind: str, model: Path, count: int) -> dict[str, Any]:
    """What bench_trainer_loop.py measured."""
    return measured("bench_trainer_loop.py", kind, model, count)


def write_model(folder: Path) -> Path:
    """A random Qwen3 of SHAPE."""
    command = "import sys, transformers as t; t.Qwen3ForCausalLM(t.Qwen3Config(**eval(sys.argv[2]))).save_pretrained(sys.argv[1])"
    subprocess.run([sys.executable, "-c", command, str(folder), repr(SHAPE)], check=True, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    return folder


def run_trainer(scratch: Path, model: Path, steps: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the trainer's command until it is ready, and its records of that many steps."""
    file, address = write_run(scratch, model, steps), f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "slimebus"]
    with (scratch / "broker.log").open("wb") as broker_log, (scratch / "trainer.log").open("wb") as trainer_log:
        broker = subprocess.Popen([*command, "broker", str(file), "--bind", address], stderr=broker_log, env=ENVIRONMENT)
        filler = threading.Thread(target=fill, args=(address, steps * GROUPS), daemon=True)
        try:
            started = time.perf_counter()
            trainer = subprocess.Popen([*command, "trainer", str(file), "--broker", address], stderr=trainer_log, env=ENVIRONMENT)
            try:
                wait_for(trainer, lambda: READY in (scratch / "trainer.log").read_text())
                start_s = time.perf_counter() - started
                filler.start()
                metrics = scratch / "run" / "metrics" / "trainer.jsonl"
                wait_for(trainer, lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= steps)
                return start_s, [json.loads(line) for line in metrics.read_text().splitlines()[:steps]]
            finally:
                stop(trainer)
        except SlimebusError as late:
            raise SlimebusError(f"{late.text}; its log ends with:\n{(scratch / 'trainer.log').read_text()[-2000:]}") from None
        finally:
            stop(broker)


def write_run(scratch: Path, model: Path, steps: int) -> Path:
    """The run.yaml: one optimizer step a batch, a version each step, no checkpoint before the last."""
    prompts, file = write_prompts(scratch / "prompts.jsonl", 1000), scratch / "run.yaml"
    file.write_text(
        f"name: bench\nrun_dir: {scratch / 'run'}\ndata: {{prompt_data: [{prompts}], rollout_shuffle: false}}\n"
        f"model: {{hf_checkpoint: {model}}}\n"
        f"rollout: {{rollout_batch_size: {GROUPS}, n_samples_per_prompt: {SAMPLES}, num_rollout: {steps + 1}}}\n"
        "broker: {max_staleness: .inf, lease_s: 600, heartbeat_s: 30, buffer_capacity: 64}\noptimizer: {lr: 1.0e-5}\n"
        f"trainer: {{max_tokens_per_gpu: {BUDGET}, save_interval: 0, tensorboard: false}}\n"
    )
    return file


def fill(address: str, groups: int) -> None:
    """A worker that has its samples ready: leases and puts until it has put so many groups."""
    frames = [encode_group(made_group(index)) for index in range(GROUPS)]
    worker = Peer(zmq.Context.instance(), address, "filler", role="rollout")
    done = 0
    while done < groups:
        worker.send(Lease(want=GROUPS, wait_s=20.0, needs_weights=False))
        reply = answer(worker)
        assert isinstance(reply, LeaseReply), reply
        for leased in reply.groups:
            worker.send(Put(group=leased.group, lease=leased.lease, lineage=leased.lineage), frames[done % GROUPS])
            answer(worker)
            done += 1


def answer(peer: Peer) -> Any:
    """The next message for it."""
    return envelope.decode(peer.socket.recv_multipart()).message


def wait_for(process: "subprocess.Popen[bytes]", is_true: Any) -> None:
    """Return when it is true. Raises SlimebusError when the process ends first, or it takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SlimebusError("the trainer did not get there")
        time.sleep(0.05)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End it at once."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

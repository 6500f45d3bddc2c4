"""The trainer against bare megatron-core: `bin/bench trainer`. Wants an otherwise idle machine.

A real broker and `slimebus trainer` with one rank of one thread; samples are put ahead of it, so that it never has to wait for them.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_process import ENVIRONMENT, BrokerProcess, measured
from bench_row import Row, row, within
from waiting import wait_until

from slimebus.bus.messages import NO_VERSION, Lease, LeaseReply, Put
from slimebus.bus.samples import Sample, encode_group
from slimebus.bus.transport.client import Client

STEPS, QUICK_STEPS = 30, 8
ROUNDS, QUICK_ROUNDS = 9, 3
WARM = 3
"""Steps of the trainer that do not count: Adam's state is made, and samples come ahead of it."""
DEADLINE_S = 600.0
READY = "training from step"
GROUPS, SAMPLES = 4, 8
"""Groups of a step, samples of a group."""
SHORTEST, LONGEST = 16, 512
VOCABULARY = 2048
BUDGET = 2048
"""trainer.max_tokens_per_gpu."""
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.02,
}  # fmt: skip


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
        row("trainer_vs_bare", tokens / step_s, "tokens/s", tokens / median(bare_s), ">= 0.97"),
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
    """Seconds from the trainer's command until it is ready, and its records of that many steps, one optimizer step each."""
    broker = BrokerProcess(
        scratch / "broker",
        model={"hf_checkpoint": str(model)},
        rollout={"rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES, "num_rollout": steps + 1},
        broker={"buffer_capacity": 64},
        optimizer={"lr": 1.0e-5},
        trainer={"max_tokens_per_gpu": BUDGET, "save_interval": 0, "tensorboard": False},
    )
    log, metrics = scratch / "trainer.log", broker.run_dir / "metrics" / "trainer.jsonl"
    filler = threading.Thread(target=fill, args=(broker.client("filler", "rollout"), steps * GROUPS), daemon=True)
    try:
        started = time.perf_counter()
        trainer = broker.start_beside("-m", "slimebus", "trainer", str(broker.file), log=log)

        def has(what: bool) -> bool:
            assert trainer.poll() is None, f"the trainer ended: {log.read_text()[-2000:]}"
            return what

        wait_until("trainer", lambda: has(READY in log.read_text()), DEADLINE_S)
        start_s = time.perf_counter() - started
        filler.start()
        wait_until(f"{steps} steps", lambda: has(metrics.exists() and metrics.read_text().count("\n") >= steps), DEADLINE_S, every_s=0.05)
        return start_s, [json.loads(line) for line in metrics.read_text().splitlines()[:steps]]
    finally:
        broker.close()


def fill(worker: Client, groups: int) -> None:
    """A worker that has its samples ready: leases and puts until it has put so many groups."""
    frames, done = [encode_group(made_group(index)) for index in range(GROUPS)], 0
    while done < groups:
        asked = worker.call(Lease(want=GROUPS, wait_s=20.0, needs_weights=False), timeout_s=60)
        for leased in asked.expect(LeaseReply).groups:
            worker.call(Put(group=leased.group, lease=leased.lease, lineage=leased.lineage), frames[done % GROUPS])
            done += 1


def made_group(index: int) -> list[Sample]:
    """Group `index` of a step: lengths drawn evenly from SHORTEST to LONGEST, one token of prompt, rewards 0 and 1 by turns."""
    draw = np.random.default_rng(index)
    lengths = draw.integers(SHORTEST, LONGEST + 1, SAMPLES)
    return [
        Sample(
            tokens=draw.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=(np.arange(length) > 0).astype(np.uint8),
            rollout_logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
            versions=[(NO_VERSION, int(length))],
            reward=float(place % 2),
        )
        for place, length in enumerate(lengths)
    ]


def step_tokens() -> int:
    """Tokens of all samples of a step."""
    return sum(len(sample.tokens) for index in range(GROUPS) for sample in made_group(index))

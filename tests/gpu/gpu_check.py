"""`bin/gpu-check`: what only a GPU shows, in one table. Exit code 0: all passed or skipped; 1: something failed; 2: no GPU here."""

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
INSTALL = "pip install --no-build-isolation 'slimebus[gpu]'"
LIMIT_S = 540.0
"""For all checks together."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "--durations=0", "-p", "no:cacheprovider"]


def layouts(test: str, num_gpus: int) -> list[str]:
    """A test of parallel layouts with each layout that has a GPU for each rank."""
    bfloat16 = {"dp2-overlap": 2, "tp2-sp": 2, "pp2": 2, "cp2": 2}
    ranks = bfloat16 if "bfloat16" in test else bfloat16 | {"tp2": 2, "dp2": 2, "tp2-pp2": 4, "tp2-pp2-dp2": 8}
    return [*PYTEST, *(f"tests/integration/test_parallel_layouts.py::{test}[{name}]" for name, need in ranks.items() if need <= num_gpus)]


def checks() -> list[tuple[str, list[str] | None, str]]:
    """Name, command, and why it is skipped where it is."""
    num_gpus = torch.cuda.device_count()
    has_two = "" if num_gpus > 1 else "one GPU: NCCL layouts need two"
    is_te_here = importlib.util.find_spec("transformer_engine") is not None
    has_te = "" if is_te_here else f"Transformer Engine is not installed ({INSTALL})"
    in_float32 = has_two or ("Transformer Engine's attention has no float32" if is_te_here else "")
    return [
        ("bf16 logprobs and step against CPU fp32, snapshot of GPU tensors", [*PYTEST, "tests/gpu", "-k", "near or snapshot"], ""),
        ("codec on GPU tensors", [*PYTEST, "-s", "tests/gpu", "-k", "deltas"], ""),
        ("MFU of 0.5 B parameters, 1,024 tokens a sequence", [*PYTEST, "-s", "-rs", "tests/gpu", "-k", "share"], ""),
        (f"NCCL layouts on {num_gpus} GPUs in float32", layouts("test_layout_trains_as_one_rank_does", num_gpus), in_float32),
        (f"NCCL layouts on {num_gpus} GPUs in bfloat16", layouts("test_bfloat16_has_fp32_masters_in_every_layout", num_gpus), has_two),
        ("Transformer Engine's kernels", [*PYTEST, "tests/gpu", "-k", "logprobs"], has_te),
        ("tokens/s against bare megatron-core", [sys.executable, "tests/bench/bench.py", "trainer", "--quick"], ""),
    ]


def outcome(code: int, text: str) -> tuple[str, str]:
    """pass, fail or skip, and what a check says in a line of `gpu-check:`, why pytest skipped it, or else its exit code."""
    said = re.findall(r"^gpu-check: (.*)$", text, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", text, re.MULTILINE)
    if code == 0 and skipped and not said and " passed" not in text:
        return "skip", skipped[0]
    return ("fail" if code else "pass"), "; ".join(said) or f"exit code {code}"


def main() -> int:
    """Run them in turn and print the table."""
    if not torch.cuda.is_available():
        print("no CUDA device: torch finds none, so there is nothing to check here")
        return 2
    deadline, results = time.monotonic() + LIMIT_S, []
    for name, command, why in checks():
        if why or command is None:
            results.append(("skip", why, name))
            continue
        try:
            left_s = max(1.0, deadline - time.monotonic())
            done = subprocess.run(command, cwd=ROOT, timeout=left_s, check=False, stdout=subprocess.PIPE, text=True)
            results.append((*outcome(done.returncode, done.stdout), name))
            print(done.stdout, flush=True)
        except subprocess.TimeoutExpired:
            results.append(("fail", f"not done within {LIMIT_S:.0f} s of all checks", name))
    print("\n".join(f"{result:4}  {name:70}  {why}" for result, why, name in results))
    return int(any(result == "fail" for result, *_ in results))


if __name__ == "__main__":
    sys.exit(main())

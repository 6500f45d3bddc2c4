"""`bin/gpu-check`: what only a GPU shows, in one table. Exit code 0: all passed or skipped; 1: something failed; 2: no GPU here."""

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 540.0
"""For all checks together."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "--durations=0", "-p", "no:cacheprovider"]


def checks() -> list[tuple[str, list[str] | None, str]]:
    """Name, command, and why it is skipped where it is."""
    num_gpus = torch.cuda.device_count()
    has_two = "" if num_gpus > 1 else "one GPU: NCCL layouts need two"
    has_te = "" if importlib.util.find_spec("transformer_engine") else "Transformer Engine is not installed (pip install 'slimebus[gpu]')"
    chosen = "tp2 or pp2 or dp2 or cp2" if num_gpus > 3 else "(tp2 or pp2 or dp2 or cp2) and not tp2-pp2"
    layouts = [*PYTEST, "tests/integration/test_parallel_layouts.py", "-k", chosen]
    return [
        ("bf16 logprobs and step against CPU fp32, snapshot of GPU tensors", [*PYTEST, "tests/gpu", "-k", "near or snapshot"], ""),
        ("codec on GPU tensors", [*PYTEST, "-s", "tests/gpu", "-k", "deltas"], ""),
        ("MFU of 0.5 B parameters, 1,024 tokens a sequence", [*PYTEST, "-s", "-rs", "tests/gpu", "-k", "share"], ""),
        (f"NCCL layouts on {num_gpus} GPUs", layouts, has_two),
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

"""1 when the program in a response passes its tests, else 0. It runs in namespaces of its own (Linux), by util-linux's `unshare`.

It sees the interpreter and its packages, 64 MiB of /tmp, no network and no other process; it has SECONDS, MAX_MEMORY for all its processes
together, at most 32 of them, 32 MiB a file and MAX_OUTPUT bytes of output. A program that takes more is wrong, also where all its cases
together take longer than MOST_OF_TIMEOUT of rollout.reward_timeout_s. The program is the last ``` block. The label is Python that is run
behind it, in the same process, and raises when a test fails; or a list of `{"input": ..., "output": ...}` (also as JSON), standard input
and what it must print, spaces at ends of lines aside.
"""

import contextlib
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout.samples.response import Response

SECONDS = 10
"""Of each run."""
MAX_OUTPUT, MAX_MEMORY = 1 << 20, 1 << 30
LOOK_S = 0.1
"""How often the memory of a program is looked at."""
MOST_OF_TIMEOUT = 0.75
SANDBOX = Path(__file__).parent / "sandbox.sh"
NAMESPACES = ["--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts"]
FIRST_UID = 1 << 20
"""With a process id added, a user that nobody is; root has no limit of processes."""

DRIVER = r"""
import gc, os, sys
take = sys.stdin.buffer.read().split(b"\0").pop
os.ftruncate(0, 0)
os.write(1, (take(), exec(compile(take(), "tests", "exec"), (globals(), gc.collect(), exec(compile(take(), "program", "exec")))[0]))[0])
"""
"""Program, tests and a mark come by standard input, and are gone from there before the program begins. The mark is written at the end: only
a program that comes to its end has passed, and not one that leaves in the middle. One expression, as what it waits with has no name that a
program could look up, neither in a file nor in a frame; after a collection the collector no longer lists the constants of the tests."""


def missing() -> str:
    """Why it cannot be used here."""
    try:
        code, out, errors = run("print(6 * 7)")
    except OSError as bad:
        code, out, errors = 1, "", str(bad)
    remedy = "run the worker as root with CAP_SYS_ADMIN, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
    return "" if (code, out) == (0, "42\n") else f"needs Linux namespaces, and here they fail: {errors.strip()}; {remedy}"


def reward(response: Response, timeout_s: float) -> float:
    """1.0 or 0.0."""
    program, tests, ends_at = program_of(response.text), _cases(response.label), time.monotonic() + MOST_OF_TIMEOUT * timeout_s
    if isinstance(tests, str):
        mark = secrets.token_hex(16)
        code, out, _ = run(DRIVER, "\0".join((program, tests, mark)), _seconds_until(ends_at))
        return float(code == 0 and mark in out)
    return float(bool(tests) and all(_passes(program, case, ends_at) for case in tests))


def _seconds_until(ends_at: float) -> int:
    return max(1, min(SECONDS, math.floor(ends_at - time.monotonic())))


def program_of(text: str) -> str:
    """The last ``` block; all of it without one."""
    blocks = re.findall(r"```[\w+-]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


def _cases(label: Any) -> str | list[dict[str, str]]:
    """The tests as a program, or as inputs and outputs. Raises ValueError for anything else."""
    if isinstance(label, str):
        try:
            label = msgspec.json.decode(label)
        except msgspec.DecodeError:
            return str(label)
    try:
        return msgspec.convert(label, list[dict[Literal["input", "output"], str]])  # type: ignore[return-value]
    except msgspec.ValidationError as bad:
        raise ValueError(f"the label is {str(label)[:80]!r}; expected Python tests, or a list of {{input, output}} texts: {bad}") from None


def _passes(program: str, case: dict[str, str], ends_at: float) -> bool:
    if time.monotonic() > ends_at:
        return False
    code, out, _ = run(program, case["input"], _seconds_until(ends_at))
    return code == 0 and [line.rstrip() for line in out.rstrip().split("\n")] == [s.rstrip() for s in case["output"].rstrip().split("\n")]


def run(program: str, stdin: str = "", seconds: int = SECONDS) -> tuple[int, str, str]:
    """Its exit status, the first MAX_OUTPUT bytes of its output, and the end of its errors."""
    is_root = os.geteuid() == 0
    uid = FIRST_UID + os.getpid() if is_root else 0
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        root = Path(folder) / "root"
        root.mkdir()
        Path(f"{root}.py").write_text(program, errors="replace")
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        own_user = [] if is_root else ["--user", "--map-root-user"]
        sandbox: list[str | Path] = ["sh", SANDBOX, root, sys.executable, str(seconds), str(uid), sys.prefix, sys.base_prefix]
        words: list[str | Path] = ["unshare", *own_user, *NAMESPACES, *sandbox]
        with subprocess.Popen(words, stdin=given, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            threading.Thread(target=_watch, args=[process], daemon=True).start()
            out = process.stdout.read(MAX_OUTPUT)
            if len(out) == MAX_OUTPUT:
                process.kill()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        return process.returncode, out.decode(errors="replace"), errors.read().decode(errors="replace")


def _watch(process: "subprocess.Popen[bytes]") -> None:
    """Kill it when what all its processes hold gets too much."""
    while process.poll() is None:
        time.sleep(LOOK_S)
        if sum(map(_held_bytes, _below(process.pid))) > MAX_MEMORY:
            process.kill()


def _below(pid: int) -> Iterator[int]:
    """The processes that this one began, and theirs."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, listed.read_text().split()):
                yield child
                yield from _below(child)


def _held_bytes(pid: int) -> int:
    """The memory of a process, its share of what it has in common with others; and its files in memory (memfd_create)."""
    held = 0
    with contextlib.suppress(OSError):
        held += 1024 * int(re.findall(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[0])
        files = (file for file in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(file).startswith("/memfd:"))
        held += sum(512 * file.stat().st_blocks for file in files)
    return held

"""Damaged payloads end in an error: no crash, no memory beyond the bound, no wrong tensor, and every kernel says the same."""

import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from slimebus.bus.errors import WeightsError
from slimebus.weights.codec import delta_codec
from slimebus.weights.codec.kernel import Kernel, load_kernel

KERNEL = Path(delta_codec.__file__).with_name("kernel.c")
ROOT = Path(__file__).parents[4]
FUZZER = ROOT / "tests" / "fixtures" / "fuzz_codec.py"


def fuzz(*words: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(FUZZER), *words],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'fixtures'}", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, f"exit {ended.returncode}\n{ended.stdout}\n{ended.stderr[-5000:]}"
    return ended.stdout


def test_damage_of_every_kind_is_an_error_by_every_kernel() -> None:
    assert "numpy" in fuzz("400", "1")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")
def test_the_compiled_kernel_stays_within_its_memory_and_the_language(tmp_path: Path) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer watch the kernel while it is given damaged streams."""
    library = tmp_path / "kernel.so"
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-fPIC", "-shared"]
    built = subprocess.run(["gcc", *flags, str(KERNEL), "-o", str(library)], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"gcc has no sanitizers here: {built.stderr[-200:]}")
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    assert "portable" in fuzz("100", "2", str(library), LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")


def lying_header(raw: int, stored: int) -> bytes:
    return delta_codec.write_header(delta_codec.DENSE, [0, 0, raw, stored, 0, 0, 0, 0])


@pytest.mark.parametrize("window_log", [10, 20, 24, 27, 31, 41])
def test_a_frame_that_asks_for_a_window_gets_none(window_log: int) -> None:
    """A frame that is cut off makes a decoder set its window up before it notices."""
    num_values = 2000
    frame = b"\x28\xb5\x2f\xfd\x80" + bytes([(window_log - 10) << 3]) + (num_values // 2).to_bytes(4, "little") + b"\x00" * 3
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), limit[1]))
    try:
        with pytest.raises(WeightsError, match=r"does not decompress|bytes decompressed"):
            delta_codec.apply(lying_header(num_values // 2, len(frame)) + frame, np.zeros(num_values, np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize("kernel", [Kernel(), load_kernel()], ids=lambda kernel: kernel.name)
def test_no_payload_makes_apply_allocate_more_than_its_unit_allows(kernel: object) -> None:
    """The largest streams that a unit may say, compressed to nothing: 4.5 bytes a value raw, and what numpy needs to look at them."""
    import zstandard

    num_values = 1 << 20
    raw = [num_values + num_values // 255, num_values // 2, num_values, 2 * num_values]
    frames = [zstandard.ZstdCompressor().compress(bytes(size)) for size in raw]
    sizes = [number for pair in zip(raw, map(len, frames), strict=True) for number in pair]
    payload = delta_codec.write_header(delta_codec.SPARSE, sizes) + b"".join(frames)
    values = np.zeros(num_values, np.uint16)
    tracemalloc.start()
    with pytest.raises(WeightsError):
        delta_codec.apply(payload, values, kernel=kernel)  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= (5 if not isinstance(kernel, Kernel) else 32) * num_values
    assert not values.any()

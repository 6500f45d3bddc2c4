"""Throws damaged payloads at every kernel: `python fuzz_codec.py COUNT SEED [LIBRARY]`; exits 1 with what went wrong.

Run in a process of its own by test_codec_damage.py, with bounded memory, and with a kernel that was built with sanitizers.
"""

import contextlib
import ctypes
import faulthandler
import itertools
import sys

import numpy as np
import zstandard
from bit_patterns import kernels

from slimebus.bus.errors import WeightsError
from slimebus.weights.codec import delta_codec
from slimebus.weights.codec.kernel import Kernel
from slimebus.weights.messages import TensorEntry
from slimebus.weights.pull.plan import KnownTensor, TensorDownload
from slimebus.weights.pull.verify import verify_tensor
from slimebus.weights.tensors import Tensor, checksum, hash_bytes

LIES = [0, 1, 2, 39, 40, 41, 127, 255, 2**15, 2**22 - 1, 2**22, 2**22 + 1, 2**31 - 1, 2**31, 2**32 - 1]


def payloads(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, bytes]:
    """A base, a target and a valid payload of any form."""
    size = int(rng.choice([1, 2, 3, 63, 64, 65, 255, 256, 300, 1001, 5000]))
    base = rng.integers(0, 65536, size).astype(np.uint16)
    step = rng.choice(np.array([[1, 65535, 1], [7, 8, 65000], [30, 200, 40000]][rng.integers(3)], np.uint16), size)
    target = base + np.where(rng.random(size) < rng.choice([0.0, 0.01, 0.2, 0.6, 1.0]), step, 0).astype(np.uint16)
    return base, target, delta_codec.encode(base, target, zstd=bool(rng.integers(2))).payload


def damaged(rng: np.random.Generator, payload: bytes) -> bytes:
    """The payload with one to three faults of any kind."""
    data = bytearray(payload)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(max(1, len(data))))
        match rng.integers(0, 8):
            case 0 if data:
                data[at] ^= 1 << rng.integers(8)
            case 1 if (header := _header(data)) is not None:  # a length that lies
                kind, sizes, end = header
                sizes[rng.integers(8)] = int(rng.choice(LIES))
                data[:end] = delta_codec.write_header(kind, sizes)
            case 2:
                del data[at:]
            case 3:
                data += rng.bytes(int(rng.integers(1, 60)))
            case 4 if data:
                data[at : at + 8] = rng.bytes(8)
            case 5:
                del data[at : at + int(rng.integers(1, 20))]
            case 6:
                data[at:at] = data[at : at + int(rng.integers(1, 50))]
            case _ if (header := _header(data)) is not None:
                data = _with_frame(rng, data, *header)
    return bytes(data)


def _header(data: bytearray) -> tuple[int, list[int], int] | None:
    with contextlib.suppress(WeightsError):
        return delta_codec.read_header(memoryview(bytes(data)), 0)
    return None


def _with_frame(rng: np.random.Generator, data: bytearray, kind: int, sizes: list[int], begin: int) -> bytearray:
    """One stream replaced by a zstd frame: of another size, bomb, cut off, without a size, or with an enormous window."""
    place = int(rng.integers(4))
    raw = sizes[2 * place]
    content = bytes(int(rng.choice([raw, raw + 1, max(0, raw - 1), 1 << 16])))
    frame = bytearray(zstandard.ZstdCompressor(write_content_size=bool(rng.integers(4))).compress(content))
    match rng.integers(0, 4):
        case 0:
            del frame[int(rng.integers(len(frame))) :]
        case 1:  # no single segment, a window of 128 MiB, the size that the unit says, and then a block that is not there
            frame = bytearray(b"\x28\xb5\x2f\xfd\x80" + bytes([(27 - 10) << 3]) + raw.to_bytes(4, "little") + b"\x00")
        case 2 if len(frame) > 5:
            frame[4 + int(rng.integers(min(8, len(frame) - 4)))] ^= 1 << rng.integers(8)
    starts = list(itertools.accumulate((sizes[2 * i + 1] for i in range(4)), initial=begin))
    sizes[2 * place + 1] = len(frame) if rng.integers(8) else int(rng.choice(LIES))
    tail = data[starts[place + 1] :] if starts[place + 1] <= len(data) else b""
    return bytearray(delta_codec.write_header(kind, sizes)) + data[begin : starts[place]] + frame + tail


def verdict(payload: bytes, base: np.ndarray, kernel: Kernel) -> bytes | None:
    """What the payload makes of the base; None for an error."""
    values = base.copy()
    try:
        delta_codec.apply(payload, values, kernel=kernel)
    except WeightsError:
        return None
    return values.tobytes()


def is_accepted(payload: bytes, base: np.ndarray, target: np.ndarray, payload_hash: str) -> bool:
    """Whether a puller takes these bytes for the payload that leads to target."""
    entry = TensorEntry(
        name="x", dtype="bfloat16", shape=base.shape, hash=hash_bytes(target), kind="delta", size=len(payload), payload_hash=payload_hash
    )
    known = KnownTensor(0, entry.form._replace(hash=hash_bytes(base)), Tensor("bfloat16", base.shape, base.view(np.uint8)))
    download = TensorDownload(entry, known)
    download.write(0, memoryview(payload))
    is_right = verify_tensor(download)
    assert not is_right or download.result.tobytes() == target.tobytes(), "a wrong tensor was accepted"
    return is_right


def check(rng: np.random.Generator, all_kernels: list[Kernel]) -> None:
    """One damaged payload: all kernels agree, and nobody takes it for what it is not."""
    base, target, payload = payloads(rng)
    bad = damaged(rng, payload)
    verdicts = {verdict(bad, base, kernel) for kernel in all_kernels}
    assert len(verdicts) == 1, f"kernels disagree about {bad.hex()} of {len(base)} values"
    merges = {_merged(bad, payload, len(base), kernel) for kernel in all_kernels}
    assert len(merges) == 1, f"merges disagree about {bad.hex()} of {len(base)} values"
    assert is_accepted(payload, base, target, checksum(payload))
    assert bad == payload or not is_accepted(bad, base, target, checksum(payload))
    is_accepted(bad, base, target, checksum(bad))  # by someone who can also make a hash fit: still only the right tensor


def _merged(bad: bytes, good: bytes, size: int, kernel: Kernel) -> bytes | None:
    try:
        return delta_codec.merge([good, bad], size, kernel=kernel, zstd=False).payload
    except WeightsError:
        return None


def check_streams(rng: np.random.Generator, all_kernels: list[Kernel]) -> None:
    """Streams that hardly fit each other, each in memory of its own, so that a sanitizer sees a byte too far."""
    size, changed = int(rng.integers(1, 600)), int(rng.integers(0, 40))
    wide, escaped = (int(rng.binomial(n, 0.3)) for n in (changed, changed // 2))
    gaps = rng.integers(0, rng.choice([3, 20, 256]), changed + int(rng.integers(0, 2))).astype(np.uint8)
    codes = rng.permutation(np.array([15] * wide + [1] * (changed - wide), np.uint8))
    wides = rng.permutation(np.array([255] * min(escaped, wide) + [3] * max(0, wide - escaped), np.uint8))
    escapes = rng.integers(0, 256, max(0, 2 * min(escaped, wide) + int(rng.integers(-1, 2)))).astype(np.uint8)
    streams = (gaps, Kernel().pack(codes), wides, escapes)
    dense = Kernel().pack(rng.choice(np.array([0, 1, 15], np.uint8), size, p=[0.9, 0.05, 0.05]))
    results = set()
    for kernel in all_kernels:
        first, second = np.zeros(size, np.uint16), np.zeros(size, np.uint16)
        fits = kernel.apply_sparse(first, *streams), kernel.apply_dense(second, dense, wides, escapes)
        results.add((fits, first.tobytes(), second.tobytes()))
    assert len(results) == 1, f"kernels disagree about streams {[s.tobytes().hex() for s in streams]} of {size} values"


def main() -> None:
    faulthandler.enable()
    count, seed, library = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
    rng, all_kernels = np.random.default_rng(seed), kernels(ctypes.CDLL(library) if library else None)
    for _ in range(count):
        check(rng, all_kernels)
        check_streams(rng, all_kernels)
    print(*(kernel.name for kernel in all_kernels))


if __name__ == "__main__":
    main()

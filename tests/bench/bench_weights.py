"""How fast and how small weight deltas are, as ratios measured in one run: `bin/bench weights`.

References: memcpy of the same bytes on one core; XOR of the bytes with zstd-1, the usual delta; a raw TCP socket.
Versions come from float32 parameters under Adam-like updates, rounded to bfloat16, as a trainer publishes them.
"""

import functools
import hashlib
import itertools
import math
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Self

import bench_fanout
import bench_serving
import msgspec
import numpy as np
import zstandard
from bench_row import Row, median_of, row
from slimebus_command import ENVIRONMENT

from slimebus.security.allow_list import grant
from slimebus.security.key_file import KeyPair, make_pair
from slimebus.weights.codec import delta_codec
from slimebus.weights.codec.kernel import Kernel
from slimebus.weights.messages import ManifestRequest
from slimebus.weights.pull.connection import WeightServerConnection, with_key
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import TensorForm
from slimebus.weights.threads import Threads

SPEED_GOALS = {
    "memcpy": "",
    "encode_ratio": ">= 0.55",
    "apply_ratio": ">= 1.0",
    "encode_zstd_ratio": ">= 0.45",
    "apply_zstd_ratio": ">= 0.85",
}
RARE_LR, DENSE_LR = 8e-7, 3.5e-5  # about 2% and 28% of the values change


def rows(quick: bool) -> list[Row]:
    """All measurements; quick takes a quarter of the bytes."""
    num_values = (1 << 24) if quick else (1 << 26)
    codec_and_store = [*codec_rows(num_values), *merge_rows(num_values // 4), *store_rows(num_values // 2)]
    codec_and_store += [*low_density_rows(num_values // 4), manifest_row(100 if quick else 1000)]
    return [*codec_and_store, *pull_rows(256 if quick else 1024), *bench_fanout.rows(), *bench_serving.rows(quick)]


def codec_rows(num_values: int) -> list[Row]:
    """Speed and size of the codec at a usual and at a dense density of changes."""
    base, target = versions(num_values, RARE_LR, 1)
    size, changed, gigabytes = base.nbytes, float(np.mean(base != target)), base.nbytes / 1e9
    payload = delta_codec.encode(base, target).payload
    seconds = _time_codec(base, target, payload)
    found = [
        row(name, gigabytes / seconds[name], unit_of(name, seconds), gigabytes / seconds["memcpy"], goal)
        for name, goal in SPEED_GOALS.items()
    ]
    xor_size, xor_gbps = _measure_xor(base, target)
    found.append(row("size_per_changed", len(payload) / size, "of the model", changed, "<= 0.7"))
    found.append(row("size_vs_xor", len(payload) / size, "of the model", xor_size, "<= 0.5"))
    both_s = seconds["encode_zstd_ratio"] + seconds["apply_zstd_ratio"]
    found.append(row("speed_vs_xor", gigabytes / both_s, "GB/s", xor_gbps, ">= 3"))
    found += [*_two_cores(base, target), _numpy(base, target), _dense(num_values // 4)]
    return found


def unit_of(name: str, seconds: Mapping[str, float]) -> str:
    """GB/s, and what bounds it on this machine: what takes less than 1.25 copies of the same bytes waits for memory, else it computes."""
    is_copy = name == "memcpy" or seconds[name] < 1.25 * seconds["memcpy"]
    return f"GB/s, bound by {'memory' if is_copy else 'computing'}"


def low_density_rows(num_values: int) -> list[Row]:
    """The size of a delta over the entropy of its changes (docs/weights.md), where few values change."""
    rng, found = np.random.default_rng(0), []
    base = rng.integers(0, 65536, num_values).astype(np.uint16)
    steps = np.where(rng.random(num_values) < 0.87, 1, rng.geometric(0.4, num_values) + 1) * rng.choice([-1, 1], num_values)
    for percent in (0.03, 0.65, 4.6):
        target = np.where(rng.random(num_values) < percent / 100, base + steps, base).astype(np.uint16)
        size = len(delta_codec.encode(base, target).payload)
        found.append(row(f"size_low_density_{percent}", size / 1e6, "MB", entropy_bytes(base, target) / 1e6, "<= 1.1"))
    return found


def entropy_bytes(base: np.ndarray, target: np.ndarray) -> float:
    """log2 C(n, k) bits for the positions of k changed values of n, and k times the entropy of their steps."""
    n, steps = len(base), (target - base)[base != target]
    k = len(steps)
    positions = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    share = np.unique(steps, return_counts=True)[1] / k
    return (positions - k * float((share * np.log2(share)).sum())) / 8


def manifest_row(num_workers: int) -> Row:
    """Manifests a second that one server gives to workers that ask for one version, 50 at once, against making and encoding each."""
    store = VersionStore()
    store.publish({f"model.layers.{i}.weight": np.zeros(64, np.uint16) for i in range(1000)})
    server = WeightServer(store, degree=2)
    connections = [WeightServerConnection(server.endpoint, name="bench", stall_s=60.0) for _ in range(50)]
    started, deadline = time.perf_counter(), time.monotonic() + 60.0
    for i in range(0, num_workers, len(connections)):
        for j, connection in enumerate(connections):
            connection.send(ManifestRequest(serves=f"tcp://10.0.{(i + j) // 256}.{(i + j) % 256}:7000"))
        for connection in connections:
            while not connection.receive(1.0):
                assert time.monotonic() < deadline, "the weight server does not answer"
    once_s = time.perf_counter() - started
    each_s = num_workers / 20 * best(lambda: [_encode_anew(store) for _ in range(20)], repeats=3, clock=time.perf_counter)
    for connection in connections:
        connection.close()
    server.close()
    return row("manifests_1k", num_workers / once_s, "1/s", num_workers / each_s, ">= 2")


def _encode_anew(store: VersionStore) -> bytes:
    store._manifests = {}
    return msgspec.msgpack.encode(store.manifest("", -1))


def merge_rows(num_values: int) -> list[Row]:
    """A merged delta of 8 versions against the chain of them."""
    chain = versions(num_values, RARE_LR, 8)
    payloads = [delta_codec.encode(a, b).payload for a, b in itertools.pairwise(chain)]
    merged = delta_codec.merge(payloads, num_values).payload
    work = chain[0].copy()
    one_s = best(lambda: delta_codec.apply(merged, work), before=lambda: np.copyto(work, chain[0]))
    chain_s = best(lambda: _apply_all(payloads, work), before=lambda: np.copyto(work, chain[0]))
    merge_s = best(lambda: delta_codec.merge(payloads, num_values))
    return [
        row("merge8_bytes", len(merged) / 1e6, "MB", sum(map(len, payloads)) / 1e6, "<= 0.55"),
        row("merge8_apply", one_s * 1e3, "ms", chain_s * 1e3, "<= 0.33"),
        row("merge8_speed", chain[0].nbytes / 1e9 / merge_s, "GB/s", chain[0].nbytes / 1e9 / merge_s, ""),
    ]


def _apply_all(payloads: list[bytes], values: np.ndarray) -> None:
    for payload in payloads:
        delta_codec.apply(payload, values)


def store_rows(num_values: int) -> list[Row]:
    """Peak memory of a store over publishes, without the caller's tensors and the deltas that it keeps."""
    chain = versions(num_values, RARE_LR, 3)
    models = [{f"layer{i}": part for i, part in enumerate(np.array_split(values, 16))} for values in chain]
    tracemalloc.start()
    store = VersionStore()
    made = [store.publish(model) for model in models]
    peak = tracemalloc.get_traced_memory()[1] - sum(info.delta_bytes for info in made[1:])
    tracemalloc.stop()
    return [row("store_memory", peak / 1e6, "MB", chain[0].nbytes / 1e6, "<= 1.1")]


def pull_rows(size_mib: int, turns: int = 5) -> list[Row]:
    """A full pull over loopback, verified, against a raw socket, without and with CURVE: medians of turns. Senders are other processes."""
    with (
        RawSocket("--serve-raw", size_mib) as raw,
        Pull("--serve-weights", size_mib) as plain,
        Pull("--serve-encrypted", size_mib, make_pair()) as curve,
    ):
        seconds = median_of(turns, {"raw": raw, "plain": plain, "curve": curve})
    gbps = {name: (size_mib << 20) / 1e9 / taken_s for name, taken_s in seconds.items()}
    return [
        row("pull_ratio", gbps["plain"], "GB/s", gbps["raw"], ">= 0.9"),
        row("pull_curve_ratio", gbps["curve"], "GB/s", gbps["raw"], ""),
    ]


class UsedMemory:
    """In place of a host's sharing: every tensor into the buffer that it had in the pull before, so that no page is new."""

    is_puller = True

    def __init__(self) -> None:
        self.folder, self._buffers = self, dict[str, np.ndarray]()

    def allocate(self, form: TensorForm) -> np.ndarray:
        return self._buffers.setdefault(form.name, np.empty(form.size, np.uint8))

    def take_from_host_or_lock(self, *about: object, **more: object) -> bool:
        return True

    def _nothing(self, *about: object) -> None:
        pass

    begin = end = touch = keep = check_room = discard_unfinished = _nothing


class Sender:
    """A process that sends; each call receives everything, in so many seconds."""

    def __init__(self, what: str, size_mib: int, pair: KeyPair | None = None) -> None:
        self.size_mib, self.pair = size_mib, pair
        command = [sys.executable, __file__, what, str(size_mib), *([pair.public] if pair else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


class Pull(Sender):
    """A weight server, pulled into memory used before."""

    @functools.cached_property
    def _puller(self) -> WeightPuller:
        return WeightPuller([self.address], pair=self.pair, host=UsedMemory())  # type: ignore[arg-type]

    def __call__(self) -> float:
        started = time.perf_counter()
        self._puller.pull()
        return time.perf_counter() - started

    def __exit__(self, *error: object) -> None:
        self._puller.close()
        super().__exit__()


class RawSocket(Sender):
    """As many bytes over a plain socket."""

    @functools.cached_property
    def _buffer(self) -> memoryview:
        return np.ones(self.size_mib << 20, np.uint8).data

    def __call__(self) -> float:
        with socket.create_connection(("127.0.0.1", int(self.address))) as connection:
            started, at = time.perf_counter(), 0
            while at < len(self._buffer):
                at += connection.recv_into(self._buffer[at : at + (4 << 20)])
            return time.perf_counter() - started


def versions(num_values: int, lr: float, steps: int) -> list[np.ndarray]:
    """bfloat16 bit patterns of a random layer before and after Adam-like steps: a drift of its own per value, and noise."""
    rng = np.random.default_rng(0)
    made = [np.empty(num_values, np.uint16) for _ in range(steps + 1)]
    for start in range(0, num_values, 1 << 22):
        part = slice(start, min(num_values, start + (1 << 22)))
        weights = rng.standard_normal(part.stop - start, np.float32) * np.float32(0.02)
        drift = rng.standard_normal(len(weights), np.float32)
        for values in made:
            values[part] = _bfloat16(weights)
            update = (drift + np.float32(0.3) * rng.standard_normal(len(weights), np.float32)) / np.sqrt(1 + drift * drift)
            weights -= np.float32(lr) * update
    return made


def _bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def best(
    work: Callable[[], Any],
    *,
    before: Callable[[], Any] = lambda: None,
    repeats: int = 5,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Seconds of the fastest of several runs; of this thread's processor time, so that other processes count less."""
    times = []
    for _ in range(repeats):
        before()
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


def medians_of_turns(
    works: Mapping[str, Callable[[], Any]], before: Callable[[], Any] = lambda: None, *, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Seconds of the usual run of each, in turns."""
    return median_of(15, {name: functools.partial(best, work, before=before, repeats=1, clock=clock) for name, work in works.items()})


def _time_codec(base: np.ndarray, target: np.ndarray, payload: bytes) -> dict[str, float]:
    work, raw = base.copy(), delta_codec.encode(base, target, zstd=False).payload
    works = {
        "memcpy": lambda: np.copyto(work, target),
        "encode_ratio": lambda: delta_codec.encode(work, target, update=True, zstd=False),
        "apply_ratio": lambda: delta_codec.apply(raw, work),
        "encode_zstd_ratio": lambda: delta_codec.encode(work, target, update=True),
        "apply_zstd_ratio": lambda: delta_codec.apply(payload, work),
    }
    return medians_of_turns(works, before=lambda: np.copyto(work, base))


def _measure_xor(base: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Size as a fraction of the model, and GB/s of encode and apply together."""
    base, target = base[: 1 << 24], target[: 1 << 24]
    compressor, decompressor = zstandard.ZstdCompressor(1), zstandard.ZstdDecompressor()
    packed = compressor.compress((base ^ target).data)
    encode_s = best(lambda: compressor.compress((base ^ target).data), repeats=2)
    work = base.copy()
    apply_s = best(lambda: np.bitwise_xor(work, np.frombuffer(decompressor.decompress(packed), np.uint16), out=work), repeats=2)
    return len(packed) / base.nbytes, base.nbytes / 1e9 / (encode_s + apply_s)


def _two_cores(base: np.ndarray, target: np.ndarray) -> list[Row]:
    """What a second core adds to encoding and, in the same turns, to memcpy and to hashing that needs no memory: what the machine gives."""
    base, target = np.tile(base, 4), np.tile(target, 4)  # many units, so that start, end and luck decide little
    copy, rounds, gigabytes = np.zeros_like(base), 200_000, base.nbytes / 1e9

    def hash_over(rounds: int) -> bytes:
        return hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)

    threads = Threads(2, "bench")
    with ThreadPoolExecutor(2) as pool:
        works = {
            "encode": lambda: delta_codec.encode(base, target),
            "encode on two": lambda: delta_codec.encode(base, target, threads=threads),
            "memcpy": lambda: np.copyto(copy, target),
            "memcpy on two": lambda: list(pool.map(np.copyto, np.split(copy, 2), np.split(target, 2))),
            "hash": lambda: hash_over(rounds),
            "hash on two": lambda: list(pool.map(hash_over, [rounds // 2, rounds // 2])),
        }
        seconds = medians_of_turns(works, clock=time.perf_counter)
    threads.close()

    def gain(name: str, work: str, amount: float, unit: str, goal: str = "") -> Row:
        return row(name, amount / seconds[f"{work} on two"], unit, amount / seconds[work], goal)

    return [
        gain("two_cores_ratio", "encode", gigabytes, "GB/s", ">= 1.7"),
        gain("two_cores_memcpy", "memcpy", gigabytes, "GB/s"),
        gain("two_cores_compute", "hash", rounds / 1e6, "million hashes/s"),
    ]


def _numpy(base: np.ndarray, target: np.ndarray) -> Row:
    base, target = base[: 1 << 24], target[: 1 << 24]
    kernel, work, gigabytes = Kernel(), base.copy(), base.nbytes / 1e9
    works = {"memcpy": lambda: np.copyto(work, target), "encode": lambda: delta_codec.encode(work, target, zstd=False, kernel=kernel)}
    seconds = medians_of_turns(works, before=lambda: np.copyto(work, base))
    return row("encode_numpy_ratio", gigabytes / seconds["encode"], "GB/s", gigabytes / seconds["memcpy"], ">= 0.12")


def _dense(num_values: int) -> Row:
    base, target = versions(num_values, DENSE_LR, 1)
    payload = delta_codec.encode(base, target).payload
    xor_size, _ = _measure_xor(base, target)
    return row("size_dense_vs_xor", len(payload) / base.nbytes, "of the model", xor_size, "<= 0.7")


def _serve_raw(size_mib: int) -> None:
    buffer = np.ones(size_mib << 20, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(buffer)


def _serve_weights(size_mib: int, worker_key: str = "") -> None:
    """worker_key: the public key of the only one who may pull; empty: anyone, without encryption."""
    values = np.random.default_rng(0).integers(0, 65536, (16, size_mib << 15), np.uint16)
    store = VersionStore()
    store.publish({f"layer{i}": layer for i, layer in enumerate(values)})
    grants = {worker_key: grant("worker", "rollout")}
    keyring: Any = SimpleNamespace(pair=make_pair(), grants=grants, refresh=lambda: None) if worker_key else None
    print(with_key(WeightServer(store, keyring=keyring).endpoint, keyring.pair.public if keyring else ""), flush=True)
    time.sleep(600)


if __name__ == "__main__":  # a sender of the pull measurement
    (_serve_raw if sys.argv[1] == "--serve-raw" else _serve_weights)(int(sys.argv[2]), *sys.argv[3:])

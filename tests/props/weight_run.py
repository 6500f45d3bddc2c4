"""Publishers and workers of weights as processes of their own, without broker and training; and someone who watches the engines.

Every version is known beforehand (`weights_of`), so that what an engine serves can be judged by whoever watches.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from slimebus.config.schema import EngineConfig
from slimebus.messages import NO_VERSION
from slimebus.weights.safetensors_file import read_model, write_model
from slimebus.weights.server import WeightServer
from slimebus.weights.store import VersionStore
from slimebus.weights.tensors import Tensor

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
TOLERANCE = 1e-4
START_S = 60.0


def weights_of(model: dict[str, Tensor], lineage: str, version: int) -> dict[str, Tensor]:
    """A version of its own: a third of the values moved by a few units, everywhere away from zero and infinity."""
    rng, made = np.random.default_rng(zlib.crc32(f"{lineage}:{version}".encode())), {}
    for name, tensor in model.items():
        bits = tensor.steps.copy()
        moves = np.where(rng.random(len(bits)) < 0.3, rng.integers(-9, 10, len(bits)), 0)
        bits[:] = np.where((bits & 0x7FFF) > 64, bits + moves, bits)
        made[name] = tensor._replace(buffer=bits.view(np.uint8))
    return made


class Liar:
    """A store that gives other bytes than it should for deltas and tensors alike."""

    def __init__(self, store: VersionStore) -> None:
        self.manifest, self._read = store.manifest, store.read

    def read(self, lineage: str, version: int, name: str, base: int) -> memoryview:
        data = bytearray(self._read(lineage, version, name, base))
        data[len(data) // 2 :: 7] = b"\x3f" * len(data[len(data) // 2 :: 7])
        return memoryview(bytes(data))


def publisher(model_dir: str, lineage: str, first: str, last: str, every_s: str, keep: str, bind: str, is_liar: str = "") -> None:
    """Publish the versions from first to last, one every so many seconds, with 0 one for each line of stdin; serve until killed."""
    model = read_model(Path(model_dir))
    store = VersionStore(keep=int(keep), lineage=lineage, first_version=int(first))
    store.publish(weights_of(model, lineage, int(first)))
    server = WeightServer(Liar(store) if is_liar else store, bind)
    print(json.dumps({"endpoint": server.endpoint, "version": int(first)}), flush=True)
    for version in range(int(first) + 1, int(last) + 1):
        if float(every_s):
            time.sleep(float(every_s))
        else:
            sys.stdin.readline()
        store.publish(weights_of(model, lineage, version))
        print(json.dumps({"endpoint": server.endpoint, "version": version}), flush=True)
    threading.Event().wait()


async def worker(model_dir: str, shm: str, logs: str, name: str) -> None:
    """Follow the announcements that come as lines of stdin; say what is served, and where the engine is."""
    from rollout.engines import Engines
    from rollout.weight_sync import WeightSync

    logging.basicConfig(level=logging.INFO)
    engines = Engines(EngineConfig(), Path(model_dir), Path(logs), name=name, sglang_args={}, seed=0)
    await engines.start()
    sync = WeightSync(engines, Path(model_dir), shm=shm, pull_timeout_s=20.0, on_change=lambda: None)
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin:
            news = json.loads(line)
            loop.call_soon_threadsafe(sync.announce, news["lineage"], news["version"], news["publishers"])

    threading.Thread(target=listen, daemon=True).start()
    following, said = asyncio.create_task(sync.run()), None
    while not following.done():
        now = (*sync.serving, sync.failures)
        if now != said:
            lineage, version, failures = said = now
            print(json.dumps({"url": engines.engines[0].url, "lineage": lineage, "version": version, "failures": failures}), flush=True)
        await asyncio.sleep(0.005)
    following.result()


class Child:
    """One of these processes. `said`: the lines it printed, as JSON, oldest first."""

    def __init__(self, folder: Path, name: str, *words: Any) -> None:
        self.said: list[dict[str, Any]] = []
        self.log = folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, __file__, *map(str, words)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True,
            )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.said.append(json.loads(line))

    def wait_for(self, what: str, is_true: Callable[[dict[str, Any]], Any], timeout_s: float = START_S) -> dict[str, Any]:
        """The newest line for which is_true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.said and is_true(self.said[-1]):
                return self.said[-1]
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}, waiting for {what}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.01)
        raise AssertionError(f"no {what} within {timeout_s:.0f} s; last said: {self.said[-1:]}\n{self.log.read_text()[-3000:]}")

    def publish(self) -> int:
        """Have a publisher make its next version; the number of it."""
        assert self.popen.stdin is not None
        version = int(self.said[-1]["version"]) + 1
        self.popen.stdin.write("publish\n")
        self.popen.stdin.flush()
        self.wait_for(f"version {version}", lambda s: s["version"] == version)
        return version

    def announce(self, lineage: str, version: int, endpoint: str) -> None:
        """To a worker."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"lineage": lineage, "version": version, "publishers": [endpoint]}) + "\n")
        self.popen.stdin.flush()

    def wait_serving(self, lineage: str, version: int) -> None:
        self.wait_for(f"{lineage}:{version} served", lambda s: (s["lineage"], s["version"]) == (lineage, version))

    @property
    def serving(self) -> str:
        """The tag of what the worker says it serves; empty for nothing."""
        last = self.said[-1] if self.said else {"version": NO_VERSION}
        return "" if last["version"] == NO_VERSION else f"{last['lineage']}:{last['version']}"

    @property
    def url(self) -> str:
        return str(self.wait_for("an engine", lambda s: "url" in s)["url"])

    def family(self) -> list[psutil.Process]:
        me = psutil.Process(self.popen.pid)
        return [me, *me.children(recursive=True)]

    def kill(self) -> None:
        """kill -9, of this process alone."""
        self.popen.kill()
        self.popen.wait(10)

    def close(self) -> None:
        """End it and all below it."""
        with contextlib.suppress(psutil.Error):
            for process in self.family():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
        self.popen.wait(10)
        self._listener.join(10)
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Engine(NamedTuple):
    """One whose worker says nothing to the observer."""

    url: str
    serving: str = ""


class Seen(NamedTuple):
    """One greedy answer of an engine: the tag of the weights that it says made it, the tokens and their logprobs."""

    tag: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    worker_said: str  # what the worker said it serves, all the while; "?" when that changed


def ask(url: str, path: str, body: object = None, timeout_s: float = 20.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.loads(reply.read() or b"null")


def greedy(url: str) -> tuple[str, tuple[int, ...], tuple[float, ...]] | None:
    """Tag, tokens and logprobs of one answer; None when the weights changed meanwhile."""
    before = ask(url, "/model_info")["weight_version"]
    answer = ask(url, "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True})
    if ask(url, "/model_info")["weight_version"] != before:
        return None
    scored = answer["meta_info"]["output_token_logprobs"]
    return str(before), tuple(int(row[1]) for row in scored), tuple(float(row[0]) for row in scored)


class Observer:
    """Asks an engine again and again what it serves, and for a greedy answer; knows nothing of what the worker thinks of it."""

    def __init__(self, worker: "Child | Engine") -> None:
        self.worker, self.seen = worker, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            with contextlib.suppress(OSError, urllib.error.URLError):
                said = self.worker.serving
                found = greedy(self.worker.url)
                time.sleep(0.05)
                if found is not None:
                    self.seen.append(Seen(*found, worker_said=said if said == self.worker.serving else "?"))

    def wait_for(self, tag: str, timeout_s: float = START_S) -> None:
        """Until an answer made by the weights of that tag was seen: on a busy machine one question can take longer than a version lasts."""
        deadline = time.monotonic() + timeout_s
        while not any(s.tag == tag for s in list(self.seen)):
            seen = list(dict.fromkeys(s.tag for s in self.seen))
            assert time.monotonic() < deadline, f"no answer of {tag} within {timeout_s:.0f} s; seen: {seen}"
            time.sleep(0.01)

    def stop(self) -> list[Seen]:
        self._stop.set()
        self._thread.join(30)
        return self.seen


def judge(
    seen: list[Seen], model_dir: Path, folder: Path, allowed: set[str], *, known: Mapping[str, Mapping[str, Tensor]] | None = None
) -> list[str]:
    """Every answer was made by the weights of its tag, and by a version that was allowed; the tags in order, each once.

    A fresh engine is given the true weights of each tag, which come from here and not over any wire; or those of `known` only.
    """
    from rollout.engine_process import embedded_engine

    order = list(dict.fromkeys(s.tag for s in seen))
    tags = [tag for tag in order if ":" in tag]
    assert set(tags) <= allowed, f"served {set(tags) - allowed}, which was never a verified version of a current lineage"
    for s in seen:
        assert s.worker_said in ("", "?", s.tag), f"the worker says it serves {s.worker_said}, its engine has {s.tag}"
    model, expected = read_model(model_dir), {}
    engine = embedded_engine(model_dir, folder / "reference.log", arguments=())
    try:
        engine.start()
        _wait_ready(engine.url)
        for tag in tags if known is None else [tag for tag in tags if tag in known]:
            lineage, _, version = tag.rpartition(":")
            path = folder / f"reference-{lineage}-{version}"
            tensors = weights_of(model, lineage, int(version)) if known is None else known[tag]
            write_model(path, tensors, config_from=model_dir)
            ask(engine.url, "/update_weights_from_disk", {"model_path": str(path), "weight_version": tag})
            expected[tag] = greedy(engine.url)
    finally:
        engine.stop()
    for s in seen:
        if s.tag in expected:
            _, token_ids, logprobs = expected[s.tag] or ("", (), ())
            assert s.token_ids == token_ids, f"{s.tag} answered {s.token_ids}, its weights answer {token_ids}"
            assert np.allclose(s.logprobs, logprobs, atol=TOLERANCE), f"{s.tag} answered {s.logprobs}, its weights answer {logprobs}"
    distinct = {(e[1], tuple(round(x, 3) for x in e[2])) for e in expected.values() if e}
    # A trainer that repeats steps from its checkpoint may well come to the same weights.
    assert known is not None or len(distinct) == len(expected), "the versions cannot be told apart"
    return order


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError):
            ask(url, "/model_info", timeout_s=2.0)
            return
        time.sleep(0.1)
    raise AssertionError("the reference engine does not start")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        asyncio.run(worker(*sys.argv[2:]))
    else:
        publisher(*sys.argv[2:])

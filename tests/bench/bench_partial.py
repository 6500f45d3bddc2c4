"""Groups trained a second while lengths have a long tail: waiting for the longest, starting more than are trained, and recalling the rest.

A real broker and a real worker. The trainer takes batches, waits TRAIN_S instead of training, and publishes real versions. The engine is
a stand-in that speaks SGLang's API and makes a token of each request every TOKEN_S, however many there are, as a GPU about does; how
long an answer is, its prompt says (log-normal), so that one that is begun anew is as long again.
"""

import asyncio
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from bench_row import Row, row

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fixtures")]

from live_broker import LiveBroker  # noqa: E402

from slimebus.bus import messages as m  # noqa: E402
from slimebus.bus.samples import decode_stored  # noqa: E402
from slimebus.bus.transport.client import Client  # noqa: E402
from slimebus.view.run_status import ask_status  # noqa: E402
from slimebus.weights.host.safetensors_file import read_model  # noqa: E402
from slimebus.weights.store.server import WeightServer  # noqa: E402
from slimebus.weights.store.version_store import VersionStore  # noqa: E402

BATCH, STARTED = 8, 16
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 80, 1.3, 1900
TOKEN_S, TRAIN_S = 0.002, 0.3
TOKEN = 7
WARM_UP = 2


class Run(NamedTuple):
    """offpolicy_share: of the trained groups' sampled tokens, those that were context alone; wasted_tokens: of samples thrown away."""

    groups_per_s: float
    offpolicy_share: float
    wasted_tokens: int


def gain(quick: bool) -> list[Row]:
    """Partial rollouts on policy against waiting, and with a bound of one version against over-sampling alone."""
    steps = 8 if quick else 30
    with tempfile.TemporaryDirectory(prefix="bench-partial-") as folder:
        from tiny_model import save_served

        save_served(Path(folder) / "model")
        engine = StandIn()
        engine.start()
        waiting = measure(folder, "waiting", engine.url, steps, eta=0, started=0, masks=False)
        partial = measure(folder, "partial", engine.url, steps, eta=0, started=STARTED, masks=True)
        over = measure(folder, "over", engine.url, steps, eta=1, started=STARTED, masks=False)
        bound = measure(folder, "bound", engine.url, steps, eta=1, started=STARTED, masks=True)
    return [
        row("partial_gain", partial.groups_per_s, f"groups/s on policy, {_shares(partial)}", waiting.groups_per_s, ">= 1.4"),
        row(
            "partial_gain_bound_1",
            bound.groups_per_s,
            f"groups/s, {_shares(bound)}; over-sampling {_shares(over)}",
            over.groups_per_s,
            ">= 1",
        ),
    ]


def _shares(run: Run) -> str:
    return f"{run.offpolicy_share:.0%} of tokens off-policy and masked, {run.wasted_tokens} wasted"


def measure(folder: str, name: str, url: str, steps: int, *, eta: int, started: int, masks: bool) -> Run:
    """So many steps after the first ones."""
    rollout: dict[str, Any] = {"rollout_batch_size": BATCH, "n_samples_per_prompt": 1, "over_sampling_batch_size": started}
    rollout |= {"mask_offpolicy_in_partial_rollout": masks, "rollout_max_response_len": MOST_TOKENS}
    rollout |= {"rm_type": "random", "num_rollout": 10_000}
    home = Path(folder) / name
    home.mkdir()
    sections = {"rollout": rollout, "model": {"hf_checkpoint": str(Path(folder) / "model")}, "broker": {"max_staleness": eta}}
    sections["engine"] = {"engine_url": [url]}
    broker = LiveBroker(home, num_prompts=5000, **sections)
    try:
        trainer = Trainer(broker.client("t"), Path(folder) / "model")
        broker.start_beside("-m", "slimebus", "rollout", str(broker.file), log=home / "worker.log")
        return trainer.train(WARM_UP + steps)
    finally:
        broker.close()


class StandIn:
    """An engine in a thread of its own."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, str]] = [(0.0, "default")]
        self.aborts: dict[str, asyncio.Event] = {}
        self.url, self.is_paused = "", False

    def start(self) -> None:
        """Listen, and go on until this process ends."""
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait(10)

    async def _serve(self, ready: threading.Event) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/{any}", self._ok)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/{any}", self._ok)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await asyncio.Event().wait()

    async def _ok(self, request: web.Request) -> web.Response:
        self.is_paused = {"/pause_generation": True, "/continue_generation": False}.get(request.path, self.is_paused)
        is_down = self.is_paused and request.path == "/ready"
        return web.json_response({"success": True, "message": ""}, status=503 if is_down else 200)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.updates[-1][1], "dtype": "bfloat16", "internal_states": [{}]})

    async def _update(self, request: web.Request) -> web.Response:
        self.updates.append((time.monotonic(), (await request.json())["weight_version"]))
        return web.json_response({"success": True, "message": ""})

    async def _abort(self, request: web.Request) -> web.Response:
        prefix = (await request.json())["rid"]
        for rid, event in self.aborts.items():
            if rid.startswith(prefix):
                event.set()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        answers = [self._answer(rid, ids) for rid, ids in zip(body["rid"], body["input_ids"], strict=True)]
        return web.json_response(await asyncio.gather(*answers))

    async def _answer(self, rid: str, ids: list[int]) -> dict[str, Any]:
        """What is left of the answer to the prompt before the first TOKEN, or as much of it as there is when it is aborted."""
        prompt = ids[: ids.index(TOKEN)] if TOKEN in ids else ids
        length = int(MEDIAN_TOKENS * random.Random(str(prompt)).lognormvariate(0, SIGMA))
        left = max(1, min(length, MOST_TOKENS) - (len(ids) - len(prompt)))
        event, begun = self.aborts.setdefault(rid, asyncio.Event()), time.monotonic()
        try:
            await asyncio.wait_for(event.wait(), left * TOKEN_S)
        except TimeoutError:
            made, reason = left, {"type": "stop", "matched": TOKEN}
        else:
            made, reason = min(left, int((time.monotonic() - begun) / TOKEN_S)), {"type": "abort", "message": ""}
        del self.aborts[rid]
        meta = {"id": rid, "finish_reason": reason, "weight_versions": self._spans(begun, made)}
        meta["output_token_logprobs"] = [[-1.0, TOKEN, None]] * made
        return {"output_ids": [TOKEN] * made, "meta_info": meta}

    def _spans(self, begun: float, made: int) -> list[dict[str, Any]]:
        """Which version made which tokens."""
        starts = [min(made, max(0, int((at - begun) / TOKEN_S))) for at, _ in self.updates]
        ends = [*starts[1:], made]
        return [
            {"version": version, "start": start, "end": end}
            for (_, version), start, end in zip(self.updates, starts, ends, strict=True)
            if end > start
        ]


class Trainer:
    """Takes batches and publishes versions that differ in a few values; no step is computed."""

    def __init__(self, client: Client, model: Path) -> None:
        self.client = client
        welcome = client.join("trainer", timeout_s=60)
        client.keep_alive(welcome.heartbeat_s, lambda: m.Heartbeat(state="training"), lambda _: None, lambda _: None)
        self.tensors = {name: tensor._replace(buffer=tensor.buffer.copy()) for name, tensor in read_model(model).items()}
        self.store = VersionStore()
        self.server = WeightServer(self.store)

    def publish(self) -> m.Publish:
        """The next version."""
        for tensor in self.tensors.values():
            tensor.steps[::1000] ^= 1
        made = self.store.publish(self.tensors)
        return m.Publish(lineage=made.lineage, version=made.version, publishers=[self.server.endpoint], digest=made.digest)

    def train(self, steps: int) -> Run:
        """Groups a second over the steps behind the first ones."""
        first = self.publish()
        self.client.call(m.Resume(step=0, version=0, lineage=first.lineage))
        self.client.call(first)
        begun, masked, sampled = 0.0, 0, 0
        for step in range(steps):
            if step == WARM_UP:
                begun = time.monotonic()
            batch = self._batch(step)
            reply = self.client.call(m.Fetch(groups=[g.group for g in batch.groups]))
            for samples in decode_stored(reply.expect(m.FetchReply).num_frames, reply.bulk):
                for sample in samples if step >= WARM_UP else []:
                    made = sum(length for version, length in sample.versions if version != m.NO_VERSION)
                    sampled, masked = sampled + made, masked + made - int(sample.loss_mask.sum())
            time.sleep(TRAIN_S)
            self.client.call(self.publish())
            self.client.call(m.Commit(step=step, checkpoint=step + 1))
        seconds = time.monotonic() - begun
        wasted = sum(waste["tokens"] for waste in ask_status(self.client, 30.0)["waste"].values())
        self.server.close()
        return Run((steps - WARM_UP) * BATCH / seconds, masked / sampled, wasted)

    def _batch(self, step: int) -> m.BatchReply:
        while not (batch := self.client.call(m.Batch(step=step, wait_s=60.0), timeout_s=90.0).expect(m.BatchReply)).groups:
            pass
        return batch


if __name__ == "__main__":
    for made in gain("--quick" in sys.argv):
        print(made)

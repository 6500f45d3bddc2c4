"""What an engine is told in an update, in which order, and what is left of it after a failure; against an SGLang of a few lines."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollout.engines.dispatch import Dispatch
from rollout.engines.engine import Engine
from rollout.engines.pool import EnginePool, check_shapes
from rollout.engines.sglang.weights import WeightCalls
from rollout.samples.response import Task
from slimebus.bus.errors import ConfigError, SlimebusError, WeightsError
from slimebus.bus.messages import NO_VERSION
from slimebus.config.schema import EngineConfig, RunConfig
from slimebus.weights.host.shared_folder import SharedTensor, SharedVersion
from slimebus.weights.tensors import hash_bytes

Session = Callable[[Engine], Coroutine[Any, Any, Any]]
UPDATE = ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"]


class FakeSGLang:
    """Keeps what it is sent, by name. `fails` maps a path to how often it answers 400."""

    def __init__(self, **about: Any) -> None:
        self.about = {"version": "0.5.23", "tp_size": 1, "dp_size": 1} | about
        self.asked: list[str] = []
        self.sent: list[str] = []
        self.held: dict[str, bytes] = {}
        self.fails: dict[str, int] = {}
        self.weight_version, self.is_paused, self.is_open = "default", False, False
        self.lies = ""
        self.keys: list[Any] = []
        self.release = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json() if request.can_read_body else {}
        if path not in ("/server_info", "/model_info", "/generate", "/abort_request", "/ready"):
            self.asked.append(path)
        if self.fails.get(path, 0) > 0:
            self.fails[path] -= 1
            return web.json_response({"success": False, "message": "it would not"}, status=400)
        answer = getattr(self, "on" + path.replace("/", "_"), lambda body: {})(body)
        if path == "/generate":
            await self.release.wait()
        return web.json_response(answer, status=400 if "success" in answer and not answer["success"] else 200)

    def on_server_info(self, body: Any) -> Any:
        return self.about

    def on_model_info(self, body: Any) -> Any:
        return {"weight_version": self.lies or self.weight_version}

    def on_ready(self, body: Any) -> Any:
        return {"success": not self.is_paused}

    def on_pause_generation(self, body: Any) -> Any:
        self.is_paused = True
        return {}

    def on_continue_generation(self, body: Any) -> Any:
        self.is_paused = False
        return {}

    def on_begin_weight_update(self, body: Any) -> Any:
        self.is_open, was_open = True, self.is_open
        return {"success": not was_open}

    def on_end_weight_update(self, body: Any) -> Any:
        self.is_open, was_open = False, self.is_open
        return {"success": was_open}

    def on_update_weights_from_distributed(self, body: Any) -> Any:
        for name in body["names"]:
            self.sent.append(name)
            self.held[name] = FakeGroup.wire[name]
        self.weight_version = body["weight_version"] or self.weight_version
        return {"success": True}

    def on_update_weights_from_disk(self, body: Any) -> Any:
        self.sent.append(body["model_path"])
        self.weight_version = body["weight_version"]
        return {"success": True}

    def on_update_weight_version(self, body: Any) -> Any:
        self.weight_version = body["new_version"]
        return {"success": True}

    def on_generate(self, body: Any) -> Any:
        self.keys.append(body.get("extra_key"))
        return self.answer(body)

    def answer(self, body: Any) -> Any:
        return {}


class FakeGroup:
    """A broadcast group without a network: the engine finds the tensors' bytes in `wire`."""

    wire: dict[str, bytes] = {}

    def __init__(self, calls: WeightCalls, address: str, num_ranks: int) -> None:
        self.calls, self.num_ranks = calls, num_ranks

    async def open(self) -> None:
        pass

    async def send(self, tensors: list[SharedTensor], tag: str | None) -> None:
        self.wire.update({tensor.name: tensor.read().tobytes() for tensor in tensors})
        await self.calls.receive(tensors, "group", tag)

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.sglang.weights.BroadcastGroup", FakeGroup)


def version(number: int, folder: Path, lineage: str = "L", **values: bytes) -> SharedVersion:
    tensors = {}
    for name, value in values.items():
        file = folder / f"{number}{name}"
        file.write_bytes(bytes(64) + value)
        tensors[name] = SharedTensor(name, "uint8", (len(value),), hash_bytes(value), file, 64)
    return SharedVersion(lineage, number, "", folder, tensors)


def talk(fake: FakeSGLang, session: Session, **config: Any) -> Any:
    return asyncio.run(talk_also(fake, session, **config))


def pool_of(folder: Path, *engines: Engine) -> EnginePool:
    """Its engines are ready."""
    (folder / "config.json").write_text("{}")
    pool = EnginePool(RunConfig(), folder, folder, name="w")
    for engine in engines:
        pool.add(engine)
        pool.apply("process_ready", engine)
    return pool


async def update(engine: Engine, given: SharedVersion) -> None:
    """In a pool of its own, the same for each update."""
    engine.pool = engine.__dict__.get("pool") or pool_of(given.directory, engine)  # type: ignore[attr-defined]
    await engine.pool.update_weights(given)  # type: ignore[attr-defined]


async def talk_also(fake: FakeSGLang, session: Session, **config: Any) -> Any:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = Engine(f"http://127.0.0.1:{runner.addresses[0][1]}", None, None, EngineConfig(**{"weight_route": "broadcast"} | config))
    engine.client._retry_s = 0.2
    try:
        return await session(engine)
    finally:
        fake.release.set()
        await engine.close()
        await runner.cleanup()


def test_only_tensors_that_changed_are_sent_between_begin_and_end(tmp_path: Path) -> None:
    fake = FakeSGLang()

    async def session(engine: Engine) -> None:
        await update(engine, version(1, tmp_path, a=b"12", b=b"345"))
        assert fake.asked == ["/pause_generation", *UPDATE, "/continue_generation"]
        assert (fake.held, fake.weight_version) == ({"a": b"12", "b": b"345"}, "L:1")
        fake.sent.clear()
        await update(engine, version(2, tmp_path, a=b"12", b=b"346"))
        assert (fake.sent, fake.held, fake.weight_version) == (["b"], {"a": b"12", "b": b"346"}, "L:2")
        assert (engine.client.sent_tensors, engine.client.sent_bytes) == (3, 8)

    talk(fake, session)


def test_a_new_version_of_the_same_tensors_is_only_renamed(tmp_path: Path) -> None:
    fake = FakeSGLang()

    async def session(engine: Engine) -> None:
        await update(engine, version(1, tmp_path, a=b"12"))
        fake.asked.clear()
        await update(engine, version(0, tmp_path, "M", a=b"12"))
        assert fake.asked == ["/pause_generation", "/update_weight_version", "/continue_generation"]
        assert engine.state.version == fake.weight_version == "M:0"

    talk(fake, session)


@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
def test_modes_that_keep_no_keys_and_values_have_the_cache_forgotten_before_it_goes_on(tmp_path: Path, pause_mode: str) -> None:
    fake = FakeSGLang()
    fake.fails = {"/flush_cache": 2}  # requests that are just ending
    talk(fake, lambda engine: update(engine, version(1, tmp_path, a=b"12")), pause_mode=pause_mode)
    assert fake.asked == ["/pause_generation", *UPDATE, "/flush_cache", "/flush_cache", "/flush_cache", "/continue_generation"]


@pytest.mark.parametrize("failing", [*UPDATE[1:], "/pause_generation", "/update_weights_from_disk"])
def test_after_a_failure_the_engine_is_out_of_service_until_it_was_sent_everything(tmp_path: Path, failing: str) -> None:
    is_disk = "disk" in failing
    fake = FakeSGLang()

    async def session(engine: Engine) -> None:
        await update(engine, version(1, tmp_path, a=b"12", b=b"3"))
        fake.fails, fake.sent = {failing: 1}, []
        with pytest.raises(SlimebusError, match="it would not"):
            await update(engine, version(2, tmp_path, a=b"13", b=b"3"))
        report = engine.report()
        assert (report.state, report.version, engine.state.version) == ("sick", NO_VERSION, "")
        assert fake.asked[-1] != "/continue_generation"
        with pytest.raises(WeightsError, match="out of service"):
            await engine.generate([[1]], [{}], ["r"])
        fake.sent.clear()
        await update(engine, version(2, tmp_path, a=b"13", b=b"3"))
        assert (fake.sent, fake.is_paused, fake.is_open) == ([str(tmp_path)] if is_disk else ["a", "b"], False, False)
        assert (engine.state.phase, engine.state.version) == ("serving", "L:2")

    talk(fake, session, weight_route="disk" if is_disk else "broadcast")


async def generating(engine: Engine, fake: FakeSGLang, folder: Path) -> "asyncio.Task[Any]":
    """A request that the engine has and does not answer; it serves version 1."""
    await update(engine, version(1, folder, a=b"12"))
    running = asyncio.create_task(engine.generate([[1]], [{}], ["r"]))
    while not fake.keys:
        await asyncio.sleep(0.01)
    return running


def test_what_an_engine_was_running_ends_with_a_failed_update_and_can_be_tried_elsewhere(tmp_path: Path) -> None:
    fake = FakeSGLang()

    async def session(engine: Engine) -> None:
        running = await generating(engine, fake, tmp_path)
        fake.fails = {UPDATE[1]: 1}
        with pytest.raises(WeightsError, match="it would not"):
            await update(engine, version(2, tmp_path, a=b"13"))
        with pytest.raises(WeightsError, match="the group is given back") as lost:
            await asyncio.wait_for(running, 5)
        assert lost.value.retryable
        assert engine.running == 0

    talk(fake, session)


def test_an_engine_that_reports_another_version_than_it_was_given_stays_paused(tmp_path: Path) -> None:
    fake = FakeSGLang()
    fake.lies = "default"

    async def session(engine: Engine) -> None:
        with pytest.raises(WeightsError, match="reports weights 'default' after an update to 'L:1'"):
            await update(engine, version(1, tmp_path, a=b"12"))
        assert engine.state.phase == "sick"
        assert fake.is_paused

    talk(fake, session)


def test_an_engine_that_somebody_resumed_in_the_middle_is_out_of_service_and_what_it_made_is_not_taken(tmp_path: Path) -> None:
    fake = FakeSGLang()

    async def session(engine: Engine) -> None:
        running = await generating(engine, fake, tmp_path)
        begin = fake.on_begin_weight_update
        fake.on_begin_weight_update = lambda body: begin(fake.on_continue_generation(body))  # type: ignore[method-assign]
        with pytest.raises(WeightsError, match="was resumed by somebody else while it was updated to 'L:2'"):
            await update(engine, version(2, tmp_path, a=b"13"))
        with pytest.raises(WeightsError, match="out of service"):
            await asyncio.wait_for(running, 5)

    talk(fake, session)


@pytest.mark.parametrize("found", ["default", "L:7"])
def test_an_engine_that_restarted_or_was_updated_by_another_is_sent_everything(tmp_path: Path, found: str) -> None:
    fake = FakeSGLang()

    async def session(engine: Engine) -> None:
        await update(engine, version(1, tmp_path, a=b"12", b=b"3"))
        fake.weight_version, fake.sent = found, []
        await update(engine, version(2, tmp_path, a=b"12", b=b"4"))
        assert fake.sent == ["a", "b"]

    talk(fake, session)


def test_a_new_engine_that_names_the_right_version_is_not_believed(tmp_path: Path) -> None:
    fake = FakeSGLang()
    fake.weight_version = "L:1"
    talk(fake, lambda engine: update(engine, version(1, tmp_path, a=b"12")))
    assert fake.sent == ["a"]


def test_an_update_that_another_worker_left_open_is_closed_first(tmp_path: Path) -> None:
    fake = FakeSGLang()
    fake.is_open = True
    talk(fake, lambda engine: update(engine, version(1, tmp_path, a=b"12")))
    begin, _, end = UPDATE
    assert fake.asked == ["/pause_generation", begin, end, *UPDATE, "/continue_generation"]


def test_engines_that_have_a_version_are_left_alone_when_others_are_tried_again(tmp_path: Path) -> None:
    fake = FakeSGLang()

    async def session(engine: Engine) -> None:
        await update(engine, version(1, tmp_path, a=b"12"))
        fake.asked.clear()
        await update(engine, version(1, tmp_path, a=b"12"))
        assert fake.asked == []
        assert engine.state.version == "L:1"

    talk(fake, session)


def test_requests_share_cached_prefixes_only_with_those_of_the_same_weights(tmp_path: Path) -> None:
    fake = FakeSGLang()
    fake.release.set()

    async def session(engine: Engine) -> None:
        for number in (1, 2):
            await update(engine, version(number, tmp_path, a=bytes([number])))
            with pytest.raises(SlimebusError, match="is not SGLang's"):
                await engine.generate([[1]], [{}], ["r"])
        assert fake.keys == ["L:1", "L:2"]

    talk(fake, session)


@pytest.mark.parametrize(
    ("about", "setting"),
    [({"version": "slimebus-cpu"}, "auto"), ({"dp_size": 2}, "auto"), ({}, "auto"), ({}, "disk")],
    ids=["embedded", "replicas", "this machine", "set"],
)
def test_engines_that_are_here_or_take_no_broadcast_load_a_directory(tmp_path: Path, about: dict[str, Any], setting: str) -> None:
    fake = FakeSGLang(**about)
    talk(fake, lambda engine: update(engine, version(1, tmp_path, a=b"12")), weight_route=setting)
    assert fake.asked == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert fake.sent == [str(tmp_path)]


def test_a_route_that_an_engine_cannot_take_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.weight_route is broadcast, but the embedded engine at"):
        talk(FakeSGLang(version="slimebus-cpu"), lambda engine: update(engine, version(1, tmp_path, a=b"1")), weight_route="broadcast")


@pytest.mark.parametrize(
    ("dtype", "config", "is_half"),
    [
        ("auto", '{"dtype": "float32"}', True),
        ("auto", '{"torch_dtype": "bfloat16"}', False),
        ("half", "{}", True),
        ("float32", "{}", False),
    ],
)
def test_an_engine_that_computes_in_float16_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, config: str, is_half: bool
) -> None:
    (tmp_path / "config.json").write_text(config)

    async def session(engine: Engine) -> None:
        engines = EnginePool(RunConfig(engine=EngineConfig(engine_url=[engine.url])), tmp_path, tmp_path, name="w")
        await engines.start()
        await engines.stop()

    talk(FakeSGLang(dtype=dtype), session)
    assert ("start it with --dtype bfloat16" in caplog.text) == is_half


def test_a_tensor_that_the_model_does_not_have_is_refused_before_any_engine_sees_it(tmp_path: Path) -> None:
    given = version(1, tmp_path, a=b"12")
    check_shapes(given, {}, tmp_path)
    check_shapes(given, {"a": (2,), "b": (1,)}, tmp_path)
    with pytest.raises(WeightsError, match=r"tensor a of version 1 has shape \[2\], in .* \[3\]"):
        check_shapes(given, {"a": (3,)}, tmp_path)
    with pytest.raises(WeightsError, match=r"tensor a of version 1 is not in .*; do trainer and worker have one model"):
        check_shapes(given, {"b": (3,)}, tmp_path)


def test_an_engine_that_fails_where_others_succeed_is_out_of_service_until_it_was_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout.engines.engine_state.RETRY_S", 0.02)
    good, bad = FakeSGLang(), FakeSGLang()

    async def session(first: Engine, second: Engine) -> None:
        engines = pool_of(tmp_path, first, second)
        await engines.update_weights(version(1, tmp_path, a=b"12", b=b"3"))
        bad.fails = {"/end_weight_update": 3}
        await engines.update_weights(version(2, tmp_path, a=b"13", b=b"3"))
        assert (first.state.phase, second.state.version) == ("sick", "L:2")
        good.release.set()
        with pytest.raises(SlimebusError, match="is not SGLang's"):  # the other engine is asked
            await Dispatch(engines).sample([Task(prompt="", prompt_ids=np.array([1], np.int32), sampling={})])
        assert (bad.keys, good.keys) == ([], ["L:2"])
        bad.sent.clear()
        while first.state.phase != "serving":
            await asyncio.sleep(0.01)
        assert [r.levelname for r in caplog.records if "stays out of service" in r.message] == ["WARNING"], "said once, not each time"
        assert bad.held == {"a": b"13", "b": b"3"}
        assert bad.sent[-2:] == ["a", "b"]
        assert first.state.version == "L:2"
        bad.fails = good.fails = {"/pause_generation": 2}
        with pytest.raises(SlimebusError, match="it would not"):
            await engines.update_weights(version(3, tmp_path, a=b"14", b=b"3"))
        await engines.update_weights(version(3, tmp_path, a=b"14", b=b"3"))
        assert (first.state.version, second.state.version) == ("L:3", "L:3")

    talk(bad, lambda first: talk_also(good, lambda second: session(first, second)))


class Sampling(FakeSGLang):
    """Answers each prompt with one token of its version."""

    def answer(self, body: Any) -> Any:
        about = {"finish_reason": {"type": "stop"}, "weight_version": self.weight_version, "output_token_logprobs": [[-1.0, 7, None]]}
        return [{"meta_info": {"id": rid} | about, "output_ids": [7]} for rid in body["rid"]]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_an_engine_that_was_started_again_serves_nobody_until_it_was_given_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_engines: int
) -> None:
    monkeypatch.setattr("rollout.engines.engine_state.RETRY_S", 0.02)
    fakes = [Sampling() for _ in range(num_engines)]
    task = Task(prompt="", prompt_ids=np.array([1], np.int32), sampling={}, group="0/0", index=0)
    lost: list[int] = []

    async def session(*started: Engine) -> None:
        engines = pool_of(tmp_path, *started)
        engines.on_lost = lambda: lost.append(1)
        await engines.update_weights(version(1, tmp_path, a=b"12", b=b"3"))
        assert (await Dispatch(engines).sample([task]))[0].versions == [(1, 1)]
        fakes[0].weight_version, fakes[0].held, fakes[0].sent = "default", {}, []
        started[-1].running = num_engines - 1  # so that the first is asked
        with pytest.raises(WeightsError, match="sampled with weights 'default'") as problem:
            await Dispatch(engines).sample([task])
        assert problem.value.retryable
        assert (started[0].state.phase, len(lost)) == (("sick", 1) if num_engines == 1 else ("syncing", 0))
        if num_engines == 1:
            with pytest.raises(WeightsError, match="out of service"):
                await Dispatch(engines).sample([task])
            assert len(lost) == 1
            await engines.update_weights(version(1, tmp_path, a=b"12", b=b"3"))
        while started[0].state.phase != "serving":
            assert (await Dispatch(engines).sample([task]))[0].versions == [(1, 1)]  # of the other
        assert (fakes[0].sent, fakes[0].weight_version) == (["a", "b"], "L:1")

    for fake in fakes:
        fake.release.set()
    if num_engines == 1:
        talk(fakes[0], session)
    else:
        talk(fakes[0], lambda first: talk_also(fakes[1], lambda second: session(first, second)))

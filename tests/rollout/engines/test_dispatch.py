"""Which engine a request goes to, and how it ends. The engines' clients only remember what they were asked."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.engines.dispatch import Dispatch
from rollout.engines.engine import Engine
from rollout.engines.engine_state import Phase
from rollout.engines.pool import EnginePool
from rollout.samples.partials import Unfinished
from rollout.samples.response import Completion, Task
from slimebus.bus.errors import SlimebusError, Unreachable, UsageError, WeightsError
from slimebus.bus.messages import NO_VERSION
from slimebus.config.engine_plan import EngineSpec
from slimebus.config.schema import EngineConfig, RunConfig


class Client:
    """Answers each prompt with one token once it is released, or what it has when it is aborted."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.asked, self.waiting = engine, 0, dict[str, asyncio.Future[str]]()
        self.is_gone = False

    async def generate(self, prompts: list[Any], samplings: list[Any], rids: list[str], **_: str) -> list[Completion]:
        self.asked += len(prompts)
        if self.is_gone:
            raise Unreachable("nobody there")
        self.waiting |= {rid: asyncio.get_running_loop().create_future() for rid in rids}
        reasons = [await self.waiting[rid] for rid in rids]
        return [Completion(np.array([7], np.int32), np.zeros(1, np.float32), reason, [("L:1", 0, 1)]) for reason in reasons]

    def release(self, reason: str = "stop") -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_result(reason)

    async def abort(self, rid: str) -> None:
        if not self.is_gone:
            self.waiting[rid].set_result("abort")

    async def weight_version(self, *, retry_s: float) -> str:
        raise Unreachable("nobody there")

    async def server_info(self, *, retry_s: float) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


def run(tmp_path: Path, talk: Callable[..., Any], *, models: tuple[str, ...] = ("", ""), **config: Any) -> None:
    """talk: with a dispatch and its engines' clients; a model's name makes an engine frozen."""
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')

    async def session() -> None:
        pool = EnginePool(RunConfig(engine=EngineConfig(**config)), tmp_path, tmp_path, name="w")
        for i, model in enumerate(models):
            spec = EngineSpec(model=model, is_frozen=bool(model))
            engine = Engine(f"http://e{i}", None, 100, pool.config.engine, spec=spec)
            engine.client = Client(engine)  # type: ignore[assignment]
            pool.add(engine)
            put(engine, "serving", pool)
        pool.lineage = "L"
        await asyncio.wait_for(talk(Dispatch(pool), *(engine.client for engine in pool.engines)), 5)

    asyncio.run(session())


def put(engine: Engine, phase: Phase, pool: EnginePool) -> None:
    engine.state.phase = phase
    pool.note_change()


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def task(group: str = "0/0") -> Task:
    return Task(prompt="", prompt_ids=np.array([1], np.int32), sampling={"max_new_tokens": 9}, group=group)


def begin(dispatch: Dispatch, num_requests: int = 1, **about: Any) -> "asyncio.Task[list[Completion]]":
    return asyncio.create_task(dispatch.generate([[1]] * num_requests, [{}] * num_requests, **about))


def test_a_session_stays_with_its_engine_and_others_go_to_the_least_busy(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, first: Client, second: Client) -> None:
        begun = [begin(dispatch, session="a"), begin(dispatch), begin(dispatch, session="a"), begin(dispatch, session="a")]
        await turns()
        assert (first.asked, second.asked) == (3, 1)
        first.release(), second.release()
        await asyncio.gather(*begun)
        put(first.engine, "sick", dispatch.pool)
        begun = [begin(dispatch, session="a")]
        await turns()
        assert second.asked == 2, "a session whose engine is out of service goes on elsewhere"
        second.release()
        await asyncio.gather(*begun)

    run(tmp_path, talk)


def test_an_engine_gets_no_more_requests_than_its_limit(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, only: Client) -> None:
        begun = [begin(dispatch, 2), begin(dispatch, 2)]
        await turns()
        assert only.asked == 2
        only.release()
        await begun[0]
        await turns()
        assert only.asked == 4
        only.release()
        await begun[1]

    run(tmp_path, talk, models=("",), sglang_server_concurrency=3)


def test_nothing_is_sent_to_an_engine_between_two_versions(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, only: Client) -> None:
        put(only.engine, "updating", dispatch.pool)
        begun = begin(dispatch)
        await turns()
        assert only.asked == 0
        put(only.engine, "serving", dispatch.pool)
        await turns()
        only.release()
        assert len(await begun) == 1

    run(tmp_path, talk, models=("",))


def test_an_engine_that_has_served_nothing_yet_holds_up_nobody(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, serving: Client, newcomer: Client) -> None:
        put(newcomer.engine, "syncing", dispatch.pool)
        begun = [begin(dispatch), begin(dispatch)]
        await turns()
        assert (serving.asked, newcomer.asked) == (2, 0)
        serving.release()
        await asyncio.gather(*begun)

    run(tmp_path, talk)


def test_requests_that_wait_go_in_order_and_none_passes_one_that_needs_more_room(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, only: Client) -> None:
        begun = [begin(dispatch), *(begin(dispatch, size) for size in (3, 1))]
        await turns()
        assert only.asked == 1
        only.release()
        await begun[0]
        await turns()
        assert (only.asked, dispatch.is_waiting("")) == (4, True)
        only.release()
        await begun[1]
        await turns()
        assert only.asked == 5
        only.release()
        await asyncio.gather(*begun)
        assert (only.engine.running, dispatch.is_waiting("")) == (0, False)

    run(tmp_path, talk, models=("",), sglang_server_concurrency=3)


def test_a_request_that_ends_wakes_those_that_there_is_room_for_and_no_others(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, only: Client) -> None:
        looks, of = list[str](), dispatch.pool.engines_of
        begun = [begin(dispatch) for _ in range(200)]
        await turns()
        dispatch.pool.engines_of = lambda model: looks.append(model) or of(model)  # type: ignore[func-returns-value, method-assign]
        only.release()
        await begun[0]
        await turns()
        assert only.asked == 2
        assert len(looks) < 10
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)

    run(tmp_path, talk, models=("",), sglang_server_concurrency=1)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_room_that_was_given_is_given_back_where_it_cannot_be_used(tmp_path: Path, is_cancelled: bool) -> None:
    async def talk(dispatch: Dispatch, only: Client) -> None:
        put(only.engine, "updating", dispatch.pool)
        waiting = begin(dispatch)
        await turns()
        put(only.engine, "serving", dispatch.pool)  # the room is its own now, before it could run
        assert only.engine.running == 1
        if is_cancelled:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert (only.engine.running, only.asked) == (0, 0)
            return
        put(only.engine, "updating", dispatch.pool)
        await turns()
        assert (only.engine.running, only.asked) == (0, 0)
        put(only.engine, "serving", dispatch.pool)
        await turns()
        only.release()
        await waiting

    run(tmp_path, talk, models=("",))


def test_an_engine_whose_server_answers_but_that_makes_no_token_is_out_of_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.pool.PROBE_PAUSE_S", 0.01)
    monkeypatch.setattr("rollout.engines.pool.QUIET_S", 0.2)

    async def talk(dispatch: Dispatch, stuck: Client, idle: Client) -> None:
        asked = list[bool]()
        for client in (stuck, idle):
            client.answers = lambda timeout_s, *, generates: asyncio.sleep(0, asked.append(generates) or not generates)  # type: ignore[attr-defined, func-returns-value]
            dispatch.pool._start_task(client.engine, "monitor", dispatch.pool._monitor)
        waiting = begin(dispatch)
        with pytest.raises(WeightsError, match="out of service until its weights are whole again"):
            await waiting
        assert (stuck.engine.state.phase, idle.engine.state.phase) == ("sick", "serving")
        assert asked.index(True) > 2, "not before it has been quiet"
        await dispatch.pool._cancel_tasks("monitor")

    run(tmp_path, talk)


def test_a_recalled_group_hands_over_what_it_has_and_others_go_on(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, only: Client) -> None:
        recalled, other = asyncio.create_task(dispatch.sample([task(), task()])), asyncio.create_task(dispatch.sample([task("0/1")]))
        waiting = asyncio.create_task(dispatch.sample([task()]))
        await turns()
        await dispatch.recall("0/0")
        for sampling, tokens in ((recalled, [[7], [7]]), (waiting, [[]])):
            with pytest.raises(Unfinished) as unfinished:
                await sampling
            assert [r.token_ids.tolist() for r in unfinished.value.responses] == tokens
        assert not other.done()
        only.release()
        assert (await other)[0].versions == [(1, 1)]

    run(tmp_path, talk, models=("",), sglang_server_concurrency=3)


def test_what_a_detached_engine_was_making_is_continued_by_the_other(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, first: Client, second: Client) -> None:
        sampling = asyncio.create_task(dispatch.sample([task(), task()]))
        await turns()
        assert (first.asked, second.asked) == (2, 0)
        put(second.engine, "updating", dispatch.pool)  # in the middle of a weight update it is in service all the same
        assert await dispatch.pool.detach("http://e0") == "http://e0 is detached"
        put(second.engine, "serving", dispatch.pool)
        await turns()
        second.release()
        assert [r.token_ids.tolist() for r in await sampling] == [[7, 7], [7, 7]]
        with pytest.raises(UsageError, match="is the only engine in service of its model"):
            await dispatch.pool.detach("http://e1")
        with pytest.raises(UsageError, match="is no engine of this worker; it has http://e1"):
            await dispatch.pool.detach("http://e0")

    run(tmp_path, talk)


def test_a_request_at_a_detached_engine_that_does_not_answer_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.engine_state.ABORT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("rollout.engines.engine_state.SETTLE_S", 0.1)

    async def talk(dispatch: Dispatch, first: Client, second: Client) -> None:
        sampling = begin(dispatch)
        await turns()
        first.is_gone = True
        assert await dispatch.pool.detach("http://e0") == "http://e0 is detached"
        with pytest.raises(WeightsError, match="the group is given back"):
            await sampling

    run(tmp_path, talk)


def test_an_engine_that_two_commands_detach_or_attach_at_once_goes_or_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def claimed(pool: EnginePool, url: str) -> Engine:
        await turns()
        pool.add(engine := Engine(url, None, 100, pool.config.engine))
        engine.client = Client(engine)  # type: ignore[assignment]
        return engine

    async def ready(pool: EnginePool, engine: Engine, timeout_s: float) -> None:
        pass

    def enlisted(pool: EnginePool, engine: Engine) -> None:
        put(engine, "serving", pool)

    monkeypatch.setattr(EnginePool, "_claim", claimed)
    monkeypatch.setattr(EnginePool, "_wait_ready", ready)
    monkeypatch.setattr(EnginePool, "_enlist", enlisted)

    async def talk(dispatch: Dispatch, first: Client, second: Client) -> None:
        pool, sampling = dispatch.pool, asyncio.create_task(dispatch.sample([task()]))
        await turns()
        assert await asyncio.gather(pool.detach("http://e0"), pool.detach("http://e0")) == ["http://e0 is detached"] * 2
        came, refused = await asyncio.gather(pool.attach("http://e2"), pool.attach("http://e2/"), return_exceptions=True)
        assert "http://e2: SGLang" in str(came)
        assert "is an engine of this worker already" in str(refused)
        assert [engine.url for engine in pool.engines] == ["http://e1", "http://e2"]
        second.release()
        await sampling

    run(tmp_path, talk, attach_hosts=["e2"])


def test_a_command_attaches_no_engine_of_a_host_that_the_workers_config_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[str] = []

    async def claimed(pool: EnginePool, url: str) -> Engine:
        connected.append(url)
        raise Unreachable("it is only looked who is asked")

    monkeypatch.setattr(EnginePool, "_claim", claimed)
    known = ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "http://gpu7:1", "http://GPU8:2", "http://10.0.0.4:9"]
    foreign = ["http://evil:1", "http://127.0.0.1@evil:1", "http://evil/127.0.0.1:1", "http://gpu7.evil:1", "http://10.0.0.40:1", "gpu7:1"]

    async def talk(dispatch: Dispatch, *_: Client) -> None:
        for url in known:
            with pytest.raises(Unreachable):
                await dispatch.pool.attach(url)
        for url in foreign:
            with pytest.raises(SlimebusError, match=r"name it in engine.attach_hosts of this worker") as refused:
                await dispatch.pool.attach(url)
            assert refused.value.code == "forbidden"
        assert connected == known

    run(tmp_path, talk, attach_hosts=["gpu7", "10.0.0.4"], engine_url=["http://gpu8:1"])


def test_an_attached_engine_that_is_not_ready_when_the_worker_starts_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engines.engine_state.RESTART_PAUSE_S", 0.0)
    (tmp_path / "config.json").write_text("{}")
    tries = {"http://a": 0, "http://b": 0}

    async def wait_ready(pool: EnginePool, engine: Engine, timeout_s: float) -> None:
        tries[engine.url] += 1
        await turns(9 if engine.url == "http://b" else 0)
        if engine.url == "http://b" and tries[engine.url] < 4:
            raise Unreachable("it was not ready in time")

    async def claim_nothing(url: str) -> socket.socket:
        return socket.socket()

    async def watch_nothing(pool: EnginePool, engine: Engine) -> None:
        pass

    monkeypatch.setattr(EnginePool, "_wait_ready", wait_ready)
    monkeypatch.setattr(EnginePool, "_monitor", watch_nothing)
    monkeypatch.setattr("rollout.engines.pool.claim", claim_nothing)

    async def session() -> None:
        pool = EnginePool(RunConfig(engine=EngineConfig(engine_url=["http://a", "http://b"])), tmp_path, tmp_path, name="w")
        await pool.start()
        first, second = pool.engines
        assert (first.state.phase, second.state.phase) == ("syncing", "starting")
        while second.state.phase != "syncing":
            await pool.until_change()
        assert tries == {"http://a": 1, "http://b": 4}
        await pool.stop()

    asyncio.run(asyncio.wait_for(session(), 5))


def test_a_dead_engine_costs_its_own_requests_and_no_others(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, dead: Client, alive: Client) -> None:
        dead.is_gone = True
        begun = [begin(dispatch), begin(dispatch)]
        with pytest.raises(Unreachable):
            await begun[0]
        assert (dead.engine.state.phase, alive.engine.state.phase) == ("sick", "serving")
        begun.append(begin(dispatch))
        await turns()
        alive.release()
        assert len(await asyncio.gather(*begun[1:])) == 2
        assert alive.asked == 2

    run(tmp_path, talk)


def test_one_unreachable_engine_keeps_no_other_from_handing_over(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, dead: Client, alive: Client) -> None:
        begun = [asyncio.create_task(dispatch.sample([task("0/0")])), asyncio.create_task(dispatch.sample([task("0/1")]))]
        await turns()
        dead.is_gone = True
        leaving = asyncio.create_task(dispatch.leave())
        with pytest.raises(Unfinished) as unfinished:
            await begun[1]
        assert unfinished.value.responses[0].token_ids.tolist() == [7]
        dead.release()
        await leaving

    run(tmp_path, talk)


def test_frozen_models_are_asked_by_name_and_their_tokens_have_no_version(tmp_path: Path) -> None:
    async def talk(dispatch: Dispatch, policy: Client, teacher: Client) -> None:
        begun = begin(dispatch, model="teacher")
        await turns()
        assert (policy.asked, teacher.asked) == (0, 1)
        teacher.release()
        (completion,) = await begun
        assert dispatch.version_runs(completion, is_frozen=True) == [(NO_VERSION, 1)]
        with pytest.raises(UsageError, match="no engine of model 'judge'; there are: policy, teacher"):
            await dispatch.generate([[1]], [{}], model="judge")
        put(policy.engine, "sick", dispatch.pool)
        with pytest.raises(WeightsError, match="out of service"):
            await dispatch.generate([[1]], [{}])

    run(tmp_path, talk, models=("", "teacher"))

"""Rewards in processes: what one does costs its own sample, and no process outlives its worker."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from waiting import has_ended, wait_until

from rollout.rewards import pool
from rollout.rewards.pool import Reward
from rollout.rewards.wire import RewardSpec
from rollout.samples.response import Response, Task

HOOK = """
import asyncio, os, re, signal, time
import numpy as np

def act(text):
    if text == "late": time.sleep(60)
    if text == "holds": re.match(r"(a+)+$", "a" * 60 + "b")
    if text == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if text == "exits": os._exit(3)
    if text == "segfaults": os.kill(os.getpid(), signal.SIGSEGV)
    if text == "raises": raise ValueError("cannot read this")
    return float(os.getpid()) if text == "pid" else 1.0

def reward(response):
    return act(response.text)

async def remote(response):
    if response.text == "waits": await asyncio.sleep(60)
    await asyncio.sleep(0.1)
    if response.text == "later":
        await asyncio.gather(asyncio.sleep(0), blocks())
    return act(response.text)

async def blocks():
    time.sleep(60)

def table(response):
    response.metadata["seen"] = True
    response.extras["advantages"] = np.full(3, 0.5, np.float32)
    return {"score": np.float64(0.25), "steps": 4}

def relative(responses):
    rewards = [float(r.text) for r in responses]
    for response in responses:
        response.extras["advantages"] = np.array([rewards[response.task.index] - max(rewards)], np.float32)
    return rewards[: int(responses[0].label)]
"""


def response(text: str, label: Any = "9", index: int = 0) -> Response:
    task = Task(prompt="p", prompt_ids=np.array([1], np.int32), sampling={}, label=label, index=index)
    ids = np.arange(3, dtype=np.int32)
    return Response(task=task, token_ids=ids, logprobs=np.zeros(3, np.float32), versions=[(0, 3)], text=text)


def make(tmp_path: Path, name: str, timeout_s: float = 0.5, key: str = "", **about: Any) -> Reward:
    (tmp_path / "hook.py").write_text(HOOK)
    return Reward(RewardSpec(f"hook.py:{name}", str(tmp_path), key, "", timeout_s, **about))


def score(reward: Reward, *responses: Response) -> list[str]:
    """What is wrong with each; empty where it got a reward."""
    return [problem.text if problem else "" for problem in asyncio.run(reward.score(responses))]


def test_whatever_a_reward_does_costs_its_own_sample_alone(tmp_path: Path) -> None:
    texts = ["good", "late", "good", "holds", "good", "exits", "good", "segfaults", "raises", "good"]
    made = [response(text) for text in texts]
    problems = dict(zip(texts, score(make(tmp_path, "reward"), *made), strict=True))
    assert [r.reward for r in made] == [1.0 if text == "good" else None for text in texts], problems
    assert problems["late"] == problems["holds"] == "reward hook.py:reward took longer than reward_timeout_s = 0.5 s"
    assert problems["exits"] == "reward hook.py:reward ended its process: exit status 3"
    assert problems["segfaults"] == "reward hook.py:reward ended its process: killed by SIGSEGV"
    assert problems["raises"].endswith("hook.py:13: ValueError: cannot read this")


def test_a_coroutine_that_blocks_costs_those_beside_it_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CANCEL_S", 0.5)
    texts = ["good"] * 4 + ["late", "later", "waits", "exits"] + ["good"] * 4
    made = [response(text) for text in texts]
    problems = score(make(tmp_path, "remote", timeout_s=1.0), *made)
    assert [r.reward for r in made] == [1.0 if text == "good" else None for text in texts], problems
    assert all("took longer than" in problem for problem in problems[4:7]), problems


def test_a_thousand_errors_cost_no_process(tmp_path: Path) -> None:
    reward = make(tmp_path, "reward", timeout_s=30.0)
    before, after, bad = response("pid"), response("pid"), [response("raises") for _ in range(1000)]
    said = f"reward hook.py:reward failed at {tmp_path}/hook.py:13: ValueError: cannot read this"
    assert score(reward, before, *bad, after) == ["", *[said] * 1000, ""]
    assert before.reward == after.reward


def test_what_a_reward_writes_into_its_response_stays_there(tmp_path: Path) -> None:
    made = response("x")
    assert score(make(tmp_path, "table", key="score"), made) == [""]
    assert (made.reward, made.metadata) == (0.25, {"seen": True, "steps": 4})
    assert made.extras["advantages"].tolist() == [0.5] * 3


def test_a_map_without_its_key_says_which_keys_there_are(tmp_path: Path) -> None:
    text = "reward hook.py:table gave a map: rollout.reward_key is ''; expected one of its keys: 'score', 'steps'"
    assert score(make(tmp_path, "table"), response("x")) == [text]


def test_a_group_reward_sees_the_group_and_may_give_advantages(tmp_path: Path) -> None:
    reward = make(tmp_path, "relative", is_group=True)
    made = [response(text, 3, i) for i, text in enumerate(["1", "3", "2"])]
    assert score(reward, *made) == ["", "", ""]
    assert [(r.reward, float(r.extras["advantages"][0])) for r in made] == [(1.0, -2.0), (3.0, 0.0), (2.0, -1.0)]
    short = [response(text, 2, i) for i, text in enumerate(["1", "3", "2"])]
    assert score(reward, *short) == ["reward hook.py:relative gave [1.0, 3.0]: expected a list of 3 rewards, one for each response"] * 3


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The address of an HTTP service, and (path, body) of what it was asked; the first answer is an error of its own."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            self.send_response(500 if len(asked) == 1 else 400 if body.get("response") == "bad" else 200)
            self.end_headers()
            said = "bad Grade: 3\nNo, better.\nGrade: 10" if "good" in str(body) else "no idea"
            answer = {"score": 0.5, "who": "me"} if "response" in body else {"choices": [{"message": {"content": said}}]}
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def test_a_remote_reward_is_what_the_service_answers(service: Any) -> None:
    url, asked = service
    made = [response("good", label=4), response("bad")]
    problems = score(Reward(RewardSpec("remote", "", "score", url, 30.0)), *made)
    assert (made[0].reward, made[0].metadata, problems[0]) == (0.5, {"who": "me"}, "")
    assert "ClientResponseError: 400" in problems[1]
    assert len(asked) == 3, "a status of 5xx is tried again"
    assert ("/", {"prompt": "p", "response": "good", "label": 4}) in asked


def test_a_model_grades_from_0_to_10(service: Any) -> None:
    url, asked = service
    made = [response("good"), response("other")]
    problems = score(Reward(RewardSpec("graded", "", "", url, 30.0)), *made)
    assert (made[0].reward, problems[0]) == (1.0, "")
    assert "ValueError: the model named no grade: 'no idea'" in problems[1]
    assert {path for path, _ in asked} == {"/v1/chat/completions"}


def test_what_cannot_be_sent_is_an_error_of_its_sample(tmp_path: Path) -> None:
    odd = response("good")
    odd.task.metadata = {"a": object()}
    fine = response("good")
    assert score(make(tmp_path, "reward"), odd, fine) == ["reward hook.py:reward cannot be given a response: a object cannot be sent", ""]


def test_a_hook_that_cannot_be_loaded_in_its_process_fails_its_calls(tmp_path: Path) -> None:
    reward = make(tmp_path, "reward")
    (tmp_path / "hook.py").write_text("import nothing_of_this_name")
    assert score(reward, *[response("good")] * 2) == ["reward hook.py:reward could not be loaded in its process: exit status 1"] * 2


def test_a_pool_that_is_dropped_ends_its_processes(tmp_path: Path) -> None:
    reward = make(tmp_path, "reward", timeout_s=60.0)
    made = response("pid")
    score(reward, made)
    gone = weakref.ref(reward)
    del reward
    gc.collect()
    assert gone() is None
    wait_until("the process has ended", lambda: has_ended(int(made.reward or 0)))


@pytest.mark.parametrize("text", ["late", "holds", "deaf"])
def test_no_reward_process_outlives_a_killed_worker(tmp_path: Path, text: str) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    script = f"""
        import asyncio, sys
        sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
        from test_pool import *
        asyncio.run(make(Path({str(tmp_path)!r}), "reward", timeout_s=60.0).score([response("pid"), response({text!r})]))
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    found: list[psutil.Process] = []

    def is_busy() -> bool:
        found[:] = psutil.Process(worker.pid).children(recursive=True)
        return len(found) == 2 and found[-1].memory_info().rss > 20 << 20 and (tmp_path / "hook.py").exists()

    wait_until("the reward runs", is_busy)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_until("no process is left", lambda: all(has_ended(process.pid) for process in found))

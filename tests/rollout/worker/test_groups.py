"""From a lease to samples, with an engine and a tokenizer of our own making."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from parrot import Parrot, make, maker

from rollout.samples.plugins import PluginError
from rollout.worker.groups import Dropped
from slimebus.bus.errors import HookError
from slimebus.bus.messages import NO_VERSION, LeasedGroup
from slimebus.bus.samples import encode_group
from slimebus.telemetry.spans import Spans


def test_a_group_becomes_rewarded_samples_with_masked_prompts(tmp_path: Path) -> None:
    samples = make(maker(tmp_path))
    assert [s.reward for s in samples] == [0.0, 1.0, 0.0]
    first = samples[0]
    assert first.tokens.tolist() == [97, 98, 120, 48, 0]
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert first.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert first.versions == [(NO_VERSION, 2), (7, 3)]


def test_a_groups_time_is_told_in_parts(tmp_path: Path) -> None:
    made = maker(tmp_path)
    made.spans = Spans(tmp_path, "w")
    make(made)
    spans = [msgspec.json.decode(line) for line in (tmp_path / "spans-w.jsonl").read_text().splitlines()]
    assert [(span["name"], span["group"]) for span in spans] == [("generate", "0/1"), ("reward", "0/1")]


@pytest.mark.parametrize("body", ["1/0", "raise SystemExit", "await asyncio.sleep(30)", "session.metadata[1] = 2"])
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_session_that_fails_or_is_late_is_a_failed_sample_and_the_others_are_kept(tmp_path: Path, body: str, kind: str) -> None:
    plug = (
        "import asyncio, numpy as np\nasync def g(session):\n    await session.generate()\n"
        "    session.extras['x'] = np.ones(5, np.float32)\n"
        f"    if session.task.index == 1:\n        {body}\ndef r(responses): return [len(responses)] * len(responses)\n"
    )
    made = maker(tmp_path, plug, custom_generate_function_path="plug.py:g", custom_rm_path="plug.py:r", generate_timeout_s="0.5")
    samples = make(made, kind=kind)
    assert [(s.status, s.reward, s.trajectory) for s in samples] == [("completed", 2.0, 0), ("failed", None, 1), ("completed", 2.0, 2)]
    assert [s.tokens.tolist() for s in samples] == [[97, 98, 120, 48 + i, 0] for i in range(3)], "what was sampled counts as waste"
    assert [s.extras["x"].sum() for s in samples] == [5, 0, 5]
    encode_group(samples)


def test_a_sample_without_a_reward_has_the_extras_of_the_others(tmp_path: Path) -> None:
    plug = "import numpy as np\ndef r(response):\n    response.extras['x'] = np.ones(1)\n    return 1 / (response.task.index - 1)\n"
    samples = make(maker(tmp_path, plug, custom_rm_path="plug.py:r"))
    assert [(s.status, s.extras["x"].tolist()) for s in samples] == [("completed", [1]), ("failed", [0]), ("completed", [1])]
    encode_group(samples)


@pytest.mark.parametrize(("num_calls", "is_kept"), [(3, True), (4, False)])
def test_rewards_that_fail_for_all_of_a_group_are_tried_again_before_its_samples_are_lost(
    tmp_path: Path, num_calls: int, is_kept: bool
) -> None:
    plug = f"calls = []\ndef r(responses):\n    calls.append(1)\n    return [0.5 / (len(calls) >= {num_calls})] * len(responses)\n"
    made = maker(tmp_path, plug, custom_rm_path="plug.py:r")
    with contextlib.nullcontext() if is_kept else pytest.raises(PluginError, match="ZeroDivisionError"):
        assert [s.reward for s in make(made)] == [0.5] * 3


def test_the_time_for_sampling_does_not_cover_rewards(tmp_path: Path) -> None:
    plug = "import asyncio, time\ndef r(response):\n    time.sleep(0.3)\n    return 1\nasync def g(session): await asyncio.sleep(30)\n"
    samples = make(maker(tmp_path, plug, custom_rm_path="plug.py:r", generate_timeout_s="0.2"), n=1)
    assert [(s.status, s.reward) for s in samples] == [("completed", 1.0)]
    with pytest.raises(PluginError, match=r"generate hook plug.py:g gave no result within generate_timeout_s = 0.2 s"):
        make(maker(tmp_path, plug, custom_generate_function_path="plug.py:g", generate_timeout_s="0.2"))


def test_what_a_session_waits_for_an_agent_is_not_counted(tmp_path: Path) -> None:
    plug = (
        "import asyncio, time\nasync def g(session):\n    session.is_waiting = True\n    await asyncio.sleep(0.6)\n"
        "    session.is_waiting, session.began_at = False, time.monotonic()\n    await session.generate()\n"
    )
    samples = make(maker(tmp_path, plug, custom_generate_function_path="plug.py:g", generate_timeout_s="0.3"))
    assert [s.status for s in samples] == ["completed"] * 3


def test_a_filter_drops_training_groups_only(tmp_path: Path) -> None:
    plug = "def keep(samples):\n    return len({s.reward for s in samples}) > 1\n"
    made = maker(tmp_path, plug, dynamic_sampling_filter_path="plug.py:keep")
    assert len(make(made)) == 3
    with pytest.raises(Dropped):
        make(made, label="nothing like it")
    assert len(make(made, label="nothing like it", kind="eval")) == 3


def test_a_generate_hook_may_fan_out(tmp_path: Path) -> None:
    plug = "async def two(session):\n    await session.generate()\n    await session.branch().generate()\n"
    samples = make(maker(tmp_path, plug, custom_generate_function_path="plug.py:two"), n=2)
    assert [s.trajectory for s in samples] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("plug", "message"),
    [
        ("def g(task, model): pass", "missing a required argument: 'model'; it is called with"),
        ("def g(): pass", "too many positional arguments"),
        ("class g: pass", r"the class has no method generate\(session\)"),
        ("class g:\n    def __init__(self, x): pass", "could not be made without arguments: TypeError"),
        ("class g:\n    def generate(self): pass", "too many positional arguments"),
    ],
)
def test_a_hook_that_takes_no_session_is_refused_at_start(tmp_path: Path, plug: str, message: str) -> None:
    with pytest.raises(HookError, match=message):
        maker(tmp_path, plug, custom_generate_function_path="plug.py:g")


def test_a_class_is_set_up_once_and_torn_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plug = (
        "class G:\n    def setup(self): self.calls = []\n"
        "    async def generate(self, session):\n        self.calls.append(1)\n        await session.generate()\n"
        "    async def teardown(self): raise OSError(f'{len(self.calls)} calls')\n"
    )
    made = maker(tmp_path, plug, custom_generate_function_path="plug.py:G")

    async def run() -> None:
        await made.setup()
        for _ in range(2):
            await made.make_group(LeasedGroup(group="0/1", lease=1, num_samples=2, deadline_s=60), msgspec.msgpack.encode({"prompt": "ab"}))
        await made.teardown()

    asyncio.run(run())
    assert "plug.py:G.teardown failed" in caplog.text
    assert "OSError: 4 calls" in caplog.text


def test_what_was_not_set_up_is_not_torn_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plug = "class G:\n    async def generate(self, session): pass\n    def teardown(self): 1/0\n"
    asyncio.run(maker(tmp_path, plug, custom_generate_function_path="plug.py:G").teardown())
    assert not caplog.text


def test_a_prompt_that_is_too_long_is_dropped_in_training_only(tmp_path: Path) -> None:
    for field in ("rollout_max_context_len", "rollout_max_prompt_len"):
        made = maker(tmp_path, **{field: "1"})
        with pytest.raises(Dropped, match=f"a prompt of 2 tokens, above {field}"):
            make(made)
    assert len(make(made, kind="eval")) == 3


def test_a_sample_has_no_more_tokens_than_the_context(tmp_path: Path) -> None:
    engine = Parrot()
    make(maker(tmp_path, engine=engine, rollout_max_context_len="7"))
    assert [task.sampling["max_new_tokens"] for task in engine.asked] == [5, 5, 5]
    samples = make(maker(tmp_path, engine=engine, rollout_max_context_len="2"))
    assert len(engine.asked) == 3
    assert [(s.tokens.tolist(), s.status, s.loss_mask.sum()) for s in samples] == [([97, 98], "truncated", 0)] * 3


def test_a_demonstration_is_the_label_and_the_end_and_is_never_stale(tmp_path: Path) -> None:
    made = maker(tmp_path, custom_generate_function_path="rollout.sft:demonstration")
    (sample,) = make(made, label="yes", n=1)
    assert sample.tokens.tolist() == [97, 98, 121, 101, 115, 0]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 1]
    assert {version for version, _ in sample.versions} == {NO_VERSION}


CHAT = "user:hi;assistant:"


@pytest.mark.parametrize(("tools", "encoded"), [([{"n": 1}], f"[{{'n': 1}}]{CHAT}"), ([], CHAT), ("mine", CHAT), (None, CHAT)])
def test_tools_in_the_metadata_go_to_the_chat_template(tmp_path: Path, tools: Any, encoded: str) -> None:
    record = msgspec.msgpack.encode({"prompt": [{"role": "user", "content": "hi"}], "label": "x0", "metadata": {"tools": tools}})
    leased = LeasedGroup(group="0/1", lease=1, num_samples=1, deadline_s=60)
    (sample,) = asyncio.run(maker(tmp_path, rm_type="exact").make_group(leased, record))
    assert "".join(map(chr, sample.tokens)).startswith(encoded)


@pytest.mark.parametrize(("stop", "text"), [(["0"], "x"), ("0", "x"), (["?", "x", "0"], ""), ([], "x0"), (["?"], "x0")])
def test_a_rewards_text_ends_before_the_stop_string(tmp_path: Path, stop: Any, text: str) -> None:
    leased = LeasedGroup(group="0/1", lease=1, num_samples=1, deadline_s=60, sampling={"stop": stop})
    record = msgspec.msgpack.encode({"prompt": "ab", "label": text})
    (sample,) = asyncio.run(maker(tmp_path, rm_type="exact").make_group(leased, record))
    assert (sample.reward, sample.tokens.tolist()) == (1.0, [97, 98, 120, 48, 0])


def test_what_a_reward_writes_into_extras_goes_to_every_context_of_the_trajectory(tmp_path: Path) -> None:
    plug = (
        "import numpy as np\n"
        "async def g(session):\n    await session.generate()\n    await session.generate([9, 9, 9])\n"
        "def r(response):\n"
        "    response.extras['advantages'] = np.array([0.5], np.float32)\n"
        "    response.extras['each'] = np.ones(len(response.prompt_ids) + len(response.token_ids), np.float32)\n"
        "    return 1\n"
    )
    samples = make(maker(tmp_path, plug, custom_generate_function_path="plug.py:g", custom_rm_path="plug.py:r"), n=1)
    assert [s.extras["advantages"].tolist() for s in samples] == [[0.5], [0.5]]
    assert [s.extras["each"].tolist() for s in samples] == [[0.0] * 5, [1.0] * 6]
    encode_group(samples)


def test_a_group_reward_leaves_what_a_hook_gave(tmp_path: Path) -> None:
    plug = (
        "async def g(session):\n    await session.generate()\n    if session.task.index == 0: session.reward = 1.0\n"
        "def r(responses): return [0.25 for response in responses]\ndef fails(responses): 1/0\n"
    )
    made = maker(tmp_path, plug, custom_generate_function_path="plug.py:g", custom_rm_path="plug.py:r")
    assert [s.reward for s in make(made)] == [1.0, 0.25, 0.25]
    made = maker(tmp_path, plug, custom_generate_function_path="plug.py:g", custom_rm_path="plug.py:fails")
    assert [(s.status, s.reward) for s in make(made)] == [("completed", 1.0), ("failed", None), ("failed", None)]

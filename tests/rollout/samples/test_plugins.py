"""What a plug-in does is an error of its group, and of nothing else."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from letters import Letters
from parrot import Parrot, make, maker

from rollout.samples.plugins import LEASED, Plugin, PluginError, called_in, contain_exits
from rollout.samples.response import Response, Task, to_sample
from rollout.worker.worker import Worker
from slimebus.bus import envelope
from slimebus.bus.errors import HookError, ProtocolError, SlimebusError, Unreachable, UsageError, WeightsError
from slimebus.bus.messages import GiveBack, Lease, LeasedGroup, LeaseReply, Message, Put, PutReply, Welcome
from slimebus.bus.samples import decode_group, encode_group
from slimebus.bus.transport.request import ReceivedReply
from slimebus.config import resolve

RAISED = [
    "1/0",
    "raise SystemExit(3)",
    "raise KeyboardInterrupt",
    "raise GeneratorExit",
    "raise StopIteration",
    "raise StopAsyncIteration",
    "raise asyncio.CancelledError",
    "raise TimeoutError",
    "raise MemoryError",
    "raise BaseExceptionGroup('two', [SystemExit(), KeyboardInterrupt()])",
    "f = lambda: f()\n    f()",
    "class Mute(Exception):\n        def __str__(self): raise SystemExit\n    raise Mute",
    "raise ValueError('\\ud800')",
    "from slimebus.bus.errors import Unreachable; raise Unreachable('the hook says so')",
    "exec('raise KeyError(1)')",
]
HOOK = "import asyncio\n\n\n{head} plug({argument}):\n    {body}\n"


@pytest.mark.parametrize("body", RAISED)
@pytest.mark.parametrize("head", ["def", "async def"])
@pytest.mark.parametrize(
    ("field", "argument"),
    [("custom_generate_function_path", "session"), ("dynamic_sampling_filter_path", "samples")],
)
def test_whatever_a_plugin_raises_is_an_error_of_its_group_with_its_path_and_the_users_line(
    tmp_path: Path, body: str, head: str, field: str, argument: str
) -> None:
    made = maker(tmp_path, HOOK.format(head=head, argument=argument, body=body), **{field: "plug.py:plug"})
    with pytest.raises(PluginError, match=rf"plug.py:plug failed at {tmp_path}/plug.py:\d+: \w+") as caught:
        make(made)
    assert not caught.value.retryable
    caught.value.text.encode()


@pytest.mark.parametrize("head", ["def", "async def"])
def test_whatever_a_reward_raises_is_an_error_with_its_path_and_the_users_line(tmp_path: Path, head: str) -> None:
    cases = (f"    if response.task.index == {i}:\n        {body.replace(chr(10), chr(10) + '    ')}\n" for i, body in enumerate(RAISED))
    made = maker(tmp_path, f"import asyncio\n\n\n{head} plug(response):\n{''.join(cases)}", custom_rm_path="plug.py:plug")
    one, none = np.ones(1, np.int32), np.zeros(1, np.float32)
    responses = [Response(task=task(i), token_ids=one, logprobs=none, versions=[(0, 1)], text="x") for i in range(len(RAISED))]
    problems = asyncio.run(made.reward.score(responses))
    for problem in problems:
        assert problem is not None
        assert re.match(rf"reward plug.py:plug failed at {tmp_path}/plug.py:\d+: \w+", problem.text)
        problem.text.encode()


def test_an_exit_in_a_task_that_a_hook_began_ends_that_task_alone(tmp_path: Path) -> None:
    plug = "import asyncio, sys\nasync def tool(): sys.exit(1)\nasync def g(session): await asyncio.gather(tool(), tool())\n"
    made = maker(tmp_path, plug, custom_generate_function_path="plug.py:g")

    async def run() -> None:
        contain_exits(asyncio.get_running_loop())
        with pytest.raises(PluginError, match="SystemExit in a task"):
            await made.make_group(LeasedGroup(group="0/1", lease=1, num_samples=2, deadline_s=60), record())

    asyncio.run(run())


def test_another_thread_sees_which_hook_a_loop_is_in_and_for_which_group_also_in_a_task_that_the_hook_began(tmp_path: Path) -> None:
    plug = "import asyncio, time\nasync def tool(): time.sleep(1)\nasync def g(session): await asyncio.gather(tool(), asyncio.sleep(0))\n"
    made = maker(tmp_path, plug, custom_generate_function_path="plug.py:g")
    leased, seen, ended = LeasedGroup(group="0/1", lease=7, num_samples=1, deadline_s=60), set[Any](), threading.Event()

    async def work() -> None:
        LEASED.set(leased)
        with pytest.raises(PluginError, match="made no sample"):
            await made.make_group(leased, record())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        contain_exits(loop)

        def look() -> None:
            while not ended.wait(0.01):
                name, group = called_in(loop)
                seen.add((name, group and group.lease))

        looking = threading.Thread(target=look)
        looking.start()
        await asyncio.gather(work())
        await asyncio.sleep(0.1)
        ended.set()
        looking.join()
        assert LEASED.get() is None, "it is that task's alone"

    asyncio.run(run())
    assert {("generate hook plug.py:g", 7), ("", None)} <= seen


def task(index: int) -> Task:
    return Task(prompt="p", prompt_ids=np.array([1], np.int32), sampling={}, label="x1", index=index)


def record(prompt: Any = "ab") -> bytes:
    return msgspec.msgpack.encode({"prompt": prompt, "label": "x1"})


def test_an_error_of_a_chat_template_names_its_line(tmp_path: Path) -> None:
    import jinja2

    class Templated(Letters):
        def encode_prompt(self, prompt: Any, tools: Any = None) -> np.ndarray:
            return self.encode(
                jinja2.Template("{{ 1 }}\n{{ prompt.nothing.there }}", undefined=jinja2.StrictUndefined).render(prompt=prompt)
            )

    made = maker(tmp_path)
    made.tokenizer = Templated()  # type: ignore[assignment]
    with pytest.raises(PluginError, match=r"tokenizer of .* failed at <template>:2: UndefinedError: 'str object' has no attribute"):
        make(made)


IMPORTS = "import numpy as np, torch\nfrom fractions import Fraction\n"
MALFORMED = """
token_ids=None ; token_ids='ab' ; token_ids=[[1, 2]] ; token_ids=[1.5, 2.5] ; token_ids=[1, -1] ; token_ids=[1, 99999] ;
token_ids=[1] ; token_ids=[1, 2, 3] ; token_ids=[1, None] ; token_ids=np.array(3) ; token_ids=5 ; token_ids=[2**70, 1] ;
logprobs=None ; logprobs=[-1.0] ; logprobs=[-1.0, float('nan')] ; logprobs=['a', 'b'] ;
logprobs=torch.zeros(2, requires_grad=True) ; versions=None ; versions=[(7, 1)] ; versions=[(7, 3)] ; versions=[(-2, 2)] ;
versions=[(7, 3), (7, -1)] ; versions=[7] ; versions=[(7.0, 2)] ; versions=[(2**63, 2)] ; text=5 ; text=None ;
finish_reason='great' ; finish_reason=None ; finish_reason=[] ; loss_mask=[1] ; loss_mask=[2, 0] ; loss_mask='11' ;
reward='good' ; reward=float('nan') ; reward=[1.0] ; reward=np.ones(2) ; temperature=0.0 ; temperature=-1 ;
temperature='hot' ; turn='first' ; turn=-1 ; turn=2**64 ; session=b'a' ; session='a' * 99999 ; session='\\ud800' ;
metadata=None ; metadata={1: 2} ; metadata={'a': [1]} ; metadata={'a': np.ones(2)} ; metadata={'a': object()} ;
metadata={'a': 2**70} ; metadata={'a': '\\ud800'} ; extras=None ; extras={'tokens': np.ones(2)} ; extras={'a': object()} ;
extras={'a': ['x']} ; prompt_ids=[-4] ; prompt_ids='ab' ; task=None
"""


@pytest.mark.parametrize("field", [field.strip() for field in MALFORMED.split(";")])
def test_a_malformed_response_is_an_error_of_its_group(tmp_path: Path, field: str) -> None:
    name, _, value = field.partition("=")
    made = maker(tmp_path)
    made.vocab_size = 1000
    response = Response(task=task(0), token_ids=[1, 2], logprobs=[-1.0, -2.0], versions=[(7, 2)], text="x")  # type: ignore[arg-type]
    setattr(response, name, eval(value, {"np": np, "torch": torch}))

    def check_and_encode() -> None:
        made._check_responses("the hook", [response])
        encode_group([to_sample(response)])

    with pytest.raises((PluginError, ProtocolError)):
        check_and_encode()


@pytest.mark.parametrize(
    "line", ["metadata = None", "metadata[1] = object()", "metadata['a'] = [object]", "extras = None", "extras['a'] = 'x'"]
)
def test_what_a_reward_writes_into_its_response_is_checked(tmp_path: Path, line: str) -> None:
    plug = f"def r(response):\n    response.{line}\n    return 1\n"
    with pytest.raises(PluginError, match=r"reward plug.py:r gave a Response that cannot be used"):
        make(maker(tmp_path, plug, custom_rm_path="plug.py:r"), n=1)


@pytest.mark.parametrize(
    "given", ["'text'", "{}", "[]", "[None]", "5", "[[1]]", "object()", "(x for x in [])", "[session, 1]", "[session] * 2"]
)
def test_what_is_no_session_is_an_error_of_its_group(tmp_path: Path, given: str) -> None:
    with pytest.raises(
        PluginError, match=r"plug.py:g (gave .*expected None, its session|made no sample|gave a session twice: expected each once)"
    ):
        make(maker(tmp_path, f"def g(session): return {given}\n", custom_generate_function_path="plug.py:g"))


@pytest.mark.parametrize(
    "line",
    [
        "session.reward = 'good'",
        "session.reward = float('nan')",
        "session.metadata = {'a': [1]}",
        "session.metadata['a'] = object()",
        "session.extras['tokens'] = np.ones(2)",
        "session.extras['a'] = object()",
        "session.observe([99999])",
        "session.observe([-1])",
        "session.observe([1.5])",
        "session.observe('ab', is_trained=2)",
    ],
)
def test_what_a_hook_sets_on_its_session_is_checked(tmp_path: Path, line: str) -> None:
    plug = f"{IMPORTS}async def g(session):\n    await session.generate()\n    {line}\n"
    made = maker(tmp_path, plug, custom_generate_function_path="plug.py:g")
    made.vocab_size = 1000
    with pytest.raises((PluginError, ProtocolError)):
        encode_group(make(made))


def test_numbers_of_numpy_and_torch_are_sent_as_pythons(tmp_path: Path) -> None:
    plug = (
        f"{IMPORTS}async def g(session):\n    await session.generate()\n    session.reward = np.float64(1)\n"
        "    session.metadata = {'a': np.float32(0.5), 'b': np.bool_(True), 'c': torch.tensor(3)}\n"
    )
    (sample,) = decode_group(encode_group(make(maker(tmp_path, plug, custom_generate_function_path="plug.py:g"), n=1)))
    assert sample.reward == 1.0
    assert sample.metadata == {"a": 0.5, "b": True, "c": 3}


@pytest.mark.parametrize("value", ["np.float64(1)", "np.int8(1)", "torch.tensor(1.0)", "True", "Fraction(1)", "np.bool_(True)", "1"])
def test_a_reward_may_be_a_number_of_any_kind(tmp_path: Path, value: str) -> None:
    imports = "import torch" if "torch" in value else "import numpy as np\nfrom fractions import Fraction"
    samples = make(maker(tmp_path, f"{imports}\ndef r(response): return {value}\n", custom_rm_path="plug.py:r"))
    assert [(type(s.reward), s.reward) for s in samples] == [(float, 1.0)] * 3


@pytest.mark.parametrize("value", ["None", "'1'", "[1]", "np.ones(3)", "float('inf')", "10**400", "object()", "1j", "response"])
def test_a_reward_that_is_no_number_fails_its_samples(tmp_path: Path, value: str) -> None:
    with pytest.raises(PluginError, match=r"reward plug.py:r gave .*expected a number within"):
        make(maker(tmp_path, f"import numpy as np\ndef r(response): return {value}\n", custom_rm_path="plug.py:r"))


def test_a_filter_cannot_change_what_is_put(tmp_path: Path) -> None:
    plug = "def keep(samples):\n    samples[0].reward = 'x'\n    samples[0].metadata['a'] = object()\n    samples.pop()\n    return True\n"
    samples = make(maker(tmp_path, plug, dynamic_sampling_filter_path="plug.py:keep"))
    assert [s.reward for s in samples] == [0.0, 1.0, 0.0]
    assert all(not s.metadata for s in samples)


def test_a_filter_may_be_a_coroutine_function(tmp_path: Path) -> None:
    from rollout.worker.groups import Dropped

    with pytest.raises(Dropped):
        make(maker(tmp_path, "async def keep(samples): return False\n", dynamic_sampling_filter_path="plug.py:keep"))


def test_a_task_is_no_other_samples_task(tmp_path: Path) -> None:
    plug = (
        "async def g(session):\n    session.task.metadata['mine'] = 1\n"
        "    assert list(session.task.metadata) == ['k', 'mine']\n    session.task.metadata.clear()\n"
        "    session.task.prompt_ids[:] = 0\n    await session.generate()\n"
    )
    samples = make(maker(tmp_path, plug, custom_generate_function_path="plug.py:g"))
    assert [s.tokens.tolist()[:2] for s in samples] == [[97, 98]] * 3


@pytest.mark.parametrize(
    ("sampling", "temperature"), [({}, 1.0), ({"temperature": 0.7}, 0.7), ({"temperature": 0}, 1.0), ({"temperature": 1e-7}, 1.0)]
)
def test_a_sample_says_the_temperature_of_its_logprobs(tmp_path: Path, sampling: dict[str, Any], temperature: float) -> None:
    leased = LeasedGroup(group="0/1", lease=1, num_samples=1, deadline_s=60, sampling=sampling)
    (sample,) = decode_group(encode_group(asyncio.run(maker(tmp_path).make_group(leased, record()))))
    assert sample.temperature == temperature


def test_when_the_engine_of_one_session_is_lost_the_others_of_the_group_stop_sampling(tmp_path: Path) -> None:
    class Slow(Parrot):
        ended = 0

        async def sample(self, tasks: Any, begun: Any = None) -> Any:
            if tasks[0].index == 1:
                raise Unreachable("no engine")
            try:
                await asyncio.sleep(60)
            finally:
                Slow.ended += 1

    plug = "async def g(session): await session.generate()\n"
    with pytest.raises(Unreachable, match="no engine"):
        make(maker(tmp_path, plug, Slow(), custom_generate_function_path="plug.py:g"))
    assert Slow.ended == 2


def test_a_plugin_that_ignores_that_it_is_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.samples.plugins.CANCEL_S", 0.1)

    async def stubborn() -> None:
        for _ in range(20):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    async def run() -> None:
        with pytest.raises(PluginError, match=r"reward x:y took longer than reward_timeout_s = 0.1 s"):
            await Plugin("reward x:y", stubborn)(timeout_s=0.1)

    asyncio.run(run())


@pytest.mark.parametrize(("error", "kind"), [(WeightsError("no weights"), WeightsError), (UsageError("a 400"), PluginError)])
def test_what_an_engine_could_not_do_is_no_fault_of_the_hook_that_asked_it(tmp_path: Path, error: SlimebusError, kind: type) -> None:
    class Broken(Parrot):
        async def sample(self, tasks: Any, begun: Any = None) -> Any:
            raise error

    plug = "async def g(session):\n    await session.generate()\n"
    with pytest.raises(kind, match=str(error)) as caught:
        make(maker(tmp_path, plug, Broken(), custom_generate_function_path="plug.py:g"))
    assert caught.value.retryable == error.retryable


# --- a worker ---


class Broker:
    """A client whose broker leases groups 0, 1, 2, ... until `enough` answers came."""

    address, credentials, name = "tcp://127.0.0.1:1", None, "w"

    def __init__(self, enough: int) -> None:
        self.enough, self.leased = enough, 0
        self.answers: list[Message] = []
        self.worker: Worker | None = None

    def keep_alive(self, *_: Any) -> None:
        pass

    def listen(self, *_: Any) -> None:
        pass

    async def ask(self, message: Message, bulk: Any = (), **_: Any) -> ReceivedReply:
        envelope.encode(message, id=1)
        await asyncio.sleep(0)
        if isinstance(message, Lease):
            self.leased += 1
            group = LeasedGroup(group=f"0/{self.leased}", lease=self.leased, num_samples=1, deadline_s=60)
            return ReceivedReply(LeaseReply(groups=[group]), [record()])
        self.answers.append(message)
        if len(self.answers) >= self.enough and self.worker is not None:
            self.worker.stop()
        return ReceivedReply(PutReply(result="accepted"), [])


def serve(tmp_path: Path, plug: str, enough: int, run: Callable[[Any], Any] = asyncio.run, *, max_message_bytes: int = 0) -> list[Message]:
    """What a worker with this generate hook answers the broker. max_message_bytes: what the broker takes."""
    (tmp_path / "plug.py").write_text(plug)
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    flags = {
        "rollout.custom_generate_function_path": f"{tmp_path}/plug.py:g",
        "engine.engine": "none",
        "model.hf_checkpoint": str(tmp_path),
    }
    flags |= {"algorithm.advantage_estimator": "sft", "rollout.n_samples_per_prompt": "1", "rollout.max_running_groups": "4"}
    resolved = resolve(None, flags, {})
    broker = Broker(enough)

    async def work() -> None:
        broker.worker = Worker(resolved, broker, name="w")  # type: ignore[arg-type]
        welcome = Welcome(run="r", epoch=1, heartbeat_s=60.0, max_message_bytes=max_message_bytes)
        await asyncio.wait_for(broker.worker.run(welcome, Letters()), 30)  # type: ignore[arg-type]

    run(work())
    return broker.answers


ODD = (
    f"{IMPORTS}import sys\ndef g(session):\n    if int(session.task.group[2:]) % 2: BODY\n"
    "    session.observe([1, 2], is_trained=True)\n    session.reward = 1.0\n"
)


@pytest.mark.parametrize("body", ["sys.exit(1)", "raise KeyboardInterrupt", "return 5", "session.task.prompt_ids = 5; 1 / 0"])
def test_a_worker_goes_on_after_a_poisonous_group_and_counts_it_as_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = serve(tmp_path, ODD.replace("BODY", body), 40)
    failed = [a for a in answers if isinstance(a, GiveBack) and a.outcome == "fail"]
    assert len(failed) >= 15
    assert all("plug.py:g" in a.reason for a in failed)
    assert sum(isinstance(a, Put) for a in answers) >= 15


def test_a_group_larger_than_the_broker_takes_is_not_sent_and_counts_as_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    long = ODD.replace("BODY", "session.metadata['text'] = 'x' * 4096")
    answers = serve(tmp_path, long, 40, max_message_bytes=1024)
    failed = [a for a in answers if isinstance(a, GiveBack) and a.outcome == "fail"]
    assert len(failed) >= 15
    assert all("at most 1024 can be fetched (broker.max_message_mib)" in a.reason for a in failed)
    assert sum(isinstance(a, Put) for a in answers) >= 15, "a smaller one is"


def test_a_plugin_that_always_fails_ends_the_worker_with_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HookError, match=r"16 groups in a row failed alike .* failed at .*/plug.py:2: ZeroDivisionError"):
        serve(tmp_path, "def g(session):\n    1/0\n", 1000)

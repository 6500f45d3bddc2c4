import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import pytest
from waiting import wait_until

from rollout.rewards import code, dapo, deepscaler, exact, f1, gpqa, math, random
from rollout.rewards.pool import find_reward
from rollout.samples.response import Response, Task
from slimebus.bus.errors import HookError, UsageError
from slimebus.config import resolve
from slimebus.config.schema import RewardName


def response(text: str, label: Any = "", *, finish: str = "stop", **metadata: Any) -> Response:
    task = Task(prompt="p", prompt_ids=np.array([1], np.int32), sampling={}, label=label, metadata=metadata)
    ids = np.arange(3, dtype=np.int32)
    return Response(task=task, token_ids=ids, logprobs=np.zeros(3), versions=[(0, 3)], text=text, finish_reason=finish)


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("so it is \\boxed{42}", "42", 1.0),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("work\n#### 1,234", "#### 1234", 1.0),
        ("the total is 18 dollars and 2.50 cents", "2.5", 1.0),
        ("$7.00", "7", 1.0),
        ("3/4", "0.75", 1.0),
        ("the answer is 41", "42", 0.0),
        ("no number at all", "42", 0.0),
        ("\\boxed{1/0}", "5", 0.0),
        ("\\boxed{1e999999999}", "5", 0.0),
        ("\\boxed{1e-9999_99999}", "0", 0.0),
        ("\\boxed{1e3}", "1000", 1.0),
        ("\\boxed{unclosed 42", "42", 1.0),
    ],
)
def test_math_compares_the_final_answer(text: str, label: str, expected: float) -> None:
    assert math.reward(response(text, label)) == expected


def test_exact_wants_the_label_and_an_end() -> None:
    assert exact.reward(response(" yes ", "yes")) == 1.0
    assert exact.reward(response("yes", "yes", finish="length")) == 0.0
    assert exact.reward(response("yes!", "yes")) == 0.0


def test_random_is_the_same_for_the_same_tokens() -> None:
    assert random.reward(response("a")) == random.reward(response("b"))


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("therefore $x^2 + 2x + 1$", "(x+1)^2", 1.0),
        ("\\boxed{(1,2)}", "(2,1)", 0.0),
        ("\\boxed{12345678901234567890}", "12345678901234567891", 0.0),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", 1.0),
    ],
)
def test_math_compares_as_mathematics(text: str, label: str, expected: float) -> None:
    assert math.reward(response(text, label)) == expected


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("so\nAnswer: 34", "34", 1.0),
        ("answer:  $34$.", 34, 1.0),
        ("Answer: 33\nAnswer: \\boxed{1,234}", "1234", 1.0),
        ("Answer: x = 34 degrees", "34.0", 1.0),
        ("Answer: \\frac12", "\\frac{1}{2}", 1.0),
        ("the answer is 34", "34", -1.0),
        ("Answer: 35", "34", -1.0),
        ("Answer: 34" + " and so on" * 30, "34", -1.0),
        ("", "", -1.0),
    ],
)
def test_dapo_gives_1_or_minus_1_for_the_last_answer_line(text: str, label: Any, expected: float) -> None:
    assert dapo.reward(response(text, label)) == expected


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("\\boxed{7} </think> it is \\boxed{8}", "8", 1.0),
        ("\\boxed{8} </think> it is \\boxed{7}", 8, 0.0),
        ("hm ###Response \\boxed{\\frac{2}{4}}", "\\boxed{0.5}", 1.0),
        ("it is \\boxed{8}", "8", 0.0),
        ("</think> it is 8", "8", 0.0),
        ("</think> \\boxed{8}", "", 0.0),
        ("</think> \\boxed{8}", "\\boxed{unclosed 8", 0.0),
    ],
)
def test_deepscaler_looks_behind_the_thinking(text: str, label: Any, expected: float) -> None:
    assert deepscaler.reward(response(text, label)) == expected


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat sat down", "the cat", 0.5),  # precision 1/3, recall 1
        ("yes", "Yes.", 1.0),
        ("yes, it did", "yes", 0.0),
        ("no", "nothing", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_f1_counts_common_words(text: str, label: str, expected: float) -> None:
    assert f1.reward(response(text, label)) == pytest.approx(expected)


CHOICES = ["Iron", "Gold", "Lead", "Tin"]


@pytest.mark.parametrize(
    ("text", "label", "about", "expected"),
    [
        ("The answer is (B)", "B", {}, 1.0),
        ("The answer is B", "b", {}, 1.0),
        ("Answer: C", "B", {}, 0.0),
        ("A looks good, but B is the correct one", "B", {}, 1.0),
        ("A </think> option B", "B", {}, 1.0),
        ("answer is B", 1, {"choices": CHOICES}, 1.0),
        ("answer is D", "Tin", {"choices": CHOICES}, 1.0),
        ("answer is Z, so D", "Tin", {"choices": CHOICES}, 1.0),
        ("it must be gold", "B", {"choices": CHOICES}, 1.0),
        ("it must be golden", "B", {"choices": CHOICES}, 0.0),
        ("answer is B", "x", {"choices": {"A": "Iron", "B": "Gold"}, "correct_letter": "b"}, 1.0),
        ("it is forty two", "Forty-two", {}, 1.0),
        ("", "B", {}, 0.0),
    ],
)
def test_gpqa_finds_the_named_option(text: str, label: Any, about: dict[str, Any], expected: float) -> None:
    assert gpqa.reward(response(text, label, **about)) == expected


# --- code ---


@pytest.mark.parametrize("label", [None, 7, [{"input": "1"}, 2], [{"in": "1"}]])
def test_a_label_that_is_no_tests_is_told(label: Any) -> None:
    with pytest.raises(ValueError, match=r"the label is .*; expected Python tests, or a list of {input, output} texts"):
        code.reward(response("print(1)", label), 60.0)


needs_namespaces = pytest.mark.skipif(bool(code.missing()), reason="the kernel makes no namespaces here")
DOUBLE = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles."
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "10 GB": "x = bytearray(10 << 30)\nx[::4096] = b'1' * len(x[::4096])\nprint('took it')",
    "endless output": "while True: print('x' * 10000)",
    "sleep": "import time\ntime.sleep(1000)",
    "kill its parent": "import os\nos.kill(os.getppid(), 9)\nprint('killed it')",
    "kill everything": """
import os
for pid in {*range(1, 1 << 16)} - {os.getpid()}:
    try:
        os.kill(pid, 9)
        print('killed', pid)
    except OSError: pass
""",
    "leave a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1000)\nos._exit(0)",
    "disk": "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\nprint('connected')",
    "memory of several": "import os, time\nfor _ in range(3): os.fork()\nx = b'1' * (100 << 20)\ntime.sleep(1)\nprint('took it')",
    "files in memory": "import os, time\nfor _ in range(16): os.write(os.memfd_create(''), bytes(31 << 20))\ntime.sleep(1); print('has')",
    "shared memory": "import ctypes\nprint('got it' if ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0 else '')",
    "a user namespace": "import ctypes\nprint('made it' if ctypes.CDLL(None).unshare(1 << 28) == 0 else '')",
    "mount": "import ctypes\nprint('mounted' if ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0 else '')",
}


@needs_namespaces
@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        (DOUBLE, "assert double(4) == 8", 1.0),
        (DOUBLE, "assert double(4) == 9", 0.0),
        ("```\nimport os\nos._exit(0)\n```", "assert False", 0.0),
        ("print('begun')\nif __name__ == '__main__': globals()['take'] = 3", "print('tested')\nassert take == 3", 1.0),
        ("print(int(input()) + 1)", [{"input": "1\n", "output": "2"}, {"input": "-1", "output": "0\n"}], 1.0),
        ("print(int(input()) + 1)", '[{"input": "1", "output": "3"}]', 0.0),
        ("not python at all", [{"input": "", "output": ""}], 0.0),
    ],
)
def test_code_is_run_against_its_tests(text: str, label: Any, expected: float) -> None:
    assert code.reward(response(text, label), 60.0) == expected


@needs_namespaces
def test_a_program_that_is_slow_in_many_cases_is_wrong_and_not_late() -> None:
    program = "```python\nimport time; time.sleep(0.6); print(1)\n```"
    started = time.monotonic()
    assert code.reward(response(program, [{"input": "", "output": "1"}] * 60), 3.0) == 0.0
    assert time.monotonic() - started < 12


@needs_namespaces
def test_a_program_finds_neither_the_tests_nor_the_mark_of_its_end(tmp_path: Path) -> None:
    # What it finds in its file, standard input, frames and objects is printed, and with it the mark, if it is there.
    program = """```
import gc, os, sys
os.lseek(0, 0, 0)
found = [open("/main.py").read(), os.read(0, 10000)]
frame = sys._getframe()
while frame:
    found += [frame.f_locals, frame.f_code.co_consts, gc.get_referents(frame)]
    frame = frame.f_back
found += [o for o in gc.get_objects() if type(o) in (list, tuple, dict) and len(o) < 100]
os.write(1, ascii(found).encode())
os._exit(0)
```"""
    _, out, _ = code.run(code.DRIVER, "\0".join((code.program_of(program), "assert 1 == 'the test'", "the mark")))
    assert "sys.stdin.buffer.read" in out
    assert "the mark" not in out
    assert "the test" not in out
    assert code.reward(response(program, "assert 1 == 2"), 60.0) == 0.0


@needs_namespaces
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_is_contained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_MEMORY", 400 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        begun = time.monotonic()
        _, out, _ = code.run(HOSTILE[name].replace("PORT", str(server.getsockname()[1])), seconds=2)
    assert time.monotonic() - begun < 30
    assert not out.strip("x\n")
    assert len(out) <= code.MAX_OUTPUT
    wait_until("all has ended", lambda: not [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[-1] == "/main.py"])


@needs_namespaces
def test_code_reads_no_file_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the key")
    paths = [
        str(tmp_path / "secret"),
        f"/proc/{os.getpid()}/environ",
        "/proc/1/environ",
        "/etc/passwd",
        str(Path(__file__)),
        str(Path.home()),
    ]
    program = f"""
import os
for path in {paths}:
    try: print(os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError: pass
"""
    _, out, errors = code.run(program)
    assert (out.replace("[]", "").strip(), errors) in (("", ""), (str(sys.base_prefix.split("/")[2:3]), ""))
    assert (tmp_path / "secret").read_text() == "the key"


# --- by name ---


def config(**fields: str) -> Any:
    return resolve(None, {f"rollout.{name}": value for name, value in fields.items()}, {}).config.rollout


@pytest.mark.parametrize("name", sorted(set(get_args(RewardName)) - {"ifbench", "code"}))
def test_every_built_in_reward_is_found_by_its_name(name: str, tmp_path: Path) -> None:
    assert find_reward(config(rm_type=name, rm_url="http://127.0.0.1:1"), tmp_path).load().name == f"reward rollout.rewards.{name}:reward"


def test_what_a_built_in_reward_lacks_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"rm_type: remote asks a server; give its address as rollout.rm_url"):
        find_reward(config(rm_type="remote"), tmp_path)
    with pytest.raises(UsageError, match=r"ifbench needs IFBench's evaluation_lib, which is in no package; clone https"):
        find_reward(config(rm_type="ifbench"), tmp_path)
    monkeypatch.setattr(code, "NAMESPACES", ["--no-such-namespace"])
    with pytest.raises(UsageError, match=r"code needs Linux namespaces, and here they fail: .*--no-such-namespace"):
        find_reward(config(rm_type="code"), tmp_path)


def test_ifbench_asks_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = """
from types import SimpleNamespace as InputExample
def test_instruction_following_strict(example, responses):
    assert example.kwargs == [{"n": 2}]
    return InputExample(follow_all_instructions=responses[example.prompt] == "two words")
"""
    (tmp_path / "evaluation_lib.py").write_text(library)
    monkeypatch.syspath_prepend(str(tmp_path))
    from rollout.rewards import ifbench

    about = {"instruction_id_list": ["count:words"], "kwargs": [{"n": 2, "m": None}], "prompt_text": "say"}
    assert ifbench.missing() == ""
    assert [ifbench.reward(response(text, **about)) for text in ("two words", "one")] == [1.0, 0.0]


def test_a_reward_whose_argument_is_responses_is_one_of_the_group(tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text("def one(response): pass\ndef all(responses): pass\ndef none(): pass\n")
    assert [find_reward(config(custom_rm_path=f"plug.py:{name}"), tmp_path).is_group for name in ("one", "all")] == [False, True]
    with pytest.raises(HookError, match=r"too many positional arguments; it is called with \(response\)"):
        find_reward(config(custom_rm_path="plug.py:none"), tmp_path)

"""What a user may get wrong: one clear line on stderr, exit code 2, no traceback, and nothing left running."""

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from live_run import MARK, Run, tiny_config
from slimebus_command import slimebus

pytestmark = pytest.mark.integration

ROLES = ("broker", "trainer", "rollout", "up")


class Refusal:
    """How a command ended. `said` is the one line that explains it. others: processes of the run that live on."""

    def __init__(self, run: Run, *words: str, others: int = 0, code: int = 2) -> None:
        started = time.monotonic()
        done = slimebus(*words, PATH="/usr/bin:/bin", HOME=str(run.folder), **{MARK: run.mark})
        self.seconds = time.monotonic() - started
        self.out, self.err, self.code = done.stdout, done.stderr, done.returncode
        self.text = f"{' '.join(words)}: exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        lines = [line for line in self.err.splitlines() if line.startswith("slimebus: ")]
        assert self.code == code, self.text
        assert "Traceback" not in self.out + self.err, self.text
        assert len(lines) == 1, self.text
        self.said = lines[0]
        run.assert_none_alive(within_s=1.0, others=others)


def refused(run: Run, role: str, *flags: str) -> Refusal:
    return Refusal(run, role, str(run.file), *flags)


def child_line(refusal: Refusal, role: str) -> str:
    """Under `up`, the explaining line of a role is in the common log with the role in front."""
    lines = [line for line in refusal.out.splitlines() if "slimebus: " in line and line.lstrip().startswith(role)]
    assert len(lines) == 1, refusal.text
    return lines[0]


@pytest.fixture
def run(tmp_path: Path, task: Path) -> Iterator[Run]:
    with Run(tmp_path, task, broker__connect_timeout_s=2) as run:
        yield run


def change(run: Run, task: Path, **changes: object) -> None:
    run.write(tiny_config(run.run_dir, task, run.address), {"broker__connect_timeout_s": 30, **changes})


def test_a_missing_data_file_is_named(run: Run, task: Path) -> None:
    change(run, task, data__prompt_data=["nowhere/prompts.jsonl"])
    assert "nowhere/prompts.jsonl does not exist" in refused(run, "broker").said
    up = refused(run, "up")
    assert "data.prompt_data: no such file" in up.said
    assert "nowhere/prompts.jsonl" in up.said


def test_up_ends_everyone_when_one_role_refuses_its_input(run: Run, task: Path) -> None:
    file = run.folder / "prompts.jsonl"
    first, *_ = (task / "rl.jsonl").read_text().splitlines(keepends=True)
    file.write_text(f"{first}nonsense\n")
    change(run, task, data__prompt_data=[str(file)])
    up = refused(run, "up", "--workers", "2")
    assert f"{file}:2: not JSON" in child_line(up, "broker")
    assert up.seconds < 30


@pytest.mark.parametrize("role", ROLES)
def test_an_unknown_key_is_named_with_its_place_and_the_nearest_name(run: Run, task: Path, role: str) -> None:
    change(run, task, rollout__num_rollouts=7)
    said = refused(run, role).said
    assert f"{run.file}:" in said
    assert "unknown key 'rollout.num_rollouts'; did you mean 'rollout.num_rollout'?" in said


def test_a_port_in_use_is_named(run: Run, task: Path) -> None:
    change(run, task)
    host, _, port = run.address.removeprefix("tcp://").partition(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        said = refused(run, "broker").said
        assert f"{host}:{port}" in said
        assert "in use" in said
        up = refused(run, "up")
        assert "in use" in up.said
        assert "|" not in up.out, "none of its processes was started"


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_an_unreachable_broker_is_named_with_who_asked_and_for_how_long(run: Run, role: str) -> None:
    refusal = Refusal(run, role, str(run.file), "--connect-timeout-s", "2", code=1)
    assert role in refusal.said
    assert run.address in refusal.said
    assert "in 2 s" in refusal.said
    assert 2 <= refusal.seconds < 20


def test_status_and_eval_say_who_does_not_answer(run: Run) -> None:
    said = Refusal(run, "status", str(run.file), "--timeout-s", "1", code=4).said
    assert f"no broker listens at {run.address} (waited 1 s)" in said


@contextlib.contextmanager
def broker_of_another_release(address: str) -> Iterator[None]:
    """A broker that speaks protocol 99."""
    header = {"v": 99, "type": "error", "id": 0, "body": {"code": "protocol_version", "text": "too old"}}
    stop = threading.Event()

    def serve() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(address)
            while not stop.is_set():
                if socket.poll(50):
                    socket.send_multipart([socket.recv_multipart()[0], msgspec.msgpack.encode(header)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_broker_of_another_protocol_version_is_told_apart_from_an_absent_one(run: Run, role: str) -> None:
    with broker_of_another_release(run.address):
        refusal = refused(run, role, "--connect-timeout-s", "30")
    assert "protocol version 99" in refusal.said
    assert "speaks 1" in refusal.said
    assert refusal.seconds < 20, "it does not wait for the deadline"


def mismatched(task: Path, folder: Path) -> Path:
    """The model with a tokenizer that has one token more than the model has embeddings."""
    shutil.copytree(task / "model", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["%"] = len(vocab)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_tokenizer_of_another_model_is_refused_by_every_role_that_has_it(run: Run, task: Path) -> None:
    change(run, task, model__hf_checkpoint=str(mismatched(task, run.folder / "model")))
    size = json.loads((task / "model" / "config.json").read_text())["vocab_size"]
    broker = run.start("broker")
    run.wait_for("a broker", lambda s: True)
    for role in ("trainer", "rollout"):
        refusal = Refusal(run, role, str(run.file), others=1)
        assert f"'%' id {size}, but the model's vocab_size is {size}" in refusal.said
    broker.kill()

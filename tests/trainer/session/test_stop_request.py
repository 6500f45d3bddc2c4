"""What a signal does to the trainer's loop. Signals are sent to this very process."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slimebus.bus.errors import ConfigError
from trainer.launch.plan import LAUNCHED
from trainer.session import stop_request
from trainer.session.stop_request import StopRequest

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGURG)


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield StopRequest()
    signal.alarm(0)
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_left_to_the_loop_and_outside_of_it_interrupts(stop: StopRequest, number: signal.Signals) -> None:
    with stop.deferred():
        send(number)
        assert stop.is_made
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_signal_that_interrupts_no_wait_of_the_main_thread_is_handled_soon(stop: StopRequest) -> None:
    """As one that comes just before the wait; here another thread gets it."""

    def send_and_watch() -> bool:
        time.sleep(0.1)
        send(signal.SIGTERM)
        until = time.monotonic() + 10.0
        while not stop.is_made and time.monotonic() < until:
            time.sleep(0.01)
        return stop.is_made

    with stop.deferred(), ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # it begins with the mask of this thread
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            assert thread.submit(send_and_watch).result()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def test_before_the_loop_a_signal_interrupts(stop: StopRequest) -> None:
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    send(signal.SIGTERM)  # one for each thread of a parent that was killed


def test_a_second_ctrl_c_interrupts_and_a_second_sigterm_does_not(stop: StopRequest) -> None:
    with stop.deferred():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_step_that_outlasts_the_deadline_is_interrupted(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    with stop.deferred():
        send(signal.SIGTERM)
        send(signal.SIGALRM)
        monkeypatch.setattr(stop_request.time, "monotonic", lambda: stop._deadline)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGALRM)


def test_a_step_may_last_as_long_as_the_config_grants(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    stop.grace_s, at = 600.0, stop_request.time.monotonic()
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: at)
    with stop.deferred():
        send(signal.SIGTERM)
        at += 599.0
        send(signal.SIGALRM)
        at += 1.0
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGALRM)


def test_the_deadline_holds_after_the_last_step_too(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    with stop.deferred():
        pass
    stop.keep_deadline()
    assert signal.alarm(0) == 0, "no signal came"
    with stop.deferred():
        send(signal.SIGTERM)
    stop.keep_deadline()
    assert signal.alarm(0) > 0
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: stop._deadline)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGALRM)


def test_a_broker_that_does_not_answer_holds_up_no_stop(stop: StopRequest) -> None:
    stop.is_broker_silent = lambda: True
    with stop.deferred():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGALRM)


def test_an_error_of_all_ranks_leaves_rank_0_first(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stop_request.time, "sleep", slept.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ConfigError, match="wrong"), stop.one_rank_says_it():
            raise ConfigError("wrong")
    assert slept == [stop_request.RANK0_ERROR_GRACE_S]


def test_an_error_of_torch_lets_the_rank_that_died_be_seen_first(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stop_request.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError), stop.one_rank_says_it():
        raise RuntimeError("Connection reset by peer")
    assert slept == [stop_request.FIRST_ERROR_S]


def test_the_launcher_gets_the_last_line_of_an_error(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile() as file:
        monkeypatch.setenv(LAUNCHED, str(file.fileno()))
        with pytest.raises(ConfigError), stop.one_rank_says_it():
            raise ConfigError("two lines:\nrollout.seed is wrong")
        assert os.pread(file.fileno(), 100, 0) == b"ConfigError: rollout.seed is wrong"

"""The log of a process stays small whatever is done to it."""

import logging

import pytest

from slimebus.telemetry import logs
from slimebus.telemetry.logs import MAX_KINDS, Throttle


@pytest.fixture(autouse=True)
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three warnings of a kind at once, ten other lines, and one a second."""
    monkeypatch.setattr(logs, "WARNINGS", (3, 1.0))
    monkeypatch.setattr(logs, "NEWS", (10, 1.0))


class Log:
    """A logger's records behind a throttle, on a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.throttle = Throttle(clock=lambda: self.now)

    def say(self, text: str, *values: object, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("broker", level, __file__, 1, text, values, None)
        return record.getMessage() if self.throttle.filter(record) else None


def test_a_burst_of_one_kind_is_cut_and_counted() -> None:
    log = Log()
    said = [log.say("message from %s refused", i) for i in range(1000)]
    assert [line for line in said if line] == [f"message from {i} refused" for i in range(3)]
    log.now = 2.5
    assert log.say("message from %s refused", 1000) == "message from 1000 refused (997 more like it)"
    assert log.say("message from %s refused", 1001) == "message from 1001 refused"
    assert log.say("message from %s refused", 1002) is None


def test_other_lines_pass_meanwhile() -> None:
    log = Log()
    for i in range(1000):
        log.say("message from %s refused", i)
    assert log.say("trainer joined") == "trainer joined"
    assert log.say("message from %s refused", 1, level=logging.ERROR) == "message from 1 refused"
    assert all(log.say("step %s", i, level=logging.INFO) for i in range(10)), "news have a wider bound"


def test_a_day_of_nonsense_is_a_bounded_number_of_lines() -> None:
    log = Log()
    written = 0
    for second in range(86_400):
        log.now = float(second)
        written += sum(log.say("refused %s", i) is not None for i in range(3))
    assert written <= 86_400 + 3


def test_no_peer_breaks_a_line_of_the_log_or_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.set_up("broker")
        logging.getLogger("broker").warning("message from %s refused", "w\n12:00:00 broker INFO: all is well\x1b]0;title\x07")
        logging.getLogger("broker").error("its stack:\n%s", "one line\r")
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith(r"WARNING: message from w\n12:00:00 broker INFO: all is well\x1b]0;title\x07 refused")
    assert second.endswith("ERROR: its stack:")
    assert third == r"one line\r"


def test_kinds_that_never_repeat_do_not_grow_the_table() -> None:
    log = Log()
    for i in range(10 * MAX_KINDS):
        log.say(f"kind {i}")
    assert len(log.throttle._kinds) <= MAX_KINDS

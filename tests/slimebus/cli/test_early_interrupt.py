"""Ctrl-C while a command is still being imported."""

import signal
import subprocess
import sys
import time

import pytest

STARTED = """
import signal, sys
install = signal.signal
install(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background has it ignored
def tell(number, handler):
    install(number, handler)
    signal.signal = install
    print("started", flush=True)
signal.signal = tell
sys.argv[1:] = {words!r}
from slimebus.__main__ import main
main()
"""
"""The `slimebus` script, which says when its first lines have run: before them Python itself answers a signal."""


@pytest.mark.parametrize(
    "words", [["trainer", "--help"], ["rollout", "--help"], ["broker", "--help"], ["status", "nowhere"]], ids=lambda w: w[0]
)
def test_an_early_ctrl_c_ends_any_command_with_130_and_no_traceback(words: list[str]) -> None:
    codes = set()
    for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3):
        command = [sys.executable, "-P", "-c", STARTED.format(words=words)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "started\n"
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            error = process.stderr.read()
        assert "Traceback" not in error, (delay_s, error)
        assert "Exception ignored" not in error, (delay_s, error)
        codes.add(process.returncode)
        if process.returncode != 130:
            break  # it was done before
    assert 130 in codes

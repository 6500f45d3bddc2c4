"""What the table of bin/gpu-check says of each outcome; the checks themselves need a GPU."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("gpu_check", Path(__file__).with_name("gpu_check.py"))
assert SPEC is not None
assert SPEC.loader is not None
gpu_check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_check)


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (0, "gpu-check: MFU 0.310, 52000 tokens/s\n.\n1 passed in 9.1s", ("pass", "MFU 0.310, 52000 tokens/s")),
        (0, "2 passed, 1 skipped in 9.1s\nSKIPPED [1] tests/gpu/x.py:3: no", ("pass", "exit code 0")),
        (
            0,
            "SKIPPED [1] tests/gpu/test_on_gpu.py:90: no peak is known of this device\n1 skipped",
            ("skip", "no peak is known of this device"),
        ),
        (1, "gpu-check: 0.2 of the bytes\n1 failed", ("fail", "0.2 of the bytes")),
        (2, "", ("fail", "exit code 2")),
    ],
)
def test_a_row_says_what_its_check_measured_or_why_there_is_nothing(code: int, text: str, said: tuple[str, str]) -> None:
    assert gpu_check.outcome(code, text) == said


def test_without_a_gpu_every_check_is_left_out_with_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert capsys.readouterr().out == "no CUDA device: torch finds none, so there is nothing to check here\n"


@pytest.mark.parametrize(("num_gpus", "count"), [(2, 10), (4, 11), (8, 12)])
def test_every_layout_of_the_table_is_one_that_the_tests_have_and_the_gpus_suffice_for(num_gpus: int, count: int) -> None:
    tests = ("test_layout_trains_as_one_rank_does", "test_bfloat16_has_fp32_masters_in_every_layout")
    chosen = [word for test in tests for word in gpu_check.layouts(test, num_gpus) if "::" in word]
    found = subprocess.run(
        [*gpu_check.PYTEST, "--collect-only", *chosen], cwd=gpu_check.ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stdout
    assert len(chosen) == count


def test_a_table_has_a_row_for_each_check(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        gpu_check, "checks", lambda: [("good", ["echo", "gpu-check: 3"], ""), ("bad", ["false"], ""), ("none", None, "why")]
    )
    assert gpu_check.main() == 1
    rows = [line.split() for line in capfd.readouterr().out.splitlines()[-3:]]
    assert rows == [["pass", "good", "3"], ["fail", "bad", "exit", "code", "1"], ["skip", "none", "why"]]

"""What configs/gsm8k-qwen3-4b-8gpu/make_data.py makes of GSM8K's lines."""

import json
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "gsm8k-qwen3-4b-8gpu"
GOOD = json.dumps({"question": "How many?", "answer": "5 + 5 = <<5+5=10>>10\n#### 1,010"}) + "\n"


def make(folder: Path, train: str, test: str = GOOD) -> "subprocess.CompletedProcess[str]":
    (folder / "train.jsonl").write_text(train)
    (folder / "test.jsonl").write_text(test)
    files = ["--train", str(folder / "train.jsonl"), "--test", str(folder / "test.jsonl"), "--out", str(folder / "out")]
    return subprocess.run([sys.executable, str(RECIPE / "make_data.py"), *files], capture_output=True, text=True, timeout=60)


def test_each_problem_becomes_a_chat_prompt_with_its_number(tmp_path: Path) -> None:
    assert make(tmp_path, GOOD * 3).returncode == 0
    records = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert len(records) == 3
    assert records[0]["label"] == "1010"
    (message,) = records[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("How many?\n")
    assert "\\boxed{}" in message["content"]


def test_bad_lines_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    for bad, reason in (
        ("{", "JSONDecodeError"),
        ('{"question": "?"}', "answer"),
        ('{"question": "?", "answer": "ten"}', "####"),
        ("7", "JSON object"),
    ):
        made = make(tmp_path, GOOD + bad + "\n")
        assert made.returncode == 2
        assert "train.jsonl:2: " in made.stderr
        assert reason in made.stderr
        assert "Traceback" not in made.stderr
    assert not (tmp_path / "out").exists()


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    files = ["--train", str(tmp_path / "none.jsonl"), "--test", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]
    made = subprocess.run([sys.executable, str(RECIPE / "make_data.py"), *files], capture_output=True, text=True, timeout=60)
    assert made.returncode == 2
    assert "none.jsonl" in made.stderr
    assert "Traceback" not in made.stderr

"""What configs/quickstart/make.py promises about its files, and reward.py about its numbers."""

import hashlib
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from recipe import CONFIGS, load

from slimebus.bus.errors import SlimebusError

RECIPE = CONFIGS / "quickstart"
SPLITS = ("sft", "rl", "heldout", "layout")


task = load("quickstart/task.py")
reward = load("quickstart/reward.py").reward


def make(out: Path, seed: int) -> Path:
    subprocess.run([sys.executable, str(RECIPE / "make.py"), "--out", str(out), "--seed", str(seed)], check=True, timeout=60)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"), 0)


@pytest.fixture(scope="module")
def made_with_another_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("another"), 1)


def records(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def problem(record: dict[str, Any]) -> tuple[int, int]:
    a, b = record["prompt"][0]["content"].split("+")
    return int(a), int(b)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_no_problem_is_in_two_files_not_even_with_its_numbers_swapped(made: Path, made_with_another_seed: Path) -> None:
    """Of any seed: the held-out problems of one are in nothing that another trains on."""
    seen = {
        split: {tuple(sorted(problem(r))) for folder in (made, made_with_another_seed) for r in records(folder, split)} for split in SPLITS
    }
    for one in SPLITS:
        for other in SPLITS:
            assert one == other or not seen[one] & seen[other]


def test_a_seed_always_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    assert digests(make(tmp_path / "again", 0)) == digests(made)


def test_a_seed_changes_weights_and_training_data_and_nothing_else(made: Path, made_with_another_seed: Path) -> None:
    one, other = digests(made), digests(made_with_another_seed)
    assert {name for name in one if one[name] != other[name]} == {"sft.jsonl", "rl.jsonl", "model/model.safetensors"}


def test_rl_and_heldout_and_layout_repeat_no_problem(made: Path) -> None:
    for split, size in (("rl", 32 * 150), ("heldout", 512), ("layout", 256)):
        pairs = [tuple(sorted(problem(r))) for r in records(made, split)]
        assert len(pairs) == len(set(pairs)) == size


def test_every_width_is_as_frequent_in_heldout(made: Path) -> None:
    widths = Counter(len(r["prompt"][0]["content"]) // 2 for r in records(made, "heldout"))
    assert set(widths) == {2, 3, 4}
    assert max(widths.values()) - min(widths.values()) <= 1


def test_labels_to_be_rewarded_are_the_sums(made: Path) -> None:
    assert all(int(r["label"]) == sum(problem(r)) for split in ("rl", "heldout", "layout") for r in records(made, split))


def test_layout_has_no_carry(made: Path) -> None:
    assert not any(task.has_carry(problem(r)) for r in records(made, "layout"))


def test_demonstrations_cover_the_warm_up(made: Path) -> None:
    demonstrations = records(made, "sft")
    assert len(demonstrations) >= 200 * 64
    assert len({problem(r) for r in demonstrations}) > 3500


def test_the_teacher_is_right_without_carries_and_often_wrong_with_them(made: Path) -> None:
    def right(record: dict[str, Any]) -> bool:
        return bool(record["label"].rpartition(">")[2] == str(sum(problem(record))))

    easy: list[bool] = []
    hard: list[bool] = []
    for r in records(made, "sft"):
        (hard if task.has_carry(problem(r)) else easy).append(right(r))
    assert all(easy)
    assert 0.2 < sum(hard) / len(hard) < 0.7


def test_work_is_written_column_by_column() -> None:
    assert task.question((38, 954)) == "038+954"
    assert task.work((38, 954)) == "8+4+0=12,3+5+1=09,0+9+0=09>992"
    assert task.work((99, 1)) == "9+1+0=10,9+0+1=10>100"


def test_a_forgotten_carry_spoils_the_result_as_it_would() -> None:
    assert task.work((38, 954), random.Random(0), forget=1.0) == "8+4+0=12,3+5+0=08,0+9+0=09>982"


def test_both_orders_of_a_problem_share_a_bucket() -> None:
    rng = random.Random(0)
    for _ in range(200):
        a, b = rng.randrange(10**4), rng.randrange(10**4)
        assert task.bucket((a, b)) == task.bucket((b, a))


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("8+4+0=12,3+5+1=09,0+9+0=09>992", "stop", 1.0),
        ("nonsense>992", "stop", 1.0),
        ("8+4+0=12,3+5+1=09,0+9+0=09>982", "stop", 0.0),
        (">982>992", "stop", 1.0),
        (">992>", "stop", 0.0),
        (">0992", "stop", 0.0),
        (">992 ", "stop", 0.0),
        ("992", "stop", 0.0),
        ("", "stop", 0.0),
        (">992", "length", 0.0),
        (">992", "abort", 0.0),
    ],
)
def test_reward_is_for_the_exact_sum_of_a_sample_that_ended(text: str, finish_reason: str, expected: float) -> None:
    assert reward(SimpleNamespace(text=text, finish_reason=finish_reason, label="992")) == expected


def test_transformers_loads_the_tokenizer_and_one_character_is_one_token(made: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    prompt = records(made, "rl")[0]["prompt"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert text == f"<|user|>{prompt[0]['content']}<|assistant|>"
    full = text + task.work(problem({"prompt": prompt})) + "<|end|>"
    ids = tokenizer(full, add_special_tokens=False).input_ids
    assert len(ids) == len(full) - len("<|user|><|assistant|><|end|>") + 3
    assert tokenizer.decode(ids) == full
    assert ids[-1] == tokenizer.eos_token_id


def test_longest_demonstration_leaves_room_to_wander(made: Path) -> None:
    longest = max(len(r["label"]) + 1 for r in records(made, "sft"))
    assert longest <= 42 < 56


def test_transformers_loads_every_weight(made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    assert not any(report.values())
    assert sum(p.numel() for p in model.parameters()) == 448_320
    assert model.generation_config.eos_token_id == 1
    embedding = model.get_input_embeddings().weight
    assert embedding[1:].std().item() == pytest.approx(0.05, rel=0.05)
    assert not embedding[0].any()


def test_a_second_run_keeps_the_results_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = load("quickstart/quickstart.py")
    monkeypatch.setattr(quickstart.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    folder = tmp_path / "quickstart"
    for seed in range(3):
        quickstart.prepare(folder, seed, resume=False)
        (folder / "result.json").write_text(str(seed))
    quickstart.prepare(folder, 2, resume=True)
    assert [(tmp_path / name / "result.json").read_text() for name in ("quickstart-1", "quickstart-2", "quickstart")] == ["0", "1", "2"]


@pytest.mark.parametrize(("layouts", "stages"), [([0.97], 1), ([0.035, 0.96], 2), ([0.0] * 5, 5)])
def test_a_warm_up_that_fails_its_check_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layouts: list[float], stages: int) -> None:
    """Also where --warm-up-steps is given."""
    quickstart, files = load("quickstart/quickstart.py"), list[Path]()
    scores = iter(layouts)
    rows = SimpleNamespace(evaluations=lambda name: [{"mean_reward": next(scores)}])

    def run_stage(title: str, file: Path) -> None:
        files.append(file)
        (file.parent / "hf").mkdir()
        (file.parent / "hf" / "config.json").write_text(str(len(files)))

    monkeypatch.setattr(quickstart, "run_stage", run_stage)
    monkeypatch.setattr(quickstart.report, "read_report", lambda folder: rows)
    model = quickstart.warm_up(tmp_path, 0, 100)
    assert len(files) == stages
    assert model == files[-1].parent / "hf"
    assert (tmp_path / "warm-up" / "hf" / "config.json").read_text() == str(stages), "what run.yaml names is the model of the last warm-up"
    assert [yaml.safe_load(file.read_text())["rollout"]["num_rollout"] for file in files] == [100, 50, 50, 50, 50][:stages]


def test_a_stage_that_fails_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart, log = load("quickstart/quickstart.py"), tmp_path / "trainer.log"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    failed = SimpleNamespace(name="trainer", log_file=log, process=SimpleNamespace(returncode=1))
    monkeypatch.setattr(quickstart, "resolve", lambda file: None)
    monkeypatch.setattr(quickstart, "Supervisor", lambda *_, **__: SimpleNamespace(run=lambda: 1, failed=failed))
    with pytest.raises(SlimebusError, match="trainer ended with code 1") as bad:
        quickstart.run_stage("GRPO", tmp_path / "run.yaml")
    assert "line 99" in bad.value.text
    assert "line 9\n" not in bad.value.text


def test_an_interrupted_quick_start_says_how_it_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = load("quickstart/quickstart.py")
    monkeypatch.setattr(quickstart.sys, "argv", ["quickstart.py", "--run-dir", "there", "--steps", "5"])

    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart.quickstart, "main", interrupt)
    with pytest.raises(SystemExit):
        quickstart.main()
    assert "`bin/quickstart --run-dir there --steps 5 --resume` goes on" in capsys.readouterr().out.replace("\n", " ")

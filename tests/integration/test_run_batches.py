"""What a step is made of, in live runs: filtered, over-sampled, chosen by a plug-in, filled by tokens."""

import json
import re
from pathlib import Path

import pytest
from live_run import Run

pytestmark = pytest.mark.integration

WIDEST = """
import json, pathlib

def choose(groups, batch):
    with pathlib.Path(__file__).with_name("offered.jsonl").open("a") as file:
        file.write(json.dumps([batch.step, [[g.id, g.reward_std, g.staleness] for g in groups]]) + chr(10))
    if batch.step == 3:
        raise RuntimeError("not today")
    return [g.id for g in sorted(groups, key=lambda g: -g.reward_std)[: batch.num_groups]]
"""


def test_filtered_over_sampled_and_chosen_groups_fill_every_step(tmp_path: Path, task: Path) -> None:
    (tmp_path / "widest.py").write_text(WIDEST)
    with Run(
        tmp_path,
        task,
        broker__buffer_filter_path="widest.py:choose",
        rollout__dynamic_sampling_filter_path="check_reward_nonzero_std",
        rollout__over_sampling_batch_size=6,
        rollout__n_samples_per_prompt=2,
        rollout__num_rollout=8,
    ) as run:
        broker, *_ = run.start_all()
        run.complete(8)
        final = run.final_status()
        assert final["filter"]["groups"] == final["groups"]["dropped"] == final["waste"]["filtered: no reward spread"]["groups"] > 0
        assert not any("zero_variance" in reason for reason in final["counted"]), "every group that is trained has a gradient"
        assert all(row["samples_trained"] == 8 for row in run.rows("trainer"))
        offered = [json.loads(line) for line in (tmp_path / "offered.jsonl").read_text().splitlines()]
        assert [step for step, _ in offered] == list(range(8)), "asked once a step"
        assert max(staleness for _, groups in offered for _, _, staleness in groups) <= 1
        assert final["counted"]["buffer filter answers refused"] == 1
        assert "RuntimeError: not today; batch 3 is chosen first in, first out instead" in broker.text()


def test_a_run_in_which_everything_is_filtered_ends_with_a_word(tmp_path: Path, task: Path) -> None:
    (tmp_path / "same.py").write_text("def reward(response):\n    return 1.0\n")
    with Run(
        tmp_path,
        task,
        rollout__custom_rm_path="same.py:reward",
        rollout__dynamic_sampling_filter_path="check_reward_nonzero_std",
        rollout__dynamic_sampling_limit=20,
    ) as run:
        run.start("broker")
        trainer = run.start("trainer")
        trainer.expected.add(1)
        run.start("rollout", name="w1")
        assert trainer.wait() == 1
        assert re.search(r"the last 2[0-8] groups were all dropped by the dynamic sampling filter and none was kept", trainer.text())
        status = run.status()
        assert status["step"] == 0
        # The worker samples four groups, and may wait for the outcome of as many that it has sampled.
        assert 20 <= status["filter"]["in_a_row"] <= 28, "and those in flight when the last of the 20 was dropped"
        assert status["source"]["position"] <= 28, "workers stop too"


def test_a_step_of_tokens_holds_as_many_groups_as_fit(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, broker__batch_tokens=400, broker__max_staleness=2, rollout__num_rollout=8) as run:
        run.start_all()
        run.complete(8, batch_size=0)
        steps = [row for row in run.rows("broker") if "groups" in row]
        assert len(steps) == 8
        assert all(row["tokens"] <= 400 for row in steps)
        assert all(row["tokens"] > 200 for row in steps), "not half empty"
        assert [row["num_samples"] for row in run.rows("trainer")] == [row["samples"] for row in steps]
        assert max(int(lag) for row in run.rows("batches") for lag in row["lag_tokens"]) <= 2

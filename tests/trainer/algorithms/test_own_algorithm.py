"""An algorithm of one's own: one file beside the run.yaml, and nothing else is touched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimebus.bus.errors import ConfigError
from slimebus.cli.config import resolve
from trainer.model.policy import Policy
from trainer.objective.choose import algorithm_problems

FILE = '''
import numpy as np

from trainer.objective.group_rewards import per_group
from trainer.objective.plugin import PolicyGradient, TokenLoss


class Ranked(PolicyGradient):
    """Vanilla policy gradient on the rank of a reward in its group, with a bonus field and the mean ratio of the sequence."""

    aggregation = "sequence"

    class Settings(PolicyGradient.Settings, frozen=True):
        """Its own."""

        rank_scale: float = 1.0
        """[ratio] Of the advantages."""

    settings: Settings

    def needs(self):
        return {"bonus", "current_logprobs"}

    def problems(self):
        yield from super().problems()
        if self.settings.rank_scale <= 0:
            yield f"algorithm.settings.rank_scale: {self.settings.rank_scale:g}; expected above 0"

    def advantages(self, batch):
        def ranks(rewards, shares):
            return self.settings.rank_scale * (rewards.argsort().argsort() - (len(rewards) - 1) / 2)

        return per_group(batch, batch["reward"], ranks) + batch.per_token("bonus")

    def prepare(self, part):
        return {"drift": np.abs(part["current_logprobs"] - part["rollout_logprobs"])}

    def learning_rate_factor(self, part):
        return 0.5

    def loss(self, row):
        s = row.sequence_mean(row.new_logprobs - row.old_logprobs).exp()
        return TokenLoss(-s * row.advantages, {"drift": row["drift"], "sequence_ratio": s.detach()})
'''


def config_of(folder: Path, **settings: Any) -> Any:
    (folder / "ranked.py").write_text(FILE)
    lines = ["optimizer: {lr: 0.01}", "algorithm:", "  advantage_estimator: ranked.py:Ranked", f"  settings: {settings}"]
    (folder / "run.yaml").write_text("\n".join(lines))
    return resolve(folder / "run.yaml", environ={})


def with_bonus(groups: list[Any]) -> list[Any]:
    for group in groups:
        for sample in group.samples:
            sample.extras = {"bonus": np.array([0.25], np.float32)}
    return groups


def test_an_algorithm_in_one_file_is_checked_and_trains(tmp_path: Path, tied_model: Path, make_batch: Any) -> None:
    assert algorithm_problems(config_of(tmp_path, rank_scale=-1)) == ["algorithm.settings.rank_scale: -1; expected above 0"]
    (unknown,) = algorithm_problems(config_of(tmp_path, rank_scal=2))
    assert unknown.endswith("run.yaml:4: algorithm.settings.rank_scal: no setting of ranked; did you mean 'rank_scale'?")
    resolved = config_of(tmp_path, rank_scale=2)
    policy = Policy.build(resolved.config, str(tied_model), resolved.base)
    try:
        assert policy.objective.fields == {"bonus"}
        metrics = [policy.train(with_bonus(make_batch()), num_steps=2) for _ in range(3)]
    finally:
        policy.close()
    assert [step["updated"] for step in metrics] == [2, 2, 2]
    assert [step["lr"] for step in metrics] == pytest.approx([0.005] * 3)
    assert metrics[0]["drift"] == pytest.approx(metrics[0]["logprob_mismatch_mean"], rel=1e-3)  # current: of before each optimizer step
    assert metrics[2]["loss"] < metrics[0]["loss"]


def test_a_plug_in_that_fails_when_loaded_is_named(tmp_path: Path) -> None:
    resolved = config_of(tmp_path)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')\n")
    text = resolve(None, {"algorithm.advantage_estimator": f"{tmp_path}/broken.py:Mine"}, environ={})
    (problem,) = algorithm_problems(text)
    assert "broken.py failed when loaded" in problem
    assert resolved.config.algorithm.advantage_estimator == "ranked.py:Ranked"
    with pytest.raises(ConfigError, match=r"broken\.py"):
        Policy.build(text.config, "", tmp_path)

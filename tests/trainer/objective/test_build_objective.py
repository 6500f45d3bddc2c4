"""Plug-ins by name and by path, their settings, and what contradicts them."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slimebus.bus.errors import ConfigError
from slimebus.cli.commands.config import check
from slimebus.cli.commands.up import arguments_of, up
from slimebus.config import resolve
from slimebus.config.file_checks import can_check_algorithms
from slimebus.config.flags import META
from slimebus.config.load import Resolved
from trainer.algorithms.grpo import Grpo
from trainer.cli import trainer
from trainer.objective.build_objective import algorithm_problems, build_objective
from trainer.objective.plugin_settings import known_settings, plugin_names


def problems(flags: dict[str, Any], base: Path | None = None) -> str:
    resolved = resolve(None, flags, environ={})
    return "\n".join(algorithm_problems(resolved if base is None else Resolved(resolved.config, resolved.origin, base)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rollout.n_samples_per_prompt": 1}, "a group of one has advantage 0 and trains nothing; sample 2 or more"),
        ({"rollout.rollout_temperature": 0}, "greedy: all samples of a group are equal and train nothing; expected a value above 0"),
        ({"rollout.rollout_top_p": 0.9}, "rollout_top_p: 0.9 cuts"),
        ({"rollout.sampling_params": {"repetition_penalty": 1.1}}, "rollout.sampling_params.repetition_penalty: 1.1 cuts"),
        ({"rollout.rollout_top_k": 20}, "every importance ratio would be wrong"),
        (
            {"rollout.rollout_top_p": 0.9, "algorithm.use_rollout_logprobs": False, "algorithm.corrections": "tis"},
            "every importance ratio would be wrong",
        ),
    ],
)
def test_sampling_that_grpo_cannot_train_on_is_refused_with_the_reason(flags: dict[str, Any], message: str) -> None:
    assert message in problems(flags)
    without_corrections = {name: value for name, value in flags.items() if name != "algorithm.corrections"}
    assert problems(without_corrections | {"algorithm.advantage_estimator": "sft"}) == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"algorithm.advantage_estimator": "grop"}, "algorithm.advantage_estimator: no 'grop' in trainer/algorithms; did you mean 'grpo'?"),
        ({"algorithm.advantage_estimator": "gae"}, "or your own by import path, file.py:Class. Here: --advantage-estimator ppo"),
        ({"algorithm.corrections": "tiss"}, "algorithm.corrections: no 'tiss' in trainer/corrections; did you mean 'tis'?"),
        ({"algorithm.corrections": "tis,tis"}, "tis is named twice"),
        ({"algorithm.advantage_estimator": "no.such:Thing"}, "cannot import no"),
        ({"algorithm.advantage_estimator": "json:dumps"}, "json:dumps is no class that derives from trainer.objective.plugin.Algorithm"),
        ({"algorithm.settings.eps_clp": 1}, "--eps-clp: algorithm.settings.eps_clp: no setting of grpo; did you mean 'eps_clip'?"),
        ({"algorithm.settings.tis_clip": 1}, "algorithm.settings.tis_clip: no setting of grpo; it belongs to tis"),
        ({"algorithm.settings.eps_clip": -1}, "--eps-clip: algorithm.settings.eps_clip: got -1; expected a number >= 0"),
        ({"algorithm.settings.eps_clip_c": 0.5}, "eps_clip_c: 0.5; the dual clip would bound the loss where the ratio is 1"),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_loss_coef": 0.1}, "kl_coef: 0.1 puts the KL in the reward"),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_loss_type": "unbiased"}, "unbiased is a term of the loss"),
        ({"algorithm.kl_loss_coef": 0.1, "algorithm.kl_loss_type": "k1"}, "the gradient of k1 in the loss has no reference in it and is 0"),
        ({"algorithm.kl_loss_type": "k2"}, "kl_loss_type: k2 of a KL with coefficient 0; set kl_loss_coef or kl_coef, or remove it"),
        ({"algorithm.ref_update_interval": 5}, "algorithm.ref_update_interval: 5, but no reference model is held"),
        ({"algorithm.advantage_estimator": "precomputed", "algorithm.kl_coef": 0.1}, "kl_coef: 0.1 is a part of rewards, and precomputed"),
        (
            {"algorithm.advantage_estimator": "sft", "algorithm.kl_loss_coef": 0.1, "algorithm.kl_loss_type": "unbiased"},
            "algorithm.kl_loss_type: unbiased, but sft trains on demonstrations",
        ),
        (
            {
                **{"rollout.rollout_top_p": 0.9, "algorithm.use_rollout_logprobs": False},
                **{"algorithm.kl_loss_coef": 0.1, "algorithm.kl_loss_type": "unbiased"},
            },
            "every importance ratio would be wrong",
        ),
        (
            {"algorithm.advantage_estimator": "sft", "algorithm.corrections": "tis"},
            "algorithm.corrections: ['tis'], but sft trains on demonstrations",
        ),
    ],
)
def test_what_the_plug_ins_cannot_do_is_refused_with_the_reason(flags: dict[str, Any], message: str) -> None:
    assert message in problems(flags)


def test_a_cut_distribution_is_allowed_where_the_loss_reads_no_rollout_logprobs() -> None:
    assert problems({"rollout.rollout_top_p": 0.9, "algorithm.use_rollout_logprobs": False}) == ""


def test_the_truncated_weight_needs_no_recomputed_logprobs() -> None:
    assert problems({"algorithm.corrections": "tis", "algorithm.use_rollout_logprobs": True}) == ""


def test_settings_go_to_the_plug_in_that_has_them() -> None:
    flags = {"algorithm.corrections": "tis", "algorithm.settings.tis_clip": 3, "algorithm.settings.eps_clip": 0.1}
    flags |= {"algorithm.use_rollout_logprobs": False, "rollout.num_steps_per_rollout": 2}
    objective = build_objective(resolve(None, flags, environ={}).config)
    assert objective.corrections[0].settings.tis_clip == 3.0  # type: ignore[attr-defined]
    assert isinstance(objective.algorithm, Grpo)
    assert objective.algorithm.settings.eps_clip == 0.1


def test_settings_read_from_the_source_are_those_of_the_classes() -> None:
    by_source = {name for name, owners in known_settings().items() if "grpo" in owners}
    assert by_source == set(Grpo.Settings.__struct_fields__)
    assert {"grpo", "sft"} <= set(plugin_names("algorithms"))


@pytest.mark.parametrize("flag", ["--eps-clip", "--algorithm-eps-clip"])
def test_a_setting_is_a_flag_of_the_trainer(flag: str) -> None:
    with trainer.make_context("trainer", [flag, "0.1"]) as ctx:
        assert ctx.meta[META] == {"algorithm.settings.eps_clip": "0.1"}


def test_up_hands_settings_on_to_its_children_and_check_reads_them() -> None:
    words = arguments_of(None, {"algorithm.settings.eps_clip": "0.1", "algorithm.corrections": "tis"})
    assert words == ["--algorithm-eps-clip", "0.1", "--corrections", "tis"]
    for command in (up, check):
        with command.make_context("x", ["--eps-clip", "0.1"]) as ctx:
            assert ctx.meta[META] == {"algorithm.settings.eps_clip": "0.1"}


def test_every_setting_is_in_the_document() -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    assert not [name for name in known_settings() if f"`{name}`" not in page]


def test_config_check_says_where_it_cannot_check_algorithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: {settings: {eps_clp: 0.1}}\n")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    assert not can_check_algorithms()
    told = CliRunner().invoke(check, [str(file)])
    assert "eps_clp" not in str(told.exception)
    monkeypatch.setattr("slimebus.cli.commands.config.file_problems", lambda resolved: [])
    told = CliRunner().invoke(check, [str(file)])
    assert told.exit_code == 0
    assert "section algorithm: its plug-ins were not checked, as torch or the trainer is not installed here" in told.output


def test_config_check_finds_what_the_algorithm_refuses(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm:\n  settings: {eps_clp: 0.1}\nrollout: {n_samples_per_prompt: 1}\n")
    refused = CliRunner().invoke(check, [str(file)])
    assert isinstance(refused.exception, ConfigError)
    assert f"{file}:2: algorithm.settings.eps_clp: no setting of grpo; did you mean 'eps_clip'?" in refused.exception.text
    assert "a group of one has advantage 0" in refused.exception.text


def test_settings_that_are_no_struct_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from trainer.objective.plugin import Correction\n\n\nclass Own(Correction):\n    class Settings:\n        cap = 1.0\n"
    )
    found = problems({"algorithm.corrections": "own.py:Own"}, tmp_path)
    assert "the Settings of own.py:Own derive from no Settings: class Settings(Correction.Settings, frozen=True)" in found

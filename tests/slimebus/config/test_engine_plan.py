"""Which GPUs, models and arguments the processes of one machine get."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimebus.bus.errors import ConfigError, UsageError
from slimebus.config import resolve
from slimebus.config.engine_plan import engine_specs, gpus_per_engine, placement
from slimebus.config.field_rules import rule_problems
from slimebus.config.schema import EngineConfig, RunConfig, TrainerConfig
from slimebus.process import supervisor
from slimebus.process.launch import ChildProcess, ProcessGroup
from slimebus.process.supervisor import start_processes

RECIPE = Path(__file__).resolve().parents[3] / "configs" / "gsm8k-qwen3-4b-8gpu" / "run.yaml"


def config(trainer: list[int] | None = None, engine: list[int] | None = None, ranks: int = 1, **sglang: Any) -> RunConfig:
    return RunConfig(trainer=TrainerConfig(gpus=trainer or [], nproc_per_node=ranks), engine=EngineConfig(gpus=engine or []), sglang=sglang)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[str], Any]]:
    """Processes that were to be started: their arguments and environment, by role."""
    found: dict[str, tuple[list[str], Any]] = {}

    def note(group: ProcessGroup, role: str, arguments: list[str], environment: Any = None) -> ChildProcess:
        found[role] = (arguments, environment)
        return None  # type: ignore[return-value]

    monkeypatch.setattr(supervisor.ProcessGroup, "start", note)
    return found


def test_the_recipe_puts_four_ranks_and_two_engines_on_eight_gpus(tmp_path: Path, started: dict[str, tuple[list[str], Any]]) -> None:
    resolved = resolve(RECIPE, {"broker.bind": "tcp://127.0.0.1:0"}, {})
    start_processes(ProcessGroup(tmp_path), resolved, [str(RECIPE)], 1, {})
    assert started["trainer"][1] == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert started["rollout"][1] == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert not started["broker"][1]
    specs = engine_specs(resolved.config, Path("model"), Path())
    assert [(spec.gpus, spec.suffix) for spec in specs] == [((4, 5), "-1"), ((6, 7), "-2")]


def test_workers_and_a_critic_share_what_is_there_and_flags_are_replaced(tmp_path: Path, started: dict[str, tuple[list[str], Any]]) -> None:
    flags = {"broker.bind": "tcp://127.0.0.1:0", "engine.gpus": "4,5,6,7", "trainer.gpus": "0,1"}
    words = ["--engine-gpus", "4,5,6,7", "--seed", "3", "--trainer-gpus", "0,1"]
    start_processes(ProcessGroup(tmp_path), resolve(None, flags, {}), words, 2, {"critic": ["trainer", "--role", "critic"]})
    seen = {role: environment["CUDA_VISIBLE_DEVICES"] for role, (_, environment) in started.items() if environment}
    assert seen == {"trainer": "0", "critic": "1", "rollout": "4,5", "rollout-2": "6,7"}
    arguments = started["rollout-2"][0]
    assert [arguments[i + 1] for i, word in enumerate(arguments) if word == "--engine-gpus"] == ["6,7"]
    assert resolve(None, {"engine.gpus": arguments[arguments.index("--engine-gpus") + 1]}, {}).config.engine.gpus == [6, 7]


def test_gpus_that_do_not_go_round_are_refused() -> None:
    with pytest.raises(UsageError, match=r"engine.gpus: 4 GPUs do not divide among 3 workers"):
        placement(config(engine=[0, 1, 2, 3]), ["trainer", "rollout", "rollout-2", "rollout-3"])
    with pytest.raises(UsageError, match=r"trainer.gpus: 2 GPUs for 2 ranks each of trainer and critic"):
        placement(config([0, 1], ranks=2), ["trainer", "critic", "rollout"])
    assert placement(config(engine=[0, 1, 2]), ["trainer", "teacher", "rollout"]) == {"trainer": (), "teacher": (2,), "rollout": (0, 1)}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (config([0, 1], [1, 2], ranks=2), "trainer.gpus and engine.gpus both have [1]; a GPU trains or samples"),
        (config([0, 1, 2], ranks=2), "trainer.gpus: 3 GPUs for trainer.nproc_per_node 2; give each rank one"),
        (config(engine=[0, 0]), "engine.gpus: [0, 0] names a GPU twice"),
        (
            config(engine=[0, 1, 2], **{"tp-size": 2}),
            "engine.gpus: 3 GPUs do not divide into engines of 2 (sglang: tp_size x pp_size x dp_size)",
        ),
    ],
)
def test_gpus_are_checked_against_each_other(given: RunConfig, problem: str) -> None:
    assert problem in rule_problems(given)


def test_an_engine_takes_the_gpus_that_sglang_counts() -> None:
    assert gpus_per_engine({"tp-size": 2, "pipeline_parallel_size": 3, "dp": 2}) == 12
    assert gpus_per_engine({"tp": 4, "dp_size": 4, "enable-dp-attention": True}) == 4


MODELS = {
    "sglang": [
        {"name": "actor", "server_groups": [{"num_gpus": 4, "num_gpus_per_engine": 2, "overrides": {"mem-fraction-static": 0.7}}]},
        {"name": "judge", "model_path": "judge", "server_groups": [{"num_gpus": 1}]},
    ]
}


def test_several_models_are_started_with_their_own_gpus_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(MODELS))
    given = RunConfig(engine=EngineConfig(sglang_config="models.yaml"), sglang={"log-level": "warning"})
    first, second, judge = engine_specs(given, tmp_path / "policy", tmp_path)
    assert (first.gpus, second.gpus, judge.gpus) == ((3, 4), (5, 6), (7,))
    assert first.arguments == {"log-level": "warning", "tp_size": 2, "mem-fraction-static": 0.7}
    assert [(one.model, one.directory.name, one.is_frozen) for one in (first, judge)] == [
        ("actor", "policy", False),
        ("judge", "judge", True),
    ]
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(ConfigError, match=r"engine.gpus: 2 GPUs for a worker, its engines need 5"):
        engine_specs(given, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ([{"name": "a", "model_path": "x", "server_groups": [{"num_gpus": 1}]}], "one of them update_weights: true, the policy"),
        ([{"name": "a", "server_groups": [{"num_gpus": 3, "num_gpus_per_engine": 2}]}], "a: num_gpus 3 is no multiple of 2 GPUs an engine"),
        ([{"name": "a", "server_groups": [{"num_gpus": 1, "worker_typ": "x"}]}], "unknown field `worker_typ`"),
        ([{"name": "a", "server_groups": [{"num_gpus": 1, "worker_type": "prefill"}]}], "Invalid enum value 'prefill'"),
    ],
)
def test_a_wrong_file_of_models_is_named(tmp_path: Path, models: list[Any], problem: str) -> None:
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"sglang": models}))
    with pytest.raises(ConfigError, match=problem):
        engine_specs(RunConfig(engine=EngineConfig(sglang_config="models.yaml")), tmp_path, tmp_path)

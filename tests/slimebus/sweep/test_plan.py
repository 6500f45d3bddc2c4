from pathlib import Path
from typing import Any

import pytest
import yaml

from slimebus.bus.errors import ConfigError
from slimebus.cli.commands.up import arguments_of
from slimebus.config import resolve
from slimebus.sweep.plan import Sweep, load

ROOT = Path(__file__).parents[3]


def plan(folder: Path, **tree: Any) -> Sweep:
    (folder / "run.yaml").write_text("name: base\nbroker: {max_staleness: 1}\n")
    (folder / "s.yaml").write_text(yaml.safe_dump({"run": "run.yaml", "sweep_dir": str(folder / "out"), **tree}, sort_keys=False))
    return load(folder / "s.yaml")


def test_a_grid_is_every_combination_for_each_seed_and_the_first_seed_goes_first(tmp_path: Path) -> None:
    sweep = plan(
        tmp_path,
        set={"rollout.num_rollout": 7},
        grid={
            "broker.max_staleness": [0, 2],
            "how": {"clip": {}, "big lr": {"optimizer.lr": 0.5, "algorithm.corrections": ["tis", "opsm"]}},
        },
        seeds=[3, 5],
    )
    assert [trial.name for trial in sweep.trials] == [
        f"max_staleness={eta},how={how},seed={seed}" for seed in (3, 5) for eta in (0, 2) for how in ("clip", "big-lr")
    ]
    assert sweep.trials[3].condition == {"broker.max_staleness": "2", "how": "big lr"}
    arguments = arguments_of(None, sweep.flags(sweep.trials[3]))
    assert arguments[arguments.index("--corrections") + 1] == "tis,opsm"
    config = resolve(sweep.base, sweep.flags(sweep.trials[3])).config
    assert (config.broker.max_staleness, config.optimizer.lr, config.seed, config.rollout.num_rollout) == (2, 0.5, 3, 7)
    assert config.algorithm.corrections == ["tis", "opsm"]
    assert config.run_dir == str(tmp_path / "out" / "trials" / sweep.trials[3].name)


def test_cases_are_taken_one_by_one_and_join_the_grid(tmp_path: Path) -> None:
    sweep = plan(
        tmp_path,
        cases=[{"name": "a", "optimizer.lr": 1.0}, {"optimizer.lr": 2.0, "broker.max_staleness": 4}],
        grid={"data.rollout_shuffle": [True]},
    )
    assert [trial.condition["case"] for trial in sweep.trials] == ["a", "lr=2, max_staleness=4"]
    assert sweep.trials[1].options == {"data.rollout_shuffle": True, "optimizer.lr": 2.0, "broker.max_staleness": 4}


def test_settings_of_open_maps_keep_their_types_on_the_command_line(tmp_path: Path) -> None:
    sweep = plan(tmp_path, set={"algorithm.settings.eps_clip": 0.1, "megatron.swiglu": False, "algorithm.corrections": []})
    config = resolve(sweep.base, sweep.flags(sweep.trials[0])).config
    assert config.algorithm.settings == {"eps_clip": 0.1}
    assert config.megatron == {"swiglu": False}
    assert config.algorithm.corrections == []


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"grid": {"broker.max_stalenes": [0, 1]}}, "no option 'broker.max_stalenes'; did you mean 'broker.max_staleness'"),
        ({"grid": {"max_staleness": [0, 1]}}, "did you mean 'broker.max_staleness'"),
        ({"set": {"optimiser.lr": 1.0}}, "did you mean 'optimizer.lr'"),
        ({"grid": {"optimizer.lr": [1.0, "much"]}}, "optimizer.lr: got 'much'; expected a number"),
        ({"grid": {"optimizer.lr": 1.0}}, "grid.optimizer.lr: expected a list of values"),
        ({"sets": {}}, "unknown key 'sets'; did you mean 'set'"),
        ({"set": {"seed": 1}}, "seed: the sweep sets it for each trial"),
        ({"axis": "eta", "grid": {"optimizer.lr": [1.0]}}, "axis: no 'eta' in grid"),
        ({"gpus": [0, 1, 2], "parallel": 2}, "gpus: 3 cannot be dealt evenly to 2 trials"),
        ({"seeds": []}, "seeds: none"),
        ({"score": "foo"}, "score: 'foo' is no evaluation of"),
        ({"cases": [{"optimizer.lr": 1.0, "name": "a b"}, {"optimizer.lr": 2.0, "name": "a*b"}]}, "two trials are called case=a-b,seed=0"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(tmp_path: Path, tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path, **tree)
    assert words in refused.value.text
    assert str(tmp_path) in refused.value.text


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_sweep_of_the_recipes_is_right(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    if "run" in tree:
        assert load(file).trials

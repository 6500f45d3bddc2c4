"""Tensor, pipeline, context and data parallelism give what one rank gives, on gloo, in real processes; families what transformers has."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from model_families import CASES, save_case
from tiny_model import save_model

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2-overlap": (2, {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2-pp2-dp2": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "pp2-uneven": (2, {"pipeline_model_parallel_size": 2, "megatron": {"num_layers_in_first_pipeline_stage": 1}}),
    "recompute-selective": (1, {"megatron": {"recompute_granularity": "selective", "recompute_modules": "core_attn,mlp"}}),
    "recompute": (1, {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}),
}


class Ranks:
    """The process of layout_rank.py, which forks the ranks of one layout after the other."""

    def __init__(self, log: Path) -> None:
        self.log = log
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("layout_rank.py"))]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )

    def run(self, model: Path, out: Path, ranks: int, layout: dict, *, exit_code: int = 0, **more: object) -> dict:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ranks": ranks, "model": str(model), "out": str(out), "layout": layout, **more}) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{[exit_code] * ranks}\n", self.log.read_text()[-4000:]
        return json.loads(out.read_text()) | {"hf": str(out.with_suffix(".hf"))}

    def close(self) -> None:
        """End it and its ranks, also where they still wait for one another."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with contextlib.closing(Ranks(tmp_path_factory.mktemp("ranks") / "stderr")) as process:
        yield process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, tied embeddings, and a vocabulary that two ranks share evenly."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"vocab_size": 38, "num_hidden_layers": 4, "head_dim": 8, "initializer_range": 0.2, "pad_token_id": None}
    save_model(folder, seed=5, dtype="float32", tie_word_embeddings=True, **shape)
    return folder


@pytest.fixture(scope="module")
def trained(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """What a layout saw, with each kind of loss; its checkpoint is under "checkpoint". Trained at the first call."""

    @cache
    def of(name: str) -> dict:
        out = tmp_path_factory.mktemp("trained") / "out.json"
        return ranks.run(model, out, *LAYOUTS[name], losses=True) | {"checkpoint": str(out.with_suffix(".checkpoint"))}

    return of


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_layout_trains_as_one_rank_does(name: str, trained: Callable[[str], dict]):
    num_ranks, _ = LAYOUTS[name]
    one_rank, got = trained("one"), trained(name)
    assert got["exported"] == one_rank["exported"]
    assert_owned_once(got, ranks=num_ranks)
    assert got["logprobs"] == pytest.approx(one_rank["logprobs"], rel=1e-5)
    of_a_step = {"loss", "grad_norm", "tokens_trained"}
    in_all = {*of_a_step, "entropy", "approx_kl", "logprob_mismatch_mean", "logprob_mismatch_max", "tis"}
    assert_metrics(got["metrics"], one_rank["metrics"], in_all)
    for aggregation, reference in one_rank["aggregations"].items():  # a loss that knows sequences, each way to make one number of it
        assert_metrics([got["aggregations"][aggregation]], [reference], {*of_a_step, "ratio"})
    assert got["mismatch"] == pytest.approx(one_rank["mismatch"], rel=1e-4)  # under version 0, three steps ago
    assert got["mismatch"]["mismatch/lag"] == 3
    for correction, reference in one_rank["corrections"].items():  # what chooses over the whole step; metrics by lag
        mine = got["corrections"][correction]
        assert mine.keys() == reference.keys()
        own = {"m2po_dropped", "vcpo_weight", "tis"} & mine.keys()
        assert_metrics([mine], [reference], {*of_a_step, *own, "lag/3-4/ess_sequence", "lag/all/m2"})
        assert mine["lr"] == pytest.approx(reference["lr"], rel=1e-4, abs=0)
    assert one_rank["corrections"]["vcpo"]["lr"] < 0.9 * one_rank["corrections"]["tis"]["lr"]
    assert 0 < one_rank["corrections"]["m2po"]["m2po_dropped"] < 1
    assert got["after_load"] == got["after_save"]
    assert_equal_weights(got, one_rank)


@pytest.fixture(scope="module")
def one_critic(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("critic") / "out.json"
    return ranks.run(model, out, 1, {}, critic=True), out.with_suffix(".checkpoint")


@pytest.mark.parametrize("name", ["tp2-sp", "pp2", "cp2", "dp2-overlap"])
def test_a_critic_learns_as_on_one_rank_and_goes_on_in_another_layout(
    name: str, ranks: Ranks, model: Path, one_critic: tuple[dict, Path], tmp_path: Path
):
    num_ranks, layout = LAYOUTS[name]
    one, checkpoint = one_critic
    got = ranks.run(model, tmp_path / "out.json", num_ranks, layout, critic=True)
    resumed = ranks.run(model, tmp_path / "resumed.json", num_ranks, layout, critic=True, resume=str(checkpoint))
    names = {"loss", "grad_norm", "value", "return", "explained_variance", "tokens_trained"}
    expected = [*one["metrics"], one["after"], one["after"]]
    assert_metrics([*got["metrics"], got["after"], resumed["after"]], expected, names, rel=1e-3, within=1e-5)
    assert one["after"]["value"] != 0


def test_experts_are_owned_by_the_ranks_that_train_them(ranks: Ranks, tmp_path: Path):
    """Two ranks with half of the experts each train as one does, and each owns its half."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=38,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    one = ranks.run(tmp_path / "model", tmp_path / "one.json", 1, {})
    layout = {"megatron": {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}}
    two = ranks.run(tmp_path / "model", tmp_path / "two.json", 2, layout)
    assert two["exported"] == one["exported"]
    assert two["logprobs"] == pytest.approx(one["logprobs"], rel=1e-5)
    assert_owned_once(two, ranks=2)
    assert {name.split(".experts.")[1][0] for name in two["owned"][1] if ".experts." in name} == {"2", "3"}
    wide = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "megatron": {"expert_model_parallel_size": 2}}
    both = ranks.run(tmp_path / "model", tmp_path / "both.json", 2, wide)
    assert both["exported"] == one["exported"]
    for split in (two, both):
        assert_equal_weights(split, one)
        assert_metrics(split["metrics"], one["metrics"], {"loss", "grad_norm", "entropy"})
    for checkpoint, run, loaded in (("two", two, (1, {})), ("one", one, (2, layout))):
        after = ranks.run(tmp_path / "model", tmp_path / "after.json", *loaded, resume=str(tmp_path / f"{checkpoint}.checkpoint"))
        assert_metrics([after["metrics"]], [run["after_save"]], RESUMED)


@pytest.fixture(scope="module")
def one_in_bfloat16(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return ranks.run(model, tmp_path_factory.mktemp("bfloat16") / "one.json", 1, {"params_dtype": "bfloat16"})


@pytest.mark.parametrize("name", ["dp2-overlap", "tp2-sp", "pp2", "cp2"])
def test_bfloat16_has_fp32_masters_in_every_layout(name: str, ranks: Ranks, model: Path, one_in_bfloat16: dict, tmp_path: Path):
    """Weights of 8 bits of mantissa: gradients differ by their rounding, and after three steps a weight by one in its last place."""
    one, (num_ranks, layout) = one_in_bfloat16, LAYOUTS[name]
    two = ranks.run(model, tmp_path / "two.json", num_ranks, layout | {"params_dtype": "bfloat16"})
    assert two["exported"] == one["exported"]
    assert_metrics(two["metrics"], one["metrics"], {"loss"}, rel=1e-3, within=4e-3)
    assert_metrics(two["metrics"], one["metrics"], {"grad_norm"}, rel=2e-2, within=0)
    assert_equal_weights(two, one, within=8e-3)


@pytest.mark.parametrize(("saved", "loaded"), [("dp2", "tp2-pp2"), ("dp2", "one"), ("tp2", "dp2")])
def test_a_checkpoint_of_one_layout_is_loaded_in_another(
    saved: str, loaded: str, ranks: Ranks, model: Path, trained: Callable[[str], dict], tmp_path: Path
):
    before = trained(saved)
    after = ranks.run(model, tmp_path / "loaded.json", *LAYOUTS[loaded], resume=before["checkpoint"])
    assert after["step"] == 3
    assert_metrics([after["metrics"]], [before["after_save"]], RESUMED)
    assert "dropout goes on from the seed, not from its random state" in ranks.log.read_text()


def test_ranks_that_share_no_disk_save_and_resume(ranks: Ranks, model: Path, tmp_path: Path):
    """Each has its own part alone; what only another has is sent."""
    before = ranks.run(model, tmp_path / "saved.json", 2, {}, own_disks=True)
    parts = [tmp_path / f"saved.checkpoint-{rank}" / "step_00000003" for rank in range(2)]
    assert [sorted(path.name for path in part.iterdir()) for part in parts] == [
        [f"rank_0000{rank}.safetensors", "state.json"] for rank in range(2)
    ]
    after = ranks.run(model, tmp_path / "loaded.json", 2, {}, resume=str(tmp_path / "saved.checkpoint"), own_disks=True)
    assert after["metrics"] == before["after_save"]


def test_kill_9_in_the_middle_of_a_save_loses_nothing_but_that_save(ranks: Ranks, model: Path, tmp_path: Path):
    before = ranks.run(model, tmp_path / "saved.json", 1, {}, killed=True, exit_code=-signal.SIGKILL)
    assert sorted(path.name for path in (tmp_path / "saved.checkpoint").iterdir()) == ["latest", "step_00000003", "step_00000004.part"]
    after = ranks.run(model, tmp_path / "loaded.json", 1, {}, resume=str(tmp_path / "saved.checkpoint"))
    assert (after["step"], after["metrics"]) == (3, before["after_save"])


def test_a_disk_that_is_full_on_one_rank_is_told_on_all_and_the_checkpoint_before_stays(ranks: Ranks, model: Path, tmp_path: Path):
    got = ranks.run(model, tmp_path / "saved.json", 2, {}, full_disk="1")
    folder = tmp_path / "saved.checkpoint"
    assert got["failed"] == [f"checkpoint of step 4: rank 1: [Errno 28] No space left on device ({folder})"] * 2
    assert got["after_load"] == got["after_save"], "of step 3"
    assert (folder / "latest").read_text().strip() == "step_00000003"


RESUMED = {"loss", "grad_norm", "entropy", "approx_kl", "lr"}


def assert_metrics(mine: list[dict], reference: list[dict], names: set[str], *, rel: float = 1e-4, within: float = 1e-6) -> None:
    """Of each step, as far as two layouts may differ."""
    for one, other in zip(mine, reference, strict=True):
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=rel, abs=within)


def assert_equal_weights(got: dict, reference: dict, within: float = 1e-4) -> None:
    """The exported weights of both after their last step, each tensor by the norm of the difference."""
    from safetensors.torch import load_file

    mine, other = (load_file(Path(run["hf"]) / "model.safetensors") for run in (got, reference))
    assert mine.keys() == other.keys() == got["exported"].keys()
    far = {name: float((mine[name] - other[name]).float().norm() / other[name].float().norm()) for name in mine}
    assert max(far.values()) < within, far


def assert_owned_once(got: dict, *, ranks: int) -> None:
    """Every tensor, whole and bit for bit, on one rank, and each rank has some."""
    assert len(got["owned"]) == ranks
    assert got["owners"] == [rank for rank, owned in enumerate(got["owned"]) if owned]
    assert len(got["owners"]) == ranks
    assert sum(map(len, got["owned"])) == len(got["exported"])
    assert {name: digest for owned in got["owned"] for name, digest in owned.items()} == got["exported"]


def test_ranks_with_other_settings_are_refused_on_each_of_them(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """Whoever started them, as torchrun compares nothing."""
    out = tmp_path / "out"
    out.write_text("{}")
    ranks.run(model, out, 2, {}, exit_code=1, lrs={"1": 1e-4})
    assert ranks.log.read_text().count("ConfigError: rank 1 has optimizer.lr 0.0001, rank 0 0.001; start every rank with the same") == 2


# --- families ---

FAMILIES = [name for name in CASES if "-" not in name and name != "kimi_k2"]  # it has deepseek_v3's map
TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
"""Half of them on each rank; experts that ranks share (expert tensor parallelism) need NCCL."""
FAMILY_LAYOUTS = {
    "tensors_and_experts": {name: {**TENSORS, "megatron": EXPERTS if "num_experts_per_tok" in CASES[name][1] else {}} for name in FAMILIES},
    "stages": {name: {"pipeline_model_parallel_size": 2} for name in FAMILIES},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("families")
    return {name: (folder / name, save_case(folder / name, name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def seen(ranks: Ranks, models: dict, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the ranks of each layout saw of all models, which they load one after the other."""
    out, found = tmp_path_factory.mktemp("seen"), {}
    for kind, layouts in FAMILY_LAYOUTS.items():
        placed = {name: (str(models[name][0]), layout) for name, layout in layouts.items()}
        found[kind] = ranks.run(out, out / kind, 2, {}, models=placed)
    return found


@pytest.mark.parametrize("kind", FAMILY_LAYOUTS)
def test_families_on_two_ranks_are_what_transformers_has(kind, models, seen):
    import torch

    for name, (_, expected) in models.items():
        of_model = seen[kind][name]
        assert not of_model["changed"], name
        for tokens, temperature, logprobs in zip(seen[kind]["tokens"], seen[kind]["temperatures"], of_model["logprobs"], strict=True):
            ids = torch.tensor(tokens)[None]
            with torch.no_grad():
                logits = expected(ids).logits[0, :-1] / temperature
            want = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs[1:]), want, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")

"""What only a GPU or 64 of them would show, on fake ones: devices, host reads, who owns what, memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from model_families import BASE, CASES

from trainer.objective.plugin_settings import plugin_names

SCRIPT = Path(__file__).with_name("fake_gpu.py")
DENSE = ("qwen3", "glm4")
RANKS, TP, PP, EP = 64, 4, 2, 4


def save_config(folder: Path, name: str, **changes: Any) -> Any:
    family, own = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **own, **changes})
    config.save_pretrained(folder)
    return config


def run(*arguments: object) -> Any:
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders = [tmp_path_factory.mktemp(name) for name in DENSE]
    for folder, name in zip(folders, DENSE, strict=True):
        save_config(folder, name)
    return run("step", *folders)


def test_a_step_is_all_on_the_device_and_the_host_reads_nothing_of_it(found: Any) -> None:
    """A mixture of devices and a value read by the host raise where they happen; where tensors ended is seen here."""
    device = found["device"]
    assert device == "gpu:0"
    assert len(found["steps"]) == len(DENSE) + 1, "a policy of each, and a critic"
    for step in found["steps"].values():
        assert step["rows"] > 1
        assert step["on"] == [device]
        assert step["gradients_on"] == [f"{device} torch.bfloat16"]


def test_the_loss_of_every_algorithm_and_correction_stays_on_the_device(found: Any) -> None:
    assert found["losses"] == {name: [found["device"]] for name in [*plugin_names("algorithms"), *plugin_names("corrections")]}


def test_64_ranks_hold_every_weight_of_the_model_in_equal_parts(tmp_path: Path) -> None:
    """Tensor 4 x pipeline 2 x expert 4: names and shapes are transformers' own, each is there, and memory is what the layout says."""
    import torch

    layers, experts, hidden = 4, 8, 64
    shape = {"num_hidden_layers": layers, "num_experts": experts, "num_key_value_heads": 4, "vocab_size": 132}
    config = save_config(tmp_path, "qwen3_moe", **shape)
    found = run("ranks", tmp_path)
    held = [{name: tuple(size) for name, size in of_rank.items()} for of_rank in found["held"]]
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    total = sum(p.numel() for p in model.parameters())
    wanted = {name for name, _ in model.named_parameters() if ".experts." not in name}
    parts = [f"mlp.experts.{j}.{part}_proj.weight" for j in range(experts) for part in ("gate", "up", "down")]
    expert = {f"model.layers.{i}.{part}" for i in range(layers) for part in parts}
    assert set().union(*held) == wanted | expert
    assert all(of_rank[name] == tuple(p.shape) for name, p in model.named_parameters() for of_rank in held if name in of_rank)

    owners = {name: [rank for rank, of_rank in enumerate(held) if name in of_rank] for name in wanted | expert}
    assert all(len(ranks) == 1 for ranks in owners.values()), "two ranks would serve one tensor"
    assert len({rank for (rank,) in owners.values()}) > RANKS // 2, "a few ranks would publish all"
    first_stage, last_stage = (range(i * RANKS // PP, (i + 1) * RANKS // PP) for i in range(PP))
    for name, (rank,) in owners.items():
        layer = name.split(".")[2] if ".layers." in name else None
        is_first = name == "model.embed_tokens.weight" or (layer is not None and int(layer) < layers // PP)
        assert rank in (first_stage if is_first else last_stage), name
        if name in expert:
            assert rank % EP == int(name.split(".")[5]) // (experts // EP), name

    whole = 1 + 2 * layers  # norms of the hidden size, whole on each tensor rank
    heads = 2 * layers * hidden // config.num_attention_heads  # norms of queries and keys
    router = layers * experts * hidden
    of_experts = layers * experts * 3 * hidden * config.moe_intermediate_size
    replicated = whole * hidden + heads + router
    per_replica = (total - of_experts - replicated) + TP * replicated + TP * of_experts // EP
    assert sum(found["bytes"]) == 2 * per_replica * RANKS // (TP * PP)
    assert max(found["bytes"]) - min(found["bytes"]) == 2 * hidden, "the last stage has the last norm"

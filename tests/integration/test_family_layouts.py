"""Every family on two ranks, by tensors, experts and stages, is what transformers has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_families import CASES, save_case

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FAMILIES = [name for name in CASES if "-" not in name and name != "kimi_k2"]  # it has deepseek_v3's map
TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
"""Half of them on each rank; experts that ranks share (expert tensor parallelism) need NCCL."""
LAYOUTS = {
    "tensors_and_experts": {name: {**TENSORS, "megatron": EXPERTS if "num_experts_per_tok" in CASES[name][1] else {}} for name in FAMILIES},
    "stages": {name: {"pipeline_model_parallel_size": 2} for name in FAMILIES},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.nn.Module]]:
    folder = tmp_path_factory.mktemp("families")
    return {name: (folder / name, save_case(folder / name, name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def seen(models: dict, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the ranks of each layout saw of all models, which they load one after the other."""
    out, asked = tmp_path_factory.mktemp("seen"), []
    for kind, layouts in LAYOUTS.items():
        placed = {name: (str(models[name][0]), layout) for name, layout in layouts.items()}
        asked.append(json.dumps({"ranks": 2, "out": str(out / kind), "models": placed}) + "\n")
    command = [sys.executable, str(Path(__file__).with_name("layout_rank.py"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input="".join(asked), env=environment, text=True, capture_output=True, timeout=300)
    assert done.stdout == "[0, 0]\n" * len(LAYOUTS), done.stderr[-4000:]
    return {kind: json.loads((out / kind).read_text()) for kind in LAYOUTS}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_families_on_two_ranks_are_what_transformers_has(kind, models, seen):
    for name, (_, expected) in models.items():
        of_model = seen[kind][name]
        assert not of_model["changed"], name
        for tokens, temperature, logprobs in zip(seen[kind]["tokens"], seen[kind]["temperatures"], of_model["logprobs"], strict=True):
            ids = torch.tensor(tokens)[None]
            with torch.no_grad():
                logits = expected(ids).logits[0, :-1] / temperature
            want = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs[1:]), want, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")

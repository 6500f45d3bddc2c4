"""What only a GPU shows; without one these are skipped. `bin/gpu-check` runs them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import save_model

from trainer.compat import cpu_compat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_logprobs_and_a_step_in_bf16_are_near_those_of_transformers_in_fp32(tmp_path: Path) -> None:
    cpu_compat.import_megatron()
    from slimebus.bus.samples import Sample
    from slimebus.cli.config import RunConfig
    from slimebus.cli.config.schema import OptimizerConfig
    from trainer.batches.batch import Group
    from trainer.model.policy import Policy

    reference = save_model(tmp_path / "model", seed=1)
    tokens = np.arange(1, 40, dtype=np.int32)
    sample = {"tokens": tokens, "loss_mask": np.ones(39, np.uint8), "versions": [(0, 39)]}
    with torch.no_grad():
        logits = reference(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
    want = logits.gather(-1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()
    rollout = np.concatenate([[0], want]).astype(np.float32)
    groups = [Group("g", [Sample(rollout_logprobs=rollout, reward=float(i), **sample) for i in range(2)])]
    policy = Policy.build(RunConfig(optimizer=OptimizerConfig(lr=1e-4)), str(tmp_path / "model"))
    try:
        assert policy.model.config.params_dtype is torch.bfloat16
        np.testing.assert_allclose(policy.logprobs(groups)[0][1:], want, atol=0.1)
        metrics = policy.train(groups)
        assert metrics["updated"] == 1.0
        assert metrics["logprob_mismatch_mean"] < 0.05
    finally:
        policy.close()


def test_a_snapshot_of_gpu_tensors_is_that_of_their_copies_on_the_host() -> None:
    from trainer.publish.snapshot import HostSnapshot

    tensors = {"a": torch.randn(1000, 33), "b": torch.randn(7)}
    want = HostSnapshot().take(tensors.items())
    got = HostSnapshot().take((name, tensor.cuda()) for name, tensor in tensors.items())
    assert all(np.array_equal(want[name], got[name]) for name in tensors)  # type: ignore[arg-type]

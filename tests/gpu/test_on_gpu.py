"""What only a GPU shows; without one these are skipped. `bin/gpu-check` runs them."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import save_model

from trainer.compat import cpu_compat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_logprobs_and_a_step_in_bf16_are_near_those_of_transformers_in_fp32(tmp_path: Path) -> None:
    cpu_compat.import_megatron()
    from slimebus.bus.samples import Sample
    from slimebus.config import RunConfig
    from slimebus.config.schema import OptimizerConfig
    from trainer.batches.batch import TrainingGroup
    from trainer.model.policy import Policy

    reference = save_model(tmp_path / "model", seed=1)
    tokens = np.arange(1, 40, dtype=np.int32)
    sample = {"tokens": tokens, "loss_mask": np.ones(39, np.uint8), "versions": [(0, 39)]}
    with torch.no_grad():
        logits = reference(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
    want = logits.gather(-1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()
    rollout = np.concatenate([[0], want]).astype(np.float32)
    groups = [TrainingGroup("g", [Sample(rollout_logprobs=rollout, reward=float(i), **sample) for i in range(2)])]
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
    from trainer.publish.rank_part import HostSnapshot

    tensors = {"a": torch.randn(1000, 33), "b": torch.randn(7)}
    want = HostSnapshot().copy_to_host(tensors.items())
    got = HostSnapshot().copy_to_host((name, tensor.cuda()) for name, tensor in tensors.items())
    assert all(np.array_equal(want[name], got[name]) for name in tensors)  # type: ignore[arg-type]


def test_versions_of_gpu_tensors_become_each_other_by_their_deltas() -> None:
    """Copied out of GPU memory in bfloat16, encoded and applied, the bits are those of the GPU's next version."""
    from slimebus.weights.codec import delta_codec
    from trainer.publish.rank_part import HostSnapshot

    torch.manual_seed(0)
    weights = torch.randn(3, 1 << 20, device=DEVICE)
    newer = weights + 1e-3 * torch.randn_like(weights) * (torch.rand_like(weights) < 0.1)
    before = np.array(HostSnapshot().copy_to_host([("a", weights)])["a"]).reshape(-1)
    after = np.array(HostSnapshot().copy_to_host([("a", newer)])["a"]).reshape(-1)
    assert np.array_equal(after, newer.bfloat16().view(torch.int16).cpu().numpy().view(np.uint16).reshape(-1))
    encoded = delta_codec.encode(before, after)
    delta_codec.apply(encoded.payload, before)
    assert np.array_equal(before, after)
    share = len(encoded.payload) / after.nbytes
    print(f"\ngpu-check: {share:.3f} of the bytes of bfloat16, {encoded.num_changed} of {after.size} values changed")


def test_the_share_of_the_devices_peak_is_a_share(tmp_path: Path) -> None:
    """A step of 64 sequences of 1,024 tokens: 0.5 B parameters in the shape of Qwen2.5 0.5B where there is a GPU."""
    cpu_compat.import_megatron()
    from slimebus.bus.samples import Sample
    from slimebus.config import RunConfig
    from slimebus.config.schema import TrainerConfig
    from trainer.batches.batch import TrainingGroup
    from trainer.model.policy import Policy
    from trainer.session.step_batch import StepBatch
    from trainer.watch.step_watch import Speed

    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "vocab_size": 151936}
    save_model(
        tmp_path / "model", "Qwen2", **(shape | {"max_position_embeddings": 2048, "initializer_range": 0.02} if DEVICE == "cuda" else {})
    )
    length = 1024 if DEVICE == "cuda" else 64
    arrays = {"tokens": np.arange(length, dtype=np.int32) % 40, "loss_mask": np.ones(length, np.uint8)}
    arrays["rollout_logprobs"] = np.full(length, -3.0, np.float32)
    groups = [TrainingGroup(str(g), [Sample(**arrays, versions=[(0, length)], reward=float(i % 2)) for i in range(8)]) for g in range(8)]
    config = RunConfig(trainer=TrainerConfig(max_tokens_per_gpu=8192, params_dtype="bfloat16"))
    policy = Policy.build(config, str(tmp_path / "model"))
    try:
        speed, lags = Speed(policy), [0] * 64
        for _ in range(3):  # the first compiles and allocates
            started = time.perf_counter()
            policy.train(groups)
            metrics = speed.of(StepBatch(0, 0, 1, groups, lags), time.perf_counter() - started)
    finally:
        policy.close()
    if speed.peak is None:
        pytest.skip(f"no peak is known of this device ({DEVICE}); {metrics['tokens_per_s']:.0f} tokens/s")
    print(f"\ngpu-check: MFU {metrics['mfu']:.3f}, {metrics['tokens_per_s']:.0f} tokens/s")
    assert 0 < metrics["mfu"] < 1

"""At staleness 0, what workers say of their tokens is what the published weights say of them.

The test is the trainer: it publishes known weights, takes the batches, and recomputes every logprob with transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bf16 import to_bf16
from live_run import Run
from scripted import WeightTrainer, fetch, take

from slimebus.bus.messages import NO_VERSION, Commit, Finish
from slimebus.bus.samples import Sample
from slimebus.bus.transport.client import Client

pytestmark = pytest.mark.integration

STEPS = 3


class HandTrainer(WeightTrainer):
    """Publishes given weights and takes batches, on the bus like any trainer."""

    def __init__(self, address: str) -> None:
        super().__init__(Client(address, name="by-hand"))
        self.client.join("trainer", timeout_s=30)

    def take_batch(self, step: int) -> list[Sample]:
        reply = take(self.client, step, wait_s=90)
        assert reply.groups, reply.reason
        assert reply.version == step
        return [sample for group in fetch(self.client, [g.group for g in reply.groups]) for sample in group]

    def close(self) -> None:
        self.client.close()
        self.server.close()


class Oracle:
    """The same weights, rounded to bfloat16 as published, in transformers and float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def load(self, weights: Mapping[str, Any], *, rounded: bool) -> None:
        given = {name: tensor.bfloat16().float() if rounded else tensor for name, tensor in weights.items()}
        missing = self.model.load_state_dict(given, strict=False)
        assert not missing.unexpected_keys

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """Of each token given those before it, [T]; 0 for the first."""
        import torch

        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = self.model(ids).logits[0, :-1].log_softmax(-1)
        return np.concatenate([[0.0], logits.gather(1, ids[0, 1:, None])[:, 0].numpy()])


def rounded(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_bf16(tensor) for name, tensor in weights.items()}


def changed(weights: Mapping[str, Any], step: int) -> dict[str, Any]:
    """As after an optimizer step: small changes everywhere, most of them below the bfloat16 step."""
    import torch

    torch.manual_seed(step)
    return {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in weights.items()}


def test_at_staleness_0_rollout_logprobs_are_those_of_the_published_weights(tmp_path: Path, task: Path) -> None:
    from safetensors.torch import load_file

    weights = changed(load_file(task / "model" / "model.safetensors"), 0)
    oracle = Oracle(task / "model")
    with Run(tmp_path, task, broker__max_staleness=0, rollout__num_rollout=STEPS, rollout__rollout_max_response_len=32) as run:
        run.start("broker")
        worker = run.start("rollout", name="w1")
        run.wait_for("a broker", lambda s: True)
        trainer = HandTrainer(run.address)
        try:
            trainer.publish(rounded(weights))
            for step in range(STEPS):
                samples = trainer.take_batch(step)
                assert len(samples) == 16
                compare(oracle, weights, samples, version=step)
                weights = changed(weights, step + 1)
                trainer.publish(rounded(weights))
                trainer.client.call(Commit(step=step))
            trainer.client.call(Finish())
            assert worker.wait(30) == 0
        finally:
            trainer.close()


def compare(oracle: Oracle, weights: Mapping[str, Any], samples: list[Sample], version: int) -> None:
    """Every trained token is of `version`, and its logprob that of the rounded weights to 1e-4; the unrounded ones are further off."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for rounded, found in errors.items():
        oracle.load(weights, rounded=rounded)
        for sample in samples:
            made_by = np.concatenate([np.full(length, v) for v, length in sample.versions])
            trained = sample.loss_mask == 1
            assert trained.any()
            assert set(made_by[trained]) == {version}
            assert set(made_by[~trained]) <= {NO_VERSION}
            found += np.abs(oracle.logprobs(sample.tokens) - sample.rollout_logprobs)[trained].tolist()
    assert max(errors[True]) < 1e-4
    assert max(errors[False]) > 1e-4, "rounding would go unnoticed: the comparison above proves nothing"

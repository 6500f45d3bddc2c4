"""A tiny random Qwen3 on disk, and a policy on it."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import save_model

from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, BrokerConfig, ModelConfig, OptimizerConfig, TrainerConfig
from trainer.compat import cpu_compat

cpu_compat.import_megatron()

from slimebus.bus.samples import Sample  # noqa: E402
from trainer.batches.batch import TrainingGroup  # noqa: E402
from trainer.model.policy import Policy  # noqa: E402

VOCAB_SIZE = 38


def write_model(folder: Path, *, tied: bool) -> Path:
    shape = {"vocab_size": VOCAB_SIZE, "head_dim": 8, "initializer_range": 0.2, "pad_token_id": None}
    save_model(folder, seed=3, dtype="float32", tie_word_embeddings=tied, **shape)
    return folder


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """The least that a tokenizer.json needs for its vocabulary to be read."""
    vocab = {f"t{i}": i for i in range(num_tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": []}))


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture
def build_policy() -> Iterator[Callable[..., Any]]:
    """Builds a policy, or another learner, on a model directory; the one before is closed first."""
    built: list[Any] = []

    def build(
        folder: Path,
        *,
        algorithm: AlgorithmConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        max_tokens_per_gpu: int = 64,
        dtype: str = "float32",
        on_nonfinite: str = "skip",
        family: str = "",
        megatron: dict | None = None,
        required_fields: Sequence[str] = (),
        learner: Any = Policy,
    ) -> Any:
        while built:
            built.pop().close()
        config = RunConfig(
            broker=BrokerConfig(required_fields=list(required_fields)),
            model=ModelConfig(family=family),
            optimizer=optimizer or OptimizerConfig(lr=1e-2, lr_warmup_iters=2),
            algorithm=algorithm or AlgorithmConfig(),
            trainer=TrainerConfig(max_tokens_per_gpu=max_tokens_per_gpu, params_dtype=dtype, on_nonfinite=on_nonfinite),
            megatron=megatron or {},
        )
        built.append(learner.build(config, str(folder)))
        return built[0]

    yield build
    while built:
        built.pop().close()


def random_batch(seed: int = 0, num_groups: int = 4, group_size: int = 4) -> list[TrainingGroup]:
    draw = np.random.default_rng(seed)

    def sample(prompt: int, reward: float) -> Sample:
        length = prompt + int(draw.integers(1, 20))
        return Sample(
            tokens=draw.integers(0, VOCAB_SIZE, length).astype(np.int32),
            loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
            rollout_logprobs=(-3.6 + 0.2 * draw.standard_normal(length)).astype(np.float32),
            versions=[(0, length)],
            reward=reward,
        )

    return [
        TrainingGroup(id=f"g{g}", samples=[sample(3 + g, reward) for reward in (draw.random(group_size) < 0.5).astype(float).tolist()])
        for g in range(num_groups)
    ]


@pytest.fixture
def make_batch() -> Callable[..., list[TrainingGroup]]:
    """Groups of random samples by seed."""
    return random_batch

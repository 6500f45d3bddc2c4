"""Ten turns on the embedded engine, its prefix cache and new weights between turns included: every trained token has the logprob and the
version that a computation of the whole sample gives."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import SHAPE, TEMPLATES, save_tokenizer
from tiny_model import save_model

from rollout.samples.response import Response, Task, to_sample
from rollout.samples.session import Session
from rollout.samples.tokenizer import Tokenizer
from slimebus.bus.messages import NO_VERSION

TURNS, REPLY = 10, 12


@pytest.fixture(scope="module")
def models_(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """(folder, transformers' model) of two versions."""
    folders = [tmp_path_factory.mktemp(f"version-{seed}") for seed in range(2)]
    return [(folder, save_model(folder, seed=seed, **SHAPE)) for seed, folder in enumerate(folders)]


class CoreEngines:
    """The embedded engine without its process: one request at a time, the second version from turn 5 on, in the middle of that reply."""

    def __init__(self, core: Any, weights: Any, sequence_of: Any) -> None:
        self.core, self.weights, self.sequence_of, self.num_turns, self.num_cached = core, weights, sequence_of, 0, 0

    async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
        (task,) = tasks
        sequence = self.sequence_of(str(self.num_turns), task.prompt_ids.tolist(), stop_ids=frozenset({257}), **task.sampling)
        self.core.add([sequence])
        self.num_turns += 1
        for step in range(REPLY):
            if self.num_turns == 5 and step == REPLY // 2:
                self.core.retract()  # its keys and values are computed again: so one version's weights make all of a token
                self.core.swap_weights(self.weights, "1")
            self.core.step()
        while self.core.has_work:
            self.core.step()
        self.num_cached += sequence.num_cached_tokens
        ids, logprobs = np.array(sequence.output_ids, np.int32), np.array(sequence.output_logprobs, np.float32)
        versions = [(int(version), end - start) for version, start, end in sequence.version_spans]
        return [
            Response(task=task, token_ids=ids, logprobs=logprobs, versions=versions, text="", finish_reason=sequence.finish_reason["type"])
        ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_versions_and_logprobs_of_ten_turns_equal_a_recompute(
    name: str, models_: Any, tmp_path: Path, core_of: Any, sequence_of: Any
) -> None:
    save_tokenizer(tmp_path, TEMPLATES[name])
    made = Tokenizer(tmp_path, apply_chat_template=True)
    core = core_of(models_[0][0], version="0")
    engines = CoreEngines(core, core_of(models_[1][0]).model.weights, sequence_of)
    prompt = [{"role": "user", "content": "begin"}]
    sampling = {"temperature": 0.8, "max_new_tokens": REPLY}
    session = Session(Task(prompt=prompt, prompt_ids=made.encode_prompt(prompt), sampling=sampling), engines, made)  # type: ignore[arg-type]
    sampled: list[int] = []

    async def talk() -> None:
        for turn in range(TURNS):
            sampled.extend((await session.generate()).token_ids.tolist())
            session.observe([{"role": "user", "content": f"go on, {turn}"}])

    asyncio.run(talk())
    (response,) = session.responses()
    sample = to_sample(response)
    assert sample.tokens[sample.loss_mask == 1].tolist() == sampled
    assert sample.turn == TURNS - 1
    assert engines.num_cached > len(sampled)
    versions = np.repeat([version for version, _ in sample.versions], [length for _, length in sample.versions])
    assert set(versions[sample.loss_mask == 0]) == {NO_VERSION}
    assert set(versions[sample.loss_mask == 1]) == {0, 1}
    ids = torch.tensor([sample.tokens.tolist()])
    for version, (_, model) in enumerate(models_):
        with torch.no_grad():
            logprobs = (model(ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        is_own = (versions == version)[1:]
        np.testing.assert_allclose(sample.rollout_logprobs[1:][is_own], logprobs[is_own], atol=1e-4, rtol=0)

"""The quick start's teacher scores the tokens that the student sampled."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recipe import load


def test_each_token_has_its_logprob_given_those_before_and_the_first_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("quickstart/teacher.py")
    odds = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]])  # of the next token, by the one before
    monkeypatch.setattr(module, "teacher", lambda: lambda ids: SimpleNamespace(logits=odds.log()[ids]))
    session = SimpleNamespace(token_ids=np.array([2, 0, 1, 2], np.int32), extras={})

    async def generate() -> None: ...

    session.generate = generate
    asyncio.run(module.generate(session))
    assert session.extras["teacher_logprobs"] == pytest.approx(np.log([1, 0.6, 0.25, 0.8]), abs=1e-6)

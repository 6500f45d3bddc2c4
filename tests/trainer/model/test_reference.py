"""The reference takes the policy's place for a forward pass: one copy in host memory, and the policy is what it was."""

import gc

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from saved_checkpoint import save_checkpoint

from slimebus.config.schema import AlgorithmConfig, OptimizerConfig
from trainer.checkpoint.load import load_checkpoint
from trainer.model import reference

KL = AlgorithmConfig(kl_loss_coef=0.1)


def tensors(policy):
    return [tensor for tensor in policy.model.gpt.state_dict(keep_vars=True).values() if isinstance(tensor, torch.Tensor)]


def memory(policy):
    return [tensor.data_ptr() for tensor in tensors(policy)]


def values(policy):
    return [tensor.detach().clone() for tensor in tensors(policy)]


def equal(these, those):
    return all(torch.equal(one, other) for one, other in zip(these, those, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tied_model", "untied_model"])
def test_the_policy_is_bit_by_bit_what_it_was_and_where_it_was(kind, dtype, request, build_policy, make_batch):
    policy = build_policy(request.getfixturevalue(kind), algorithm=KL, dtype=dtype, optimizer=OptimizerConfig(lr=1e-2))
    first = values(policy)
    policy.train(make_batch())
    trained, where = values(policy), memory(policy)
    assert not equal(trained, first)
    with policy.reference.swapped_in():
        assert equal(values(policy), first)
    assert equal(values(policy), trained)
    assert memory(policy) == where


def test_on_a_cpu_the_two_trade_places_and_nothing_is_copied(tied_model, build_policy, monkeypatch):
    policy = build_policy(tied_model, algorithm=KL)
    held, live = [tensor.data_ptr() for tensor in policy.reference._held], memory(policy)
    assert not {*held} & {*live}
    monkeypatch.setattr(reference, "host_copy", lambda tensor: pytest.fail("copied"))
    with policy.reference.swapped_in():
        assert memory(policy) == held
        assert [tensor.data_ptr() for tensor in policy.reference._held] == live
    assert memory(policy) == live


def test_there_is_one_model_and_its_reference_is_as_large_as_its_weights(tied_model, build_policy):
    def models():
        gc.collect()
        return sum(type(found) is GPTModel for found in gc.get_objects())

    before = models()
    policy = build_policy(tied_model, algorithm=KL)
    assert models() == before + 1
    size = sum(tensor.numel() * tensor.element_size() for tensor in policy.reference._held)
    assert size == sum(parameter.numel() * parameter.element_size() for parameter in policy.model.gpt.parameters())


def test_by_copies_as_on_a_gpu_the_result_is_the_same(tied_model, build_policy, make_batch, monkeypatch):
    batch, optimizer = make_batch(), OptimizerConfig(lr=1e-2)
    policy = build_policy(tied_model, algorithm=KL, optimizer=optimizer)
    want = [policy.train(batch) for _ in range(2)]
    weights = values(policy)
    monkeypatch.setattr(reference, "swap_by_pointer", reference.swap_by_copy)
    policy = build_policy(tied_model, algorithm=KL, optimizer=optimizer)
    where = memory(policy)
    assert [policy.train(batch) for _ in range(2)] == want
    assert equal(values(policy), weights)
    assert memory(policy) == where


def test_the_policy_is_back_when_the_pass_fails(tied_model, build_policy):
    policy = build_policy(tied_model, algorithm=KL)
    where = memory(policy)
    with pytest.raises(ZeroDivisionError), policy.reference.swapped_in():
        raise ZeroDivisionError
    assert memory(policy) == where


def test_a_run_without_a_kl_term_holds_no_reference(tied_model, build_policy):
    assert build_policy(tied_model).reference is None


def steps(policy, make_batch, numbers):
    made = []
    for step in numbers:
        made.append(policy.train(make_batch(step)))
        policy.refresh_reference(step + 1)
    return made


def test_the_reference_becomes_the_policy_every_interval(tied_model, build_policy, make_batch):
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, ref_update_interval=2)
    divergence = [made["kl_loss"] for made in steps(build_policy(tied_model, algorithm=algorithm), make_batch, range(5))]
    assert [value < 1e-6 for value in divergence] == [True, False, True, False, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_before", [1, 3])
def test_a_resumed_run_has_the_reference_that_it_had(num_before, dtype, tied_model, build_policy, make_batch, tmp_path):
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, ref_update_interval=2)
    policy = build_policy(tied_model, algorithm=algorithm, dtype=dtype)
    steps(policy, make_batch, range(num_before))
    save_checkpoint(tmp_path, policy, num_before)
    want = steps(policy, make_batch, range(num_before, 6))
    held = [np.asarray(tensor.float()) for tensor in policy.reference._held]

    resumed = build_policy(tied_model, algorithm=algorithm, dtype=dtype)
    load_checkpoint(tmp_path, resumed)
    assert resumed.reference.is_refreshed == (num_before > 1), "a checkpoint holds it only where it is not the initial model"
    assert steps(resumed, make_batch, range(num_before, 6)) == want
    assert all(np.array_equal(one, other.float()) for one, other in zip(held, resumed.reference._held, strict=True))

"""The policy against transformers: logits' log-probabilities, the training step, and the weights it exports."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimebus.config.schema import AlgorithmConfig, OptimizerConfig
from slimebus.errors import ConfigError, DataError
from trainer.batch import Group, Sample


def hf_logprobs(model, tokens):
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None]
    logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("kind", ["tied_model", "untied_model"])
def test_logprobs_equal_those_of_transformers(kind, request, build_policy, make_batch):
    folder = request.getfixturevalue(kind)
    batch = make_batch()
    policy = build_policy(folder)
    got = policy.logprobs(batch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sample, logprobs in zip([s for g in batch for s in g.samples], got, strict=True):
        with torch.no_grad():
            want = hf_logprobs(model, sample.tokens)
        assert logprobs[0] == 0
        np.testing.assert_allclose(logprobs[1:], want.numpy(), atol=1e-4)


def test_rows_of_any_size_give_the_same_logprobs(tied_model, build_policy, make_batch):
    batch = make_batch()
    small = build_policy(tied_model, max_tokens_per_gpu=1).logprobs(batch)
    large = build_policy(tied_model, max_tokens_per_gpu=100000).logprobs(batch)
    for a, b in zip(small, large, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", ["tied_model", "untied_model"])
def test_exported_weights_are_bit_equal_to_the_files(kind, request, build_policy):
    from safetensors.torch import load_file

    folder = request.getfixturevalue(kind)
    want = load_file(folder / "model.safetensors")
    got = dict(build_policy(folder).hf_tensors())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_saved_directory_reloads_with_the_trained_weights(tied_model, build_policy, make_batch, tmp_path):
    policy = build_policy(tied_model)
    policy.train(make_batch())
    policy.save_hf(str(tmp_path / "out"))
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    exported = {name: tensor.clone() for name, tensor in policy.hf_tensors()}
    assert all(torch.equal(weights[name], exported[name]) for name in exported)
    before = AutoModelForCausalLM.from_pretrained(tied_model).state_dict()
    assert not torch.equal(before["model.embed_tokens.weight"], exported["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def naive_step(model, optimizer, batch, clip=(0.8, 1.28)):
    """GRPO one sample at a time."""
    samples, losses, tokens = [], [], 0
    for group in batch:
        rewards = np.array([s.reward for s in group.samples])
        if rewards.min() < rewards.max():
            samples += list(zip(group.samples, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True))
    tokens = sum(int(s.loss_mask[1:].sum()) for s, _ in samples)
    optimizer.zero_grad()
    for sample, advantage in samples:
        new = hf_logprobs(model, sample.tokens)
        ratio = (new - torch.from_numpy(sample.rollout_logprobs[1:])).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(*clip) * advantage)
        loss = (loss * torch.from_numpy(sample.loss_mask[1:])).sum() / tokens
        loss.backward()
        losses.append(loss.item())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sum(losses), float(norm)


def test_three_steps_equal_a_naive_loop_over_samples(tied_model, build_policy, make_batch):
    policy = build_policy(tied_model, optimizer=OptimizerConfig(lr=1e-2, adam_beta2=0.99))
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(3):
        batch = make_batch(step)
        metrics = policy.train(batch)
        loss, norm = naive_step(model, optimizer, batch)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def with_reward(batch, reward):
    return [Group(g.id, [Sample(s.tokens, s.loss_mask, s.rollout_logprobs, reward) for s in g.samples]) for g in batch]


def test_groups_of_equal_reward_are_left_out_and_counted(tied_model, build_policy, make_batch):
    batch = make_batch(num_groups=4)
    dull = with_reward(make_batch(9, num_groups=2), 1.0)
    alone = build_policy(tied_model).train(batch)
    mixed = build_policy(tied_model).train([*batch, *dull])
    assert mixed["zero_variance_groups"] == alone["zero_variance_groups"] + 2
    assert mixed["tokens_trained"] == alone["tokens_trained"]
    assert mixed["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_a_batch_without_signal_changes_no_weight(tied_model, build_policy, make_batch):
    policy = build_policy(tied_model)
    before = {name: tensor.clone() for name, tensor in policy.hf_tensors()}
    metrics = policy.train(with_reward(make_batch(), 0.0))
    assert metrics["updated"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.hf_tensors())


def test_sft_learns_its_samples(tied_model, build_policy, make_batch):
    batch = [Group(g.id, [Sample(s.tokens, s.loss_mask) for s in g.samples]) for g in make_batch()]
    policy = build_policy(tied_model, algorithm=AlgorithmConfig(loss_type="sft_loss"))
    losses = [policy.train(batch)["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_mismatch_is_zero_when_the_sampler_is_the_trainer(tied_model, build_policy, make_batch):
    policy = build_policy(tied_model)
    batch = make_batch()
    logprobs = iter(policy.logprobs(batch))
    own = [Group(g.id, [Sample(s.tokens, s.loss_mask, next(logprobs), s.reward) for s in g.samples]) for g in batch]
    metrics = policy.train(own)
    assert metrics["logprob_mismatch_max"] < 1e-4
    assert metrics["approx_kl"] < 1e-8
    assert metrics["pg_clipfrac"] == 0


def test_recomputed_old_logprobs_start_at_ratio_one(tied_model, build_policy, make_batch):
    policy = build_policy(tied_model, algorithm=AlgorithmConfig(use_rollout_logprobs=False, use_tis=True))
    metrics = policy.train(make_batch())
    assert metrics["pg_clipfrac"] == 0
    assert 0 < metrics["tis"] <= 2.0
    assert metrics["logprob_mismatch_mean"] > 0.01


def test_a_kl_term_keeps_the_groups_without_variance(tied_model, build_policy, make_batch):
    policy = build_policy(tied_model, algorithm=AlgorithmConfig(kl_loss_coef=0.1))
    batch = with_reward(make_batch(), 1.0)
    metrics = policy.train(batch, reference_logprobs=[logprobs - 0.5 for logprobs in policy.logprobs(batch)])
    assert metrics["updated"] == 1
    assert metrics["kl_loss"] == pytest.approx(np.exp(-0.5) - 1 + 0.5, rel=1e-3)


def test_the_reference_stays_what_the_model_was(tied_model, build_policy, make_batch):
    policy = build_policy(tied_model, algorithm=AlgorithmConfig(kl_loss_coef=0.1), optimizer=OptimizerConfig(lr=1e-2))
    first, second = policy.train(make_batch()), policy.train(make_batch())
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert second["kl_loss"] > 1e-4


def test_bfloat16_trains_close_to_float32(tied_model, build_policy, make_batch):
    wide = build_policy(tied_model).train(make_batch())
    policy = build_policy(tied_model, dtype="bfloat16")
    narrow = policy.train(make_batch())
    assert narrow["loss"] == pytest.approx(wide["loss"], rel=0.05, abs=0.02)
    assert {tensor.dtype for _, tensor in policy.hf_tensors()} == {torch.bfloat16}


def test_learning_rate_follows_the_schedule(tied_model, build_policy, make_batch):
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=2, lr_decay_iters=4, lr_decay_style="linear")
    policy = build_policy(tied_model, optimizer=optimizer)
    rates = [policy.train(make_batch())["lr"] for _ in range(6)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4, 1e-4, 1e-4])


def test_tokens_outside_the_vocabulary_are_refused(tied_model, build_policy):
    policy = build_policy(tied_model)
    with pytest.raises(DataError, match="group x sample 0: token id 38 is outside the model's vocabulary of 38"):
        policy.train([Group("x", [Sample(np.array([1, 38]), np.array([0, 1], np.uint8), np.zeros(2, np.float32), 1.0)])])


def test_unknown_megatron_option_names_the_nearest(tied_model, build_policy):
    from trainer.megatron_fields import split_megatron_options

    with pytest.raises(ConfigError, match="did you mean 'recompute_granularity'"):
        split_megatron_options({"recompute_granularty": "full"})
    assert split_megatron_options({"clip_grad": 1.0})["OptimizerConfig"] == {"clip_grad": 1.0}

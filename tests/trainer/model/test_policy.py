"""The policy against transformers: logits' log-probabilities, the training step, and the weights it exports."""

import itertools
import json

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from slimebus.bus.errors import SlimebusError
from slimebus.bus.samples import Sample
from slimebus.config.schema import AlgorithmConfig, OptimizerConfig
from trainer.algorithms.grpo import Grpo
from trainer.batches.batch import TrainingGroup
from trainer.model import update
from trainer.objective.objective import Objective
from trainer.objective.plugin import TokenLoss

VOCAB_SIZE = 38


def hf_logprobs(model, tokens, temperature=1.0):
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None]
    logits = model(ids).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def test_rows_of_any_size_give_the_same_logprobs(tied_model, build_policy, make_batch):
    batch = make_batch()
    small = build_policy(tied_model, max_tokens_per_gpu=1).logprobs(batch)
    large = build_policy(tied_model, max_tokens_per_gpu=100000).logprobs(batch)
    for a, b in zip(small, large, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_saved_directory_reloads_with_the_trained_weights(tied_model, build_policy, make_batch, tmp_path):
    policy = build_policy(tied_model)
    policy.train(make_batch())
    policy.save_hf(str(tmp_path / "out"))
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    exported = {name: tensor.clone() for name, tensor in policy.export.tensors()}
    assert all(torch.equal(weights[name], exported[name]) for name in exported)
    before = AutoModelForCausalLM.from_pretrained(tied_model).state_dict()
    assert not torch.equal(before["model.embed_tokens.weight"], exported["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def naive_step(model, optimizer, batch, clip=(0.8, 1.2)):
    """GRPO one sample at a time."""
    samples, losses = [], []
    for group in batch:
        rewards = np.array([s.reward for s in group.samples])
        if rewards.min() < rewards.max():
            samples += list(zip(group.samples, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True))
    tokens = sum(int(s.loss_mask[1:].sum()) for group in batch for s in group.samples)  # those without a gradient count too
    optimizer.zero_grad()
    for sample, advantage in samples:
        new = hf_logprobs(model, sample.tokens, sample.temperature)
        ratio = (new - torch.from_numpy(sample.rollout_logprobs[1:])).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(*clip) * advantage)
        loss = (loss * torch.from_numpy(sample.loss_mask[1:])).sum() / tokens
        loss.backward()
        losses.append(loss.item())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sum(losses), float(norm)


MIXED = [0.7, 1.3, 1.0, 0.25]


def sampled_at(batch, model, temperatures):
    """The same batch with the logprobs that an engine with this model reports at these temperatures, sample by sample in turn."""
    turn = itertools.cycle(temperatures)

    def again(s):
        temperature = next(turn)
        with torch.no_grad():
            logprobs = hf_logprobs(model, s.tokens, temperature)
        return replace(s, rollout_logprobs=np.concatenate([[0.0], logprobs.numpy()]).astype(np.float32), temperature=temperature)

    return [TrainingGroup(g.id, [again(s) for s in g.samples]) for g in batch]


@pytest.mark.parametrize("temperatures", [[0.7], [1.0], [1.3], MIXED])
def test_logprobs_are_those_of_the_temperature_that_each_sample_was_made_at(temperatures, tied_model, build_policy, make_batch):
    policy = build_policy(tied_model)
    batch = sampled_at(make_batch(), AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32), temperatures)
    for sample, logprobs in zip([s for g in batch for s in g.samples], policy.logprobs(batch), strict=True):
        np.testing.assert_allclose(logprobs, sample.rollout_logprobs, atol=1e-4)
    metrics = policy.train(batch)
    assert metrics["logprob_mismatch_max"] < 1e-4
    assert metrics["approx_kl"] < 1e-8
    assert metrics["pg_clipfrac"] == 0


@pytest.mark.parametrize("algorithm", [{"kl_loss_coef": 0.1}, {"use_rollout_logprobs": False, "corrections": ["tis"]}])
def test_old_and_reference_logprobs_are_of_the_samples_temperature_too(algorithm, tied_model, build_policy, make_batch):
    batch = sampled_at(make_batch(), AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32), MIXED)
    metrics = build_policy(tied_model, algorithm=AlgorithmConfig(**algorithm)).train(batch)
    assert metrics.get("kl_loss", 0.0) == pytest.approx(0.0, abs=1e-6)
    assert metrics.get("tis", 1.0) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("num_steps", "temperatures"), [(3, None), (1, MIXED)])
def test_steps_equal_a_naive_loop_over_samples(num_steps, temperatures, tied_model, build_policy, make_batch):
    policy = build_policy(tied_model, optimizer=OptimizerConfig(lr=1e-2, adam_beta2=0.99))
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(num_steps):
        batch = sampled_at(make_batch(step), model, temperatures) if temperatures else make_batch(step)
        metrics = policy.train(batch)
        loss, norm = naive_step(model, optimizer, batch)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def with_reward(batch, reward):
    return [TrainingGroup(g.id, [replace(s, reward=reward) for s in g.samples]) for g in batch]


def test_groups_of_equal_reward_are_left_out_and_counted(tied_model, build_policy, make_batch):
    batch = make_batch(num_groups=4)
    dull = with_reward(make_batch(9, num_groups=2), 1.0)
    alone = build_policy(tied_model).train(batch)
    mixed = build_policy(tied_model).train([*batch, *dull])
    assert mixed["zero_variance_groups"] == alone["zero_variance_groups"] + 2
    assert mixed["tokens_trained"] == alone["tokens_trained"]
    tokens = sum(int(s.loss_mask[1:].sum()) for group in batch for s in group.samples)
    more = sum(int(s.loss_mask[1:].sum()) for group in dull for s in group.samples)
    assert mixed["loss"] == pytest.approx(alone["loss"] * tokens / (tokens + more), rel=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"loss_aggregation": aggregation} for aggregation in ("token", "sequence", "group", "constant")),
        {"corrections": ["tis"], "settings": {"tis_batch_normalize": True}},
        {"corrections": ["vcpo"]},
        {"advantage_estimator": "dppo"},
    ],
    ids=lambda a: "-".join(str(value) for value in a.values()),
)
@pytest.mark.parametrize("term", ["kl_loss_coef", "entropy_coef"])
def test_the_gradient_does_not_jump_when_a_coefficient_leaves_zero(algorithm, term, tied_model, build_policy, make_batch):
    batch = [*make_batch(num_groups=2), *with_reward(make_batch(9, num_groups=4), 1.0)]
    steps = []
    for coefficient in (0.0, 1e-12):
        policy = build_policy(tied_model, algorithm=AlgorithmConfig(**algorithm, **{term: coefficient}), optimizer=OptimizerConfig(lr=1e-3))
        steps.append(policy.train(batch))
    for name in ("grad_norm", "lr"):
        assert steps[1][name] == pytest.approx(steps[0][name], rel=1e-4), name


def test_the_gradient_does_not_jump_when_rounding_leaves_advantages_of_zero(tied_model, build_policy):
    """Whitening gives groups of equal rewards exactly 0 where the mean of all tokens is exactly 0, and next to it elsewhere."""
    draw, norms = np.random.default_rng(0), []
    tokens = draw.integers(0, 30, (4, 4, 8)).astype(np.int32)
    for more in (0.0, 1e-6):
        rewards = np.array([[1.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4, [1.0] * 4])
        rewards[0, 0] += more
        groups = [TrainingGroup(str(g), [sample_of(tokens[g, i], reward=float(rewards[g, i])) for i in range(4)]) for g in range(4)]
        policy = build_policy(tied_model, algorithm=AlgorithmConfig(advantage_estimator="reinforce_plus_plus_baseline"))
        norms.append(policy.train(groups)["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def sample_of(tokens, reward):
    mask = (np.arange(len(tokens)) >= 3).astype(np.uint8)
    return Sample(
        tokens=tokens, loss_mask=mask, rollout_logprobs=-3.6 * mask.astype(np.float32), versions=[(0, len(tokens))], reward=reward
    )


def test_a_batch_without_signal_changes_no_weight(tied_model, build_policy, make_batch):
    policy = build_policy(tied_model)
    before = {name: tensor.clone() for name, tensor in policy.export.tensors()}
    metrics = policy.train(with_reward(make_batch(), 0.0))
    assert metrics["updated"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.export.tensors())


def state(policy):
    """Every weight and both moments of Adam."""
    weights = {name: tensor.detach().clone() for name, tensor in policy.export.tensors()}
    of_optimizer = [part.optimizer.state for part in policy.optimizer.chained_optimizers]
    moments = [value[name].clone() for states in of_optimizer for value in states.values() for name in ("exp_avg", "exp_avg_sq")]
    return [*weights.values(), *moments]


def spoiled(batch):
    """A batch with one NaN, which the check of samples would have found."""
    sample = batch[0].samples[0]
    logprobs = np.where(sample.loss_mask > 0, np.float32("nan"), sample.rollout_logprobs)
    bad = replace(sample, rollout_logprobs=logprobs, reward=1.0 - batch[0].samples[1].reward)
    return [TrainingGroup("bad", [bad, *batch[0].samples[1:]]), *batch[1:]]


def test_a_step_whose_gradient_is_not_finite_changes_neither_weights_nor_moments(tied_model, build_policy, make_batch):
    policy, good = build_policy(tied_model), make_batch()
    policy.train(good)
    before = state(policy)
    metrics = policy.train(spoiled(make_batch(1)))
    assert (metrics["updated"], metrics["nonfinite"]) == (0, 1)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(torch.equal(old, new) for old, new in zip(before, state(policy), strict=True))
    assert policy.train(good)["updated"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in state(policy))


@pytest.mark.parametrize(("on_nonfinite", "num_steps"), [("stop", 1), ("skip", 8)])
def test_steps_that_are_not_finite_end_the_run_at_once_or_after_eight_in_a_row(
    on_nonfinite, num_steps, tied_model, build_policy, make_batch
):
    policy, bad = build_policy(tied_model, on_nonfinite=on_nonfinite), spoiled(make_batch())
    for _ in range(num_steps - 1):
        policy.train(bad)
    with pytest.raises(SlimebusError, match=f"{num_steps} optimizer steps in a row was not finite") as caught:
        policy.train(bad)
    assert caught.value.code == "nonfinite"


def test_several_optimizer_steps_on_a_batch_equal_as_many_batches(tied_model, build_policy, make_batch):
    batch, algorithm = make_batch(num_groups=6), AlgorithmConfig(use_rollout_logprobs=True)
    policy = build_policy(tied_model, algorithm=algorithm)
    parts = [policy.train(batch[:3]), policy.train(batch[3:])]
    weights = {name: tensor.clone() for name, tensor in policy.export.tensors()}
    policy = build_policy(tied_model, algorithm=algorithm)
    whole = policy.train(batch, num_steps=2)
    for name, tensor in policy.export.tensors():
        torch.testing.assert_close(tensor, weights[name])
    assert (whole["updated"], whole["lr"]) == (2, parts[1]["lr"])
    for name in ("samples", "tokens", "tokens_trained", "zero_variance_groups"):
        assert whole[name] == sum(part[name] for part in parts)
    tokens = [part["tokens_trained"] for part in parts]
    for name in ("loss", "entropy", "pg_clipfrac", "logprob_mismatch_mean"):
        assert whole[name] == pytest.approx(np.average([part[name] for part in parts], weights=tokens), abs=1e-6)
    assert whole["logprob_mismatch_max"] == pytest.approx(max(part["logprob_mismatch_max"] for part in parts), rel=1e-4)


def test_several_passes_equal_as_many_steps_on_the_same_batch(tied_model, build_policy, make_batch):
    batch = make_batch()
    policy = build_policy(tied_model)
    apart = [policy.train(batch, num_steps=2) for _ in range(3)]
    weights = {name: tensor.clone() for name, tensor in policy.export.tensors()}
    policy = build_policy(tied_model)
    policy.config = replace(policy.config, rollout=replace(policy.config.rollout, num_passes_per_rollout=3))
    together = policy.train(batch, num_steps=2)
    for name, tensor in policy.export.tensors():
        torch.testing.assert_close(tensor, weights[name])
    assert (together["updated"], together["lr"]) == (6, apart[-1]["lr"])
    assert [together[name] for name in ("samples", "tokens", "zero_variance_groups")] == [
        apart[0][name] for name in ("samples", "tokens", "zero_variance_groups")
    ]
    assert together["loss"] == pytest.approx(np.mean([metrics["loss"] for metrics in apart]), rel=1e-4)
    assert together["lag/all/m2"] == pytest.approx(apart[0]["lag/all/m2"])  # of the policy that the batch was given to


def passes(monkeypatch):
    """The forward-only passes that a policy makes."""
    made, compute = [], update.forward_pass
    monkeypatch.setattr(update, "forward_pass", lambda *args: made.append(args) or compute(*args))
    return made


@pytest.mark.parametrize(("num_steps", "num_passes"), [(4, 1), (1, 3)])
def test_old_logprobs_are_those_of_before_the_first_of_several_steps(
    num_steps, num_passes, tied_model, build_policy, make_batch, monkeypatch
):
    made, own = passes(monkeypatch), AlgorithmConfig(use_rollout_logprobs=False)
    policy = build_policy(tied_model, algorithm=own, optimizer=OptimizerConfig(lr=0.05))
    policy.config = replace(policy.config, rollout=replace(policy.config.rollout, num_passes_per_rollout=num_passes))
    assert policy.train(make_batch(), num_steps=num_steps)["pg_clipfrac"] > 0  # recomputed before each step the ratio would be 1
    assert len(made) == 1


def test_one_step_on_a_batch_makes_no_pass_for_old_logprobs_as_the_ratio_is_one(tied_model, build_policy, make_batch, monkeypatch):
    made = passes(monkeypatch)
    tis = {"corrections": ["tis"]}
    once = build_policy(tied_model, algorithm=AlgorithmConfig(use_rollout_logprobs=False, **tis)).train(make_batch())
    same = build_policy(tied_model, algorithm=AlgorithmConfig(use_rollout_logprobs=True, **tis)).train(make_batch())
    assert made == []
    assert once == same
    assert once["pg_clipfrac"] == 0
    assert 0 < once["tis"] <= 2.0


class Needy(Grpo):
    """Reads every pass that there is."""

    def needs(self):
        return {"old_logprobs", "current_logprobs", "reference_logprobs"}

    def prepare(self, part):
        return {"moved": np.abs(part["current_logprobs"] - part["old_logprobs"])}

    def loss(self, row):
        outcome = super().loss(row)
        return replace_measures(outcome, moved=row["moved"], off=(row.new_logprobs.detach() - row["current_logprobs"]).abs())


def replace_measures(outcome, **measures):
    return TokenLoss(outcome.loss, {**outcome.measures, **measures})


@pytest.mark.parametrize("num_steps", [1, 3])
def test_each_pass_that_an_algorithm_needs_is_made_once(num_steps, tied_model, build_policy, make_batch, monkeypatch, tmp_path):
    policy = build_policy(
        tied_model, algorithm=AlgorithmConfig(kl_loss_coef=0.1, use_rollout_logprobs=False), optimizer=OptimizerConfig(lr=0.05)
    )
    config = policy.config
    policy.objective = Objective(config, Needy(config, Needy.Settings()), [])
    made = passes(monkeypatch)
    metrics = policy.train(make_batch(num_groups=6), num_steps=num_steps)
    assert metrics["updated"] == num_steps
    assert len(made) == 2 + (num_steps - 1)  # reference; old, which the first step's current is too; current before each further step
    assert metrics["off"] < 1e-5
    assert (metrics["moved"] > 0) == (num_steps > 1)


def test_groups_know_whether_they_had_a_gradient(tied_model, build_policy, make_batch):
    batch = [*make_batch(num_groups=3), *with_reward(make_batch(9, num_groups=1), 1.0)]
    build_policy(tied_model).train(batch, num_steps=2)
    assert [group.has_gradient for group in batch] == [len({s.reward for s in group.samples}) > 1 for group in batch]
    build_policy(tied_model, algorithm=AlgorithmConfig(advantage_estimator="sft")).train(batch)
    assert all(group.has_gradient for group in batch)


def test_masked_logprobs_that_are_not_finite_change_nothing(tied_model, build_policy, make_batch):
    batch = make_batch()
    nan = [
        TrainingGroup(g.id, [replace(s, rollout_logprobs=np.where(s.loss_mask, s.rollout_logprobs, np.float32(np.nan))) for s in g.samples])
        for g in batch
    ]
    assert build_policy(tied_model).train(nan) == build_policy(tied_model).train(batch)


def test_sft_learns_its_samples(tied_model, build_policy, make_batch):
    batch = [
        TrainingGroup(g.id, [replace(s, reward=None, rollout_logprobs=0 * s.rollout_logprobs) for s in g.samples]) for g in make_batch()
    ]
    policy = build_policy(tied_model, algorithm=AlgorithmConfig(advantage_estimator="sft"))
    losses = [policy.train(batch)["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_kl_term_keeps_the_groups_without_variance(tied_model, build_policy, make_batch, monkeypatch):
    policy = build_policy(tied_model, algorithm=AlgorithmConfig(kl_loss_coef=0.1))
    compute = update.forward_pass
    monkeypatch.setattr(update, "forward_pass", lambda *args: compute(*args) - 0.5)
    metrics = policy.train(with_reward(make_batch(), 1.0))
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
    assert {tensor.dtype for _, tensor in policy.export.tensors()} == {torch.bfloat16}


class LogitsSeen(TorchDispatchMode):
    """Of the tensors made inside that have a column for each token of the vocabulary: the most values of one by dtype."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCAB_SIZE,):
                self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), tensor.numel())
        return out


def test_logits_of_a_whole_row_never_exist(tied_model, build_policy, make_batch, monkeypatch):
    """Neither in the model's dtype, nor in fp32: of a row of 32,768 tokens and 152,000 columns they would take 30 GB."""
    whole = build_policy(tied_model, dtype="bfloat16").train(make_batch())
    monkeypatch.setattr("trainer.model.logprobs.BLOCK_VALUES", 40 * VOCAB_SIZE)
    monkeypatch.setattr("trainer.model.logprobs.CHUNK_VALUES", 3 * VOCAB_SIZE)
    with LogitsSeen() as seen:
        cut = build_policy(tied_model, dtype="bfloat16").train(make_batch())
    assert seen.largest == {torch.bfloat16: 40 * VOCAB_SIZE, torch.float32: 3 * VOCAB_SIZE}
    assert cut["loss"] == whole["loss"]
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-2)


@pytest.mark.parametrize(("style", "between"), [("linear", [7e-4, 4e-4]), ("cosine", [7.75e-4, 3.25e-4])])
def test_learning_rate_follows_the_schedule(style, between, tied_model, build_policy, make_batch):
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=2, lr_decay_iters=5, lr_decay_style=style)
    policy = build_policy(tied_model, optimizer=optimizer)
    rates = [policy.train(make_batch())["lr"] for _ in range(7)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, *between, 1e-4, 1e-4])


def test_weight_decay_shrinks_matrices_and_leaves_norms_as_they_are(tied_model, build_policy, make_batch):
    def trained(decay):
        policy = build_policy(tied_model, optimizer=OptimizerConfig(lr=1e-2), megatron={"weight_decay": decay})
        policy.train(make_batch())
        return {name: tensor.clone() for name, tensor in policy.export.tensors()}

    without, decayed = trained(0.0), trained(0.1)
    changed = {name for name, tensor in without.items() if not torch.equal(tensor, decayed[name])}
    assert changed == {name for name, tensor in without.items() if tensor.dim() > 1}

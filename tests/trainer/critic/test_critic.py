"""The critic: its values against transformers, its step against a loop, what it learns, and how it goes on from a checkpoint."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from saved_checkpoint import save_checkpoint
from transformers import AutoModelForCausalLM

from slimebus.bus.errors import ConfigError
from slimebus.bus.samples import Sample
from slimebus.config.schema import AlgorithmConfig, OptimizerConfig
from trainer.batches.batch import TrainingGroup
from trainer.checkpoint.load import load_checkpoint
from trainer.critic.critic import Critic, explained_variance

PPO = AlgorithmConfig(advantage_estimator="ppo", settings={"gamma": 1.0, "lambd": 1.0, "value_clip": 0.3})


@pytest.fixture
def build_critic(build_policy):
    """Builds a critic on a model directory; the one before is closed first."""

    def build(folder, algorithm=PPO, dtype="float32", lr=1e-3, required_fields=("values",)):
        given = {"algorithm": algorithm, "dtype": dtype, "required_fields": required_fields, "max_tokens_per_gpu": 256}
        return build_policy(folder, optimizer=OptimizerConfig(lr=lr), learner=Critic, **given)

    return build


def with_values(critic, groups):
    """The groups as they are learned: with the values of the weights that are there now."""
    values = iter(critic.values(groups))
    return [TrainingGroup(g.id, [replace(s, extras={"values": next(values)}) for s in g.samples]) for g in groups]


def use_random_head(critic):
    head = critic.model.gpt.output_layer
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(5))
        head.bias.fill_(0.5)
    return head.weight.detach().clone().float(), head.bias.detach().clone().float()


def hf_values(model, tokens, head):
    """V(tokens[:t]) for each t, 0 at the first token."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    hidden = model.model(ids).last_hidden_state[0, :-1]
    return torch.cat([torch.zeros(1), hidden @ head[0][0] + head[1]])


@pytest.mark.parametrize("kind", ["tied_model", "untied_model"])
def test_values_are_the_head_on_the_hidden_states_of_transformers(kind, request, build_critic, make_batch):
    folder, batch = request.getfixturevalue(kind), make_batch()
    critic = build_critic(folder)
    assert all(np.all(values == 0) for values in critic.values(batch)), "values begin at 0"
    head = use_random_head(critic)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sample, values in zip([s for g in batch for s in g.samples], critic.values(batch), strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(values, hf_values(model, sample.tokens, head).numpy(), atol=1e-4)


def test_a_step_equals_a_loop_over_samples(tied_model, build_critic, make_batch):
    critic = build_critic(tied_model)
    batch, head = make_batch(), use_random_head(critic)
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    parameters = [torch.nn.Parameter(tensor) for tensor in head]
    valued = with_values(critic, batch)
    shifted = [TrainingGroup(g.id, [replace(s, extras={"values": s.extras["values"] - 0.4}) for s in g.samples]) for g in valued]
    losses, num_tokens = [], sum(int(s.loss_mask[1:].sum()) for g in batch for s in g.samples)
    for group in shifted:
        for s in group.samples:
            mask, before = torch.from_numpy(s.loss_mask.astype(bool)), torch.from_numpy(s.extras["values"])
            mask[0] = False
            if not mask.any():
                continue
            values = hf_values(model, s.tokens, parameters)
            returns = torch.full_like(before, s.reward)  # gamma = lambda = 1: the reward at the end
            near = before + (values - before).clamp(-0.3, 0.3)
            per_token = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
            losses.append(per_token[mask].sum() / num_tokens)
    loss = torch.stack(losses).sum()
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in [*model.model.parameters(), *parameters] if p.grad is not None))
    metrics = critic.train(shifted)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert 0 < metrics["value_clipfrac"] < 1


def telling_groups(seed, num_groups=8):
    """Samples whose first token tells the reward: 1 where it is even."""
    draw = np.random.default_rng(seed)

    def sample():
        tokens = draw.integers(2, 38, 8).astype(np.int32)
        mask = np.array([0, 0, 1, 1, 1, 1, 1, 1], np.uint8)
        logprobs = np.full(8, -1.0, np.float32)
        return Sample(tokens=tokens, loss_mask=mask, rollout_logprobs=logprobs, versions=[(0, 8)], reward=float(tokens[0] % 2 == 0))

    return [TrainingGroup(f"g{seed}-{i}", [sample() for _ in range(4)]) for i in range(num_groups)]


def learn(critic, steps):
    return [critic.train(with_values(critic, telling_groups(step))) for step in steps]


def test_it_learns_what_tells_the_return(tied_model, build_critic):
    critic = build_critic(tied_model, lr=3e-3)
    first, *_, last = learn(critic, range(40))
    assert first["explained_variance"] == 0
    assert last["explained_variance"] > 0.5
    assert last["value"] == pytest.approx(last["return"], abs=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_then_resume_for_three_equals_six_steps_bitwise(dtype, tied_model, build_critic, tmp_path):
    critic = build_critic(tied_model, dtype=dtype)
    learn(critic, range(3))
    save_checkpoint(tmp_path, critic, 3)
    want = learn(critic, range(3, 6))
    values = critic.values(telling_groups(9))
    resumed = build_critic(tied_model, dtype=dtype)
    load_checkpoint(tmp_path, resumed)
    assert learn(resumed, range(3, 6)) == want
    assert all(np.array_equal(one, other) for one, other in zip(resumed.values(telling_groups(9)), values, strict=True))


def test_it_has_a_learning_rate_of_its_own(tied_model, build_critic):
    algorithm = replace(PPO, settings={"critic_lr": 5e-4})
    assert learn(build_critic(tied_model, algorithm), [0])[0]["lr"] == 5e-4
    assert learn(build_critic(tied_model), [0])[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": AlgorithmConfig()}, "grpo has no critic; a critic needs ppo"),
        ({"algorithm": replace(PPO, kl_coef=0.1)}, r"kl_coef: 0\.1 puts a KL in the rewards"),
        ({"required_fields": []}, "required_fields: values is not among them"),
    ],
)
def test_what_a_critic_cannot_learn_from_is_refused(given, message, tied_model, build_critic):
    with pytest.raises(ConfigError, match=message):
        build_critic(tied_model, **given)


def test_explained_variance_by_hand():
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full(4, 7.0), returns) == 0
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, np.ones(4)) == 0
    assert explained_variance(returns[:0], returns[:0]) == 0

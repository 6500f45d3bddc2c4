"""Log-probability and entropy, and their gradients, against log_softmax."""

import pytest
import torch

from trainer.model.logprobs import logprobs_and_entropy


def test_values_and_gradients_equal_those_of_log_softmax():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 11, requires_grad=True)
    targets = torch.randint(0, 11, (2, 5))
    got, entropy = logprobs_and_entropy(logits, targets, vocab_size=11)
    (got * 0.3 + entropy * torch.arange(5.0)).sum().backward()
    mine = logits.grad.clone()
    logits.grad = None
    log_p = logits.log_softmax(-1)
    want, want_entropy = log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    (want * 0.3 + want_entropy * torch.arange(5.0)).sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(entropy, want_entropy)
    torch.testing.assert_close(mine, logits.grad, atol=1e-6, rtol=1e-4)


def test_values_and_gradients_at_a_temperature_for_each_token_equal_those_of_divided_logits():
    torch.manual_seed(0)
    logits, temperature = torch.randn(2, 5, 11, requires_grad=True), torch.tensor([0.7, 1.3, 1.0, 0.1, 2.0]).repeat(2, 1)
    targets = torch.randint(0, 11, (2, 5))
    got = logprobs_and_entropy(logits, targets, temperature, vocab_size=11)
    (got[0] * 0.3 + got[1]).sum().backward()
    mine, logits.grad = logits.grad.clone(), None
    want = logprobs_and_entropy(logits / temperature[..., None], targets, vocab_size=11)
    (want[0] * 0.3 + want[1]).sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, logits.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("temperature", [None, torch.tensor([1.0, 0.5, 1e-3, 3.0])])
def test_padding_columns_are_no_tokens(temperature):
    torch.manual_seed(0)
    logits = torch.randn(4, 8)
    targets = torch.tensor([0, 1, 2, 5])
    got, entropy = logprobs_and_entropy(logits, targets, temperature, vocab_size=6)
    want, want_entropy = logprobs_and_entropy(logits[:, :6].clone(), targets, temperature, vocab_size=6)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(entropy, want_entropy)

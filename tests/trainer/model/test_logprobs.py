"""Log-probability and entropy, and their gradients, against log_softmax."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model import logprobs as of_hidden_states


def logprobs_and_entropy(logits, *args, columns=None, **options):
    """Of logits that an output layer makes of hidden states equal to them; columns: those of this rank."""
    weight = torch.eye(logits.shape[-1], dtype=logits.dtype)[columns or slice(None)]
    return of_hidden_states.logprobs_and_entropy(logits, weight, *args, **options)


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


class HalfOfTheVocabulary:
    """A tensor-parallel group of two as one of its ranks sees it, for collectives that are summed by hand."""

    def __init__(self, rank):
        self._rank = rank

    def size(self):
        return 2

    def rank(self):
        return self._rank


def results(logits, targets, temperature, **more):
    """Values, and the gradient of a mix of both."""
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(leaf, targets, temperature, **more)
    (logprobs * 0.3 + entropy * torch.arange(float(targets.shape[-1]))).sum().backward()
    return logprobs.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("temperature", [None, torch.rand(1, 9) + 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_tokens_change_nothing(temperature, dtype, monkeypatch):
    torch.manual_seed(0)
    logits, targets = torch.randn(1, 9, 16).to(dtype), torch.randint(0, 14, (1, 9))
    whole = results(logits, targets, temperature, vocab_size=14)
    monkeypatch.setattr("trainer.model.logprobs.CPU_CHUNK_VALUES", 4 * 16)
    for a, b in zip(results(logits, targets, temperature, vocab_size=14), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    monkeypatch.setattr("trainer.model.logprobs.CHUNK_VALUES", 2 * 16)
    for a, b in zip(results(logits, targets, temperature, vocab_size=14), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("vocab_size", [16, 13, 8, 7])
def test_a_split_vocabulary_in_chunks_gives_what_the_whole_one_gives(vocab_size, monkeypatch):
    """Two ranks as two threads; also where the second has padding columns alone."""
    torch.manual_seed(0)
    logits, targets, warmth = torch.randn(1, 6, 16), torch.randint(0, vocab_size, (1, 6)), torch.rand(1, 6) + 0.5
    whole = results(logits, targets, warmth, vocab_size=vocab_size)
    monkeypatch.setattr("trainer.model.logprobs.CHUNK_VALUES", 2 * 8)
    meet, sent = threading.Barrier(2), {}

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        sent[group.rank()] = tensor.clone()
        meet.wait(30)
        tensor.copy_(torch.maximum(sent[0], sent[1]) if op == dist.ReduceOp.MAX else sent[0] + sent[1])
        meet.wait(30)

    monkeypatch.setattr("trainer.model.logprobs.dist.all_reduce", all_reduce)
    with ThreadPoolExecutor(2) as pool:
        halves = list(
            pool.map(
                lambda r: results(
                    logits, targets, warmth, columns=slice(8 * r, 8 * r + 8), vocab_size=vocab_size, group=HalfOfTheVocabulary(r)
                ),
                (0, 1),
            )
        )
    for half in halves:
        torch.testing.assert_close(half[:2], whole[:2])
    torch.testing.assert_close(halves[0][2] + halves[1][2], whole[2], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("block", [1 << 28, 3 * 11])
@pytest.mark.parametrize("chunk", [1 << 24, 2 * 11])
@pytest.mark.parametrize("cpu_chunk", [1 << 17, 3 * 11])
def test_the_gradient_of_the_output_layer_is_that_of_a_product_with_all_logits(block, chunk, cpu_chunk, monkeypatch):
    monkeypatch.setattr(of_hidden_states, "CPU_CHUNK_VALUES", cpu_chunk)
    monkeypatch.setattr(of_hidden_states, "BLOCK_VALUES", block)
    monkeypatch.setattr(of_hidden_states, "CHUNK_VALUES", chunk)
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 8, 5, requires_grad=True), torch.randn(13, 5, requires_grad=True)  # two rows fill it up
    targets = torch.randint(0, 11, (1, 8))
    got = of_hidden_states.logprobs_and_entropy(hidden, weight, targets, vocab_size=11)
    log_p = (hidden @ weight[:11].T).log_softmax(-1)
    want = log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    grads = [torch.autograd.grad((a * 0.3 + b * torch.arange(8.0)).sum(), (hidden, weight)) for a, b in (got, want)]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


class Fp32Seen(TorchDispatchMode):
    """The most values that any fp32 tensor made inside has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_fp32_tensor_is_larger_than_a_chunk_forward_or_backward(monkeypatch):
    monkeypatch.setattr("trainer.model.logprobs.CHUNK_VALUES", 4 * 64)
    logits = torch.randn(1, 40, 64, dtype=torch.bfloat16).requires_grad_()
    with Fp32Seen() as seen:
        logprobs, entropy = logprobs_and_entropy(logits, torch.zeros(1, 40, dtype=torch.int64), torch.ones(1, 40), vocab_size=60)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.largest == 4 * 60

"""Floating-point operations against numbers worked out by hand."""

import pytest

from trainer.watch.step_watch import peak_flops, step_flops, used_parameters


def test_a_token_costs_six_operations_a_parameter_and_twelve_for_each_attended_token() -> None:
    # two sequences of 3 and 5 tokens; 1000 parameters; 2 layers of 4 heads of 8
    assert step_flops([3, 5], 1000, 2 * 4 * 8) == 6 * 1000 * 8 + 12 * 64 * (9 + 25)


def test_only_experts_that_a_token_is_sent_to_count_and_an_embedding_only_where_it_is_the_output_too() -> None:
    shapes = {
        "embedding.word_embeddings.weight": (10, 4),
        "decoder.layers.mlp.experts.linear_fc1.weight": (2, 8, 3, 4),
        "norm.weight": (4,),
    }
    assert used_parameters(shapes, is_tied=False, share_of_experts=0.25) == 2 * 8 * 3 * 4 / 4 + 4
    assert used_parameters(shapes, is_tied=True, share_of_experts=1.0) == 40 + 192 + 4


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Tesla K80", None)],
)
def test_the_peak_is_that_of_the_device(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak

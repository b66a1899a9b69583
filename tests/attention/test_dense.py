"""Dense attention with its log-sum-exp, and the merge of two results."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.torch_decode import dense_attention, merge_attention


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_log_sum_exp_are_those_of_the_definition(is_causal: bool) -> None:
    q, k, v = (draw(2, 3, 7, 16, seed=seed) for seed in range(3))
    bias = torch.tensor([[0.0] * 5 + [-math.inf] * 2, [0.0] * 7]).view(2, 1, 1, 7)
    is_future = torch.ones(7, 7).triu(1).bool()
    scores = 0.3 * q @ k.mT
    scores = scores.masked_fill(is_future, -math.inf) if is_causal else scores + bias
    out, lse = dense_attention(
        q, k, v, scale=0.3, causal=is_causal, bias=None if is_causal else bias
    )
    torch.testing.assert_close(out, scores.softmax(-1) @ v, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-6, rtol=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 100), st.sampled_from([0.1, 1, 20]))
def test_merging_two_parts_gives_the_whole(
    num_first: int, num_second: int, seed: int, scale: float
) -> None:
    """Property: whatever the sizes, and where one part outweighs the other by far."""
    q, k, v = (draw(1, 2, n, 8, seed=seed + i) for i, n in enumerate([3, 60, 60]))
    stop = num_first + num_second
    parts = [
        dense_attention(q, k[:, :, span], v[:, :, span], scale=scale)
        for span in (slice(0, num_first), slice(num_first, stop))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])
    whole, whole_lse = dense_attention(q, k[:, :, :stop], v[:, :, :stop], scale=scale)
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


def test_a_part_without_keys_weighs_nothing() -> None:
    out, lse = draw(4, 8), draw(4)
    nothing = torch.zeros(4, 8), torch.full((4,), -math.inf)
    for merged in (merge_attention(out, lse, *nothing), merge_attention(*nothing, out, lse)):
        torch.testing.assert_close(merged, (out, lse))
    empty, empty_lse = merge_attention(*nothing, *nothing)
    assert not empty.any() and bool(empty_lse.isneginf().all())

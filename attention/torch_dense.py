"""Attention over dense keys and values, for the torch backend.

Attention without a soft cap uses fused kernels. With a window or a soft cap, queries
are computed in pieces of limited size.
"""

from typing import Final

import torch
from torch import Tensor

from attention.base import AttentionKind

_MAX_SCORES: Final = 2**24  # scores in memory at once, of all heads together
# Queries that are computed at once. With a window, a larger number would compute more
# scores that are then masked.
_MAX_QUERIES: Final = 512
_ALIGNMENT: Final = 16  # elements; fused kernels need rows of a bias to be aligned


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Computes softmax(scale * q k^T + bias) v.

    All scores are in memory at once only if there is a soft cap.

    Args:
        q: [A, B, Tq, D].
        k, v: [A, B, Tk, D]; an expanded axis is not copied.
        scale: Factor of the scores.
        causal: Query i sees keys 0..i. This requires Tq == Tk and no soft cap.
        bias: Added to the scores, [A or 1, 1, Tq or 1, Tk] in q's dtype.
        soft_cap: Applied to the scores before the bias is added; 0: no cap.

    Returns:
        The output [A, B, Tq, D] in q's dtype and the log-sum-exp, float32 [A, B, Tq].
    """
    if soft_cap:
        assert not causal
        return _soft_capped_attention(q, k, v, scale, bias, soft_cap)
    full_bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=full_bias, scale=scale
        )
    else:
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, full_bias, True, 0.0, causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads its rows
    return out, lse.float()


def _soft_capped_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, soft_cap: float
) -> tuple[Tensor, Tensor]:
    shape = q.shape
    if k.stride(1) == 0:
        # All entries of axis B share the keys' memory, so one product serves them all.
        q = q.flatten(1, 2)[:, None]
        k = k[:, :1]
        v = v[:, :1]
    # Scores are float32, because 16-bit scores would be rounded before they are capped.
    scores = q.float() @ k.float().mT
    scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap).view(*shape[:3], -1)
    scores = scores if bias is None else scores.add_(bias)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype)
    return (weights.view(*q.shape[:3], -1) @ v).view(shape), lse


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merges attention over two disjoint sets of keys into attention over their union.

    Args:
        out_a, out_b: [..., D], the output over each set.
        lse_a, lse_b: float32 [...], the log-sum-exp over each set.

    Returns:
        The merged output in out_a's dtype, and the merged log-sum-exp.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, kind: AttentionKind
) -> tuple[Tensor, Tensor]:
    """Computes causal attention for the last Tq tokens of a sequence.

    `kind` may have a window and a soft cap.

    Args:
        q: [H, B, Tq, D], with B query heads for each KV head.
        k, v: [H, Tk, D]; the last Tq keys and values are those of the queries' tokens.
        scale: Factor of the scores.

    Returns:
        The output and the log-sum-exp, as dense_attention returns them.
    """
    num_heads = q.shape[0] * q.shape[1]
    num_queries = q.shape[2]
    num_keys = k.shape[1]
    window = kind.window or num_keys
    num_cached = num_keys - num_queries
    max_keys = min(num_keys, window + _MAX_QUERIES)
    piece_size = max(1, min(_MAX_QUERIES, _MAX_SCORES // (num_heads * max_keys)))
    parts = []
    for start in range(0, num_queries, piece_size):
        stop = min(start + piece_size, num_queries)
        first_key = max(0, num_cached + start + 1 - window)
        last_key = num_cached + stop
        seen = (
            tensor[:, None, first_key:last_key].expand(-1, q.shape[1], -1, -1)
            for tensor in (k, v)
        )
        key_positions = torch.arange(first_key, last_key, device=q.device)
        query_positions = key_positions[start - stop :, None]
        is_after_query = key_positions > query_positions
        is_before_window = key_positions <= query_positions - window
        width = -(-len(key_positions) // _ALIGNMENT) * _ALIGNMENT
        bias = q.new_zeros(1, 1, stop - start, width)[..., : len(key_positions)]
        bias.masked_fill_(is_after_query | is_before_window, float("-inf"))
        part = dense_attention(
            q[:, :, start:stop], *seen, scale=scale, bias=bias, soft_cap=kind.soft_cap
        )
        parts.append(part)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)

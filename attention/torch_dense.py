"""Attention over keys and values that lie densely, for the torch backend: fused kernels where
scores are plain products, sums over pieces of the queries where they have a window or a soft cap.
"""

from typing import Final

import torch
from torch import Tensor

from attention.base import Kind

_MAX_SCORES: Final = 2**24  # that are held at once, of all heads
_MAX_QUERIES: Final = (
    512  # of a piece in a window: the more, the more scores are hidden
)
_ALIGNMENT: Final = 16  # elements, of the rows of a bias that fused kernels take


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
    """softmax(scale * q k^T + bias) v without ever holding all scores, but where they are capped.

    Args:
        q: [A, B, Tq, D]; k, v: [A, B, Tk, D], where an expanded axis costs no copy.
        causal: query i sees keys 0..i; needs Tq == Tk, and no soft cap.
        bias: added to the scores, [A or 1, 1, Tq or 1, Tk] in q's dtype.
        soft_cap: of the scores before the bias, see attention.base.Kind.

    Returns:
        The output [A, B, Tq, D] in q's dtype and the log-sum-exp, float32 [A, B, Tq].
    """
    if soft_cap:
        assert not causal
        rows = q.shape
        if k.stride(1) == 0:  # one memory for all of B: their queries make one product
            q, k, v = q.flatten(1, 2)[:, None], k[:, :1], v[:, :1]
        scores = (
            q.float() @ k.float().mT
        )  # in 16 bits they would be rounded before they are capped
        scores = (
            scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap).view(*rows[:3], -1)
        )
        scores = scores if bias is None else scores.add_(bias)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype)
        return (weights.view(*q.shape[:3], -1) @ v).view(rows), lse
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


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the result over each.

    Args:
        out_a, out_b: [..., D]; lse_a, lse_b: float32 [...].

    Returns:
        The merged output in out_a's dtype and its log-sum-exp.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (
        torch.exp(part - lse).unsqueeze(-1) for part in (lse_a, lse_b)
    )
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """Attention of the last tokens of a sequence, of any kind.

    Args:
        q: [H, B, Tq, D]; k, v: [H, Tk, D], the queries' own tokens at their end.

    Returns:
        As dense_attention.
    """
    heads, num_queries, num_keys = q.shape[0] * q.shape[1], q.shape[2], k.shape[1]
    window, before = kind.window or num_keys, num_keys - num_queries
    reach = min(num_keys, window + _MAX_QUERIES)
    at_once = max(1, min(_MAX_QUERIES, _MAX_SCORES // (heads * reach)))
    parts = []
    for start in range(0, num_queries, at_once):
        stop = min(start + at_once, num_queries)
        first, last = max(0, before + start + 1 - window), before + stop
        seen = (x[:, None, first:last].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        keys = torch.arange(first, last, device=q.device)
        own = keys[start - stop :, None]
        is_hidden = (keys > own) | (keys <= own - window)
        width = -(-len(keys) // _ALIGNMENT) * _ALIGNMENT
        bias = q.new_zeros(1, 1, stop - start, width)[..., : len(keys)]
        bias.masked_fill_(is_hidden, float("-inf"))
        part = dense_attention(
            q[:, :, start:stop], *seen, scale=scale, bias=bias, soft_cap=kind.soft_cap
        )
        parts.append(part)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)

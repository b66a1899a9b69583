"""Attention over dense tensors that also returns the log-sum-exp, and the merge of two results.

Softmax attention over a set of keys that is split in two is the average of the two results weighted
by exp(lse): this is what lets cached context and new tokens, or the shards of a context-parallel
cache, be attended to separately.
"""

import torch


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T + bias) v without ever holding all scores.

    Args:
        q: [A, B, Tq, D]; k, v: [A, B, Tk, D], where an expanded axis costs no copy.
        causal: query i sees keys 0..i; needs Tq == Tk.
        bias: added to the scores, [A, 1, 1, Tk] in q's dtype.

    Returns:
        The output [A, B, Tq, D] in q's dtype and the log-sum-exp, float32 [A, B, Tq].
    """
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
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the result over each.

    Args:
        out_a, out_b: [..., D]; lse_a, lse_b: float32 [...]. An lse of -inf stands for no keys.

    Returns:
        The merged output in out_a's dtype and its log-sum-exp.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # No key on either side: the weights would be exp(-inf - -inf); any finite base gives zeros.
    base = torch.where(lse.isneginf(), 0.0, lse)
    weight_a, weight_b = (torch.exp(part - base).unsqueeze(-1) for part in (lse_a, lse_b))
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse

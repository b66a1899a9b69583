"""Plain formulas of MTP layers and EAGLE-3 in float32, for one sequence.

The formulas share no code with `model/`: weights are read by their names, and each
function computes all positions at once, without a cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float, *, pairs: str) -> Tensor:
    """Rotates x [T, heads, dim].

    Args:
        pairs: "halves" if element i pairs with element i + dim / 2, "neighbours" if
            elements 2 i and 2 i + 1 pair.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half)
    angles = positions[:, None, None] * frequencies
    if pairs == "halves":
        first, second = x[..., :half], x[..., half:]
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    rotated_first = first * angles.cos() - second * angles.sin()
    rotated_second = first * angles.sin() + second * angles.cos()
    if pairs == "halves":
        return torch.cat((rotated_first, rotated_second), dim=-1)
    return torch.stack((rotated_first, rotated_second), dim=-1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [T, heads, dim] over k and v [T, KV heads, dim]."""
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    is_later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(is_later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def head_attention(
    x: Tensor, positions: Tensor, weights: Weights, prefix: str, raw: dict[str, Any]
) -> Tensor:
    """Grouped-query attention, with biases and norms of heads if there are any."""
    dim = raw["head_dim"]
    rotary = int(dim * raw.get("partial_rotary_factor", 1.0))
    parts = []
    for name in "qkv":
        part = x @ weights[f"{prefix}.{name}_proj.weight"].T
        if f"{prefix}.{name}_proj.bias" in weights:
            part = part + weights[f"{prefix}.{name}_proj.bias"]
        part = part.view(len(x), -1, dim)
        norm = weights.get(f"{prefix}.{name}_norm.weight")
        if norm is not None:
            part = rms_norm(part, norm, raw["rms_norm_eps"])
        if name != "v":
            rotated = rotate(
                part[..., :rotary], positions, raw["rope_theta"], pairs="halves"
            )
            part = torch.cat((rotated, part[..., rotary:]), dim=-1)
        parts.append(part)
    return attend(*parts) @ weights[f"{prefix}.o_proj.weight"].T


def latent_attention(
    x: Tensor, positions: Tensor, weights: Weights, prefix: str, raw: dict[str, Any]
) -> Tensor:
    """MLA with complete keys and values for each head."""
    nope, rope = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    heads, rank = raw["num_attention_heads"], raw["kv_lora_rank"]
    theta = raw["rope_theta"]
    if f"{prefix}.q_proj.weight" in weights:
        q = x @ weights[f"{prefix}.q_proj.weight"].T
    else:
        low_rank = x @ weights[f"{prefix}.q_a_proj.weight"].T
        low_rank = rms_norm(low_rank, weights[f"{prefix}.q_a_layernorm.weight"])
        q = low_rank @ weights[f"{prefix}.q_b_proj.weight"].T
    q = q.view(len(x), heads, -1)
    compressed = x @ weights[f"{prefix}.kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(compressed[:, :rank], weights[f"{prefix}.kv_a_layernorm.weight"])
    keys_values = latent @ weights[f"{prefix}.kv_b_proj.weight"].T
    keys_values = keys_values.view(len(x), heads, -1)
    q_rope = rotate(q[..., nope:], positions, theta, pairs="neighbours")
    k_rope = rotate(
        compressed[:, None, rank:], positions, theta, pairs="neighbours"
    ).expand(-1, heads, rope)
    q = torch.cat((q[..., :nope], q_rope), dim=-1)
    k = torch.cat((keys_values[..., :nope], k_rope), dim=-1)
    out = attend(q, k, keys_values[..., nope:])
    return out @ weights[f"{prefix}.o_proj.weight"].T


def gated_mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    gate = x @ weights[f"{prefix}.gate_proj.weight"].T
    up = x @ weights[f"{prefix}.up_proj.weight"].T
    return (silu(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T


def mixture(x: Tensor, weights: Weights, prefix: str, raw: dict[str, Any]) -> Tensor:
    """A mixture of experts with sigmoid scores, groups and shared experts."""
    out = gated_mlp(x, weights, f"{prefix}.shared_experts")
    scores = (x @ weights[f"{prefix}.gate.weight"].T).sigmoid()
    bias = weights[f"{prefix}.gate.e_score_correction_bias"]
    for row in range(len(x)):
        groups = (scores[row] + bias).view(raw["n_group"], -1)
        group_scores = groups.topk(2).values.sum(-1)
        allowed = torch.full_like(groups, float("-inf"))
        for group in group_scores.topk(raw["topk_group"]).indices:
            allowed[group] = groups[group]
        chosen = allowed.flatten().topk(raw["num_experts_per_tok"]).indices
        factors = scores[row][chosen]
        if raw["norm_topk_prob"]:
            factors = factors / factors.sum()
        for expert, factor in zip(chosen.tolist(), factors, strict=True):
            expert_out = gated_mlp(x[row], weights, f"{prefix}.experts.{expert}")
            out[row] += raw["routed_scaling_factor"] * factor * expert_out
    return out


def decoder_layer(
    x: Tensor, positions: Tensor, weights: Weights, prefix: str, raw: dict[str, Any]
) -> Tensor:
    normed = rms_norm(
        x, weights[f"{prefix}.input_layernorm.weight"], raw["rms_norm_eps"]
    )
    attention = latent_attention if "kv_lora_rank" in raw else head_attention
    x = x + attention(normed, positions, weights, f"{prefix}.self_attn", raw)
    return x + _feed_forward(x, weights, prefix, raw)


def _feed_forward(
    x: Tensor, weights: Weights, prefix: str, raw: dict[str, Any]
) -> Tensor:
    normed = rms_norm(
        x, weights[f"{prefix}.post_attention_layernorm.weight"], raw["rms_norm_eps"]
    )
    if f"{prefix}.mlp.gate.weight" in weights:
        return mixture(normed, weights, f"{prefix}.mlp", raw)
    return gated_mlp(normed, weights, f"{prefix}.mlp")


def mtp(
    token_ids: Tensor,
    states: Tensor,
    weights: Weights,
    names: dict[str, str],
    raw: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Returns the states and the logits of an MTP layer for a whole sequence.

    Args:
        states: the states of the model after its final norm.
        names: names of weights for the keys token_norm, state_norm, projection, layer,
            norm, embedding and head.
    """
    eps = raw["rms_norm_eps"]
    embedded = weights[names["embedding"]][token_ids]
    inputs = torch.cat(
        (
            rms_norm(embedded, weights[names["token_norm"]], eps),
            rms_norm(states, weights[names["state_norm"]], eps),
        ),
        dim=-1,
    )
    x = inputs @ weights[names["projection"]].T
    x = decoder_layer(x, torch.arange(len(x)), weights, names["layer"], raw)
    x = rms_norm(x, weights[names["norm"]], eps)
    return x, x @ weights[names["head"]].T


def eagle3(
    token_ids: Tensor,
    states: Tensor,
    weights: Weights,
    raw: dict[str, Any],
    embedding: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the states and the logits of EAGLE-3 for a whole sequence.

    Args:
        states: the combined states of the target, which are input of the drafter.

    Returns:
        The states, and the logits over the drafter's vocabulary.
    """
    eps = raw["rms_norm_eps"]
    normed = rms_norm(states, weights["midlayer.hidden_norm.weight"], eps)
    embedded = rms_norm(
        embedding[token_ids], weights["midlayer.input_layernorm.weight"], eps
    )
    x = normed if raw.get("norm_before_residual") else states
    inputs = torch.cat((embedded, normed), dim=-1)
    positions = torch.arange(len(x))
    x = x + head_attention(inputs, positions, weights, "midlayer.self_attn", raw)
    x = x + _feed_forward(x, weights, "midlayer", raw)
    return x, rms_norm(x, weights["norm.weight"], eps) @ weights["lm_head.weight"].T

"""A mixture of experts as config.json describes it."""

from dataclasses import dataclass
from typing import Any, Final

from model.architectures.table import Mixture
from model.architectures.values import each_layer, number, size, unsupported, wrong
from model.errors import UnsupportedModel
from protocol.short_repr import short_repr

_METHODS: Final = {
    "softmax": ("greedy", "group_limited_greedy"),
    "sigmoid": ("noaux_tc",),
}


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in all layers but `dense_layers`.

    Attributes:
        shared_intermediate_size: of each of the shared experts.
        scoring: "softmax" or "sigmoid" of the router's logits.
        is_normalized: the weights of a token's experts add up to 1, before they are scaled.
        clamps: alpha and limit of a gate g that is g * sigmoid(alpha * g) times up + 1, of g below
            the limit and up within it; None: the model's activation.
        num_groups: of neighbouring experts, of which the best `topk_groups` remain; 1: all do.
    """

    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    dense_layers: tuple[int, ...]
    scoring: str
    is_normalized: bool
    num_groups: int
    topk_groups: int
    routed_scaling_factor: float
    clamps: tuple[float, float] | None = None


def parse_experts(raw: dict[str, Any], mixture: Mixture) -> MoEConfig | None:
    """None where every layer is dense."""
    count = mixture.count
    first, step = (
        int(raw.get("first_k_dense_replace") or 0),
        raw.get("decoder_sparse_step") or 1,
    )
    listed, layers = raw.get("mlp_only_layers") or (), range(each_layer(raw))
    dense = tuple(n for n in layers if n < first or n in listed or (n + 1) % step)
    if not raw.get(count) or len(dense) == len(layers):
        return None
    expected = "sigmoid" if mixture.correction else "softmax"
    scoring = str(raw.get("scoring_func") or expected)
    if scoring != expected:
        raise unsupported(f"scoring_func {short_repr(scoring)}", f"{expected} here")
    method = str(raw.get("topk_method") or _METHODS[scoring][0])
    if method not in _METHODS[scoring]:
        raise unsupported(
            f"topk_method {short_repr(method)}", ", ".join(_METHODS[scoring])
        )
    if raw.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModel("moe_layer_freq other than 1 is not supported")
    if raw.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias true is not supported beside experts")
    experts, each = size(raw, count), size(raw, "num_experts_per_tok")
    if each > experts:
        raise wrong(f"num_experts_per_tok is {each}, above {count} {experts}")
    if raw.get("norm_topk_prob") and not mixture.may_normalize:
        raise unsupported("norm_topk_prob true", "weights that are not normalised here")
    groups, kept = (1, 1) if method == "greedy" else _groups(raw, count, experts, each)
    if experts // groups < mixture.group_best:
        raise wrong(f"n_group is {groups}, above half of {count} {experts}")
    width = size(raw, mixture.width)
    shared_width, num_shared = width, int(raw.get("n_shared_experts") or 0)
    if mixture.shared_width:
        shared_width, num_shared = size(raw, mixture.shared_width), 1
    return MoEConfig(
        num_experts=experts,
        num_shared_experts=num_shared,
        experts_per_token=each,
        expert_intermediate_size=width,
        shared_intermediate_size=shared_width,
        dense_layers=dense,
        scoring=scoring,
        is_normalized=bool(raw.get("norm_topk_prob")),
        num_groups=groups,
        topk_groups=kept,
        routed_scaling_factor=number(raw, "routed_scaling_factor", 1.0),
        clamps=(number(raw, "swiglu_alpha", 1.702), number(raw, "swiglu_limit", 7.0))
        if raw.get("swiglu_limit")
        else None,
    )


def _groups(
    raw: dict[str, Any], count: str, experts: int, each: int
) -> tuple[int, int]:
    groups, kept = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    if experts % groups or not 1 <= kept <= groups or each > experts // groups * kept:
        told = f"n_group {groups}, topk_group {kept} and num_experts_per_tok {each}"
        raise wrong(f"{told} do not fit {count} {experts}")
    return groups, kept

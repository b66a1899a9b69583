"""Reads the mixture-of-experts part of a config.json."""

from dataclasses import dataclass
from typing import Any, Final

from model.architectures.table import Mixture
from model.architectures.values import (
    config_error,
    read_num_layers,
    read_number,
    read_size,
    unsupported_error,
)
from model.errors import UnsupportedModel
from protocol.short_repr import short_repr

# Implemented values of topk_method for each scoring function; the first is the default.
_TOPK_METHODS: Final = {
    "softmax": ("greedy", "group_limited_greedy"),
    "sigmoid": ("noaux_tc",),
}


@dataclass(frozen=True)
class MoEConfig:
    """The mixture of experts of all layers except `dense_layers`.

    Attributes:
        shared_intermediate_size: the intermediate size of one shared expert.
        scoring: "softmax" or "sigmoid", the function applied to the router's logits.
        is_normalized: whether the weights of a token's experts are scaled to the sum 1
            before `routed_scaling_factor` is applied.
        num_groups: number of groups of neighboring experts. Only experts of the best
            `topk_groups` groups are chosen. With 1 group, all experts are candidates.
        clamps: (alpha, limit) of the clamped SwiGLU, which computes
            gate * sigmoid(alpha * gate) * (up + 1). Before that, `gate` is clamped to
            at most `limit`, and `up` is clamped to [-limit, limit]. None: the model's
            activation is used.
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
    """Reads the experts of a model. Returns None if every layer is dense.

    Raises:
        UnsupportedModel: the routing is not implemented.
        ModelLoadError: a size is missing or does not fit the number of experts.
    """
    dense_layers = _dense_layers(raw)
    if not raw.get(mixture.count_field) or len(dense_layers) == read_num_layers(raw):
        return None
    scoring = _scoring(raw, mixture)
    topk_method = _topk_method(raw, scoring)
    if raw.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModel("moe_layer_freq other than 1 is not supported")
    if raw.get("mlp_bias"):
        raise UnsupportedModel(
            "mlp_bias true is not supported in a model with experts; supported: false"
        )
    num_experts = read_size(raw, mixture.count_field)
    experts_per_token = read_size(raw, "num_experts_per_tok")
    if experts_per_token > num_experts:
        raise config_error(
            f"num_experts_per_tok is {experts_per_token}, above {mixture.count_field} "
            f"{num_experts}"
        )
    if raw.get("norm_topk_prob") and not mixture.may_normalize:
        raise unsupported_error("norm_topk_prob true in this architecture", "false")
    num_groups = 1
    topk_groups = 1
    if topk_method != "greedy":
        num_groups, topk_groups = _expert_groups(
            raw, mixture.count_field, num_experts, experts_per_token
        )
    if num_experts // num_groups < mixture.group_score_experts:
        raise config_error(
            f"n_group is {num_groups}, above half of {mixture.count_field} "
            f"{num_experts}"
        )
    width = read_size(raw, mixture.width_field)
    shared_width = width
    num_shared = int(raw.get("n_shared_experts") or 0)
    if mixture.shared_width_field:
        shared_width = read_size(raw, mixture.shared_width_field)
        num_shared = 1
    return MoEConfig(
        num_experts=num_experts,
        num_shared_experts=num_shared,
        experts_per_token=experts_per_token,
        expert_intermediate_size=width,
        shared_intermediate_size=shared_width,
        dense_layers=dense_layers,
        scoring=scoring,
        is_normalized=bool(raw.get("norm_topk_prob")),
        num_groups=num_groups,
        topk_groups=topk_groups,
        routed_scaling_factor=read_number(raw, "routed_scaling_factor", 1.0),
        clamps=_clamps(raw),
    )


def _dense_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    first_moe_layer = int(raw.get("first_k_dense_replace") or 0)
    step = raw.get("decoder_sparse_step") or 1
    listed = raw.get("mlp_only_layers") or ()
    return tuple(
        layer
        for layer in range(read_num_layers(raw))
        if layer < first_moe_layer or layer in listed or (layer + 1) % step
    )


def _scoring(raw: dict[str, Any], mixture: Mixture) -> str:
    expected = "sigmoid" if mixture.correction_bias else "softmax"
    scoring = str(raw.get("scoring_func") or expected)
    if scoring != expected:
        raise unsupported_error(
            f"scoring_func {short_repr(scoring)} in this architecture", expected
        )
    return scoring


def _topk_method(raw: dict[str, Any], scoring: str) -> str:
    methods = _TOPK_METHODS[scoring]
    method = str(raw.get("topk_method") or methods[0])
    if method not in methods:
        raise unsupported_error(f"topk_method {short_repr(method)}", ", ".join(methods))
    return method


def _expert_groups(
    raw: dict[str, Any], count_field: str, num_experts: int, experts_per_token: int
) -> tuple[int, int]:
    """Returns the number of groups of experts, and the number of groups per token."""
    num_groups = int(raw.get("n_group") or 1)
    topk_groups = int(raw.get("topk_group") or 1)
    if (
        num_experts % num_groups
        or not 1 <= topk_groups <= num_groups
        or experts_per_token > num_experts // num_groups * topk_groups
    ):
        raise config_error(
            f"n_group {num_groups}, topk_group {topk_groups} and num_experts_per_tok "
            f"{experts_per_token} do not fit {count_field} {num_experts}"
        )
    return num_groups, topk_groups


def _clamps(raw: dict[str, Any]) -> tuple[float, float] | None:
    if not raw.get("swiglu_limit"):
        return None
    alpha = read_number(raw, "swiglu_alpha", 1.702)
    limit = read_number(raw, "swiglu_limit", 7.0)
    return alpha, limit

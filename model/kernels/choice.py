"""Triton kernel that chooses the experts of each token."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait
from model.architectures.experts import MoEConfig


def _mask_other_groups(  # type: ignore[no-untyped-def]
    choice,
    index,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORE_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Returns `choice` with -inf outside of the best TOP_GROUPS groups.

    The score of a group is the sum of its SCORE_EXPERTS best values.
    """
    group = tl.arange(0, PADDED)
    expert_group = index // SIZE
    members = tl.where(
        expert_group[None, :] == group[:, None], choice[None, :], float("-inf")
    )
    sums = tl.where(group < GROUPS, 0.0, float("-inf"))
    for _ in tl.static_range(SCORE_EXPERTS):
        sums += tl.max(members, 1)
        best = tl.argmax(members, 1)
        members = tl.where(index[None, :] == best[:, None], float("-inf"), members)
    is_inside = index < 0
    for _ in tl.static_range(TOP_GROUPS):
        best_group = tl.argmax(sums, 0)
        is_inside = is_inside | (expert_group == best_group)
        sums = tl.where(group == best_group, float("-inf"), sums)
    return tl.where(is_inside, choice, float("-inf"))


_mask_groups: Any = triton.jit(_mask_other_groups)


def _load_optional(  # type: ignore[no-untyped-def]
    vector, index, is_expert
):
    """Loads a number of each expert; 0 if there is no vector."""
    values = 0.0
    if vector is not None:
        values = tl.load(vector + index, mask=is_expert, other=0.0)
    return values


_loaded_optional: Any = triton.jit(_load_optional)


def _choose(  # type: ignore[no-untyped-def]
    logits,
    logit_bias,
    correction,
    weights,
    chosen,
    num_experts,
    scale,
    NUM_CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORE_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, EXPERTS)
    is_expert = index < num_experts
    added = _loaded_optional(logit_bias, index, is_expert)
    bias = _loaded_optional(correction, index, is_expert)
    let_next_begin_and_wait()
    logit = added + tl.load(
        logits + row * num_experts + index, mask=is_expert, other=float("-inf")
    )
    score = tl.sigmoid(logit) if SIGMOID else tl.exp(logit - tl.max(logit, 0))
    if not SIGMOID and (correction is not None or not NORMALIZED):
        score = score / tl.sum(score, 0)
    choice = score + bias
    if correction is None and GROUPS == 1 and not SIGMOID:
        # Experts are chosen by logits, because small scores may round to equal numbers.
        # Logits and scores have the same order.
        choice = logit
    # NaN is treated as the largest value.
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(is_expert, choice, float("-inf"))
    if GROUPS > 1:
        choice = _mask_groups(
            choice, index, GROUPS, SIZE, TOP_GROUPS, SCORE_EXPERTS, PADDED
        )
    # Floats are mapped to integers of the same order, because a warp finds the largest
    # integer in one instruction. Adding 0.0 turns -0 into 0.
    bits = (choice + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = tl.full((EXPERTS,), NUM_CHOSEN, tl.int32)
    for turn in tl.static_range(NUM_CHOSEN):
        best = tl.min(tl.where(order == tl.max(order, 0), index, EXPERTS), 0)
        place = tl.where(index == best, turn, place)
        order = tl.where(index == best, -(1 << 31), order)
    is_chosen = place < NUM_CHOSEN
    at = row * NUM_CHOSEN + place
    if NORMALIZED:
        score = score / (tl.sum(tl.where(is_chosen, score, 0.0), 0) + 1e-20)
    tl.store(weights + at, score * scale, mask=is_chosen)
    tl.store(chosen + at, index, mask=is_chosen)


_choose_kernel: Any = triton.jit(_choose)


def choose(
    logits: Tensor,
    logit_bias: Tensor | None,
    correction: Tensor | None,
    config: MoEConfig,
    group_score_experts: int,
) -> tuple[Tensor, Tensor]:
    """Chooses experts by float32 logits [T, experts]. See Router._choose.

    Experts with NaN are chosen first. Of experts with equal values, those with lower
    ids are chosen first.

    Args:
        logit_bias: float32 [experts], which is added to the logits.
        correction: float32 [experts], which is added to the scores for the choice only.
    """
    num_rows, num_experts = logits.shape
    weights = logits.new_empty(num_rows, config.experts_per_token)
    ids = logits.new_empty(num_rows, config.experts_per_token, dtype=torch.int64)
    _choose_kernel[(num_rows,)](
        logits,
        logit_bias,
        correction,
        weights,
        ids,
        num_experts,
        config.routed_scaling_factor,
        NUM_CHOSEN=config.experts_per_token,
        EXPERTS=triton.next_power_of_2(num_experts),
        SIGMOID=config.scoring == "sigmoid",
        NORMALIZED=config.is_normalized,
        GROUPS=config.num_groups,
        SIZE=num_experts // config.num_groups,
        TOP_GROUPS=config.topk_groups,
        SCORE_EXPERTS=group_score_experts,
        PADDED=triton.next_power_of_2(config.num_groups),
        num_warps=1,
        launch_pdl=PDL,
    )
    return weights, ids

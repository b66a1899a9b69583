"""The router of a mixture of experts: chooses the experts of each token, with
weights."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.config import ModelConfig
from model.weights import WeightLoader

_SELF_TEST_TOKENS: Final = 24
# Rounding decides between experts with nearly equal scores. In the self-test, the
# kernel may therefore choose another expert than torch. The scores of the two experts
# must differ by less than this number times the limit of `fused_ops.passes_self_test`.
_TIE_DIFFERENCE: Final = 1e-3
# Added to sums of weights before a division, so that the divisor is not 0.
_EPSILON: Final = 1e-20


class Router:
    """Chooses the experts that a token goes through, and their weights."""

    def __init__(self, loader: WeightLoader, prefix: str, config: ModelConfig) -> None:
        moe = config.moe
        mixture = config.traits.mixture
        assert moe is not None and mixture is not None
        self._moe = moe
        self._group_score_experts = mixture.group_score_experts
        name = f"{prefix}.{mixture.router}.weight"
        shape = (moe.num_experts, config.hidden_size)
        self.weight = loader.load(name, shape)
        self._bias = None
        if mixture.biased:
            name = f"{prefix}.{mixture.router}.bias"
            self._bias = loader.load(name, shape[:1], dtype=torch.float32)
        self._correction_bias = None
        if mixture.correction_bias:
            name = f"{prefix}.{mixture.correction_bias}"
            self._correction_bias = loader.load(name, shape[:1], dtype=torch.float32)
        self._is_fused = fused_ops.is_supported(self.weight.device, self.weight.dtype)
        self._has_one_row_kernel = (
            self._is_fused and fused_ops.kernels().has_one_row_kernel(self.weight)
        )
        self._has_kernel = self._is_fused and self._passes_self_test()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and expert ids for x [T, hidden]. See `choose`."""
        if self._has_one_row_kernel and len(x) == 1:
            logits = fused_ops.kernels().one_row(
                x, self.weight, bias=self._bias, dtype=torch.float32
            )
        elif self._is_fused:
            # torch.mm multiplies the 16-bit numbers exactly and sums in float32, so x
            # and the weight need not be converted.
            logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
            return self._choose(logits, self._bias)
        else:
            logits = F.linear(x.float(), self.weight.float(), self._bias)
        return self.choose(logits)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts by their logits [T, experts], which include the router's
        bias.

        Returns:
            Weights float32 and expert ids int64, both [T, experts_per_token].
        """
        return self._choose(logits, None)

    def _choose(
        self, logits: Tensor, logit_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Chooses experts by the sums of their logits and `logit_bias` [experts]."""
        if self._has_kernel:
            return self._choose_by_kernel(logits, logit_bias)
        return self._choose_by_torch(logits, logit_bias)

    def _choose_by_kernel(
        self, logits: Tensor, logit_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return fused_ops.experts().choose(  # type: ignore[no-any-return]
            logits,
            logit_bias,
            self._correction_bias,
            self._moe,
            self._group_score_experts,
        )

    def _choose_by_torch(
        self, logits: Tensor, logit_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        moe = self._moe
        if logit_bias is not None:
            logits = logits + logit_bias
        if moe.scoring == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(dim=-1)
        # Experts are chosen by these values, which may differ from the scores that give
        # the weights.
        choice = scores
        if self._correction_bias is not None:
            choice = scores + self._correction_bias
        elif moe.scoring == "softmax" and moe.num_groups == 1:
            # Logits are used, because small scores may round to equal numbers. Logits
            # and scores have the same order.
            choice = logits
        if moe.num_groups > 1:
            choice = self._mask_other_groups(choice)
        experts = choice.topk(moe.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if moe.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
        return weights * moe.routed_scaling_factor, experts

    def _mask_other_groups(self, choice: Tensor) -> Tensor:
        """Returns `choice` [T, experts] with -inf outside the best groups of
        experts."""
        groups = choice.view(len(choice), self._moe.num_groups, -1)
        best_scores = groups.topk(self._group_score_experts, dim=-1).values
        group_scores = best_scores.sum(-1)
        best_groups = group_scores.topk(self._moe.topk_groups, dim=-1).indices
        is_outside = torch.ones_like(group_scores, dtype=torch.bool)
        is_outside.scatter_(1, best_groups, False)
        return groups.masked_fill(is_outside[..., None], float("-inf")).view_as(choice)

    def _passes_self_test(self) -> bool:
        """Returns whether the kernel chooses correctly. See
        `fused_ops.passes_self_test`."""
        kind = (
            self._moe,
            self._group_score_experts,
            self._bias is None,
            self._correction_bias is None,
            self.weight.device,
        )
        return fused_ops.passes_self_test(
            kind,
            "the kernel that chooses experts %s; torch chooses them instead",
            self._deviation,
        )

    def _deviation(self) -> Tensor:
        """Returns how much the kernel deviates from `_choose_by_torch`.

        The result is the sum of two errors. The first is the relative error of the
        weights. The second is the difference between the scores of the experts that the
        kernel and torch choose. This difference is 0, except for ties that rounding
        decides. All test logits of a token differ, before the router's bias is added.
        """
        num_experts = self._moe.num_experts
        generator = torch.Generator().manual_seed(0)
        permutations = [
            torch.randperm(num_experts, generator=generator)
            for _ in range(_SELF_TEST_TOKENS)
        ]
        ranks = torch.stack(permutations).to(self.weight.device)
        logits = (ranks - num_experts / 2) * (8 / num_experts)
        weights, experts = self._choose_by_kernel(logits, self._bias)
        expected_weights, expected_experts = self._choose_by_torch(logits, self._bias)
        if self._bias is not None:
            logits = logits + self._bias
        choice = logits.sigmoid()
        if self._correction_bias is not None:
            choice = choice + self._correction_bias
        choice_error = choice.gather(1, experts) - choice.gather(1, expected_experts)
        weight_error = weights - expected_weights
        deviation: Tensor = (
            weight_error.norm() / expected_weights.norm()
            + choice_error.norm() / _TIE_DIFFERENCE
        )
        return deviation

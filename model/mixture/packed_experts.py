"""Routed experts in MXFP4 on a GPU. Kernels multiply by the packed codes directly."""

from typing import Any, Final

import torch
from torch import Tensor

from model import fused_ops
from model.mixture.experts import Experts, relative_error
from model.quantization import packed_fp4
from model.quantization.packed_fp4 import PackedFP4
from model.quantization.quantized import Quantized, Weight

# Maximum number of tokens that go through the experts at a time. The products of each
# token with each of its experts are stored, so this limit bounds the memory of a step.
_MAX_TOKENS: Final = 8192
# Half of these tokens go through the same experts. Each of these experts then has more
# rows than any `min_rows` of TILES.
_SELF_TEST_TOKENS: Final = 320


class PackedExperts:
    """Computes the same as `Experts`, with packed weights.

    Args:
        gate_up, down, first, total, biases, clamps: see `Experts`.
    """

    def __init__(
        self,
        gate_up: PackedFP4,
        down: PackedFP4,
        *,
        first: int,
        total: int,
        biases: tuple[Tensor, Tensor] | None,
        clamps: tuple[float, float] | None,
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._first = first
        self._num_experts = total
        self._has_all_experts = total == gate_up.shape[0]
        self._biases = biases
        self._clamps = clamps

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        residual: Tensor | None = None,
        tiles: Any = None,
    ) -> Tensor:
        """Sends tokens through their experts.

        Args:
            x: [T, hidden].
            weights: float32 [T, k].
            experts: int64 [T, k], ids of experts.
            residual: [T, hidden], to which the sums are added in place.
            tiles: see `fp4_experts.mixture`.

        Returns:
            [T, hidden]: the residual if given, else a new tensor.
        """
        out = torch.empty_like(x) if residual is None else residual
        if not self._has_all_experts:
            experts = (experts - self._first) % self._num_experts
        parts = zip(
            torch.split(x, _MAX_TOKENS),
            torch.split(weights, _MAX_TOKENS),
            torch.split(experts, _MAX_TOKENS),
            torch.split(out, _MAX_TOKENS),
            strict=True,
        )
        for part_x, part_weights, part_experts, part_out in parts:
            fused_ops.fp4_experts().mixture(
                part_x,
                self._gate_up,
                self._down,
                part_weights,
                part_experts,
                self._num_experts,
                out=part_out,
                adds=residual is not None,
                biases=self._biases,
                clamps=self._clamps,
                tiles=tiles,
            )
        return out


def make_experts(
    gate_up: Weight,
    down: Weight,
    activation: str,
    *,
    first: int,
    total: int,
    biases: tuple[Tensor, Tensor] | None,
    clamps: tuple[float, float] | None,
    num_chosen: int,
) -> Experts | PackedExperts:
    """Returns packed experts if their kernels accept the weights and pass a self-test.

    Otherwise returns `Experts`, which takes the same arguments.
    """
    experts = Experts(
        gate_up,
        down,
        activation,
        first=first,
        total=total,
        biases=biases,
        clamps=clamps,
        num_chosen=num_chosen,
    )
    is_packable = packed_fp4.can_pack(gate_up) and packed_fp4.can_pack(down)
    if not is_packable or activation != "silu":
        return experts
    assert isinstance(gate_up, Quantized) and isinstance(down, Quantized)
    if not fused_ops.is_supported(down.device, down.dtype):
        return experts
    if not fused_ops.fp4_experts().is_supported(down.device, down.dtype):
        return experts
    packed = PackedExperts(
        packed_fp4.pack(gate_up),
        packed_fp4.pack(down),
        first=first,
        total=total,
        biases=biases,
        clamps=clamps,
    )
    kind = (
        "MXFP4",
        gate_up.shape,
        down.shape,
        down.device,
        total,
        num_chosen,
        biases is None,
        clamps,
    )
    is_usable = fused_ops.passes_self_test(
        kind,
        "a kernel for experts in MXFP4 %s; slower kernels are used instead",
        lambda: _deviations(packed, experts, num_chosen),
    )
    return packed if is_usable else experts


def _deviations(packed: PackedExperts, experts: Experts, num_chosen: int) -> Tensor:
    """Returns the errors of packed experts relative to `experts`: one for each item of
    TILES, and one for a single token."""
    many = _uneven_example(experts, num_chosen)
    expected = experts(*many)
    errors = [
        relative_error(packed(*many, tiles=tiles), expected)
        for tiles in fused_ops.fp4_experts().TILES
    ]
    x, weights, chosen = experts.example(num_chosen, 1)
    # In reverse order, the first experts may be on other ranks.
    weights = weights.flip(1)
    chosen = chosen.flip(1)
    actual = packed(x, weights, chosen)
    errors.append(relative_error(actual, experts(x, weights, chosen)))
    return torch.stack(errors)


def _uneven_example(experts: Experts, num_chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random arguments of a call in which some experts have many rows.

    Tiles with few rows run other code than full tiles, and a self-test must run both.
    """
    x, weights, chosen = experts.example(num_chosen, _SELF_TEST_TOKENS)
    chosen[::2] = chosen[0]
    return x, weights, chosen

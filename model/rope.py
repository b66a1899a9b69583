"""Rotary position embedding: angles once a step, rotation once a layer."""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.architectures.rotation import RopeConfig, yarn_mscale

_FUSED_DIMS: Final = (64, 128, 256)  # of heads that are rotated by a kernel of ours

# cos and sin, or what the fused rotation takes: see Rope.angles
Angles = tuple[Tensor, Tensor]


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each rotated pair, float32 [dim / 2], on the CPU."""
    divisor = config.exponent_dim or config.dim
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / divisor
    frequencies = config.theta**exponents
    if config.rope_type == "linear":
        return 1.0 / frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, 1.0 / frequencies)
    if config.rope_type == "yarn":
        return _yarn(config, frequencies)
    if config.rope_type == "longrope":
        return 1.0 / (torch.tensor(config.divisors) * frequencies)
    return 1.0 / frequencies


def _llama3(config: RopeConfig, inverse: Tensor) -> Tensor:
    """Slows the long wavelengths by `factor`, keeps the short, blends those in between."""
    turns = config.original_max_position * inverse / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    smooth = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return (1 - smooth) * inverse / config.factor + smooth * inverse


def _yarn(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Blends interpolated and original frequencies along a ramp over the dimensions."""

    def dimension_of(turns: float) -> float:
        reach = math.log(config.original_max_position / (turns * 2 * math.pi))
        return config.dim * reach / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    high = high + 0.001 if low == high else high  # an empty ramp would divide by zero
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep


def attention_scaling(config: RopeConfig) -> float:
    """What cos and sin are multiplied by; 1 except for yarn and longrope."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type != "yarn":
        return 1.0
    if config.mscale and config.mscale_all_dim:
        of_all = yarn_mscale(config.factor, config.mscale_all_dim)
        return yarn_mscale(config.factor, config.mscale) / of_all
    return yarn_mscale(config.factor, 1.0)


def mscale_of_scores(config: RopeConfig) -> float:
    """What DeepSeek multiplies the attention scale by; 1 except for yarn with mscale_all_dim."""
    if config.rope_type != "yarn" or not config.mscale_all_dim:
        return 1.0
    return yarn_mscale(config.factor, config.mscale_all_dim) ** 2


def halves_order(config: RopeConfig, head_dim: int) -> list[int] | None:
    """The order of a head's elements in which its rotation is one of halves of the whole head:
    that of neighbours or of a part of it becomes one when the weights that make queries and keys
    are put in this order, and the elements that are not rotated turn by no angle. None: as it is.
    """
    half = config.dim // 2
    if config.dim == head_dim and not config.interleaved:
        return None
    firsts = [2 * pair if config.interleaved else pair for pair in range(half)]
    seconds = [first + (1 if config.interleaved else half) for first in firsts]
    rest = list(range(config.dim, head_dim))
    split = len(rest) // 2
    return [*firsts, *rest[:split], *seconds, *rest[split:]]


class Rope:
    """One rotation on one device.

    Args:
        head_dim: of heads in `halves_order`; None: of elements in their own order, all rotated.

    The angles of a step are computed from its positions, not looked up: a table for a context of
    131,072 tokens would take more memory than some models.
    """

    def __init__(
        self,
        config: RopeConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        head_dim: int | None = None,
    ) -> None:
        self._half = (head_dim or config.dim) // 2
        unrotated = (0, self._half - config.dim // 2)
        self._inverse = F.pad(inverse_frequencies(config), unrotated).to(device)
        scaling = torch.full((config.dim // 2,), attention_scaling(config))
        self._scaling = (
            None if scaling[0] == 1 else F.pad(scaling, unrotated, value=1.0).to(device)
        )
        self._dtype = dtype
        self._interleaved = config.interleaved and head_dim is None
        is_served = (head_dim or config.dim) in _FUSED_DIMS
        self._is_fused = is_served and fused_ops.works(torch.device(device), dtype)

    def angles(self, positions: Tensor) -> Angles:
        """cos and signed sin [T, 1, dim] of positions [T], ready for `rotate_pair`.

        Where the rotation is fused: cosines beside sines, float32 [T, dim], twice.
        """
        turned = positions[:, None] * self._inverse
        joined = turned.new_empty(len(turned), 2, self._half)
        cos, sin = (
            f(turned, out=joined[:, i]) for i, f in enumerate((torch.cos, torch.sin))
        )
        if self._scaling is not None:
            joined *= self._scaling
        if self._is_fused:
            return joined.flatten(1), joined.flatten(1)
        if self._interleaved:
            return cos[:, None], sin[:, None]
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
        return cos.to(self._dtype)[:, None], sin.to(self._dtype)[:, None]

    def cos_sin(self, angles: Angles) -> Tensor | None:
        """float32 [T, dim], cosines beside sines of halves, for an attention backend that rotates;
        None where `rotate_pair` is not fused."""
        return angles[0] if self._is_fused else None

    def rotate_pair(
        self, q: Tensor, k: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """Rotates q and k [T, heads, dim], in place where that is faster."""
        if self._is_fused:
            fused_ops.rotation().rotate(q, k, angles[0], interleaved=self._interleaved)
            return q, k
        return self._rotate(q, angles), self._rotate(k, angles)

    def _rotate(self, x: Tensor, angles: Angles) -> Tensor:
        cos, sin = angles
        if not self._interleaved:
            return (x * cos).addcmul_(x.roll(self._half, dims=-1), sin)
        even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)

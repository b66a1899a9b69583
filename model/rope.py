"""Rotary position embedding.

Angles are computed once for each step. Each layer uses these angles to rotate its
queries and keys.
"""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.architectures.rotation import RopeConfig, yarn_mscale

# Head dimensions that the fused rotation kernel supports.
_FUSED_DIMS: Final = (64, 128, 256)

# Cosines and sines in the layout that `Rope.angles` describes.
Angles = tuple[Tensor, Tensor]


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Returns the radians by which one position rotates each pair.

    Returns:
        float32 [dim / 2], on the CPU.
    """
    divisor = config.exponent_dim or config.dim
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / divisor
    frequencies = config.theta**exponents
    if config.rope_type == "linear":
        return 1.0 / frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3_frequencies(config, 1.0 / frequencies)
    if config.rope_type == "yarn":
        return _yarn_frequencies(config, frequencies)
    if config.rope_type == "longrope":
        return 1.0 / (torch.tensor(config.divisors) * frequencies)
    return 1.0 / frequencies


def _llama3_frequencies(config: RopeConfig, inverse: Tensor) -> Tensor:
    """Divides low frequencies by `factor`, and keeps high frequencies.

    Frequencies between the two are blended.
    """
    rotations = config.original_max_position * inverse / (2 * math.pi)
    blend_width = config.high_freq_factor - config.low_freq_factor
    smooth = ((rotations - config.low_freq_factor) / blend_width).clamp(0, 1)
    return (1 - smooth) * inverse / config.factor + smooth * inverse


def _yarn_frequencies(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Blends interpolated and original frequencies, along a ramp over the pairs."""

    def dimension_with(rotations: float) -> float:
        """Returns the index of the pair that makes `rotations` rotations.

        The rotations are counted over the original context. The index may be a
        fraction.
        """
        ratio = config.original_max_position / (rotations * 2 * math.pi)
        return config.dim * math.log(ratio) / (2 * math.log(config.theta))

    low = dimension_with(config.beta_fast)
    high = dimension_with(config.beta_slow)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, config.dim - 1)
    if low == high:
        high += 0.001  # an empty ramp would divide by zero
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep


def attention_scaling(config: RopeConfig) -> float:
    """Returns the factor of cos and sin, which is 1 except for yarn and longrope."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type != "yarn":
        return 1.0
    if config.mscale and config.mscale_all_dim:
        mscale_all_dim = yarn_mscale(config.factor, config.mscale_all_dim)
        return yarn_mscale(config.factor, config.mscale) / mscale_all_dim
    return yarn_mscale(config.factor, 1.0)


def score_mscale(config: RopeConfig) -> float:
    """Returns the factor by which DeepSeek's models multiply the attention scale.

    The factor is 1 except for yarn with mscale_all_dim.
    """
    if config.rope_type != "yarn" or not config.mscale_all_dim:
        return 1.0
    return yarn_mscale(config.factor, config.mscale_all_dim) ** 2


def rotate_half_order(config: RopeConfig, head_dim: int) -> list[int] | None:
    """Returns an order of a head's elements in which its halves form the pairs.

    The weights that make queries and keys are reordered once, when they are loaded.
    After that, the first half of a head is rotated against the second half, even if the
    model rotates neighbors, or only a part of the head. Elements that the model does
    not rotate get the angle 0.

    Returns:
        The old index of each element, or None if the order needs no change.
    """
    half = config.dim // 2
    if config.dim == head_dim and not config.interleaved:
        return None
    if config.interleaved:
        firsts = [2 * pair for pair in range(half)]
        seconds = [first + 1 for first in firsts]
    else:
        firsts = list(range(half))
        seconds = [first + half for first in firsts]
    unrotated = list(range(config.dim, head_dim))
    split = len(unrotated) // 2
    return [*firsts, *unrotated[:split], *seconds, *unrotated[split:]]


class Rope:
    """One rotary embedding on one device.

    The angles of a step are computed from its positions and not read from a table. A
    table for a context of 131,072 tokens would take more memory than some models.

    Args:
        dtype: data type of queries and keys.
        head_dim: elements of a head, in the order of `rotate_half_order`. None: the
            elements are in the order of the files, and all of them are rotated.
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
        self._scaling = None
        if scaling[0] != 1:
            self._scaling = F.pad(scaling, unrotated, value=1.0).to(device)
        self._dtype = dtype
        self._interleaved = config.interleaved and head_dim is None
        has_kernel = fused_ops.is_supported(torch.device(device), dtype)
        self._is_fused = has_kernel and (head_dim or config.dim) in _FUSED_DIMS

    def angles(self, positions: Tensor) -> Angles:
        """Returns the cosines and sines of positions [T], as `rotate_pair` takes them.

        For the fused kernel, both items of the result are the same: float32 [T, dim],
        with all cosines before all sines. Without the kernel, the first item has the
        cosines and the second item the sines. Their shape is [T, 1, dim / 2] if
        neighbors form the pairs, else [T, 1, dim]. In the latter case, the first half
        of the sines is negated.
        """
        radians = positions[:, None] * self._inverse
        joined = radians.new_empty(len(radians), 2, self._half)
        cos = torch.cos(radians, out=joined[:, 0])
        sin = torch.sin(radians, out=joined[:, 1])
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
        """Returns `angles` for a backend that rotates: see RopeNormArgs.cos_sin.

        Returns None if the fused kernel does not support this rope.
        """
        return angles[0] if self._is_fused else None

    def rotate_pair(
        self, q: Tensor, k: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """Rotates q and k [T, heads, dim]; the fused kernel does so in place."""
        if self._is_fused:
            fused_ops.rotation().rotate(q, k, angles[0], interleaved=self._interleaved)
            return q, k
        return self._rotate(q, angles), self._rotate(k, angles)

    def _rotate(self, x: Tensor, angles: Angles) -> Tensor:
        cos, sin = angles
        if not self._interleaved:
            return (x * cos).addcmul_(x.roll(self._half, dims=-1), sin)
        even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)

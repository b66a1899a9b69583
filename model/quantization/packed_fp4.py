"""MXFP4 matrices in the order in which tensor cores read them.

The kernels of `model.kernels.fp4_experts` multiply by 16-bit numbers, which each thread
converts from codes. A thread of a tensor-core product needs four numbers of every 16
columns. Here the codes of 64 columns that a thread needs are next to each other, so
that it loads 8 bytes at once and exchanges nothing with other threads.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.quantization.quantized import Quantized

GROUP: Final = 32  # columns that share a scale
CHUNK: Final = 64  # columns with codes in a common order
# Rows of codes and scales are padded to a multiple of this many columns, which the
# kernels multiply at a time.
DEPTH: Final = 128
# Scales of a row are padded to a multiple of this, so that each row is aligned.
_SCALE_ALIGNMENT: Final = 16
# The kernels compute 2^(scale - 1) as a bfloat16, which has no larger exponent.
_MAX_SCALE: Final = 128


@dataclass(frozen=True)
class PackedFP4:
    """Matrices [experts, out, in] of e2m1 codes; 32 columns share a power of two.

    Attributes:
        codes: uint8 [experts, out, padded columns / 2].
        scales: uint8 [experts, out, padded groups], the exponents of float32 numbers.
        width: columns of the matrices, without padding.
    """

    codes: Tensor
    scales: Tensor
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the dequantised matrices."""
        experts, rows, _ = self.codes.shape
        return (experts, rows, self.width)

    @property
    def device(self) -> torch.device:
        return self.codes.device


def can_pack(weight: object) -> bool:
    """Returns whether `pack` accepts a weight [experts, out, in]."""
    return (
        isinstance(weight, Quantized)
        and weight.kind == "fp4"
        and weight.scales.dtype == torch.uint8
        and weight.group == GROUP
        and weight.shape[-1] % GROUP == 0
        and weight.scales.max().item() <= _MAX_SCALE
    )


def pack(weight: Quantized) -> PackedFP4:
    """Reorders the codes of a weight that `can_pack` accepts.

    The columns of a chunk are numbered by six bits w, half, upper, t (two bits) and b:
    the word of the thread, its half, the upper columns of a product of 16, the thread,
    and the number within a register. A word of 32 bits holds eight codes in the order
    b, upper, half, so that two codes that go to one register are 16 bits apart.
    """
    experts, rows, width = weight.shape
    missing = -width % DEPTH
    codes = F.pad(weight.codes, (0, missing // 2))
    nibbles = torch.stack((codes & 15, codes >> 4), -1)
    # Dimensions: chunk, w, half, upper, t, b.
    chunks = nibbles.view(experts, rows, -1, 2, 2, 2, 4, 2)
    ordered = chunks.permute(0, 1, 2, 6, 3, 7, 5, 4)  # chunk, t, w, b, upper, half
    packed = ordered[..., 0] | ordered[..., 1] << 4
    num_scales = (width + missing) // GROUP
    spare_scales = -num_scales % _SCALE_ALIGNMENT + num_scales - width // GROUP
    return PackedFP4(
        codes=packed.reshape(experts, rows, -1),
        scales=F.pad(weight.scales, (0, spare_scales)),
        width=width,
    )

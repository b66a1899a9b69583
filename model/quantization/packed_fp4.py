"""MXFP4 matrices in the order in which tensor cores read them.

The kernels of `model.kernels.fp4_experts` multiply by 16-bit numbers, which each thread
converts from codes. A thread of a tensor-core product needs four numbers of every 16
columns. In the packed order, all codes that a thread needs from 64 columns are next to
each other. So the thread loads 8 bytes at once and exchanges nothing with other
threads.

A matrix is stored in blocks of 64 rows and 128 columns. Each block is contiguous,
because memory is read faster in long pieces: with one row of a block after another row
of the whole matrix, a program would read pieces of 64 bytes.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.quantization.quantized import Quantized

GROUP: Final = 32  # columns that share a scale
CHUNK: Final = 64  # columns; the codes of a chunk are reordered together
BLOCK_ROWS: Final = 64
BLOCK_COLUMNS: Final = 128  # a kernel multiplies by this many columns at a time
# The kernels compute 2^(scale - 1) as a bfloat16. Its largest power of two is 2^127.
_MAX_SCALE: Final = 128


@dataclass(frozen=True)
class PackedFP4:
    """Matrices [experts, out, in] of e2m1 codes; 32 columns share a scale.

    Attributes:
        words: int32 [experts, blocks of rows, blocks of columns, BLOCK_ROWS,
            BLOCK_COLUMNS / 8], with eight codes each.
        scales: uint8 [experts, blocks of rows, blocks of columns, BLOCK_ROWS,
            BLOCK_COLUMNS / GROUP], the exponents of float32 numbers.
        shape: the shape of the matrices, without padding.
    """

    words: Tensor
    scales: Tensor
    shape: tuple[int, int, int]

    @property
    def device(self) -> torch.device:
        return self.words.device


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

    The six bits of a column's index in its chunk are, from the highest to the lowest:

        w      the word: a thread has two words, each with the codes of 32 columns
        half   which half of the 32 columns: 16 columns are multiplied at a time
        upper  which half of the 16 columns
        t      the thread, two bits
        b      which of the two numbers of a register

    A word of 32 bits holds eight codes. The bits of a code with b = 1 are 16 bits away
    from those of the code with b = 0 of the same register. See `_place_bits`.
    """
    experts, rows, width = weight.shape
    missing_columns = -width % BLOCK_COLUMNS
    missing_rows = -rows % BLOCK_ROWS
    codes = F.pad(weight.codes, (0, missing_columns // 2, 0, missing_rows))
    scales = F.pad(weight.scales, (0, missing_columns // GROUP, 0, missing_rows))
    nibbles = torch.stack((codes & 15, codes >> 4), -1)
    # Dimensions: chunk, w, half, upper, t, b.
    chunks = nibbles.view(*codes.shape[:2], -1, 2, 2, 2, 4, 2)
    registers = chunks.permute(0, 1, 2, 6, 3, 4, 5, 7).flatten(-3, -2)
    words = torch.zeros(registers.shape[:-2], dtype=torch.int32, device=weight.device)
    for register in range(4):
        code = registers[..., register, :].int()
        placed = _place_bits(code, register)
        words |= placed[..., 0] | _swap_halves(placed[..., 1])
    return PackedFP4(
        words=_in_blocks(words.flatten(2), BLOCK_COLUMNS // 8),
        scales=_in_blocks(scales, BLOCK_COLUMNS // GROUP),
        shape=(experts, rows, width),
    )


def _in_blocks(rows: Tensor, block_width: int) -> Tensor:
    """Cuts [experts, rows, elements] into blocks: [experts, blocks of rows, blocks of
    columns, BLOCK_ROWS, block_width]."""
    experts, num_rows, width = rows.shape
    block_counts = (num_rows // BLOCK_ROWS, width // block_width)
    blocks = rows.view(experts, block_counts[0], BLOCK_ROWS, block_counts[1], -1)
    return blocks.transpose(2, 3).contiguous()


def _place_bits(code: Tensor, register: int) -> Tensor:
    """Returns the bits of codes at the places of b = 0 in a word; see `pack`.

    A bfloat16 number needs the code's sign in bit 15 and its other bits in bits 8 to 6.
    The code of register 0 is stored in exactly these bits. The code of register 1 is
    stored shifted right by 6, and the code of register 2 rotated left by 6. So a kernel
    moves and masks all bits of such a code at once. The code of register 3 takes the
    remaining bits of the word, and a kernel moves it in two parts.
    """
    sign = code >> 3
    exponent = code >> 1 & 3
    mantissa = code & 1
    if register == 0:
        return sign << 15 | exponent << 7 | mantissa << 6
    if register == 1:
        return sign << 9 | exponent << 1 | mantissa
    if register == 2:
        return sign << 21 | exponent << 13 | mantissa << 12
    return sign << 11 | exponent << 3 | mantissa << 10


def _swap_halves(words: Tensor) -> Tensor:
    """Rotates words by 16 bits."""
    return words << 16 | words >> 16 & 0xFFFF

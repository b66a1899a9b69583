"""FP8 KV: an element is stored as its value divided by a scale, rounded to float8_e4m3fn.

A scale belongs to the keys or to the values of one layer, for all heads and ranks. It is fixed when
the server starts. Values beyond the format's largest number are clamped to it.
"""

from typing import Final

import torch

DTYPE: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0


def stored_as(
    values: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """`values / scale` in `dtype`, those beyond what FP8 holds as its largest number; NaN stays
    NaN."""
    if (
        scale != 1.0
    ):  # rounded once, and by a factor: as every kernel and device does it
        values = values.float() * (1.0 / scale)
    if dtype is DTYPE:
        values = values.clamp(-LARGEST, LARGEST)
    return values.to(dtype)


def addressable(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch's indexed kernels know."""
    return rows.view(torch.uint8) if rows.dtype is DTYPE else rows


def numbers(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What lies in `addressable` rows, in `dtype`; not yet multiplied by any scale."""
    return (rows.view(DTYPE) if rows.dtype is torch.uint8 else rows).to(dtype)

"""FP8 KV: an element is stored as its value divided by a scale, as float8_e4m3fn.

A scale belongs to the keys or to the values of one layer, for all heads and ranks. It
is fixed when the server starts. Values beyond the largest number of the format are
clamped to it.
"""

from typing import Final

import torch

DTYPE: Final = torch.float8_e4m3fn
MAX_VALUE: Final = 448.0


def to_stored(
    values: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """`values / scale` in `dtype`.

    For FP8, values beyond the largest number are clamped; NaN stays NaN.
    """
    if scale != 1.0:
        # Multiplied by the reciprocal and rounded once, like all kernels and devices
        # do.
        values = values.float() * (1.0 / scale)
    if dtype is DTYPE:
        values = values.clamp(-MAX_VALUE, MAX_VALUE)
    return values.to(dtype)


def addressable(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch's indexing kernels support."""
    return rows.view(torch.uint8) if rows.dtype is DTYPE else rows


def from_stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements of `addressable` rows in `dtype`, not yet multiplied by a scale."""
    stored = rows.view(DTYPE) if rows.dtype is torch.uint8 else rows
    return stored.to(dtype)

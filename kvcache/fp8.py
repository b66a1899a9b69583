"""FP8 KV: an element is stored as its value divided by a scale, as float8_e4m3fn.

Each layer has one scale for its keys and one for its values; all heads and ranks use
the same scales. Scales are fixed when the server starts. Values beyond the largest
number of the format, 448, are clamped to that number.
"""

from typing import Final

import torch

DTYPE: Final = torch.float8_e4m3fn
MAX_VALUE: Final = 448.0


def to_stored(
    values: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Returns `values / scale` in `dtype`.

    For FP8, values beyond the largest number are clamped; NaN stays NaN.
    """
    if scale != 1.0:
        # The kernels that store KV multiply by the reciprocal in float32. This
        # function does the same, so that all results are equal.
        values = values.float() * (1.0 / scale)
    if dtype is DTYPE:
        values = values.clamp(-MAX_VALUE, MAX_VALUE)
    return values.to(dtype)


def addressable(rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows in a dtype that torch's indexing kernels support.

    FP8 rows become a view of dtype uint8; all other rows are returned unchanged.
    """
    return rows.view(torch.uint8) if rows.dtype is DTYPE else rows


def from_stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts stored rows, or rows from `addressable`, to `dtype`.

    Does not multiply by the scale.
    """
    stored = rows.view(DTYPE) if rows.dtype is torch.uint8 else rows
    return stored.to(dtype)

"""A Triton kernel for silu(gate(x)) * up(x) of many rows: the product of a prefill's feed-forward.

With cuBLAS the two products are written, 0.5 GB for 8,192 tokens of an 8B model, and read by
another kernel. Here a program keeps a tile of both in registers and writes only the result. There
are as many programs as multiprocessors, each of which computes one tile after another; operands are
loaded by TMA, which fills what is outside x with zeros.
"""

import functools
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MIN_ROWS: Final = 1024  # of fewer the tiles do not fill the GPU evenly


class Tiling(NamedTuple):
    """How the kernel divides its work; measured on an H200, see docs/performance.md."""

    rows: int = 128  # of x
    columns: int = 128  # of the result
    depth: int = 64  # elements of a row multiplied at a time
    group: int = 8  # tiles of rows whose programs run beside each other, sharing the matrix
    flatten: bool = False  # load a tile's first operands while the one before it is written
    halves: bool = False  # write a tile in two
    stages: int = 3


TILING: Final = Tiling()
_WARPS: Final = 8


def _product(  # type: ignore[no-untyped-def]
    x, weight, out, num_rows, num_columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, HALVES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(num_rows, ROWS)
    across = tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=FLATTEN):
        first = tile // (GROUP * across) * GROUP
        height = min(down - first, GROUP)
        row = (first + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * COLUMNS
        both = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
        for step in range(tl.cdiv(width, DEPTH)):
            left = x.load([row, step * DEPTH])
            right = weight.load([0, column, step * DEPTH])
            both = tl.dot(left, tl.reshape(right, (2 * COLUMNS, DEPTH)).T, both)
        gate, up = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, COLUMNS)), (0, 2, 1)))
        result = (gate / (1 + tl.exp(-gate)) * up).to(out.dtype)
        if HALVES:
            halves = tl.permute(tl.reshape(result, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
            lower, upper = tl.split(halves)
            out.store([row, column], lower)
            out.store([row, column + COLUMNS // 2], upper)
        else:
            out.store([row, column], result)


_kernel: Any = triton.jit(_product, do_not_specialize=["num_rows"])


@functools.cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def works(weight: torch.Tensor) -> bool:
    """Whether `silu_product` can take the matrix [2 n, in], a contiguous one on a GPU."""
    num_out, width = weight.shape
    return (
        torch.cuda.get_device_capability(weight.device)[0] == 9
        and weight.is_contiguous()
        and num_out % (2 * TILING.columns) == 0
        and width % TILING.depth == 0
    )


def silu_product(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling = TILING) -> torch.Tensor:
    """x [T, in] times weight [2 n, in] -> silu of the first n columns times the others, [T, n]."""
    num_rows, width = x.shape
    num_columns = weight.shape[0] // 2
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    rows, columns, depth = tiling.rows, tiling.columns, tiling.depth
    programs = _num_programs(x.device)
    _kernel[(programs,)](
        TensorDescriptor(x, [num_rows, width], [width, 1], [rows, depth]),
        TensorDescriptor(
            weight,
            [2, num_columns, width],
            [num_columns * width, width, 1],
            [2, columns, depth],
        ),
        TensorDescriptor(
            out, [num_rows, num_columns], [num_columns, 1], [rows, columns >> tiling.halves]
        ),
        num_rows, num_columns, width, ROWS=rows, COLUMNS=columns, DEPTH=depth, GROUP=tiling.group,
        FLATTEN=tiling.flatten, HALVES=tiling.halves, PROGRAMS=programs,
        num_warps=_WARPS, num_stages=tiling.stages,
    )  # fmt: skip
    return out

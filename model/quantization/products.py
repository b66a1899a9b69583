"""Products by quantised weights: those that proved themselves here against their definition."""

import functools
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.quantization.quantized import FP8, Kind, Quantized, Weight, plain
from protocol.process.logging import get_logger

_log = get_logger(__name__)
_DTYPES: Final = (torch.bfloat16, torch.float16)
# Fewer keep their 16 bits: with 8 bits and what makes them they would be 8 % faster, not more.
_SCALED_ROWS: Final = 9
# Of fewer, what has one scale for all is 1.2 to 1.8 times as fast as what has one for each row.
_SCALED_BY_ROW: Final = 129
_ALIGNMENT: Final = 16  # elements, of the sides of a scaled product
# Of a proof: norm of the difference by the norm of the product. Kernels round the result alone, to
# 8 bits or more; scaled products the input too, to 4, whose mean error is 2.6 %.
_TOLERANCE: Final = 0.01
_SCALED_TOLERANCE: Final = 0.06
_PROVED_ROWS: Final = (1, 12, 45, 100, 200)  # of every tile
_PROVED_OUT: Final = 80


@functools.cache
def _kernels() -> Any:
    """Imported on first use: Triton is where CUDA builds of torch are."""
    from model.quantization import kernels

    return kernels


# What decides which kernel multiplies by a weight: its kind, the columns that can be multiplied at
# a time, whether its groups have scales of their own, whether it has zeros, the dtypes of its
# scales and of products. Some ways divide rows by their width: those are proved for each.
Like = tuple[Kind, int, bool, bool, torch.dtype, torch.dtype, torch.device]


def problem(weight: Quantized) -> str | None:
    """Why it cannot be multiplied by as it is, at its device and in its dtype; None: it can."""
    if weight.device.type != "cuda" or weight.dtype not in _DTYPES:
        return f"no kernel for {weight.dtype} on {weight.device.type}"
    like, least = _like(weight), _kernels().MIN_DEPTH
    if like[1] < least:
        sizes = f"{weight.shape[-1]} columns in groups of {weight.group}"
        return f"no kernel takes {sizes}: both must be multiples of {least}"
    _can_scale(weight)  # proved here, not while a graph is captured
    return _disproof("kernel", like) or _disproof("kernel for experts", like)


def multiply(weight: Quantized, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """x [T, in] by [out, in] -> [T, out]; by its definition on the CPU. A `residual` [T, out] is
    added to, and returned."""
    if x.device.type == "cpu":
        found = F.linear(x, weight.dequantise())
        return found if residual is None else residual.add_(found)
    if len(x) >= _SCALED_ROWS and _can_scale(weight):
        return _scaled(weight, x, residual)
    return _kernels().multiply(weight, x, residual=residual)  # type: ignore[no-any-return]


def multiply_groups(weight: Weight, x: Tensor, ends: Tensor) -> Tensor:
    """As grouped_mm, by [experts, out, in]; ends int32 [experts]. Rows behind all are undefined."""
    if isinstance(weight, Tensor) or x.device.type == "cpu":
        return F.grouped_mm(x, plain(weight).transpose(1, 2), offs=ends)
    return _kernels().multiply(weight, x, ends)  # type: ignore[no-any-return]


def takes_one_row(weight: Weight, *, gated: bool = False) -> bool:
    """Whether the product of one row with what is around it, one kernel, takes [out, in] there."""
    if not fused_ops.kernels().one_row_works(weight, gated=gated):
        return False
    way = "gated product of one row" if gated else "product of one row"
    return (
        isinstance(weight, Tensor)
        or _disproof(way, _like(weight), weight.shape[1]) is None
    )


def _like(weight: Quantized) -> Like:
    depth, has_zeros, scales = (
        _kernels().depth_of(weight),
        weight.zeros is not None,
        weight.scales,
    )
    of_scales = scales.shape[-1] > 1, has_zeros, scales.dtype
    return weight.kind, depth, *of_scales, weight.dtype, weight.device


def _can_scale(weight: Quantized) -> bool:
    """Whether torch has a scaled product for it: on Hopper. Sums of products of codes are numbers
    in bfloat16 alone."""
    (*_, num_out, width), of_row = weight.shape, weight.scales.shape[-1] == 1
    if (
        weight.kind != "fp8"
        or not of_row
        or weight.dtype != torch.bfloat16
        or width % _ALIGNMENT
    ):
        return False
    return (
        _disproof("scaled product", _like(weight), width) is None
        and num_out % _ALIGNMENT == 0
    )


_one: Any = functools.cache(lambda device: torch.ones((), device=device))


def _scaled(weight: Quantized, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """With x in FP8 as well, each row by its own scale."""
    codes, scales = _kernels().quantised(x)
    by_row = len(x) >= _SCALED_BY_ROW
    one = _one(x.device)
    found = torch._scaled_mm(
        codes, weight.codes.view(FP8).t(), scale_a=scales if by_row else one,
        scale_b=weight.scales.t() if by_row else one, out_dtype=weight.dtype, use_fast_accum=True,
    )  # fmt: skip
    if not by_row:
        return _kernels().rescaled(found, scales, weight.scales, residual)  # type: ignore[no-any-return]
    return found if residual is None else residual.add_(found)


@functools.cache
def _disproof(way: str, like: Like, width: int = 0) -> str | None:
    """What is wrong with a way to multiply by such weights, perhaps of some width; None: nothing.
    Told once, in the log where another way is taken, else by who asks."""

    def errors() -> Tensor:
        weight, sizes = example(like, width), (1,) if "one row" in way else _PROVED_ROWS
        return torch.stack([_error(way, weight, rows) for rows in sizes])

    told = fused_ops.flaw(errors, _SCALED_TOLERANCE if "scaled" in way else _TOLERANCE)
    if told and "kernel" not in way:
        _log.warning("the %s for %s %s: another is used", way, like[0], told)
    return f"the {way} for {like[0]} {told}" if told else None


def _error(way: str, weight: Quantized, rows: int) -> Tensor:
    """Of a product, perhaps on top of another: the norm of the difference by that of the result;
    no number, if the result is none."""
    exact, width = weight.dequantise().float(), weight.shape[1:]
    rows = max(rows, _SCALED_ROWS) if "scaled" in way else rows
    count = 4 * rows if "experts" in way else rows
    x = F.rms_norm(torch.randn(count, *width, device=weight.device), width).to(
        weight.dtype
    )
    expected = 2 * F.linear(x.float(), exact)
    if way == "kernel":  # both ways to divide it
        found = _kernels().multiply(weight, x, splits=False)
        found = _kernels().multiply(weight, x, residual=found)
    elif way == "kernel for experts":
        experts = weight.each(lambda part: part.expand(4, -1, -1)).to(x.device, x.dtype)
        ends = torch.tensor(
            [rows, rows, 3 * rows, count], dtype=torch.int32
        )  # tiles: by the mean
        found = 2 * multiply_groups(experts, x, ends.to(x.device))
    elif "scaled" in way:
        found = _scaled(weight, x, _scaled(weight, x))
    else:
        one, norm = fused_ops.kernels().one_row, torch.ones_like(x[0])
        found = one(4 * x, weight, norm=norm, gated="gated" in way)
        if "gated" in way:
            gate, up = expected.div(2).chunk(2, dim=1)
            expected = F.silu(gate) * up
        else:
            found = one(x, weight, residual=found)
    deviation: Tensor = (found.float() - expected).norm() / expected.norm()
    return deviation


def example(like: Like, width: int = 0) -> Quantized:
    """Codes of all sorts, scales around 1."""
    kind, depth, has_groups, has_zeros, scales, dtype, device = like
    # Of depths that rows and not groups allow, as many as they allow: see `depth_of`.
    width = width or depth * (4 if has_groups or depth == _kernels().MAX_DEPTH else 5)
    random = torch.Generator().manual_seed(0)
    of_groups = (_PROVED_OUT, width // depth if has_groups else 1)

    def draw(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, generator=random, dtype=torch.uint8)

    codes = draw(0, 256, _PROVED_OUT, width if kind == "fp8" else width // 2)
    if kind == "fp8":
        codes &= (
            0xBF  # small ones: the largest would outweigh all others, or are no numbers
        )
    factors = 0.5 + torch.rand(of_groups, generator=random)
    found = draw(125, 130, *of_groups) if scales == torch.uint8 else factors.to(scales)
    zeros = draw(0, 16, *of_groups) if has_zeros else None
    return Quantized(
        codes, found, zeros, kind, depth if has_groups else width, dtype
    ).to(device, dtype)

"""Products by quantised weights: those that proved themselves here against their definition."""

import functools
import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.quantization.quantized import FP8, FP8_MOST, TINY, Kind, Quantized, Weight, plain
from protocol.process.logging import get_logger

_log = get_logger(__name__)
_DTYPES: Final = (torch.bfloat16, torch.float16)
_SCALED_ROWS: Final = 65  # fewer are bound by reading the weights, and keep their 16 bits
_ALIGNMENT: Final = 16  # elements, of the sides of a scaled product
# Of a proof: norm of the difference by the norm of the product. Kernels round the result alone, to
# 8 bits or more; scaled products the input too, to 4, whose mean error is 2.6 %.
_TOLERANCE: Final = 0.01
_SCALED_TOLERANCE: Final = 0.06
_PROVED_ROWS: Final = (1, 17, 80)  # of every tile
_PROVED_OUT: Final = 80


@functools.cache
def _kernels() -> Any:
    """Imported on first use: Triton is where CUDA builds of torch are."""
    from model.quantization import kernels

    return kernels


# What decides which kernel multiplies by a weight: its kind, the columns that can be multiplied at
# a time (None: all have one scale), whether it has zeros, the dtypes of its scales and of products.
Like = tuple[Kind, int | None, bool, torch.dtype, torch.dtype, torch.device]


def problem(weight: Quantized) -> str | None:
    """Why it cannot be multiplied by as it is, at its device and in its dtype; None: it can."""
    if weight.device.type != "cuda" or weight.dtype not in _DTYPES:
        return f"no kernel for {weight.dtype} on {weight.device.type}"
    like, least = _like(weight), _kernels().MIN_DEPTH
    if _kernels().depth_of(weight) < least:
        return f"no kernel takes groups of {weight.group} columns, where {least} or more"
    _can_scale(weight)  # proved here, not while a graph is captured
    return _disproof("kernel", like) or _disproof("kernel for experts", like)


def multiply(weight: Quantized, x: Tensor) -> Tensor:
    """x [T, in] by [out, in] -> [T, out]; by its definition on the CPU."""
    if x.device.type == "cpu":
        return F.linear(x, weight.dequantise())
    if len(x) >= _SCALED_ROWS and _can_scale(weight):
        return _scaled(weight, x)
    return _kernels().multiply(weight, x)  # type: ignore[no-any-return]


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
    return isinstance(weight, Tensor) or _disproof(way, _like(weight)) is None


def _like(weight: Quantized) -> Like:
    group = None if weight.scales.shape[-1] == 1 else _kernels().depth_of(weight)
    has_zeros = weight.zeros is not None
    return weight.kind, group, has_zeros, weight.scales.dtype, weight.dtype, weight.device


def _can_scale(weight: Quantized) -> bool:
    """Whether torch has a scaled product for it, by row: on Hopper, and in bfloat16."""
    by_row = weight.kind == "fp8" and weight.scales.shape[-1] == 1
    if not by_row or any(size % _ALIGNMENT for size in weight.shape):
        return False
    return _disproof("scaled product", _like(weight)) is None


def _scaled(weight: Quantized, x: Tensor) -> Tensor:
    """With x in FP8 as well, each row by its own scale."""
    scales = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scales = scales.clamp_(min=TINY).div_(FP8_MOST)
    codes = (x / scales).to(FP8)
    return torch._scaled_mm(
        codes, weight.codes.view(FP8).t(), scale_a=scales, scale_b=weight.scales.t(),
        out_dtype=weight.dtype, use_fast_accum=True,
    )  # fmt: skip


@functools.cache
def _disproof(way: str, like: Like) -> str | None:
    """What is wrong with a way to multiply by such weights; None: nothing. Told once, in the log
    where another way is taken, else by who asks."""
    try:
        error, most = _error(way, like), _SCALED_TOLERANCE if "scaled" in way else _TOLERANCE
        told = "" if error < most else f"deviates by {error:.2g}, and not by less than {most}"
    except Exception as error:  # of any kind, from compilers and drivers
        told = f"raises {type(error).__name__}: {str(error).strip()[:200]}"
    if told and "kernel" not in way:
        _log.warning("the %s for %s %s: another is used", way, like[0], told)
    return f"the {way} for {like[0]} {told}" if told else None


def _error(way: str, like: Like) -> float:
    """The largest of some products, each the norm of the difference by that of the product."""
    weight, errors = example(like), []
    exact, experts = weight.dequantise().float(), weight.each(lambda part: part.expand(3, -1, -1))
    experts = experts.to(weight.device, weight.dtype)
    for rows in _PROVED_ROWS:
        count = rows * (3 if way == "kernel for experts" else 1)
        x = torch.randn(count, exact.shape[1], device=weight.device).to(weight.dtype)
        expected = F.linear(x.float(), exact)
        if way == "kernel":
            found = _kernels().multiply(weight, x)
        elif way == "kernel for experts":
            ends = torch.tensor([rows, rows, count], dtype=torch.int32)  # tiles: by their mean
            found = multiply_groups(experts, x, ends.to(weight.device))
        elif way == "scaled product":
            found = _scaled(weight, x)
        else:
            gated, one = way.startswith("gated"), fused_ops.kernels().one_row
            found = torch.cat([one(row, weight, gated=gated) for row in torch.split(x, 1)])
            if gated:
                gate, up = expected.chunk(2, dim=1)
                expected = F.silu(gate) * up
        errors.append((found.float() - expected).norm() / expected.norm())
    return torch.stack(errors).max().item()  # no number, if one is none


def example(like: Like) -> Quantized:
    """Codes of all sorts, scales around 1."""
    kind, group, has_zeros, scales, dtype, device = like
    width, random = 4 * (group or 128), torch.Generator().manual_seed(0)
    of_groups = (_PROVED_OUT, width // group if group else 1)

    def draw(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, generator=random, dtype=torch.uint8)

    codes = draw(0, 256, _PROVED_OUT, width if kind == "fp8" else width // 2)
    if kind == "fp8":
        codes &= 0xBF  # small ones: the largest would outweigh all others, or are no numbers
    factors = 0.5 + torch.rand(of_groups, generator=random)
    found = draw(125, 130, *of_groups) if scales == torch.uint8 else factors.to(scales)
    zeros = draw(0, 16, *of_groups) if has_zeros else None
    return Quantized(codes, found, zeros, kind, group or width, dtype).to(device, dtype)

"""A quantised matrix: codes and scales of groups of them, in one order whoever wrote the files."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "int4", "fp4"]
FP8: Final = torch.float8_e4m3fn
FP8_MOST: Final = torch.finfo(FP8).max
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; bit 3 is the sign
_MANTISSA_BITS: Final = 23  # of float32, before its exponent
_INT4_ZERO: Final = 8  # where no zeros are given
TINY: Final = 1e-12  # of a row of zeros
_ROWS: Final = 4096  # quantised at a time: bounds the float32 scratch


@dataclass(frozen=True)
class Quantized:
    """A matrix [out, in], or [experts, out, in], whose element is (code - zero) x scale.

    Each row has scales of its own, so that rows can be taken, reordered and joined like any.

    Attributes:
        codes: uint8 [..., out, in] of FP8 (e4m3), else [..., out, in / 2], the even column in the
            low half.
        scales: floats [..., out, groups], or uint8, the exponents of float32s.
        zeros: uint8 [..., out, groups], the codes of 0; None: 8 of int4, 0 of floats.
        group: columns; the last one of a row may have fewer.
        dtype: what products are computed in.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    kind: Kind
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the matrix that it stands for."""
        *rows, width = self.codes.shape
        return (*rows, width if self.kind == "fp8" else 2 * width)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def parts(self) -> list[Tensor]:
        """What it is made of; rows are the last dimension but one of each."""
        return [
            part for part in (self.codes, self.scales, self.zeros) if part is not None
        ]

    def made_of(self, parts: Iterable[Tensor]) -> "Quantized":
        """The same of other `parts`."""
        codes, scales, *zeros = parts
        return replace(
            self, codes=codes, scales=scales, zeros=zeros[0] if zeros else None
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        return self.made_of(change(part) for part in self.parts)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Quantized":
        return replace(
            self.each(lambda part: part.to(device).contiguous()), dtype=dtype
        )

    def columns(self, cols: range) -> "Quantized":
        """Some columns; groups become smaller where `cols` cuts them."""
        width, old = self.shape[-1], self.group
        new = len(cols)
        if self.scales.shape[-1] > 1:
            new = math.gcd(old, cols.start, 0 if cols.stop == width else cols.stop)
        at = torch.arange(cols.start, cols.stop, new, device=self.device) // old
        of_byte = 1 if self.kind == "fp8" else 2
        if cols.start % of_byte or cols.stop % of_byte:  # one byte belongs to two ranks
            raise ValueError(f"columns {cols.start} to {cols.stop} of two a byte")
        codes = self.codes[..., cols.start // of_byte : cols.stop // of_byte]
        of_groups = (part[..., at] for part in self.parts[1:])
        return replace(self.made_of([codes, *of_groups]), group=new)

    def dequantise(self) -> Tensor:
        """The matrix that it stands for: computed in float32, then rounded to `dtype`."""
        if self.kind == "fp8":
            values = self.codes.view(FP8).float()
        else:
            values = (
                torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2).float()
            )
        if self.kind == "fp4":
            values = values.new_tensor([*_FP4, *(-value for value in _FP4)])[
                values.int()
            ]
        if self.kind == "int4":
            values -= _INT4_ZERO if self.zeros is None else self._spread(self.zeros)
        scales = self.scales
        if scales.dtype == torch.uint8:
            scales = (scales.int() << _MANTISSA_BITS).view(torch.float32)
        return values.mul_(self._spread(scales)).to(self.dtype)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """[..., out, groups] -> float32 [..., out, in]."""
        column = torch.arange(self.shape[-1], device=self.device) // self.group
        return of_groups.float()[..., column]


Weight = Tensor | Quantized


def plain(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantise()


def changed(weight: Weight, change: Callable[[Tensor], Tensor]) -> Weight:
    """See Quantized.each."""
    return change(weight) if isinstance(weight, Tensor) else weight.each(change)


def quantise(weight: Tensor) -> Quantized:
    """A matrix [..., out, in] in FP8, each row by its own largest element."""
    codes, scales, (*rows, width) = [], [], weight.shape
    for rows_of in torch.split(weight.reshape(-1, width), _ROWS):
        part = rows_of.float()
        of_row = part.abs().amax(1, keepdim=True).clamp_(min=TINY).div_(FP8_MOST)
        codes.append(
            (part / of_row).clamp_(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8)
        )
        scales.append(of_row)
    joined = torch.cat(codes).view(*rows, width), torch.cat(scales).view(*rows, 1)
    return Quantized(*joined, None, "fp8", width, weight.dtype)


def concatenated(parts: list[Weight]) -> Weight | None:
    """Matrices [out, in] of the same columns, one below the other; None: they are unlike."""
    if len(set(map(_layout, parts))) > 1:
        return None
    joined = map(torch.cat, zip(*map(_parts, parts), strict=True))
    return parts[0] if len(parts) == 1 else _of(parts[0], joined)


def stacked(count: int, parts: Iterable[Weight]) -> Weight:
    """`count` matrices [out, in] as one [count, out, in], without a second copy of all of them.
    Raises ValueError where they are not stored alike."""
    out: list[Tensor] = []
    first: Weight | None = None
    for index, part in enumerate(parts):
        if first is None:
            first, out = (
                part,
                [each.new_empty(count, *each.shape) for each in _parts(part)],
            )
        if _layout(first) != _layout(part):
            raise ValueError("experts of one layer are quantised in different ways")
        for place, tensor in zip(out, _parts(part), strict=True):
            place[index] = tensor
    assert first is not None
    return _of(first, out)


def _parts(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else weight.parts


def _of(like: Weight, parts: Iterable[Tensor]) -> Weight:
    return next(iter(parts)) if isinstance(like, Tensor) else like.made_of(parts)


def _layout(weight: Weight) -> tuple[object, ...]:
    """Of weights that can be joined: alike."""
    dtypes = [part.dtype for part in _parts(weight)]
    return (
        *dtypes,
        *(() if isinstance(weight, Tensor) else (weight.kind, weight.group)),
    )

"""A quantised matrix: codes and scales, in an order that is the same for all file
formats."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "int4", "fp4"]
FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = torch.finfo(FP8).max
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; bit 3 is the sign
_MANTISSA_BITS: Final = 23  # of float32; the exponent is in the bits above
_INT4_ZERO: Final = 8  # the zero point of int4 matrices that store no zero points
# Lower bound of a row's largest absolute value, so that no row has a scale of 0.
MIN_ROW_MAX: Final = 1e-12
# Number of rows that are quantised at a time, which bounds the float32 scratch memory.
_CHUNK_ROWS: Final = 4096


@dataclass(frozen=True)
class Quantized:
    """A matrix [out, in], or [experts, out, in], with elements (code - zero) x scale.

    Each row has its own scales. Rows can therefore be selected, reordered and joined as
    in a matrix that is not quantised.

    Attributes:
        codes: uint8 [..., out, in] for FP8 (e4m3), else [..., out, in / 2] with the
            even column in the low half of a byte.
        scales: floats [..., out, groups], or uint8, the exponents of float32 numbers.
        zeros: uint8 [..., out, groups], the code of 0; None: 8 for int4, 0 for floats.
        group: number of columns in a group; the last group of a row may be smaller.
        dtype: data type of products.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    kind: Kind
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised matrix."""
        *rows, width = self.codes.shape
        return (*rows, width if self.kind == "fp8" else 2 * width)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def parts(self) -> list[Tensor]:
        """Codes, scales and zeros. Rows are the second to last dimension of each."""
        return [
            part for part in (self.codes, self.scales, self.zeros) if part is not None
        ]

    def with_parts(self, parts: Iterable[Tensor]) -> "Quantized":
        """Returns this matrix with other codes, scales and zeros; see `self.parts`."""
        codes, scales, *zeros = parts
        return replace(
            self, codes=codes, scales=scales, zeros=zeros[0] if zeros else None
        )

    def map_parts(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        """Returns a matrix with `change` applied to each of the parts."""
        return self.with_parts(change(part) for part in self.parts)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Quantized":
        """Returns the matrix on another device, for products in `dtype`."""
        moved = self.map_parts(lambda part: part.to(device).contiguous())
        return replace(moved, dtype=dtype)

    def columns(self, cols: range) -> "Quantized":
        """Returns some columns. Groups that `cols` cuts become several smaller groups.

        Raises:
            ValueError: `cols` cuts a byte that holds two columns.
        """
        width = self.shape[-1]
        new_group = len(cols)
        if self.scales.shape[-1] > 1:
            stop = 0 if cols.stop == width else cols.stop
            new_group = math.gcd(self.group, cols.start, stop)
        starts = torch.arange(cols.start, cols.stop, new_group, device=self.device)
        old_groups = starts // self.group
        codes_per_byte = 1 if self.kind == "fp8" else 2
        if cols.start % codes_per_byte or cols.stop % codes_per_byte:
            raise ValueError(
                f"columns {cols.start} to {cols.stop} cut a byte that holds two columns"
            )
        first_byte = cols.start // codes_per_byte
        end_byte = cols.stop // codes_per_byte
        codes = self.codes[..., first_byte:end_byte]
        scales_and_zeros = [part[..., old_groups] for part in self.parts[1:]]
        return replace(self.with_parts([codes, *scales_and_zeros]), group=new_group)

    def dequantise(self) -> Tensor:
        """Returns the matrix, computed in float32 and rounded to `dtype`."""
        if self.kind == "fp8":
            values = self.codes.view(FP8).float()
        else:
            halves = (self.codes & 15, self.codes >> 4)
            values = torch.stack(halves, -1).flatten(-2).float()
        if self.kind == "fp4":
            table = values.new_tensor([*_FP4, *(-value for value in _FP4)])
            values = table[values.int()]
        if self.kind == "int4":
            values -= _INT4_ZERO if self.zeros is None else self._spread(self.zeros)
        scales = self.scales
        if scales.dtype == torch.uint8:
            scales = (scales.int() << _MANTISSA_BITS).view(torch.float32)
        return values.mul_(self._spread(scales)).to(self.dtype)

    def _spread(self, group_values: Tensor) -> Tensor:
        """Repeats values of groups [..., out, groups] as float32 [..., out, in]."""
        groups = torch.arange(self.shape[-1], device=self.device) // self.group
        return group_values.float()[..., groups]


Weight = Tensor | Quantized


def dequantised(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantise()


def map_weight(weight: Weight, change: Callable[[Tensor], Tensor]) -> Weight:
    """Returns a weight with `change` applied to its tensor, or to each of its parts."""
    return change(weight) if isinstance(weight, Tensor) else weight.map_parts(change)


def quantise(weight: Tensor) -> Quantized:
    """Quantises a matrix [..., out, in] to FP8.

    The scale of a row maps its largest absolute value to the largest FP8 number.
    """
    *rows, width = weight.shape
    codes = []
    scales = []
    for weight_chunk in torch.split(weight.reshape(-1, width), _CHUNK_ROWS):
        chunk = weight_chunk.float()
        row_max = chunk.abs().amax(1, keepdim=True).clamp_(min=MIN_ROW_MAX)
        row_scales = row_max.div_(FP8_MAX)
        scaled = (chunk / row_scales).clamp_(-FP8_MAX, FP8_MAX)
        codes.append(scaled.to(FP8).view(torch.uint8))
        scales.append(row_scales)
    return Quantized(
        codes=torch.cat(codes).view(*rows, width),
        scales=torch.cat(scales).view(*rows, 1),
        zeros=None,
        kind="fp8",
        group=width,
        dtype=weight.dtype,
    )


def concatenated(parts: list[Weight]) -> Weight | None:
    """Concatenates matrices [out, in] along `out`. All must have the same `in`.

    Returns None if their data types or formats differ.
    """
    if len(set(map(_layout, parts))) > 1:
        return None
    if len(parts) == 1:
        return parts[0]
    joined = map(torch.cat, zip(*map(_tensors, parts), strict=True))
    return _with_tensors(parts[0], joined)


def stacked(count: int, parts: Iterable[Weight]) -> Weight:
    """Stacks `count` matrices [out, in] to [count, out, in].

    The matrices are copied one by one, so that not all of them are in memory twice.

    Raises:
        ValueError: their data types or formats differ.
    """
    out: list[Tensor] = []
    first: Weight | None = None
    for index, part in enumerate(parts):
        if first is None:
            first = part
            out = [tensor.new_empty(count, *tensor.shape) for tensor in _tensors(part)]
        if _layout(first) != _layout(part):
            raise ValueError("experts of one layer are quantised in different ways")
        for target, tensor in zip(out, _tensors(part), strict=True):
            target[index] = tensor
    assert first is not None
    return _with_tensors(first, out)


def _tensors(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else weight.parts


def _with_tensors(weight: Weight, tensors: Iterable[Tensor]) -> Weight:
    """Returns a weight of the same kind as `weight`, made of other tensors."""
    if isinstance(weight, Tensor):
        return next(iter(tensors))
    return weight.with_parts(tensors)


def _layout(weight: Weight) -> tuple[object, ...]:
    """Returns a value that is equal for weights that can be concatenated."""
    dtypes = [tensor.dtype for tensor in _tensors(weight)]
    if isinstance(weight, Tensor):
        return tuple(dtypes)
    return (*dtypes, weight.kind, weight.group)

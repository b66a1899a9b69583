"""The index arithmetic of the placing kernel, without the kernel.

The kernel numbers the units (of up to 16 bytes) of a copy's pieces, piece by piece and inside a
piece in the source's own order, so that neighbours in number are neighbours in its memory. From a
unit's number five divisions give its place on every axis; two tables give where its piece begins on
either side, and two sets of strides the rest, all in units. No list of runs is made, whatever the
orders, block sizes, heads and dtypes. If elements change their scale, the same divisions find a
unit's layer and component, and so its factor.

A division by a constant d is a multiplication: n // d == (n * magic) >> shift for n below 2**31.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvcache.layout import ITEMSIZE_BYTES, KVLayout
from kvcache.transfer.plan.block_copy import BlockCopy, Factors
from kvcache.transfer.plan.endpoint import IntArray, PlanError
from protocol.handshake import FP8

UNIT_BYTES = 16  # what a thread moves at once, at most
FIRST_AXIS, AXIS_PARAMETERS = 3, 6
NUM_PARAMETERS = FIRST_AXIS + 4 * AXIS_PARAMETERS  # before the factors, if any
MAX_UNITS = (1 << 31) - 1  # of one launch: their numbers are 32-bit


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    source_dtype: str
    target_dtype: str
    unit_elements: int  # on either side
    scaled: bool

    @property
    def converts(self) -> bool:
        """Elements change on the way: their dtype, or their scale."""
        return self.source_dtype != self.target_dtype or self.scaled


class Units(NamedTuple):
    """A copy as units, but for where its pieces begin.

    The parameters are the units of one head of one token as a divisor, then of each axis, innermost
    of the source first: its size as a divisor (3), its stride at the source and at the target, and
    how many factors (of layers and components) a step is; at last the factors' float32 bits.
    """

    kind: Kind
    of_piece: int
    parameters: IntArray  # i64[NUM_PARAMETERS + factors]


def kind_of(source: KVLayout, target: KVLayout, factors: Factors) -> Kind:
    """A unit has the most elements, a power of two, that divide a head's and take 16 bytes on
    neither side."""
    fitting = UNIT_BYTES // max(source.itemsize, target.itemsize)
    elements = min(fitting, source.head_dim & -source.head_dim)
    return Kind(source.dtype, target.dtype, elements, factors is not None)


def kinds_into(target: KVLayout, *, convert: bool) -> Iterator[Kind]:
    """All that any peer's KV may need to get into a pool.

    Args:
        convert: also KV of other dtypes and scales.
    """
    for dtype in ITEMSIZE_BYTES if convert else (target.dtype,):
        may_scale = convert and FP8 in (dtype, target.dtype)
        for factors in (None, (1.0,))[: 1 + may_scale]:
            yield kind_of(replace(target, dtype=dtype), target, factors)


def piece_units(copy: BlockCopy, kind: Kind) -> tuple[IntArray, IntArray]:
    """Where the pieces begin at the source and at the target, in units."""
    return (
        copy.sources // (kind.unit_elements * copy.source.itemsize),
        copy.targets // (kind.unit_elements * copy.target.itemsize),
    )


def divisor(size: int) -> tuple[int, int, int]:
    """(d, magic, shift): exact for 0 <= n < 2**31, and n * magic < 2**63.

    With s the bits of d - 1, magic = ceil(2**(31 + s) / d) overshoots by less than 2**s / d, which
    times n stays below 2**(31 + s) / d: too little to reach the next whole number.
    """
    bits = (size - 1).bit_length()
    return size, -(-(1 << (31 + bits)) // size), 31 + bits


def units_of(copy: BlockCopy, factors: Factors) -> Units:
    """
    Raises:
        PlanError: one piece has too many units to number.
    """
    return _units(copy.source, copy.target, copy.heads, copy.tokens, factors)


@lru_cache(maxsize=1024)
def _units(source: KVLayout, target: KVLayout, heads: int, tokens: int, factors: Factors) -> Units:
    kind = kind_of(source, target, factors)
    reads, writes = source.strides, target.strides
    row = source.head_dim // kind.unit_elements
    values, of_piece = [*divisor(row)], row
    sizes = {"H": heads, "L": source.num_layers, "C": source.num_components, "N": tokens}
    for axis in reversed(source.order.replace("B", "").replace("D", "")):
        strides = (reads[axis] // kind.unit_elements, writes[axis] // kind.unit_elements)
        factor = {"L": source.num_components, "C": 1}.get(axis, 0)
        values += [*divisor(sizes[axis]), *strides, factor]
        of_piece *= sizes[axis]
    if of_piece > MAX_UNITS:
        raise PlanError(f"a block of the peer has {of_piece} units to gather; use smaller blocks")
    bits = np.array(factors or (), np.float32).view(np.int32).astype(np.int64)
    return Units(kind, of_piece, np.concatenate((np.array(values, np.int64), bits)))

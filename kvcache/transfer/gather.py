"""The index arithmetic of the mapped path's gather kernel, without the kernel.

A gather copies one owner's share of a transfer out of a peer's mapped memory. It numbers the units
(of up to 16 bytes) of the owner's blocks, block by block and inside a block in the peer's own
order, so that neighbours in number are neighbours in the peer's memory. From a unit's number five
divisions give its place on every axis; two block tables and two sets of strides, all in units, give
both addresses. No list of runs is made, whatever the orders, block sizes, heads and dtypes. If FP8
elements change their scale, the same divisions find a unit's layer and component, and so
its factor.

`locate` below and the kernel in mapped_kernel.py compute the same from the same parameters. A
division by a constant d is a multiplication: n // d == (n * magic) >> shift for all n below 2**31.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.layout import KVLayout
from kvcache.transfer.boxes import Transfer
from kvcache.transfer.topology import Endpoint, IntArray, PlanError, scale_factors

UNIT_BYTES = 16  # what a thread moves at once, at most
NUM_PARAMETERS = 41  # before the factors, if any
FIRST_AXIS, AXIS_PARAMETERS = 13, 7
_MAX_UNITS = 1 << 31  # of one launch: their numbers are 32-bit


@dataclass(frozen=True, eq=False)
class Share:
    """What all gathers of the same heads between the same two ranks have in common. A unit is
    `unit_elements` elements on either side."""

    remote_rank: int
    source_dtype: str
    target_dtype: str
    unit_elements: int
    num_heads: int
    parameters: IntArray  # i64[NUM_PARAMETERS + factors], see `_parameters`; lengths in units
    block_step: int  # from a block to the next one of the same owner, in the sequence
    block_units: int  # of the wanted heads in one block
    block_bytes: int  # the same in bytes of P
    factors: tuple[float, ...] | None  # of the elements, by layer and component

    @property
    def converts(self) -> bool:
        """Elements change on the way: their dtype, or their scale."""
        return self.source_dtype != self.target_dtype or self.factors is not None


class Gather(NamedTuple):
    """One owner's share of a transfer."""

    share: Share
    token_start: int  # [start, stop) is wanted
    token_stop: int
    block_first: int  # ordinal in the sequence of its first block of P
    num_blocks: int  # of P, of which at least a part is wanted

    def ordinal(self, first: int) -> int:
        """In the sequence, of this gather's block `first`."""
        return self.block_first + first * self.share.block_step


Shares = tuple[tuple[Share, ...], ...]  # of each head group, by owner


def shares_of(transfer: Transfer) -> Shares:
    """What all transfers between the same endpoints gather.

    Raises:
        PlanError: one block has too many units to number.
    """
    shares: Shares | None = transfer.kept.get("shares")
    if shares is None:
        local, total = transfer.local, transfer.total_kv_heads
        shares = transfer.kept["shares"] = tuple(
            tuple(
                _share(local, transfer.remote[owner], group.heads, len(group.owners), total)
                for owner in group.owners
            )
            for group in transfer.groups
        )
    return shares


def make_gathers(transfer: Transfer) -> tuple[Gather, ...]:
    """One gather for each head group and each rank of P that owns it.

    Raises:
        PlanError: one block has too many units to number.
    """
    start, stop = transfer.token_start, transfer.token_stop
    if start == stop:
        return ()
    size = transfer.remote[0].layout.block_size
    low, high = start // size, (stop - 1) // size
    gathers = []
    for group, owners in zip(transfer.groups, shares_of(transfer), strict=True):
        step = len(owners)
        for index, share in enumerate(owners):
            first = low + (index - group.turn - low) % step  # owners take turns, block by block
            if first <= high:
                count = (high - first) // step + 1
                gathers.append(Gather(share, start, stop, first, count))
    return tuple(gathers)


def launches(gather: Gather, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each launch, in blocks of this gather: chunk_bytes or one block each."""
    share = gather.share
    fitting = min(chunk_bytes // share.block_bytes, (_MAX_UNITS - 1) // share.block_units)
    count = max(1, fitting)
    for first in range(0, gather.num_blocks, count):
        yield first, min(count, gather.num_blocks - first)


def locate(
    gather: Gather, remote_blocks: IntArray, local_blocks: IntArray, first: int, count: int
) -> tuple[IntArray, IntArray, npt.NDArray[np.float32]]:
    """Units of the source and of the target that one launch pairs, i64[n] each, and what the
    elements of each pair are multiplied by, float32[n].

    Args:
        remote_blocks, local_blocks: i64, the two block tables from token 0 of the sequence on.
    """
    share = gather.share
    p = [int(value) for value in share.parameters]
    source_first, target_first, source_block, target_block, target_token = p[:5]
    block_step, source_tokens = p[5:7]
    target_tokens, row_units = p[7:10], p[10:13]

    number = np.arange(count * share.block_units, dtype=np.int64)
    number, unit = _divide(number, row_units)
    source, target = source_first + unit, target_first + unit
    token = np.zeros_like(number)
    factor = np.zeros_like(number)
    for axis in range(FIRST_AXIS, NUM_PARAMETERS, AXIS_PARAMETERS):
        number, index = _divide(number, p[axis : axis + 3])
        source = source + index * p[axis + 3]
        target = target + index * p[axis + 4]
        token = token + index * p[axis + 5]
        factor = factor + index * p[axis + 6]
    ordinal = gather.ordinal(first) + number * block_step
    token = token + ordinal * source_tokens
    wanted = (token >= gather.token_start) & (token < gather.token_stop)
    source, target, token, ordinal, factor = (
        x[wanted] for x in (source, target, token, ordinal, factor)
    )
    target_ordinal, target_offset = _divide(token, target_tokens)
    source = source + remote_blocks[ordinal] * source_block
    target = target + local_blocks[target_ordinal] * target_block + target_offset * target_token
    if share.factors is None:
        return source, target, np.ones(len(source), np.float32)
    factors = share.parameters[NUM_PARAMETERS:].astype(np.int32).view(np.float32)
    return source, target, factors[factor]


def _divide(number: IntArray, divisor: list[int]) -> tuple[IntArray, IntArray]:
    """Quotient and remainder, by `_divisor`'s triple."""
    size, magic, shift = divisor
    quotient = (number * magic) >> shift
    return quotient, number - quotient * size


def _divisor(size: int) -> tuple[int, int, int]:
    """(d, magic, shift): exact for 0 <= n < 2**31, and n * magic < 2**63.

    With s the bits of d - 1, magic = ceil(2**(31 + s) / d) overshoots by less than 2**s / d, which
    times n stays below 2**(31 + s) / d: too little to reach the next whole number.
    """
    bits = (size - 1).bit_length()
    return size, -(-(1 << (31 + bits)) // size), 31 + bits


@lru_cache(maxsize=1024)
def _share(local: Endpoint, end: Endpoint, heads: range, copies: int, total: int) -> Share:
    source, target = end.layout, local.layout
    elements, factors = unit_elements(source, target), scale_factors(end, local)
    units = (source.head_dim // elements) * len(heads) * source.num_layers
    units *= source.num_components * source.block_size
    if units >= _MAX_UNITS:
        raise PlanError(f"a block of the peer has {units} units to gather; use smaller blocks")
    return Share(
        remote_rank=end.rank,
        source_dtype=source.dtype,
        target_dtype=target.dtype,
        unit_elements=elements,
        num_heads=len(heads),
        parameters=np.concatenate(
            (_parameters(local, end, heads, copies, total, elements), _bits(factors))
        ),
        block_step=copies,
        block_units=units,
        block_bytes=units * elements * source.itemsize,
        factors=factors,
    )


def _bits(factors: tuple[float, ...] | None) -> IntArray:
    return np.array(factors or (), np.float32).view(np.int32).astype(np.int64)


def unit_elements(source: KVLayout, target: KVLayout) -> int:
    """The most elements, a power of two, that divide a head's and take 16 bytes on neither side."""
    fitting = UNIT_BYTES // max(source.itemsize, target.itemsize)
    return min(fitting, source.head_dim & -source.head_dim)


def _parameters(
    local: Endpoint, end: Endpoint, heads: range, copies: int, total: int, elements: int
) -> IntArray:
    """What the arithmetic needs to know:

    0  source_first      of the first wanted head
    1  target_first
    2  source_block      strides
    3  target_block
    4  target_token
    5  block_step        to this gather's next block: other owners have those between
    6  source_tokens     in a block of P
    7  target_tokens     in a block of D, as a divisor (3)
    10 row_units         of one head of one token, as a divisor (3)
    13 four axes, innermost of P first: size as a divisor (3), source and target stride,
       how many tokens a step is (1 for the token axis, whose target stride is 0, else 0), and
       how many factors (of layers and components)
    41 the factors, float32 bits, where there are any
    """
    source, target = end.layout, local.layout
    reads = {axis: stride // elements for axis, stride in source.strides.items()}
    writes = {axis: stride // elements for axis, stride in target.strides.items()}
    remote_head = heads.start - end.heads(total).start
    local_head = heads.start - local.heads(total).start
    values = [
        remote_head * reads["H"],
        local_head * writes["H"],
        reads["B"],
        writes["B"],
        writes["N"],
        copies,
        source.block_size,
        *_divisor(target.block_size),
        *_divisor(source.head_dim // elements),
    ]
    sizes = {**source.sizes, "H": len(heads)}
    for axis in reversed(source.order.replace("B", "").replace("D", "")):
        write = 0 if axis == "N" else writes[axis]
        factor = {"L": source.num_components, "C": 1}.get(axis, 0)
        values += [*_divisor(sizes[axis]), reads[axis], write, int(axis == "N"), factor]
    assert len(values) == NUM_PARAMETERS
    return np.array(values, dtype=np.int64)

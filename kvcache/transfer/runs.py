"""The longest byte runs that are contiguous on both sides of a copy.

A copy is a list of index boxes: a box is a token segment (inside one block of either side) times
heads, layers, components and elements. Inside a box every axis has one stride on each side. A run
starts as the elements of one head of one token; an axis whose stride is exactly the run's length
on BOTH sides lengthens the run by its extent, until no axis does. What is left are the axes of an
outer product of offsets. Both sides being mixed-radix numbers, no shorter list of runs exists
inside a box; across boxes, neighbours on both sides are merged. Everything is in bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from kvcache.transfer.topology import IntArray


class Axis(NamedTuple):
    extent: int
    remote_stride: int
    local_stride: int


class Runs(NamedTuple):
    """Contiguous pieces, in ascending order of their local offset. Three i64[n] of bytes."""

    remote: IntArray
    local: IntArray
    lengths: IntArray


class RankRead(NamedTuple):
    """What to read from one rank of P. Three i64[n], bytes from each allocation's base."""

    remote_rank: int
    remote_offsets: IntArray
    local_offsets: IntArray
    lengths: IntArray


@dataclass(frozen=True)
class Boxes:
    """Boxes of one (reader, source) pair: alike but for where they start and their token count."""

    remote: IntArray  # i64[n] first byte, from the remote allocation's base
    local: IntArray  # i64[n]
    tokens: IntArray  # i64[n] extent of the token axis
    token_axis: Axis  # extent unused
    axes: tuple[Axis, ...]  # heads, layers, components
    element_bytes: int  # one head of one token

    @property
    def nbytes(self) -> int:
        """Bytes in all boxes together."""
        per_token = self.element_bytes * prod(axis.extent for axis in self.axes)
        return int(self.tokens.sum()) * per_token


class Product(NamedTuple):
    """Runs as an outer product: every base with every offset of the axes."""

    remote: IntArray
    local: IntArray
    lengths: IntArray
    axes: list[Axis]

    @property
    def num_runs(self) -> int:
        return len(self.remote) * prod(axis.extent for axis in self.axes)


def count_runs(boxes: Boxes) -> int:
    """How many runs `runs_by_slot` will return, and `find_runs` or a few more, without them."""
    return sum(product.num_runs for product in _products(boxes))


def runs_in_order(boxes: Boxes) -> Iterator[Runs]:
    """The runs of boxes in the order of these, once for each token count.

    Cheaper than `find_runs` by what sorting all runs costs: neighbours are merged before the axes
    are multiplied out, not after.
    """
    for product in _products(boxes):
        bases = Runs(product.remote, product.local, product.lengths)
        yield multiply_out(bases, axis_offsets(product.axes))


def axis_offsets(axes: list[Axis]) -> tuple[IntArray, IntArray]:
    """Where the pieces of a box lie, from its start: bytes, remote and local."""
    return _offsets(axes, 1), _offsets(axes, 2)


def multiply_out(bases: Runs, offsets: tuple[IntArray, IntArray]) -> Runs:
    """Every base with every offset."""
    remote, local = offsets
    if len(remote) == 1:  # the offset is 0
        return Runs(bases.remote, bases.local, bases.lengths)
    return Runs(
        (bases.remote[:, None] + remote).reshape(-1),
        (bases.local[:, None] + local).reshape(-1),
        bases.lengths.repeat(len(local)),
    )


def find_runs(boxes: Boxes) -> Runs:
    """The fewest runs that hold exactly the bytes of the boxes."""
    parts = [_expand(product) for product in _products(boxes)]
    if not parts:
        nothing = np.empty(0, np.int64)
        return Runs(nothing, nothing, nothing)
    if len(parts) == 1:
        return _merge(parts[0])
    return _merge(Runs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))))


def _products(boxes: Boxes) -> list[Product]:
    """One product per token count: equal boxes share all their offsets."""
    products = []
    for tokens in _distinct(boxes.tokens):
        run, axes = grow(
            boxes.element_bytes, [*boxes.axes, boxes.token_axis._replace(extent=tokens)]
        )
        picked = np.flatnonzero(boxes.tokens == tokens)
        picked = picked[np.argsort(boxes.local[picked], kind="stable")]
        lengths = np.full(len(picked), run, np.int64)
        merged = _merge(Runs(boxes.remote[picked], boxes.local[picked], lengths))
        products.append(Product(*merged, axes))
    return products


def _distinct(tokens: IntArray) -> list[int]:
    # Token counts are at most a block, so counting beats sorting.
    return [int(count) for count in np.flatnonzero(np.bincount(tokens))]


def grow(run: int, axes: list[Axis]) -> tuple[int, list[Axis]]:
    """Lengthens a run by every axis that continues it on both sides: its length, the axes left."""
    axes = [axis for axis in axes if axis.extent > 1]
    grew = True
    while grew:
        grew = False
        for axis in axes:
            if axis.remote_stride == run == axis.local_stride:
                run *= axis.extent
                axes.remove(axis)
                grew = True
                break
    return run, axes


def _expand(product: Product) -> Runs:
    if not product.axes:
        return Runs(product.remote, product.local, product.lengths)
    # Axes outside the block axis go first: the result is then in order, or nearly.
    reach = int(product.local[-1] - product.local[0])
    outer = [axis for axis in product.axes if axis.local_stride > reach]
    inner = [axis for axis in product.axes if axis.local_stride <= reach]
    shape = (
        prod(axis.extent for axis in outer),
        len(product.remote),
        prod(axis.extent for axis in inner),
    )
    remote = _sums(_offsets(outer, 1), product.remote, _offsets(inner, 1))
    local = _sums(_offsets(outer, 2), product.local, _offsets(inner, 2))
    lengths = np.broadcast_to(product.lengths[None, :, None], shape).reshape(-1)
    return Runs(remote, local, lengths)


def _offsets(axes: list[Axis], side: int) -> IntArray:
    offsets = np.zeros(1, np.int64)
    for axis in sorted(axes, key=lambda axis: -axis.local_stride):
        steps = np.arange(axis.extent, dtype=np.int64) * axis[side]
        offsets = np.add.outer(offsets, steps).reshape(-1)
    return offsets


def _sums(outer: IntArray, base: IntArray, inner: IntArray) -> IntArray:
    total: IntArray = np.add.outer(np.add.outer(outer, base), inner).reshape(-1)
    return total


def _merge(runs: Runs) -> Runs:
    """Joins runs that follow each other on both sides."""
    remote, local, lengths = runs
    if np.any(local[1:] < local[:-1]):
        order = np.argsort(local, kind="stable")
        remote, local, lengths = remote[order], local[order], lengths[order]
    joined = remote[1:] == (remote + lengths)[:-1]
    if joined.any():  # seldom: the other side need not be looked at
        joined &= local[1:] == (local + lengths)[:-1]
    if not joined.any():
        return Runs(remote, local, lengths)
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joined) + 1))
    return Runs(remote[starts], local[starts], np.add.reduceat(lengths, starts))

"""Block copies: equal pieces of blocks, from one paged memory to another.

A paged memory is an array in some order of axes (kvcache/layout.py) with a block table: the pool of
a rank, or a slot of staging memory. The tokens of a sequence are cut wherever a block of either
side ends, so a piece lies in one block on both sides: some tokens of some heads, in all layers and
components. Pieces of equal size make one BlockCopy, the only thing that is ever read, placed or
counted:

    descriptors(copies)   READs of the longest runs that are contiguous on both sides
    place                 strided copies, by torch (move/place.py) or by a kernel

A run starts as the elements of one head of one token. An axis whose stride is the run's length on
BOTH sides lengthens the run by its size, until none does; the other axes give the offsets of an
outer product. Both sides being mixed-radix numbers, no piece has fewer runs; runs of different
pieces that follow each other on both sides are merged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import prod
from typing import NamedTuple

import numpy as np

from kvcache.layout import KVLayout
from kvcache.transfer.plan.endpoint import Endpoint, HeadGroup, IntArray, PlanError

Factors = (
    tuple[float, ...] | None
)  # of the elements, by layer and component, if they change


class Side(NamedTuple):
    """Source or target of a copy: a sequence's blocks in one paged memory."""

    layout: KVLayout
    blocks: IntArray  # i64, the block table from token 0 of the sequence on
    head: int = 0  # first head to copy, counted in this memory
    base: int = 0  # bytes to the memory's first block

    def places(self, tokens: IntArray) -> IntArray:
        """Byte offsets of tokens: of the first copied head's first element in layer 0."""
        strides = self.layout.byte_strides
        ordinals, within = np.divmod(tokens, self.layout.block_size)
        places: IntArray = self.blocks[ordinals] * strides["B"] + within * strides["N"]
        return places + (self.base + self.head * strides["H"])


class BlockCopy(NamedTuple):
    """Equal pieces: `tokens` tokens of `heads` heads in all layers and components."""

    owner: int  # rank of P whose memory is the source; no meaning if that is a slot
    source: KVLayout
    target: KVLayout
    heads: int
    tokens: int
    sources: IntArray  # i64[n], bytes from the memory's base to each piece
    targets: IntArray  # i64[n]

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece, in the source's dtype."""
        return (
            self.tokens * self.heads * self.source.token_bytes // self.source.num_heads
        )

    @property
    def nbytes(self) -> int:
        return len(self.sources) * self.piece_bytes

    def part(self, first: int, count: int) -> "BlockCopy":
        """`count` of the pieces, from number `first` on."""
        pieces = slice(first, first + count)
        return self._replace(sources=self.sources[pieces], targets=self.targets[pieces])

    @property
    def shape(self) -> "Shape":
        return shape_of(self.source, self.target, self.heads, self.tokens)


class Axis(NamedTuple):
    size: int
    source_stride: int  # bytes
    target_stride: int


class Shape(NamedTuple):
    """A piece as an outer product: runs of `run_bytes`, one at each index of the axes."""

    run_bytes: int
    axes: tuple[Axis, ...]  # outermost of the target first

    @property
    def num_runs(self) -> int:
        return prod(axis.size for axis in self.axes)


class ReadDescriptors(NamedTuple):
    """The runs to read from one rank of P: three i64[n], in bytes; offsets from a memory's base."""

    remote_rank: int
    remote_offsets: IntArray
    local_offsets: IntArray
    lengths: IntArray

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())


class _Runs(NamedTuple):
    sources: IntArray
    targets: IntArray
    lengths: IntArray


@lru_cache(maxsize=64)  # the chunks of a pull, and of the next one
def pieces(
    start: int, stop: int, *block_sizes: int
) -> tuple[tuple[int, IntArray], ...]:
    """Tokens [start, stop), cut at every block border: (length, starts) of pieces of one length."""
    if start >= stop:
        return ()
    borders = (
        np.arange(start - start % size + size, stop, size) for size in block_sizes
    )
    cuts = np.unique(np.concatenate([[start, stop], *borders]))
    starts, lengths = cuts[:-1], np.diff(cuts)
    return tuple(
        (length, starts[lengths == length]) for length in np.unique(lengths).tolist()
    )


def cut(
    owner: int,
    source: Side,
    target: Side,
    heads: int,
    tokens: range,
    turn: IntArray | None = None,
) -> Iterator[BlockCopy]:
    """Tokens of a sequence as copies between two paged memories.

    Args:
        turn: bool[n], the source's blocks that are read from this owner; None: all.
    """
    sizes = source.layout.block_size, target.layout.block_size
    for length, starts in pieces(tokens.start, tokens.stop, *sizes):
        mine = starts if turn is None else starts[turn[starts // sizes[0]]]
        if len(mine):
            places = source.places(mine), target.places(mine)
            yield BlockCopy(owner, source.layout, target.layout, heads, length, *places)


@dataclass(frozen=True, eq=False)
class Transfer:
    """The KV that one rank of D wants of one sequence: all layers and components of its heads. With
    a dcp, tokens and blocks are those of this rank."""

    local: Endpoint
    remote: tuple[Endpoint, ...]  # by rank
    total_kv_heads: int
    groups: tuple[HeadGroup, ...]  # the wanted heads, by their owners
    tokens: range
    local_blocks: IntArray  # i64, D's block table from token 0 on
    remote_blocks: IntArray  # i64, P's
    lanes: IntArray  # i64, for each block of P: the holder's rank in its context-parallel group
    shift: int  # with copies of a head, rotates the owners that blocks are read from
    factors: Factors

    @property
    def block_size(self) -> int:
        """P's block size, in tokens."""
        return self.remote[0].layout.block_size

    @property
    def remote_ordinals(self) -> range:
        """The tokens' blocks, as indices into P's block table."""
        return range(
            self.tokens.start // self.block_size,
            -(-self.tokens.stop // self.block_size),
        )

    @property
    def converts(self) -> bool:
        """Whether the two sides differ in dtype or scales."""
        return (
            self.local.layout.dtype != self.remote[0].layout.dtype
            or self.factors is not None
        )

    @property
    def token_bytes(self) -> int:
        """Bytes that this rank wants of each token, in the peer's dtype."""
        layout = self.remote[0].layout
        heads = sum(len(group.heads) for group in self.groups)
        return heads * layout.token_bytes // layout.num_heads

    @property
    def useful_bytes(self) -> int:
        """Bytes that this rank wants, in the peer's dtype."""
        return len(self.tokens) * self.token_bytes

    def part(self, start: int, stop: int) -> "Transfer":
        """The same for tokens [start, stop)."""
        return replace(self, tokens=range(start, stop))

    def copies(self, tokens: range | None = None) -> Iterator[BlockCopy]:
        """Copies straight from P's memory into D's pool; of all tokens, or of `tokens`."""
        for group in self.groups:
            side = self.target(group)
            yield from self.copies_from(group, group.heads, side, tokens or self.tokens)

    def target(self, group: HeadGroup) -> Side:
        """The place of a group's heads in D's pool."""
        first = self.local.heads(self.total_kv_heads).start
        return Side(
            self.local.layout, self.local_blocks, head=group.heads.start - first
        )

    def copies_from(
        self, group: HeadGroup, heads: range, target: Side, tokens: range
    ) -> Iterator[BlockCopy]:
        """Copies of `heads` into `target`; the group's owners take turns, block by block."""
        dcp = self.remote[0].dcp
        count, turn = len(group.owners) // dcp, None
        whose = (
            np.arange(len(self.remote_blocks)) + self.shift
        ) % count * dcp + self.lanes
        for index, owner in enumerate(group.owners):
            end = self.remote[owner]
            head = heads.start - end.heads(self.total_kv_heads).start
            source = Side(end.layout, self.remote_blocks, head=head)
            if len(group.owners) > 1:
                turn = whose == index
            yield from cut(owner, source, target, len(heads), tokens, turn)


def check_blocks(
    name: str,
    ids: Sequence[int] | IntArray,
    num_blocks: int,
    block_size: int,
    tokens: range,
    first: int = 0,
) -> IntArray:
    """A block table as i64[n], after a check that the tokens' blocks are in the pool, from id
    `first` on: 1 where tables have gaps. `name` is for errors.

    Raises:
        PlanError: the table is too short, or names a block outside the pool.
    """
    table = np.array(ids, np.int64).reshape(-1)
    if not tokens:
        return table
    needed = -(-tokens.stop // block_size)
    if len(table) < needed:
        raise PlanError(
            f"{name} has {len(table)} blocks of {block_size} tokens; "
            f"{tokens.stop} tokens need {needed}"
        )
    used = table[tokens.start // block_size : needed]
    for block in (int(used.min()), int(used.max())):
        if not first <= block < num_blocks:
            raise PlanError(
                f"{name} names block {block}; the pool has blocks {first} to {num_blocks - 1}"
            )
    return table


def descriptors(copies: Iterable[BlockCopy]) -> tuple[ReadDescriptors, ...]:
    """The fewest READs for all these copies, by rank of P; runs are in the target's order."""
    by_owner: dict[int, list[_Runs]] = {}
    for copy in copies:
        by_owner.setdefault(copy.owner, []).append(_expand(copy))
    joined = {
        owner: _merge(_Runs(*map(np.concatenate, zip(*parts, strict=True))))
        for owner, parts in sorted(by_owner.items())
    }
    return tuple(ReadDescriptors(owner, *runs) for owner, runs in joined.items())


def count_descriptors(copies: Iterable[BlockCopy]) -> int:
    """An upper bound, a few above the number, of the runs in `descriptors(copies)`."""
    return sum(
        len(_joined_pieces(copy).sources) * copy.shape.num_runs for copy in copies
    )


@lru_cache(maxsize=4096)
def shape_of(source: KVLayout, target: KVLayout, heads: int, tokens: int) -> Shape:
    """The runs of a piece, for sides of the same dtype."""
    reads, writes = source.byte_strides, target.byte_strides
    sizes = {
        "H": heads,
        "L": source.num_layers,
        "C": source.num_components,
        "N": tokens,
    }
    axes = [
        Axis(size, reads[name], writes[name])
        for name, size in sizes.items()
        if size > 1
    ]
    axes.sort(key=lambda axis: axis.target_stride)
    run = source.head_dim * source.itemsize
    left: list[Axis] = []
    for axis in axes:
        if axis.source_stride == run == axis.target_stride:
            run *= axis.size
        else:
            left.append(axis)
    return Shape(run, tuple(reversed(left)))


def _joined_pieces(copy: BlockCopy) -> _Runs:
    """The first run of each piece, with neighbours merged; the other runs merge alike."""
    lengths = np.full(len(copy.sources), copy.shape.run_bytes)
    return _merge(_Runs(copy.sources, copy.targets, lengths))


def _expand(copy: BlockCopy) -> _Runs:
    """The copy's runs: an outer product, in the target's order if it has one."""
    pieces, axes = _joined_pieces(copy), copy.shape.axes
    reach = int(pieces.targets[-1] - pieces.targets[0])
    grid = [
        _Runs(*(np.arange(axis.size) * step for step in (*axis[1:], 0)))
        for axis in axes
    ]
    grid.insert(sum(axis.target_stride > reach for axis in axes), pieces)
    return _Runs(*(reduce(_outer_sum, arrays) for arrays in zip(*grid, strict=True)))


def _outer_sum(some: IntArray, others: IntArray) -> IntArray:
    return np.add.outer(some, others).reshape(-1)


def _merge(runs: _Runs) -> _Runs:
    """Sorts runs by target, and joins those that follow each other on both sides."""
    sources, targets, lengths = runs
    if (targets[1:] < targets[:-1]).any():
        order = np.argsort(targets, kind="stable")
        sources, targets, lengths = sources[order], targets[order], lengths[order]
    follows = sources[1:] == (sources + lengths)[:-1]
    follows &= targets[1:] == (targets + lengths)[:-1]
    if not follows.any():
        return _Runs(sources, targets, lengths)
    firsts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~follows) + 1))
    return _Runs(sources[firsts], targets[firsts], np.add.reduceat(lengths, firsts))

"""Block copies: copies of equally sized pieces of blocks between two paged memories.

A paged memory is an array in some order of axes (kvcache/layout.py) with a block table:
the pool of a rank, or a slot of staging memory. The tokens of a sequence are cut
wherever a block of either side ends. So a piece lies in one block on both sides, and
contains some tokens of some heads, in all layers and components. The pieces of equal
size form one BlockCopy. READs, copies and cost estimates are made from BlockCopies:

    descriptors(copies)   READs of the longest runs that are contiguous on both sides
    place                 strided copies, by torch (move/place.py) or by a kernel

A run starts as the elements of one head of one token. If the stride of an axis equals
the length of the run on BOTH sides, the run grows by the factor of the axis's size.
This is repeated until no axis has such a stride. The remaining axes give the offsets of
the runs, as an outer product. Offsets on both sides are mixed-radix numbers, so a piece
cannot be divided into fewer runs. Runs of different pieces that follow each other on
both sides are merged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import prod
from typing import NamedTuple

import numpy as np

from kvcache.layout import KVLayout
from kvcache.transfer.plan.endpoint import Endpoint, HeadGroup, IntArray, PlanError

# Stored elements are multiplied by these factors (endpoint.scale_factors): one for each
# layer and component, layers outermost. None: the scales of both sides are equal.
ScaleFactors = tuple[float, ...] | None


class Side(NamedTuple):
    """The source or the target of a copy: a sequence's blocks in one paged memory."""

    layout: KVLayout
    blocks: IntArray  # i64, the block table from token 0 of the sequence on
    head: int = 0  # first head to copy, counted in this memory
    base: int = 0  # byte offset of block 0

    def byte_offsets(self, tokens: IntArray) -> IntArray:
        """Byte offsets of tokens in the memory.

        The offset of a token is the offset of the token's first element in the first
        copied head, in layer 0 and component 0.
        """
        strides = self.layout.byte_strides
        ordinals, within = np.divmod(tokens, self.layout.block_size)
        offsets: IntArray = self.blocks[ordinals] * strides["B"] + within * strides["N"]
        return offsets + (self.base + self.head * strides["H"])


class BlockCopy(NamedTuple):
    """Copies of equally sized pieces of `num_tokens` tokens and `num_heads` heads.

    A piece has all layers and components of its tokens and heads.
    """

    owner: int  # the rank of P that has the source; unused if the source is a slot
    source: KVLayout
    target: KVLayout
    num_heads: int
    num_tokens: int
    sources: IntArray  # i64[n]: byte offset of each piece in the source
    targets: IntArray  # i64[n]: byte offset of each piece in the target

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece, in the source's dtype."""
        token_bytes = self.num_heads * self.source.token_bytes // self.source.num_heads
        return self.num_tokens * token_bytes

    @property
    def nbytes(self) -> int:
        return len(self.sources) * self.piece_bytes

    def part(self, first: int, count: int) -> "BlockCopy":
        """The same copy, restricted to `count` pieces, starting with piece `first`."""
        pieces = slice(first, first + count)
        return self._replace(sources=self.sources[pieces], targets=self.targets[pieces])

    @property
    def shape(self) -> "Shape":
        return shape_of(self.source, self.target, self.num_heads, self.num_tokens)


class Axis(NamedTuple):
    """One axis of a piece, with its strides on both sides in bytes."""

    size: int
    source_stride: int
    target_stride: int


class Shape(NamedTuple):
    """The runs of a piece: one run of `run_bytes` for each combination of indices."""

    run_bytes: int
    axes: tuple[Axis, ...]  # in the target's order, outermost axis first

    @property
    def num_runs(self) -> int:
        return prod(axis.size for axis in self.axes)


class ReadDescriptors(NamedTuple):
    """One READ: the runs to read from one rank of P.

    Offsets and lengths are i64[n], in bytes. Remote offsets count from the start of the
    rank's memory, local offsets from the start of the memory or slot that is read into.
    """

    remote_rank: int
    remote_offsets: IntArray
    local_offsets: IntArray
    lengths: IntArray

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())


class _Runs(NamedTuple):
    """Contiguous runs of a copy: three i64[n], in bytes."""

    sources: IntArray
    targets: IntArray
    lengths: IntArray


@lru_cache(maxsize=64)  # enough for the chunks of two pulls
def pieces(
    start: int, stop: int, *block_sizes: int
) -> tuple[tuple[int, IntArray], ...]:
    """Cuts tokens [start, stop) at every multiple of every block size.

    Returns:
        One tuple for each length that occurs: (number of tokens in a piece, the first
        token of each piece of this length).
    """
    if start >= stop:
        return ()
    borders = [
        np.arange(start - start % size + size, stop, size) for size in block_sizes
    ]
    cuts = np.unique(np.concatenate([[start, stop], *borders]))
    starts = cuts[:-1]
    lengths = np.diff(cuts)
    return tuple(
        (length, starts[lengths == length]) for length in np.unique(lengths).tolist()
    )


def cut(
    owner: int,
    source: Side,
    target: Side,
    num_heads: int,
    tokens: range,
    is_from_owner: IntArray | None = None,
) -> Iterator[BlockCopy]:
    """Yields the copies that move tokens of a sequence between two paged memories.

    Args:
        owner: as in BlockCopy.
        num_heads: number of heads to copy.
        is_from_owner: bool[n]: whether each block of the source is read from this
            owner; None: all blocks are.
    """
    source_size = source.layout.block_size
    target_size = target.layout.block_size
    for length, starts in pieces(tokens.start, tokens.stop, source_size, target_size):
        if is_from_owner is not None:
            starts = starts[is_from_owner[starts // source_size]]
        if len(starts):
            yield BlockCopy(
                owner=owner,
                source=source.layout,
                target=target.layout,
                num_heads=num_heads,
                num_tokens=length,
                sources=source.byte_offsets(starts),
                targets=target.byte_offsets(starts),
            )


@dataclass(frozen=True, eq=False)
class Transfer:
    """The KV of a sequence that a rank of D has to read from P, in one layer group.

    D is the decode server, and P the prefill server. A transfer moves the heads of the
    rank, in all layers of the group and all components. If D has a dcp above 1, tokens
    and blocks are counted on this rank alone.

    Attributes:
        local: the rank of D.
        remote: the ranks of P, by rank.
        groups: the wanted heads, grouped by the ranks of P that own them.
        tokens: the wanted tokens.
        local_blocks: i64: D's block table from token 0 on.
        remote_blocks: i64: P's block table from token 0 on.
        lanes: i64: for each block of P, the number of the rank that stores the block,
            counted within P's context-parallel group.
        shift: if n copies of a head exist on P, block i is read from copy number
            (i + shift) % n, so that the copies share the load.
    """

    local: Endpoint
    remote: tuple[Endpoint, ...]
    total_kv_heads: int
    groups: tuple[HeadGroup, ...]
    tokens: range
    local_blocks: IntArray
    remote_blocks: IntArray
    lanes: IntArray
    shift: int
    scale_factors: ScaleFactors

    @property
    def block_size(self) -> int:
        """P's block size, in tokens."""
        return self.remote[0].layout.block_size

    @property
    def remote_ordinals(self) -> range:
        """The indices in P's block table of the blocks that hold the tokens."""
        return range(
            self.tokens.start // self.block_size,
            -(-self.tokens.stop // self.block_size),
        )

    @property
    def converts(self) -> bool:
        """True if the two sides differ in dtype or scales."""
        if self.scale_factors is not None:
            return True
        return self.local.layout.dtype != self.remote[0].layout.dtype

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
        """The same transfer, restricted to tokens [start, stop)."""
        return replace(self, tokens=range(start, stop))

    def copies(self, tokens: range | None = None) -> Iterator[BlockCopy]:
        """Yields the copies straight from P's memory into D's pool.

        Args:
            tokens: the tokens to copy; None: all tokens of the transfer.
        """
        for group in self.groups:
            side = self.target(group)
            yield from self.copies_from(group, group.heads, side, tokens or self.tokens)

    def target(self, group: HeadGroup) -> Side:
        """The target of copies of a group's heads: D's pool."""
        first = self.local.heads(self.total_kv_heads).start
        return Side(
            self.local.layout,
            self.local_blocks,
            head=group.heads.start - first,
            base=self.local.base,
        )

    def copies_from(
        self, group: HeadGroup, heads: range, target: Side, tokens: range
    ) -> Iterator[BlockCopy]:
        """Yields the copies of `heads` into `target`, from the owners of a head group.

        If there are several owners, the blocks are read from these owners in rotation.

        Args:
            heads: head numbers in the model: the heads of `group`, or a larger range
                that contains them and that every owner of the group holds.
        """
        dcp = self.remote[0].dcp
        num_copies = len(group.owners) // dcp
        copy_numbers = (np.arange(len(self.remote_blocks)) + self.shift) % num_copies
        owner_indices = copy_numbers * dcp + self.lanes
        is_from_owner = None
        for index, owner in enumerate(group.owners):
            endpoint = self.remote[owner]
            head = heads.start - endpoint.heads(self.total_kv_heads).start
            source = Side(
                endpoint.layout, self.remote_blocks, head=head, base=endpoint.base
            )
            if len(group.owners) > 1:
                is_from_owner = owner_indices == index
            yield from cut(owner, source, target, len(heads), tokens, is_from_owner)


def check_blocks(
    name: str,
    ids: Sequence[int] | IntArray,
    num_blocks: int,
    block_size: int,
    tokens: range,
    first: int = 0,
) -> IntArray:
    """Checks that the tokens' blocks are in the pool, and returns the table as i64[n].

    Args:
        name: the table's name, for errors.
        first: the lowest valid block id. If it is 1, a null block in the place of a
            needed block is an error.

    Raises:
        PlanError: the table is too short, or has an id outside the pool.
    """
    table = np.array(ids, np.int64).reshape(-1)
    if not tokens:
        return table
    num_needed = -(-tokens.stop // block_size)
    if len(table) < num_needed:
        raise PlanError(
            f"{name} has {len(table)} blocks of {block_size} tokens; "
            f"{tokens.stop} tokens need {num_needed}"
        )
    needed_blocks = table[tokens.start // block_size : num_needed]
    for block in (int(needed_blocks.min()), int(needed_blocks.max())):
        if not first <= block < num_blocks:
            raise PlanError(
                f"{name} names block {block}; "
                f"the pool has blocks {first} to {num_blocks - 1}"
            )
    return table


def descriptors(copies: Iterable[BlockCopy]) -> tuple[ReadDescriptors, ...]:
    """Makes one READ per rank of P, which carries out all copies from that rank.

    Each READ has the fewest possible runs, in the order of the target.
    """
    runs_by_owner: dict[int, list[_Runs]] = {}
    for copy in copies:
        runs_by_owner.setdefault(copy.owner, []).append(_expand(copy))
    reads: list[ReadDescriptors] = []
    for owner, parts in sorted(runs_by_owner.items()):
        runs = _Runs(*map(np.concatenate, zip(*parts, strict=True)))
        reads.append(ReadDescriptors(owner, *_merge(runs)))
    return tuple(reads)


def count_descriptors(copies: Iterable[BlockCopy]) -> int:
    """A close upper bound for the number of runs in `descriptors(copies)`."""
    return sum(
        len(_joined_first_runs(copy).sources) * copy.shape.num_runs for copy in copies
    )


@lru_cache(maxsize=4096)
def shape_of(
    source: KVLayout, target: KVLayout, num_heads: int, num_tokens: int
) -> Shape:
    """The shape of a piece of a copy. Both sides must have the same dtype."""
    source_strides = source.byte_strides
    target_strides = target.byte_strides
    sizes = {
        "H": num_heads,
        "L": source.num_layers,
        "C": source.num_components,
        "N": num_tokens,
    }
    axes = [
        Axis(size, source_strides[name], target_strides[name])
        for name, size in sizes.items()
        if size > 1
    ]
    axes.sort(key=lambda axis: axis.target_stride)
    run_bytes = source.head_dim * source.itemsize
    outer_axes: list[Axis] = []
    for axis in axes:
        if axis.source_stride == run_bytes == axis.target_stride:
            run_bytes *= axis.size
        else:
            outer_axes.append(axis)
    return Shape(run_bytes, tuple(reversed(outer_axes)))


def _joined_first_runs(copy: BlockCopy) -> _Runs:
    """The first runs of all pieces, joined where they follow each other on both sides.

    If the first runs of two pieces follow each other, so do their second runs, their
    third runs and so on.
    """
    lengths = np.full(len(copy.sources), copy.shape.run_bytes)
    return _merge(_Runs(copy.sources, copy.targets, lengths))


def _expand(copy: BlockCopy) -> _Runs:
    """All runs of a copy, as an outer product of the first runs and the axes.

    The runs are in the order of the target, if the pieces do not interleave in the
    target.
    """
    first_runs = _joined_first_runs(copy)
    axes = copy.shape.axes
    target_extent = int(first_runs.targets[-1] - first_runs.targets[0])
    terms: list[_Runs] = []
    for axis in axes:
        index = np.arange(axis.size)
        source_offsets = index * axis.source_stride
        target_offsets = index * axis.target_stride
        terms.append(_Runs(source_offsets, target_offsets, lengths=index * 0))
    # In the order of the target, axes with a stride longer than the distance from the
    # first piece to the last piece come before the pieces; all other axes come after.
    num_longer_axes = sum(axis.target_stride > target_extent for axis in axes)
    terms.insert(num_longer_axes, first_runs)
    return _Runs(*(reduce(_outer_sum, arrays) for arrays in zip(*terms, strict=True)))


def _outer_sum(first: IntArray, second: IntArray) -> IntArray:
    return np.add.outer(first, second).reshape(-1)


def _merge(runs: _Runs) -> _Runs:
    """Sorts runs by target, and joins runs that follow each other on both sides."""
    sources, targets, lengths = runs
    if (targets[1:] < targets[:-1]).any():
        order = np.argsort(targets, kind="stable")
        sources = sources[order]
        targets = targets[order]
        lengths = lengths[order]
    follows = sources[1:] == (sources + lengths)[:-1]
    follows &= targets[1:] == (targets + lengths)[:-1]
    if not follows.any():
        return _Runs(sources, targets, lengths)
    firsts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~follows) + 1))
    return _Runs(sources[firsts], targets[firsts], np.add.reduceat(lengths, firsts))

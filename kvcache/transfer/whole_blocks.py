"""Direct reads of whole blocks that are one run on both sides: the plans that most pulls get.

What depends on geometry alone is worked out once for a pair of engines; a pull then costs a handful
of numpy calls on its block ids, each of which takes microseconds when the processor has done other
things in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.transfer.boxes import Transfer
from kvcache.transfer.runs import Axis, RankRead, grow
from kvcache.transfer.topology import Endpoint, HeadGroup, IntArray, byte_strides

_HIGH = 32  # bits for a block id
_LOW_BITS = (1 << _HIGH) - 1
_NEXT = (1 << _HIGH) + 1  # from a pair of block ids to that of the blocks behind both


@dataclass(frozen=True)
class _Share:
    """What a rank of D reads of every whole block from one rank of P. Bytes."""

    owner: int
    group: int
    copy: int  # index among the ranks that take turns
    copies: int
    run_bytes: int
    remote_block: int  # distance of two blocks
    local_block: int
    remote_offset: int  # inside a block
    local_offset: int

    @property
    def joins(self) -> bool:
        """Runs of neighbouring blocks are neighbours."""
        return self.run_bytes == self.remote_block == self.local_block


class WholeBlocks:
    """See `of`."""

    def __init__(self, shares: Sequence[_Share]) -> None:
        self._shares = shares
        self.run_bytes = min(share.run_bytes for share in shares)

    @classmethod
    def of(
        cls,
        local: Endpoint,
        remote: Sequence[Endpoint],
        groups: Sequence[HeadGroup],
        total_kv_heads: int,
    ) -> "WholeBlocks | None":
        """The reads of whole blocks between these; None where one of them takes several runs, or
        one rank of P is read from in several parts of a block."""
        if local.layout.block_size != remote[0].layout.block_size:
            return None
        shares = list(_shares(local, remote, groups, total_kv_heads))
        owners = {share.owner for share in shares}
        if len(owners) < len(shares) or not all(share.run_bytes for share in shares):
            return None
        return cls(shares)

    def reads(self, transfer: Transfer, first: int, last: int) -> tuple[RankRead, ...]:
        """The fewest runs of blocks [first, last) of the sequence, by rank of P."""
        remote = transfer.remote_blocks[first:last]
        local = transfer.local_blocks[first:last]
        found = []
        for share in self._shares:
            start = (share.copy - first - transfer.groups[share.group].turn) % share.copies
            if start < last - first:
                mine = slice(start, None, share.copies)
                found.append(_read(share, remote[mine], local[mine]))
        found.sort(key=lambda read: read.remote_rank)
        return tuple(found)


def _shares(
    local: Endpoint, remote: Sequence[Endpoint], groups: Sequence[HeadGroup], total_kv_heads: int
) -> Iterator[_Share]:
    writes, layout = byte_strides(local.layout), local.layout
    first = local.heads(total_kv_heads).start
    sizes = (layout.num_layers, layout.num_components, layout.block_size)
    for number, group in enumerate(groups):
        for copy, owner in enumerate(group.owners):
            reads = byte_strides(remote[owner].layout)
            axes = [
                Axis(size, reads[axis], writes[axis])
                for axis, size in zip("HLCN", (len(group.heads), *sizes), strict=True)
            ]
            run, left = grow(layout.head_dim * layout.itemsize, axes)
            theirs = group.heads.start - remote[owner].heads(total_kv_heads).start
            yield _Share(
                owner,
                number,
                copy,
                len(group.owners),
                0 if left else run,
                reads["B"],
                writes["B"],
                theirs * reads["H"],
                (group.heads.start - first) * writes["H"],
            )


def _read(share: _Share, remote: IntArray, local: IntArray) -> RankRead:
    lengths = None
    if share.joins and len(local) > 1:
        remote, local, lengths = _joined(remote, local)
        lengths *= share.run_bytes
    else:
        lengths = np.empty(len(local), np.int64)
        lengths.fill(share.run_bytes)
    return RankRead(
        share.owner,
        remote * share.remote_block + share.remote_offset,
        local * share.local_block + share.local_offset,
        lengths,
    )


def _joined(remote: IntArray, local: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """First blocks and lengths, in blocks, of the longest rows of neighbours on both sides."""
    pairs = (local << _HIGH) | remote  # one sort and one comparison instead of two of each
    pairs.sort()
    firsts, counts = joined(pairs[1:] - pairs[:-1] == _NEXT)
    pairs = pairs[firsts]
    return pairs & _LOW_BITS, pairs >> _HIGH, counts


def joined(follows: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """First ones and lengths of rows of things of which each after the first may follow its
    predecessor, i64[rows] each."""
    (breaks,) = np.logical_not(follows).nonzero()
    borders = np.empty(len(breaks) + 2, np.int64)
    borders[0], borders[-1] = 0, len(follows) + 1
    np.add(breaks, 1, out=borders[1:-1])
    return borders[:-1], borders[1:] - borders[:-1]

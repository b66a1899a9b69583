"""Direct reads of whole blocks that are one run on both sides: the plans that most pulls get.

What depends only on geometry is worked out once for a pair of engines; a pull then costs a loop
over its block ids or, if there are many, a handful of numpy calls. Each of those takes up to 10 us
if the processor has done other things in between, and the link is idle meanwhile.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvcache.transfer.boxes import Transfer, int_array
from kvcache.transfer.runs import Axis, RankRead, grow
from kvcache.transfer.topology import Endpoint, HeadGroup, IntArray, byte_strides

_FEW_BLOCKS = 256
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
        transfer.local_table.check()
        is_few = last - first <= _FEW_BLOCKS
        found = []
        for share in self._shares:
            begin = first + (share.copy - first - transfer.groups[share.group].turn) % share.copies
            if begin >= last:
                continue
            mine = slice(begin, last, share.copies)
            if is_few:
                tables = transfer.local_table.ids[mine], transfer.remote_table.ids[mine]
                found.append(_read_few(share, *tables))
            else:
                found.append(_read(share, transfer, mine))
        if len(found) > 1:
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


def _read_few(share: _Share, local: list[int], remote: list[int]) -> RankRead:
    if share.joins and len(local) > 1:
        rows = _rows(remote, local)
        remote, local = [row[1] for row in rows], [row[0] for row in rows]
        lengths = [row[2] * share.run_bytes for row in rows]
    else:
        lengths = [share.run_bytes] * len(local)
    return RankRead(
        share.owner,
        int_array([block * share.remote_block + share.remote_offset for block in remote]),
        int_array([block * share.local_block + share.local_offset for block in local]),
        int_array(lengths),
    )


def _rows(remote: list[int], local: list[int]) -> list[tuple[int, int, int]]:
    """As `_joined`: (local, remote, count) of each row of neighbours on both sides."""
    rows = _follow(zip(local, remote, repeat(1)))
    ordered = sorted(rows)
    return rows if ordered == rows else _follow(ordered)


def _follow(rows: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Joins rows that continue the one before them."""
    found: list[tuple[int, int, int]] = []
    target = source = count = 0
    next_target = next_source = -1
    for row in rows:
        if row[0] == next_target and row[1] == next_source:
            count += row[2]
        else:
            if count:
                found.append((target, source, count))
            target, source, count = row
        next_target, next_source = target + count, source + count
    found.append((target, source, count))
    return found


def _read(share: _Share, transfer: Transfer, mine: slice) -> RankRead:
    remote, local = transfer.remote_blocks[mine], transfer.local_blocks[mine]
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

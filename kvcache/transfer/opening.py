"""The first READ of a pull, found before the pull is planned: the link idles until then.

To check tables, plan, and make a job and its first chunk takes 0.1 to 0.2 ms; the chunk is read in
0.3. But once it is known how pulls like it are staged, a pull's own block table says what its first
chunk reads. So that is posted first, and all else is done while it is being read.

Of a staged pull that is a guess. It is bounded to P's leased blocks and to staging memory that
nobody uses, and what it brought is used only if the plan turns out to want just these runs in just
that place (`PullJob`); else it is thrown away, and its slot is free when the READ has ended (I7).
A pull of nothing but whole blocks, each one long run, leaves nothing to guess: what is read of it
first goes to its place in the pool, and the plan reads the rest.
"""

from typing import NamedTuple

from kvcache.transfer.chunks import Share, few_runs, shares_of_chunks
from kvcache.transfer.runs import RankRead, multiply_out
from kvcache.transfer.staged import Cuts, Staging, Way, next_border

_MAX_BLOCKS = 128  # of a chunk: by a loop


class Opening(NamedTuple):
    """What a pull reads first, into the pool; or is likely to, into the first slot of staging
    memory."""

    read: RankRead  # local offsets from the pool's base, or that slot's
    slot_bytes: int = 0
    num_blocks: int = 0  # read into the pool; else none

    @property
    def is_staged(self) -> bool:
        return not self.num_blocks

    def stays_inside(self, local_bytes: int, remote_bytes: int) -> bool:
        """Of memory of these sizes: the block tables have not been checked yet."""
        read, lengths = self.read, self.read.lengths.tolist()
        places = ((read.local_offsets, local_bytes), (read.remote_offsets, remote_bytes))
        return all(
            0 <= at and at + length <= size
            for offsets, size in places
            for at, length in zip(offsets.tolist(), lengths, strict=True)
        )

    def rest(self, reads: tuple[RankRead, ...]) -> tuple[RankRead, ...]:
        """A plan's reads without it."""
        return reads[1:] if reads and reads[0] is self.read else reads


class _Opener(NamedTuple):
    """How the first chunk of pulls of one kind is read."""

    way: Way
    cuts: Cuts
    slot_bytes: int
    shares: tuple[Share, ...]


class Openings:
    """Of pulls between one pair of engines.

    Args:
        block_size: of P, in tokens.
        num_blocks: of P's smallest pool.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._size = block_size
        self._num_blocks = num_blocks
        self._openers: dict[tuple[int, ...], _Opener | None] = {}  # None: such pulls differ

    def forget(self) -> None:
        """What was learnt does not hold any more."""
        self._openers.clear()

    def learn(self, kind: tuple[int, ...], staging: Staging | None) -> None:
        """How a pull of a kind is planned: all of it staged so, or else (None)."""
        if kind in self._openers:
            known = self._openers[kind]
            if known is not None and (staging is None or known.way != staging.way):
                self._openers[kind] = None
            return
        if staging is None:
            self._openers[kind] = None
            return
        shares = shares_of_chunks(staging)
        self._openers[kind] = _Opener(staging.way, staging.cuts, staging.slot_bytes, shares)

    def find(
        self, kind: tuple[int, ...], start: int, stop: int, blocks: list[int], turn: int
    ) -> Opening | None:
        """The opening of a pull of tokens [start, stop) out of `blocks` of P; None where it is not
        sure, or not made quickly.

        Args:
            turn: of the head groups, see topology.HeadGroup.
        """
        opener = self._openers.get(kind)
        if opener is None:
            return None
        way, cuts, slot_bytes, shares = opener
        size = self._size
        first, low = cuts.first(start // size), start // size
        high = next_border(first, -(-stop // size), cuts)
        is_ragged = start % size or high * size > stop
        if high - first > _MAX_BLOCKS or (is_ragged and not way.whole):
            return None
        begins = ((low + (each.copy - low - turn) % each.copies, each) for each in shares)
        begin, share = next((found for found in begins if found[0] < high), (high, shares[0]))
        mine = blocks[begin : high : share.copies]
        if high > len(blocks) or not mine or min(mine) < 0 or max(mine) >= self._num_blocks:
            return None
        runs = multiply_out(few_runs(share, mine, begin - first), share.offsets)
        return Opening(RankRead(share.owner, *runs), slot_bytes)

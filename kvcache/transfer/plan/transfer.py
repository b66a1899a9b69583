"""One checked transfer: which tokens, out of whose blocks, into which ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcache.transfer.plan.block_copy import BlockCopy, Side, cut
from kvcache.transfer.plan.endpoint import Endpoint, HeadGroup, IntArray, PlanError


@dataclass(frozen=True, eq=False)
class Transfer:
    """What one rank of D wants of one sequence: all layers and components of its heads. Of ranks
    that share tokens, tokens and blocks are this rank's."""

    local: Endpoint
    remote: tuple[Endpoint, ...]  # by rank
    total_kv_heads: int
    groups: tuple[HeadGroup, ...]  # the heads wanted, by who owns them
    tokens: range
    local_blocks: IntArray  # i64, D's block table from token 0 on
    remote_blocks: IntArray  # i64, P's
    shift: int  # of whose turn it is among copies of a head
    factors: tuple[float, ...] | None  # of the elements, by layer and component, if they change

    @property
    def block_size(self) -> int:
        """Of P, in tokens."""
        return self.remote[0].layout.block_size

    @property
    def converts(self) -> bool:
        """The two sides differ in dtype or scales."""
        return self.local.layout.dtype != self.remote[0].layout.dtype or self.factors is not None

    @property
    def useful_bytes(self) -> int:
        """Bytes of the peer's KV that this rank wants."""
        layout = self.remote[0].layout
        heads = sum(len(group.heads) for group in self.groups)
        return len(self.tokens) * heads * layout.token_bytes // layout.num_heads

    def part(self, start: int, stop: int) -> "Transfer":
        """Some of the tokens."""
        return replace(self, tokens=range(start, stop))

    def copies(self) -> Iterator[BlockCopy]:
        """Straight out of P's memory into D's pool."""
        for group in self.groups:
            yield from self.copies_from(group, group.heads, self.target(group), self.tokens)

    def target(self, group: HeadGroup) -> Side:
        """Where a group's heads belong."""
        first = self.local.heads(self.total_kv_heads).start
        return Side(self.local.layout, self.local_blocks, head=group.heads.start - first)

    def copies_from(
        self, group: HeadGroup, heads: range, target: Side, tokens: range
    ) -> Iterator[BlockCopy]:
        """Heads that a group's owners hold, out of their blocks in turn."""
        for index, owner in enumerate(group.owners):
            end = self.remote[owner]
            head = heads.start - end.heads(self.total_kv_heads).start
            source = Side(end.layout, self.remote_blocks, head=head)
            turn = group.turn(index, self.shift)
            yield from cut(owner, source, target, len(heads), tokens, turn)


def check_blocks(
    name: str,
    ids: Sequence[int] | IntArray,
    num_blocks: int,
    block_size: int,
    tokens: range,
    *,
    distinct: bool = False,
) -> IntArray:
    """A block table as i64[n], once every block that the tokens lie in is known to exist.

    Args:
        name: for errors.
        num_blocks: of the pool.
        distinct: these blocks must differ from each other.

    Raises:
        PlanError: the table is too short, or names a block outside the pool, or one twice.
    """
    table = np.array(ids, np.int64).reshape(-1)
    if not tokens:
        return table
    if len(table) * block_size < tokens.stop:
        raise PlanError(
            f"{name} has {len(table)} blocks of {block_size} tokens; "
            f"{tokens.stop} tokens need {-(-tokens.stop // block_size)}"
        )
    used = table[tokens.start // block_size : -(-tokens.stop // block_size)]
    low, high, last = int(used.min()), int(used.max()), num_blocks - 1
    if low < 0 or high > last:
        wrong = low if low < 0 else high
        raise PlanError(f"{name} names block {wrong}; the pool has blocks 0 to {last}")
    if distinct:
        ordered = np.sort(used)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise PlanError(f"{name} names block {twice[0]} twice")
    return table

"""Leases cached prefixes to other engines, and makes the references to leased blocks.

A reference contains all data that a reader needs to read the blocks. Engines and the KV
store of a host (engine/store) make references in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.blocks import BlockAllocator, BlockState
from kvcache.groups import without_null_blocks
from kvcache.lease_server import LeaseServer
from kvcache.prefix import PrefixIndex
from protocol.handshake import Lookup
from protocol.messages import RemotePrefill
from protocol.metrics import stat_key

# When leases take this share of the pool, lookups get only cached blocks that sequences
# use or that are leased already.
_MAX_LEASED_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class ReferenceMaker:
    """Makes the references of one engine. Its fields are the members that all these
    references have in common.

    Attributes:
        host, port: address of the engine's lease server.
        block_size: tokens of a block on one rank.
        num_groups: number of the model's KV groups (kvcache/groups.py).
    """

    host: str
    port: int
    engine_id: str
    incarnation: str
    lease_s: float
    block_size: int
    tp: int
    dcp: int
    num_groups: int

    def make(
        self,
        request_id: str,
        block_ids: Sequence[int],
        lease_id: str,
        num_tokens: int,
        **details: Any,
    ) -> RemotePrefill:
        """Returns a reference to leased blocks.

        If `dcp` ranks share tokens, a block of a table is a block on each of these
        ranks. The reference therefore names every block `dcp` times.
        """
        num_blocks = -(-num_tokens // self.block_size) * self.num_groups
        rank_block_ids = [block for block in block_ids for _ in range(self.dcp)]
        return RemotePrefill(
            host=self.host,
            port=self.port,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            request_id=request_id,
            lease_id=lease_id,
            lease_s=self.lease_s,
            block_ids=rank_block_ids[:num_blocks],
            block_size=self.block_size,
            num_tokens=num_tokens,
            tp_size=self.tp,
            **details,
        )


class LookupAnswerer:
    """Answers lookups: leases the longest cached prefix of a prompt.

    Args:
        prefix: the prefix index; None if caching is off.
        num_drafted: see Speculator.num_drafted.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        prefix: PrefixIndex | None,
        leases: LeaseServer,
        references: ReferenceMaker,
        num_drafted: Callable[[Sequence[int], list[int]], int] = lambda *_: 0,
    ) -> None:
        self._allocator = allocator
        self._prefix = prefix
        self._leases = leases
        self._references = references
        self._num_drafted = num_drafted
        self._outcomes = dict.fromkeys(("found", "none", "full"), 0)

    def answer(self, lookup: Lookup, num_needed: int = 0) -> RemotePrefill | None:
        """Leases the longest cached prefix, and counts the outcome. Returns a
        reference, or None if the prefix is too short or too many blocks are leased.

        Sequences of this engine may use the leased blocks at the same time.

        Args:
            num_needed: number of blocks that the leases must leave available.
        """
        prefix = self._prefix
        if prefix is None:
            self._outcomes["none"] += 1
            return None
        table = prefix.match(lookup.token_ids, salt=lookup.cache_salt)
        if num_table_tokens(prefix, table) < lookup.min_tokens:
            self._outcomes["none"] += 1
            return None
        table = self._leasable_prefix(prefix, table, num_needed)
        num_tokens = num_table_tokens(prefix, table)
        if not table or num_tokens < lookup.min_tokens:
            self._outcomes["full"] += 1
            return None
        self._outcomes["found"] += 1
        self._allocator.lease(without_null_blocks(table))
        lease_id = self._leases.grant(lookup.nonce, table, self._references.lease_s)
        return self._references.make(
            lookup.nonce,
            table,
            lease_id,
            num_tokens,
            cached_tokens=num_tokens,
            drafted_tokens=self._num_drafted(lookup.token_ids, table),
            first_tokens=[],
        )

    def _leasable_prefix(
        self, prefix: PrefixIndex, table: list[int], num_needed: int
    ) -> list[int]:
        """The leading blocks of `table` that can be leased to a lookup.

        The leases may take half of the pool, but must leave `num_needed` blocks. Blocks
        that a sequence uses can always be leased, because they are not available
        anyway.
        """
        allocator = self._allocator
        max_leased = min(
            allocator.capacity * _MAX_LEASED_SHARE, allocator.capacity - num_needed
        )
        num_left = max_leased - allocator.counts()[BlockState.LEASED]
        leasable: list[int] = []
        for block in table:
            num_left -= allocator.state(block) is BlockState.CACHED
            if num_left < 0:
                break
            leasable.append(block)
        if prefix.groups.drops_blocks and len(leasable) < len(table):
            # The blocks in the windows at the end of a shorter prefix may have been
            # released.
            return []
        return leasable

    def stats(self) -> dict[str, float]:
        """The metric values by series (protocol.metrics)."""
        return {
            stat_key("baton_kv_lookups_answered", outcome=outcome): float(count)
            for outcome, count in self._outcomes.items()
        }


def num_table_tokens(prefix: PrefixIndex, table: Sequence[int]) -> int:
    """The number of tokens that a table of full blocks has entries for."""
    return len(table) // prefix.groups.count * prefix.block_size


def min_resume_tokens_of(num_tokens: int, block_size: int) -> int:
    """The argument `min_resume_tokens` of KVGroups.token_ranges with which a store
    pulls a prefix of `num_tokens` tokens in full blocks.

    A window may begin in the middle of a block. The store needs all of this block, or
    the prefix would never be a hit.
    """
    return max(0, num_tokens - block_size + 1)

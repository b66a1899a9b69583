"""Demotions: an engine offers KV of its prefix cache to a region, which pulls it.

    offered --> WAITING --blocks are free--> RECEIVING --pull done--> published: CACHED
                   |                             `------pull failed-> FREE
                   `--dropped: too many or too long waiting, evicted, or of no use

The region renews the lease of an offer until the pull ends. If the region then has all
offered tokens, it completes the lease, otherwise it aborts the lease. So the engine
receives the result of the demotion.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from engine.kv.references import min_resume_tokens_of
from kvcache.blocks import NULL_BLOCK, BlockAllocator, BlockState, IntegrityError
from kvcache.groups import without_null_blocks
from kvcache.prefix import PrefixCursor, PrefixIndex
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.lease_client import new_id
from kvcache.transfer.pulls.messages import (
    Event,
    PullDone,
    PullDrained,
    PullFailed,
    PullStuck,
)
from protocol.handshake import Demote
from protocol.ipc.kv_store import OFFER_OUTCOMES
from protocol.process.logging import get_logger

logger = get_logger(__name__)

MAX_WAITING = 64  # beyond this number of waiting offers, the oldest is dropped
MAX_ACTIVE = 4  # maximum number of concurrent pulls
# An offer that has waited this long is dropped, because the engine cannot reuse the
# offered blocks while they are leased.
MAX_WAIT_S = 5.0


@dataclass
class _Demotion:
    """An offer, and the blocks that its pull writes to.

    Attributes:
        stop: number of offered tokens that fill whole blocks of the region.
        offered_s: when the offer arrived.
        start: number of these tokens that the region already had when the pull began.
        table: the block table of the tokens, with shared blocks and `fresh_blocks`.
        fresh_blocks: the blocks that the pull writes to.
    """

    offer: Demote
    stop: int
    offered_s: float
    start: int = 0
    table: list[int] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)

    @property
    def shared_blocks(self) -> list[int]:
        fresh_blocks = set(self.fresh_blocks)
        blocks = without_null_blocks(self.table)
        return [block for block in blocks if block not in fresh_blocks]


class Demotions:
    """The waiting and active demotions of one region. One thread uses this object.

    Attributes:
        outcomes: number of ended demotions, by outcome (OFFER_OUTCOMES).
        num_bytes: total number of pulled bytes.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        prefix: PrefixIndex,
        coordinator: PullCoordinator,
    ) -> None:
        self._allocator = allocator
        self._prefix = prefix
        self._coordinator = coordinator
        # By pull id, oldest first. This class makes the pull ids: lease ids come from
        # engines, which may repeat an offer after the offer's pull has ended.
        self._waiting: OrderedDict[str, _Demotion] = OrderedDict()
        self._active: dict[str, _Demotion] = {}
        # Blocks to which READs of an ended pull may still write, by pull id.
        self._undrained: dict[str, list[int]] = {}
        self.outcomes = Counter(dict.fromkeys(OFFER_OUTCOMES, 0))
        self.num_bytes = 0

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._active or self._undrained)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, offer: Demote, now_s: float) -> None:
        """Adds an offer, and begins to renew its lease. Drops unusable offers."""
        pull_id = new_id()
        block_size = self._prefix.block_size
        num_tokens = min(offer.remote.num_tokens, len(offer.token_ids))
        stop = num_tokens // block_size * block_size
        demotion = _Demotion(offer, stop, now_s)
        self._coordinator.hold(pull_id, offer.remote)
        self._waiting[pull_id] = demotion
        is_complete = any(offer.remote.block_ids) and offer.remote.transfer_id is None
        if not (stop > 0 and is_complete and self._can_ever_hold(stop)):
            self._drop(pull_id)
        elif len(self._waiting) > MAX_WAITING:
            self._drop(next(iter(self._waiting)))

    def _can_ever_hold(self, num_tokens: int) -> bool:
        groups = self._prefix.groups
        needed = groups.num_blocks_for(num_tokens, 0, self._prefix.block_size)
        return needed <= self._allocator.capacity

    def _drop(self, pull_id: str, outcome: str = "dropped") -> None:
        del self._waiting[pull_id]
        self.outcomes[outcome] += 1
        self._coordinator.cancel(pull_id)

    def begin_pulls(self, now_s: float) -> None:
        """Begins the pulls that fit, and drops the offers that have waited too long."""
        for pull_id, demotion in list(self._waiting.items()):
            if now_s - demotion.offered_s >= MAX_WAIT_S:
                self._drop(pull_id)
            elif len(self._active) < MAX_ACTIVE and not self._begin(pull_id, demotion):
                return

    def _begin(self, pull_id: str, demotion: _Demotion) -> bool:
        """Begins the pull of a waiting demotion, if possible.

        Returns False if too few blocks are free. No other demotion should be tried
        now in that case.
        """
        offer = demotion.offer
        prefix = self._prefix
        groups = prefix.groups
        table = prefix.match(
            offer.token_ids, max_tokens=demotion.stop, salt=offer.cache_salt
        )
        start = len(table) // groups.count * prefix.block_size
        # If an active pull reads tokens of this offer, wait for its end, so that no
        # token is read twice. An engine may offer the next piece of a sequence before
        # this region has handled the end of the previous piece's pull.
        if any(
            _brings_next_block(active, demotion, start, prefix.block_size)
            for active in self._active.values()
        ):
            return True
        if start < offer.first_token:
            self._drop(pull_id, "evicted")
            return True
        demotion.start = start
        ranges = self._ranges(demotion)
        entries = groups.missing_entries(table, ranges, prefix.block_size)
        allocator = self._allocator
        hits = without_null_blocks(table)
        num_idle = sum(allocator.state(block) is BlockState.CACHED for block in hits)
        if len(entries) > allocator.num_available - num_idle:
            return False
        if not allocator.can_receive(len(entries)):
            return False
        allocator.share(hits)
        demotion.fresh_blocks = allocator.allocate(len(entries))
        allocator.receive(demotion.fresh_blocks)
        groups.fill_entries(table, entries, demotion.fresh_blocks)
        demotion.table = table
        self._active[pull_id] = self._waiting.pop(pull_id)
        # If the region already has all tokens, the pull only completes the lease.
        self._coordinator.pull(
            pull_id,
            offer.remote,
            start,
            demotion.stop,
            table,
            min_resume_tokens=min_resume_tokens_of(demotion.stop, prefix.block_size),
        )
        return True

    def _ranges(self, demotion: _Demotion) -> list[range]:
        """Returns, for each layer group, the tokens that a demotion pulls."""
        prefix = self._prefix
        return prefix.groups.token_ranges(
            demotion.start,
            demotion.stop,
            min_resume_tokens_of(demotion.stop, prefix.block_size),
        )

    def on_event(self, event: Event) -> None:
        match event:
            case PullDone():
                self._on_done(event)
            case PullFailed():
                self._on_failed(event)
            case PullStuck():
                self._allocator.quarantine(self._undrained.get(event.pull_id, []))
            case PullDrained():
                self._allocator.drained(self._undrained.pop(event.pull_id, []))

    def _on_done(self, event: PullDone) -> None:
        demotion = self._active.pop(event.pull_id)
        self.outcomes["stored"] += 1
        self.num_bytes += event.nbytes
        self._allocator.received(demotion.fresh_blocks)
        offer = demotion.offer
        self._prefix.publish(
            offer.token_ids,
            self._publishable(demotion),
            cursor=PrefixCursor(),
            salt=offer.cache_salt,
        )
        for retention in offer.retention:
            self._prefix.pin(
                offer.token_ids,
                retention.num_tokens,
                retention.seconds,
                owner=offer.owner,
                salt=offer.cache_salt,
            )
        self._allocator.release(without_null_blocks(demotion.table))

    def _publishable(self, demotion: _Demotion) -> list[int]:
        """Returns the table of a demotion without its partly filled blocks.

        The pull fills only a part of the block in which a group's window begins.
        """
        groups = self._prefix.groups
        block_size = self._prefix.block_size
        table = list(demotion.table)
        for group, tokens in enumerate(self._ranges(demotion)):
            index = tokens.start // block_size * groups.count + group
            if tokens.start % block_size and index < len(table):
                table[index] = NULL_BLOCK
        return table

    def _on_failed(self, event: PullFailed) -> None:
        pull_id = event.pull_id
        is_waiting = self._waiting.pop(pull_id, None) is not None
        demotion = self._active.pop(pull_id, None)
        if not is_waiting and demotion is None:
            return  # the offer was dropped earlier
        logger.info("a demotion failed: %s", event.error.message)
        self.outcomes["failed"] += 1
        if demotion is None:
            return
        if event.drained:
            self._allocator.drained(demotion.fresh_blocks)
        else:
            self._allocator.quarantine(demotion.fresh_blocks)
            self._undrained[pull_id] = demotion.fresh_blocks
        self._allocator.release(demotion.shared_blocks)

    def cancel_waiting(self) -> None:
        """Drops all waiting offers, because the region closes."""
        for pull_id in list(self._waiting):
            self._drop(pull_id)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a block is held for no demotion, or if blocks of a
        demotion are in the wrong state."""
        shared_blocks: set[int] = set()
        num_exposed = sum(map(len, self._undrained.values()))
        for demotion in self._active.values():
            shared_blocks.update(demotion.shared_blocks)
            num_exposed += len(demotion.fresh_blocks)
        counts = self._allocator.counts()
        counted = counts[BlockState.RECEIVING] + counts[BlockState.QUARANTINED]
        if (counts[BlockState.USED], counted) != (len(shared_blocks), num_exposed):
            raise IntegrityError(
                f"demotions share {len(shared_blocks)} blocks and expose {num_exposed} "
                f"to READs, but the allocator counts {counts} (invariant I1)"
            )


def _brings_next_block(
    active: _Demotion, waiting: _Demotion, start: int, block_size: int
) -> bool:
    """Whether an active pull brings the first block that a waiting demotion lacks.

    Args:
        start: number of tokens of the waiting demotion that the region already has.
    """
    stop = start + block_size
    return (
        active.start <= start < active.stop
        and waiting.stop >= stop
        and active.offer.cache_salt == waiting.offer.cache_salt
        and active.offer.token_ids[:stop] == waiting.offer.token_ids[:stop]
    )

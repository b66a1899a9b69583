"""Offers the KV of this engine to the KV store of its host, which pulls a copy.

The copy survives the eviction of the blocks from this engine's pool, and the end of
this engine. Blocks are offered soon after they were published, so that little is lost
if this engine is killed. An offer leases the blocks until the store has read them. No
request waits for the store:

- A sequence has at most one offer in flight. While this offer is in flight, new blocks
  of the sequence are only counted in its entry. They are queued when the offer ends.
- At most MAX_OFFERS offers are in flight, and together they lease at most
  MAX_LEASED_SHARE of the pool. A longer part of a sequence is offered piece by piece.
- If the queue is full, its oldest entry is dropped.
- While requests wait for blocks, only blocks that running sequences use are offered,
  because the waiting requests cannot get these blocks anyway. An offer then ends after
  MAX_HOLD_S if any of its blocks is no longer used by a sequence.

The block table of an offer comes from the prefix index, like the table of a lookup. So
it contains only blocks with bytes that are known to be good.
"""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.core.connector import CoreServices
from engine.core.sequence import Sequence
from engine.kv.references import ReferenceMaker, min_resume_tokens_of, num_table_tokens
from engine.kv.stalls import is_short_of_blocks
from engine.kv.store_link import StoreRegion
from kvcache.blocks import NULL_BLOCK, BlockState
from kvcache.groups import without_null_blocks
from kvcache.lease import EndedLease, LeaseOutcome
from kvcache.lease_server import LeaseServer
from kvcache.prefix import PrefixCursor, PrefixIndex
from kvcache.transfer.pulls.coordinator import PullCoordinator
from protocol.handshake import Demote
from protocol.messages import AddRequest
from protocol.metrics import stat_key

MAX_OFFERS = 4
MAX_LEASED_SHARE = 0.125
MAX_HOLD_S = 0.25
MAX_QUEUED = 1024  # sequences with blocks to offer, running or ended
DEMOTION_OUTCOMES = ("stored", "dropped", "lost")
# A running sequence is offered again only when it has grown by this share, because each
# offer contains the ids of all its tokens. When it has ended, any growth is offered.
_MIN_GROWTH = 1 / 64
# Duration of the lease of an offer. When the offer has arrived, the store renews the
# lease.
_LEASE_S = 5.0


@dataclass(eq=False)
class _Entry:
    """A sequence with published blocks.

    Attributes:
        token_ids: the tokens of the sequence; a running sequence appends to the list.
        num_published: number of tokens in published blocks.
        num_offered: number of tokens in the last offer.
        num_stored: number of tokens that the store has, as far as is known.
        has_ended: the sequence will not grow.
    """

    token_ids: list[int]
    request: AddRequest
    num_published: int = 0
    num_offered: int = 0
    num_stored: int = 0
    has_ended: bool = False
    is_in_flight: bool = False
    cursor: PrefixCursor = field(default_factory=PrefixCursor)


@dataclass(frozen=True)
class _Offer:
    """An offer with a lease that has not ended."""

    key: tuple[str, int]
    entry: _Entry
    num_tokens: int
    blocks: list[int]
    started_s: float


class Demoter:
    """The offers of one engine. All methods run on the core's thread.

    Args:
        get_region: returns the region of the store; None while there is none.
    """

    def __init__(
        self,
        get_region: Callable[[], StoreRegion | None],
        coordinator: PullCoordinator,
        leases: LeaseServer,
    ) -> None:
        self._get_region = get_region
        self._coordinator = coordinator
        self._leases = leases
        self._region: StoreRegion | None = None
        # By request id and choice.
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._queue: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._offers: dict[str, _Offer] = {}  # by lease id
        self._outcomes = Counter(dict.fromkeys(DEMOTION_OUTCOMES, 0))

    def bind(self, core: CoreServices, references: ReferenceMaker) -> None:
        """Connects this object to the core. Called once, before all other methods."""
        self._core = core
        self._references = references

    # -- sequences

    def on_published(self, sequence: Sequence) -> None:
        """Queues a sequence if it has enough published blocks that are not offered."""
        if self._region is None or _is_for_scoring(sequence):
            return
        block_size = self._core.scheduler.limits.block_size
        num_published = sequence.num_computed // block_size * block_size
        key = (sequence.request_id, sequence.choice)
        entry = self._entries.get(key)
        if entry is None:
            if not num_published:
                return
            entry = _Entry(sequence.token_ids, sequence.request)
            self._entries[key] = entry
        entry.num_published = max(entry.num_published, num_published)
        if not entry.is_in_flight and self._has_grown(entry):
            self._enqueue(key)

    def on_end(self, sequence: Sequence) -> None:
        """Queues the choices of an ended request that have blocks not yet offered."""
        for choice in sequence.choices:
            key = (choice.request_id, choice.choice)
            entry = self._entries.get(key)
            if entry is None:
                continue
            entry.has_ended = True
            if not entry.is_in_flight and self._has_grown(entry):
                self._enqueue(key)
            self._forget_if_done(key)

    def on_promoted(self, sequence: Sequence, num_tokens: int) -> None:
        """Records that the store has the first `num_tokens` tokens of a sequence."""
        if self._region is None:
            return
        key = (sequence.request_id, sequence.choice)
        entry = _Entry(sequence.token_ids, sequence.request)
        entry.num_stored = self._whole_blocks(num_tokens, self._region)
        entry.num_offered = entry.num_stored
        self._entries[key] = entry

    def _enqueue(self, key: tuple[str, int]) -> None:
        self._queue.setdefault(key)
        if len(self._queue) > MAX_QUEUED:
            oldest, _ = self._queue.popitem(last=False)
            self._outcomes["dropped"] += 1
            self._forget_if_done(oldest)

    def _has_grown(self, entry: _Entry) -> bool:
        """Whether a sequence has enough new blocks for an offer."""
        growth = entry.num_published - entry.num_offered
        if entry.has_ended:
            return growth > 0
        block_size = self._core.scheduler.limits.block_size
        return growth >= max(block_size, entry.num_published * _MIN_GROWTH)

    def _forget_if_done(self, key: tuple[str, int]) -> None:
        entry = self._entries[key]
        if entry.has_ended and not entry.is_in_flight and key not in self._queue:
            del self._entries[key]

    # -- offers

    def poll(self) -> None:
        """Sends the offers that the limits allow now."""
        region = self._get_region()
        if region != self._region:
            # A new region has none of the blocks that were offered to the old region.
            self._region = region
            self._queue.clear()
            self._entries.clear()
        if not (self._queue or self._offers):
            return
        is_short = is_short_of_blocks(self._core.scheduler)
        if is_short:
            self._end_long_offers()
        if region is None:
            return
        for key in list(self._queue):
            entry = self._entries[key]
            if entry.is_in_flight or (is_short and entry.has_ended):
                continue
            num_leased = sum(len(offer.blocks) for offer in self._offers.values())
            num_left = self._max_leased(region) - num_leased
            is_full = num_left < self._min_piece_blocks(region)
            if is_full or len(self._offers) >= MAX_OFFERS:
                return
            self._offer(key, region, num_left, is_short=is_short)

    def _end_long_offers(self) -> None:
        """Ends the leases that have kept blocks from waiting requests for too long. The
        store then drops the blocks that it has read under such a lease."""
        state_of = self._core.scheduler.allocator.state
        latest_start_s = time.monotonic() - MAX_HOLD_S
        for lease_id, offer in self._offers.items():
            if offer.started_s <= latest_start_s and any(
                state_of(block) is BlockState.LEASED for block in offer.blocks
            ):
                self._leases.abort(lease_id)

    def _step_tokens(self, region: StoreRegion) -> int:
        """The smallest number of tokens that fills complete blocks both of this engine
        and of the store."""
        block_size = self._core.scheduler.limits.block_size
        return math.lcm(block_size, region.block_size)

    def _min_piece_blocks(self, region: StoreRegion) -> int:
        """The number of blocks of the shortest piece that is offered."""
        limits = self._core.scheduler.limits
        num_blocks = self._step_tokens(region) // limits.block_size
        return num_blocks * limits.groups.count

    def _max_leased(self, region: StoreRegion) -> int:
        """The largest number of blocks that offers may lease at the same time: a share
        of the pool, but at least one piece."""
        capacity = self._core.scheduler.allocator.capacity
        share = math.floor(capacity * MAX_LEASED_SHARE)
        return max(self._min_piece_blocks(region), share)

    def _offer(
        self,
        key: tuple[str, int],
        region: StoreRegion,
        num_left: int,
        *,
        is_short: bool,
    ) -> None:
        """Offers the blocks that the store lacks, if these blocks may be leased now.

        Args:
            num_left: number of blocks that may be leased.
            is_short: whether requests wait for blocks. If so, blocks that no sequence
                uses must not be leased.
        """
        entry = self._entries[key]
        prefix = self._core.scheduler.prefix
        assert prefix is not None  # settings require the prefix cache
        allocator = self._core.scheduler.allocator
        table = self._table_to_offer(prefix, entry, region, num_left)
        blocks = without_null_blocks(table)
        num_tokens = num_table_tokens(prefix, table)
        has_idle = any(allocator.state(block) is BlockState.CACHED for block in blocks)
        if is_short and has_idle:
            return
        del self._queue[key]
        if not blocks:
            # The blocks were evicted from the pool, or fill no block of the store.
            entry.num_offered = entry.num_published
            self._forget_if_done(key)
            return
        allocator.lease(blocks)
        lease_id = self._leases.grant(f"demotion-{id(entry):x}", table, _LEASE_S)
        entry.num_offered = num_tokens
        entry.is_in_flight = True
        self._offers[lease_id] = _Offer(
            key, entry, num_tokens, blocks, started_s=time.monotonic()
        )
        remote = self._references.make(
            f"demotion-{lease_id}",
            table,
            lease_id,
            num_tokens,
            cached_tokens=num_tokens,
            first_tokens=[],
        )
        offer = Demote(
            nonce=f"demote-{lease_id}",
            incarnation=region.incarnation,
            remote=replace(
                remote, lease_s=_LEASE_S, host=remote.host or region.local_host
            ),
            token_ids=entry.token_ids[:num_tokens],
            first_token=entry.num_stored,
            cache_salt=entry.request.cache_salt,
            retention=entry.request.retention,
            owner=entry.request.share,
        )
        self._coordinator.demote(region.address, offer)

    def _table_to_offer(
        self, prefix: PrefixIndex, entry: _Entry, region: StoreRegion, num_left: int
    ) -> list[int]:
        """The table of the longest published prefix of a sequence. Null blocks replace
        the blocks that the store has. At most `num_left` other blocks remain."""
        table = self._table_of(prefix, entry, region, entry.num_published)
        if len(without_null_blocks(table)) <= num_left:
            return table
        num_tokens = num_left // prefix.groups.count * prefix.block_size
        return self._table_of(prefix, entry, region, entry.num_stored + num_tokens)

    def _table_of(
        self, prefix: PrefixIndex, entry: _Entry, region: StoreRegion, max_tokens: int
    ) -> list[int]:
        """Like `_table_to_offer`, but with a limit on tokens instead of blocks."""
        has_windows = prefix.groups.drops_blocks
        # With windows, the table must end with a full block of the store. If the store
        # cut off the last tokens, blocks of the windows before the cut could be absent.
        step = self._step_tokens(region) if has_windows else prefix.block_size
        num_tokens = max_tokens
        table: list[int] = []
        while num_tokens := num_tokens // step * step:
            table = prefix.match(
                entry.token_ids,
                max_tokens=num_tokens,
                min_resume_tokens=min_resume_tokens_of(num_tokens, region.block_size),
                cursor=entry.cursor,
                salt=entry.request.cache_salt,
            )
            num_matched = num_table_tokens(prefix, table)
            if num_matched == num_tokens or not has_windows:
                break
            num_tokens = num_matched
        if not num_tokens:
            return []
        num_stored = entry.num_stored // prefix.block_size * prefix.groups.count
        table[:num_stored] = [NULL_BLOCK] * min(num_stored, len(table))
        return table

    def on_lease_ended(self, ended: EndedLease) -> None:
        """Handles the end of an offer's lease. Ignores all other leases."""
        offer = self._offers.pop(ended.lease_id, None)
        if offer is None:
            return
        entry = offer.entry
        entry.is_in_flight = False
        if ended.outcome is LeaseOutcome.COMPLETED and self._region is not None:
            self._outcomes["stored"] += 1
            num_stored = self._whole_blocks(offer.num_tokens, self._region)
            if num_stored <= entry.num_stored:
                # The offer filled no new block of the store. Another offer of the same
                # tokens would not either.
                entry.num_offered = entry.num_published
            entry.num_stored = num_stored
        else:
            is_lost = ended.outcome is LeaseOutcome.EXPIRED
            self._outcomes["lost" if is_lost else "dropped"] += 1
            # If the offer left out tokens that the store had (`num_stored`), the store
            # may have evicted them, so the whole sequence is offered once more.
            entry.num_offered = 0 if entry.num_stored else entry.num_published
            entry.num_stored = 0
        if self._entries.get(offer.key) is entry:
            if self._has_grown(entry):
                self._enqueue(offer.key)
            self._forget_if_done(offer.key)

    def _whole_blocks(self, num_tokens: int, region: StoreRegion) -> int:
        """Rounds a number of tokens down to full blocks of the store, and then down to
        full blocks of this engine. The store has no partial blocks, and the next offer
        begins with a full block of this engine."""
        block_size = self._core.scheduler.limits.block_size
        num_stored = num_tokens // region.block_size * region.block_size
        return num_stored // block_size * block_size

    def stats(self) -> dict[str, float]:
        """The metric values by series (protocol.metrics)."""
        values = {
            stat_key("baton_host_kv_demotions", outcome=outcome): float(count)
            for outcome, count in self._outcomes.items()
        }
        queued = self._queue.keys()
        in_flight = {offer.key for offer in self._offers.values()}
        values["baton_host_kv_demotions_pending"] = float(len(queued | in_flight))
        return values


def _is_for_scoring(sequence: Sequence) -> bool:
    """Whether the client requested logprobs of the prompt. Such a prompt is rarely
    repeated. A request with `max_tokens` 0 and without logprobs does not count: its
    purpose is to cache the KV of the prompt."""
    return sequence.request.num_prompt_logprobs is not None

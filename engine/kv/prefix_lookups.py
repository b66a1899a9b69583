"""Looks up the beginning of a prompt where its KV may be: on the engine that the
request's hint names, and in the KV store of this host.

A lookup is sent only if a pull is likely to take less time than computing the tokens. A
lookup in the store is given up when a pull can no longer save time. The engine that the
hint names is queried first, because the proxy expects it to have the KV. If this engine
has no KV, or does not answer in time, the store is queried next.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.connector import CoreServices
from engine.core.sequence import Sequence
from engine.kv.borrower_counters import BorrowerCounters
from engine.kv.rates import Rates
from engine.kv.store_link import StoreRegion
from kvcache.groups import without_null_blocks
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.lease_client import new_id
from kvcache.transfer.pulls.messages import LookedUp, key_of
from protocol.handshake import Lookup
from protocol.messages import KVHint, RemotePrefill

logger = logging.getLogger("baton.kv")

# If the store does not answer a lookup within MIN_STALL_S, prompts are not looked up in
# the store for STORE_PAUSE_S.
MIN_STALL_S = 0.25
STORE_PAUSE_S = 5.0


@dataclass(eq=False)
class _OpenLookup:
    """A sequence with a lookup in progress.

    Attributes:
        target: the engine or store that is queried now.
        next_targets: engines or stores to query if nothing is found on `target`.
        num_cached: number of first tokens that need no lookup.
        max_tokens: number of tokens to look up, including these first tokens.
    """

    sequence: Sequence
    target: KVHint
    next_targets: list[KVHint]
    num_cached: int
    max_tokens: int

    @property
    def is_in_store(self) -> bool:
        """Whether `target` is the KV store of this host."""
        return self.target is not self.sequence.request.hint


@dataclass(frozen=True)
class PrefixFound:
    """The result of a lookup that has ended.

    Attributes:
        sequence: None if the request was aborted during the lookup.
        remote: the reference; None if nothing was found.
        is_in_store: the KV is in the store of this host.
    """

    sequence: Sequence | None
    remote: RemotePrefill | None
    is_in_store: bool = False


class PrefixLookups:
    """The lookups of one engine, at most one for each request.

    Args:
        rates: decides from measurements whether to pull a prefix.
        engine_id: the id of this engine.
        get_region: returns the region of this host's KV store; None while no region
            can be read.
    """

    def __init__(
        self,
        coordinator: PullCoordinator,
        rates: Rates,
        counters: BorrowerCounters,
        engine_id: str,
        get_region: Callable[[], StoreRegion | None],
    ) -> None:
        self._coordinator = coordinator
        self._rates = rates
        self._counters = counters
        self._engine_id = engine_id
        self._get_region = get_region
        self._store_paused_until_s = 0.0
        self._open: dict[str, _OpenLookup] = {}  # by request id

    def bind(self, core: CoreServices) -> None:
        self._core = core

    def begin(self, sequence: Sequence) -> bool:
        """Sends a lookup, if pulling the prefix is likely to take less time than
        computing it. Returns whether a lookup was sent.

        For a request that resumes on this engine, the outputs so far are looked up
        together with the prompt. If such a request has a reference to KV, only the
        store is queried, and it must have KV of more tokens than the reference.
        """
        request = sequence.request
        pull = sequence.pull
        if sequence.is_scoring or (pull is not None and not request.resumed_choices):
            return False
        max_tokens = self._max_tokens(sequence)
        table = self._cached_table(sequence, max_tokens)
        num_cached = self._core.scheduler.tables.num_tokens(table)
        targets = []
        if pull is not None:
            num_cached = max(num_cached, pull.num_to_pull(len(sequence.token_ids)))
        elif request.hint is not None and request.hint.engine_id != self._engine_id:
            if self._is_worth_a_pull(request.hint, sequence, num_cached, max_tokens):
                targets.append(request.hint)
            else:
                self._counters.count_lookup("computed")
        targets += self._store_if_worth_a_pull(sequence, num_cached, max_tokens)
        return self._begin(sequence, table, targets, num_cached, max_tokens)

    def begin_in_store(self, sequence: Sequence) -> bool:
        """Sends a lookup to the store only, because the pull from another engine was
        given up. Returns whether a lookup was sent."""
        if sequence.is_scoring:
            return False
        max_tokens = self._max_tokens(sequence)
        table = self._cached_table(sequence, max_tokens)
        num_cached = self._core.scheduler.tables.num_tokens(table)
        targets = self._store_if_worth_a_pull(sequence, num_cached, max_tokens)
        return self._begin(sequence, table, targets, num_cached, max_tokens)

    def _store_if_worth_a_pull(
        self, sequence: Sequence, num_cached: int, max_tokens: int
    ) -> list[KVHint]:
        region = self._get_region()
        if region is None or self._is_store_paused():
            return []
        store = region.hint()
        if not self._is_worth_a_pull(store, sequence, num_cached, max_tokens):
            return []
        return [store]

    def _is_store_paused(self) -> bool:
        return time.monotonic() < self._store_paused_until_s

    def _begin(
        self,
        sequence: Sequence,
        table: list[int],
        targets: list[KVHint],
        num_cached: int,
        max_tokens: int,
    ) -> bool:
        if not targets:
            return False
        self._mark_recently_used(table)
        lookup = _OpenLookup(sequence, targets[0], targets[1:], num_cached, max_tokens)
        self._open[sequence.request_id] = lookup
        self._send(lookup)
        return True

    def _max_tokens(self, sequence: Sequence) -> int:
        """The largest number of tokens to pull KV for. The last token must be computed,
        because the next token is drawn from its logits."""
        num_tokens = len(sequence.token_ids)
        if sequence.choices.children:
            num_tokens = sequence.num_prompt_tokens
        return self._core.scheduler.tables.resume_limit(sequence, num_tokens - 1)

    def _cached_table(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """The table of the tokens that need no lookup, because this engine has cached
        them."""
        prefix = self._core.scheduler.prefix
        if prefix is None:
            return []
        return prefix.match(
            sequence.token_ids,
            max_tokens=max_tokens,
            salt=sequence.request.cache_salt,
        )

    def _mark_recently_used(self, table: list[int]) -> None:
        """Marks cached blocks as the most recently used ones, because other requests
        may allocate blocks during the lookup. The pull brings only the tokens after
        these blocks.
        """
        blocks = without_null_blocks(table)
        allocator = self._core.scheduler.allocator
        allocator.share(blocks)
        allocator.release(blocks)

    def _is_worth_a_pull(
        self, target: KVHint, sequence: Sequence, num_cached: int, max_tokens: int
    ) -> bool:
        min_tokens = self._rates.min_pull_tokens(key_of(target))
        should_pull = min(target.num_tokens, max_tokens) - num_cached >= min_tokens
        logger.debug(
            "request %s: %d prompt tokens cached here, up to %d on %s, "
            "pull threshold %g tokens: %s",
            sequence.request_id,
            num_cached,
            target.num_tokens,
            target.engine_id,
            min_tokens,
            "looking up" if should_pull else "computing",
        )
        return should_pull

    def _has_next_target(self, lookup: _OpenLookup) -> bool:
        """Sets the target of a lookup to its next target. Skips a store that was paused
        after the lookup began, and targets from which a pull would not save time any
        more, according to new measurements. Returns False if no target is left."""
        while lookup.next_targets:
            lookup.target = lookup.next_targets.pop(0)
            if lookup.is_in_store and self._is_store_paused():
                continue
            if self._is_worth_a_pull(
                lookup.target, lookup.sequence, lookup.num_cached, lookup.max_tokens
            ):
                return True
        return False

    def _send(self, lookup: _OpenLookup) -> None:
        sequence = lookup.sequence
        target = lookup.target
        num_missing = lookup.max_tokens - lookup.num_cached
        # The estimates for the link may have changed since `_is_worth_a_pull`, so that
        # `min_pull_tokens` may now be infinite.
        min_pull_tokens = self._rates.min_pull_tokens(key_of(target))
        min_tokens = math.ceil(min(min_pull_tokens, num_missing))
        request = Lookup(
            nonce=f"lookup-{new_id()}",
            incarnation=target.incarnation,
            token_ids=sequence.token_ids[: lookup.max_tokens],
            min_tokens=lookup.num_cached + min_tokens,
            cache_salt=sequence.request.cache_salt,
        )
        timeout_s = math.inf  # the coordinator limits the time, first contact included
        if target is not sequence.request.hint:  # the store, already connected
            num_tokens = min(target.num_tokens, lookup.max_tokens) - lookup.num_cached
            timeout_s = self._rates.gain_s(key_of(target), num_tokens)
        self._coordinator.look_up(sequence.request_id, target, request, timeout_s)

    def forget(self, sequence: Sequence) -> bool:
        """Gives up the lookup of an aborted request. Returns whether there was one."""
        return self._open.pop(sequence.request_id, None) is not None

    def on_looked_up(self, event: LookedUp) -> PrefixFound | None:
        """Handles the answer to a lookup. Returns the result of the lookup, or None if
        another target is queried now."""
        lookup = self._open.get(event.pull_id)
        if lookup is None:
            return PrefixFound(None, event.remote)
        is_in_store = lookup.is_in_store
        if is_in_store:
            self._counters.count_store_lookup(event.outcome)
            if event.outcome == "late" and event.seconds >= MIN_STALL_S:
                self._store_paused_until_s = time.monotonic() + STORE_PAUSE_S
        else:
            self._counters.count_lookup(event.outcome)
        if event.remote is not None or (is_in_store and event.outcome == "late"):
            self._rates.record_lookup(key_of(lookup.target), event.seconds)
        if event.remote is None and self._has_next_target(lookup):
            self._send(lookup)
            return None
        del self._open[event.pull_id]
        return PrefixFound(lookup.sequence, event.remote, is_in_store)

"""A pull coordinator that behaves randomly, without threads or sockets.

FakeCoordinator does everything that PullCoordinator may do: it connects, reads in
pieces, fails with and without active READs, loses leases, and hangs. A lease determines
the tokens that a pull reads. While a pull may write, its blocks must be RECEIVING or
QUARANTINED.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache.blocks import BlockState
from kvcache.transfer.pulls.messages import (
    Event,
    PeerDecided,
    PullDone,
    PullDrained,
    PullFailed,
    PullStuck,
    key_of,
)
from protocol.errors import (
    BatonError,
    LeaseGone,
    PeerUnreachable,
    PullTimeout,
    TransferFailed,
)
from protocol.messages import RemotePrefill

GARBAGE = 10_000  # a token id outside the vocabulary, for KV that P has overwritten


@dataclass
class _Pull:
    """The state of one pull.

    Attributes:
        blocks: D's blocks, into which the pull writes.
        tokens: positions of the tokens to read.
        unread: positions that have not been read yet.
        is_reported: whether the engine got a PullFailed or PullStuck while READs were
            active.
    """

    remote: RemotePrefill
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    is_begun: bool = False
    is_draining: bool = False
    is_cancelled: bool = False
    is_reported: bool = False
    error: BatonError | None = None


class FakeCoordinator:
    """Stands in for PullCoordinator.

    Args:
        content: maps a lease ID to the tokens in the lease's blocks.
        write: writes a token into a block of D: (block, offset, token).
        state_of: returns the state of a block of D.
    """

    def __init__(
        self,
        rng: random.Random,
        block_size: int,
        content: dict[str, list[int]],
        write: Callable[[int, int, int], None],
        state_of: Callable[[int], BlockState],
    ) -> None:
        self._rng = rng
        self._block_size = block_size
        self._content = content
        self._write_token = write
        self._state_of = state_of
        self._events: list[Event] = []
        self._pulls: dict[str, _Pull] = {}
        # Maps the id of each ended pull to whether it ended with PullDrained.
        self._ended: dict[str, bool] = {}
        self._ready: set[str] = set()
        self._awaited: set[tuple[str, str]] = set()
        self._failure_rate = rng.choice([0.0, 0.1, 0.5])
        self._hang_rate = rng.choice([0.0, 0.2, 0.7])
        self._speed = rng.choice([0.05, 0.2, 0.5, 1.0])
        self._lease_loss_rate = rng.choice([0.0, 0.0, 0.02])
        self.counts: Counter[str] = Counter()

    @property
    def is_idle(self) -> bool:
        return not (self._events or self._pulls or self._awaited)

    # -- methods that the engine's Borrower calls

    def shares_draft_kv(self, remote: RemotePrefill) -> bool:
        return False

    def can_pull_from(self, remote: RemotePrefill) -> bool:
        return remote.engine_id in self._ready

    def connect(self, remote: RemotePrefill) -> None:
        if self.can_pull_from(remote):
            self._events.append(PeerDecided(key_of(remote)))
        else:
            self._awaited.add(key_of(remote))

    def hold(self, pull_id: str, remote: RemotePrefill) -> None:
        if pull_id not in self._pulls and pull_id not in self._ended:
            self._pulls[pull_id] = _Pull(remote)

    def pull(
        self,
        pull_id: str,
        remote: RemotePrefill,
        token_start: int,
        token_stop: int,
        local_block_ids: Sequence[int],
        **_: Any,
    ) -> None:
        self.hold(pull_id, remote)
        pull = self._pulls.get(pull_id)
        if pull is None:
            return  # the pull lost its lease; the engine has yet to receive that event
        assert not pull.is_begun, "the pull was ordered twice"
        pull.is_begun = True
        pull.blocks = list(local_block_ids)
        pull.tokens = list(range(token_start, token_stop))
        pull.unread = list(pull.tokens)
        if not pull.tokens:
            self._end(pull_id, PullDone(pull_id, 0, 0, 0.0, "none"))

    def cancel(self, pull_id: str, *, keep_lease: bool = False) -> None:
        pull = self._pulls.get(pull_id)
        if pull is None:
            if not self._ended.get(pull_id, False):
                self._ended[pull_id] = True
                self._events.append(PullDrained(pull_id))
        elif not pull.is_cancelled:
            pull.is_cancelled = True
            if not pull.is_begun:
                self._end(pull_id, PullDrained(pull_id))
            elif not pull.is_draining:
                pull.is_draining = True
            elif pull.is_reported:
                self._events.append(PullStuck(pull_id))

    def drain(self) -> list[Event]:
        """Return some of the waiting events. The rest are delivered by later calls."""
        count = len(self._events)
        if self._rng.random() < 0.3:
            count = self._rng.randint(0, count)
        events = self._events[:count]
        del self._events[:count]
        return events

    def handshake_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass

    # -- the simulation

    def advance(self, *, to_end: bool = False) -> None:
        """Advance some pulls by a random amount.

        With `to_end`, advance all pulls as far as possible.
        """
        for key in sorted(self._awaited):
            if to_end or self._rng.random() < 0.3:
                self._decide(key)
        for pull_id, pull in list(self._pulls.items()):
            if not to_end and self._rng.random() > self._speed:
                continue
            if not pull.is_begun:
                self._advance_hold(pull_id)
            elif pull.is_draining:
                self._advance_drain(pull_id, pull, to_end)
            else:
                self._advance_read(pull_id, pull, to_end)

    def _decide(self, key: tuple[str, str]) -> None:
        self._awaited.discard(key)
        if self._rng.random() < 0.8:
            self._ready.add(key[0])
            self._events.append(PeerDecided(key))
        else:
            self._events.append(
                PeerDecided(key, PeerUnreachable("the peer does not answer"))
            )

    def _advance_hold(self, pull_id: str) -> None:
        if self._rng.random() < self._lease_loss_rate:
            self._end(
                pull_id, PullFailed(pull_id, LeaseGone("the lease expired"), True)
            )

    def _advance_read(self, pull_id: str, pull: _Pull, to_end: bool) -> None:
        if self._rng.random() < self._failure_rate:
            self._fail(pull_id, pull)
            return
        count = len(pull.unread) if to_end else self._rng.randint(0, len(pull.unread))
        for position in pull.unread[:count]:
            self._write(pull, position, self._content[pull.remote.lease_id][position])
        del pull.unread[:count]
        if pull.unread:
            return
        if self._rng.random() < 0.1:
            self._end(
                pull_id,
                PullFailed(pull_id, LeaseGone("the fence reports a lost lease"), True),
            )
        else:
            self._end(pull_id, PullDone(pull_id, 1, 1, 0.0, "direct"))

    def _fail(self, pull_id: str, pull: _Pull) -> None:
        kinds = [PullTimeout, TransferFailed, PeerUnreachable, LeaseGone]
        error: BatonError = self._rng.choice(kinds)("it failed")
        if self._rng.random() < 0.5:
            for position in self._rng.sample(
                pull.unread, self._rng.randint(0, len(pull.unread))
            ):
                self._write(pull, position, GARBAGE)
            self._end(pull_id, PullFailed(pull_id, error, True))
            return
        pull.is_draining = True
        pull.error = error
        if self._rng.random() < 0.5:
            pull.is_reported = True
            self._events.append(PullFailed(pull_id, error, False))

    def _advance_drain(self, pull_id: str, pull: _Pull, to_end: bool) -> None:
        """Advance the READs of a cancelled or failed pull.

        These READs write what is now in P's blocks, which may be GARBAGE.
        """
        for position in pull.tokens:
            if self._rng.random() < 0.3:
                self._write(pull, position, self._rng.choice([GARBAGE, 3]))
        if not to_end and self._rng.random() < self._hang_rate:
            if not pull.is_reported:
                pull.is_reported = True
                if pull.is_cancelled or pull.error is None:
                    self._events.append(PullStuck(pull_id))
                else:
                    self._events.append(PullFailed(pull_id, pull.error, False))
        elif pull.is_cancelled or pull.is_reported or pull.error is None:
            self._end(pull_id, PullDrained(pull_id))
        else:
            self._end(pull_id, PullFailed(pull_id, pull.error, True))

    def _write(self, pull: _Pull, position: int, token: int) -> None:
        block = pull.blocks[position // self._block_size]
        state = self._state_of(block)
        assert state in (BlockState.RECEIVING, BlockState.QUARANTINED), (
            f"a READ writes to a block that is {state.name}"
        )
        self._write_token(block, position % self._block_size, token)

    def _end(self, pull_id: str, event: Event) -> None:
        del self._pulls[pull_id]
        self._ended[pull_id] = isinstance(event, PullDrained)
        self._events.append(event)
        self.counts[type(event).__name__] += 1

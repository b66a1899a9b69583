"""A pull coordinator without threads or sockets, which does what PullCoordinator may
do, at random: shakes hands, reads in pieces, fails with READs under way or without,
loses leases, hangs.

What it reads is known by lease. While it may write, the blocks must be RECEIVING or
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

GARBAGE = 10_000  # no token


@dataclass
class _Pull:
    remote: RemotePrefill
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # positions to be read
    left: list[int] = field(default_factory=list)  # of those, what is still to be read
    is_begun: bool = False
    is_draining: bool = False
    is_cancelled: bool = False
    is_told: bool = False  # that it failed, or is stuck, while READs are active
    error: BatonError | None = None


class FakeCoordinator:
    """Stands in for PullCoordinator.

    Args:
        content: the tokens of each lease.
        write: puts a token into a block of D: (block, place in it, token).
        state_of: of a block of D.
    """

    def __init__(
        self,
        rng: random.Random,
        block_size: int,
        content: dict[str, list[int]],
        write: Callable[[int, int, int], None],
        state_of: Callable[[int], BlockState],
    ) -> None:
        self._rng, self._block_size, self._content = rng, block_size, content
        self._write_token, self._state_of = write, state_of
        self._events: list[Event] = []
        self._pulls: dict[str, _Pull] = {}
        self._ended: dict[str, bool] = {}  # -> PullDrained was told
        self._ready: set[str] = set()
        self._awaited: set[tuple[str, str]] = set()
        self._failing = rng.choice([0.0, 0.1, 0.5])
        self._hanging = rng.choice([0.0, 0.2, 0.7])
        self._speed = rng.choice([0.05, 0.2, 0.5, 1.0])
        self._losing = rng.choice([0.0, 0.0, 0.02])
        self.counts: Counter[str] = Counter()

    @property
    def is_idle(self) -> bool:
        return not (self._events or self._pulls or self._awaited)

    # -- what the role calls

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
            return  # its lease is gone: that is on its way to the engine
        assert not pull.is_begun, "a pull is ordered once"
        pull.is_begun, pull.blocks = True, list(local_block_ids)
        pull.tokens = list(range(token_start, token_stop))
        pull.left = list(pull.tokens)
        if not pull.tokens:
            self._end(pull_id, PullDone(pull_id, 0, 0, 0.0, "none"))

    def cancel(self, pull_id: str, *, lend: bool = False) -> None:
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
            elif pull.is_told:
                self._events.append(PullStuck(pull_id))

    def drain(self) -> list[Event]:
        """Some of the events; the others are late."""
        count = len(self._events)
        if self._rng.random() < 0.3:
            count = self._rng.randint(0, count)
        events, self._events = self._events[:count], self._events[count:]
        return events

    def handshakes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass

    # -- what happens meanwhile

    def go_on(self, *, to_end: bool = False) -> None:
        """Something happens to some pulls; with `to_end` as much as can to all of
        them.
        """
        for key in sorted(self._awaited):
            if to_end or self._rng.random() < 0.3:
                self._decide(key)
        for pull_id, pull in list(self._pulls.items()):
            if not to_end and self._rng.random() > self._speed:
                continue
            if not pull.is_begun:
                self._hold_on(pull_id)
            elif pull.is_draining:
                self._drain_on(pull_id, pull, to_end)
            else:
                self._read_on(pull_id, pull, to_end)

    def _decide(self, key: tuple[str, str]) -> None:
        self._awaited.discard(key)
        if self._rng.random() < 0.8:
            self._ready.add(key[0])
            self._events.append(PeerDecided(key))
        else:
            self._events.append(PeerDecided(key, PeerUnreachable("nobody is there")))

    def _hold_on(self, pull_id: str) -> None:
        if self._rng.random() < self._losing:
            self._end(pull_id, PullFailed(pull_id, LeaseGone("it ran out"), True))

    def _read_on(self, pull_id: str, pull: _Pull, to_end: bool) -> None:
        if self._rng.random() < self._failing:
            self._fail(pull_id, pull)
            return
        count = len(pull.left) if to_end else self._rng.randint(0, len(pull.left))
        for at in pull.left[:count]:
            self._write(pull, at, self._content[pull.remote.lease_id][at])
        del pull.left[:count]
        if pull.left:
            return
        if self._rng.random() < 0.1:
            self._end(
                pull_id, PullFailed(pull_id, LeaseGone("so says the fence"), True)
            )
        else:
            self._end(pull_id, PullDone(pull_id, 1, 1, 0.0, "direct"))

    def _fail(self, pull_id: str, pull: _Pull) -> None:
        kinds = [PullTimeout, TransferFailed, PeerUnreachable, LeaseGone]
        error: BatonError = self._rng.choice(kinds)("it failed")
        if self._rng.random() < 0.5:
            for at in self._rng.sample(pull.left, self._rng.randint(0, len(pull.left))):
                self._write(pull, at, GARBAGE)
            self._end(pull_id, PullFailed(pull_id, error, True))
            return
        pull.is_draining, pull.error = True, error
        if self._rng.random() < 0.5:
            pull.is_told = True
            self._events.append(PullFailed(pull_id, error, False))

    def _drain_on(self, pull_id: str, pull: _Pull, to_end: bool) -> None:
        """READs of a pull that was given up deliver whatever P has there by now."""
        for at in pull.tokens:
            if self._rng.random() < 0.3:
                self._write(pull, at, self._rng.choice([GARBAGE, 3]))
        if not to_end and self._rng.random() < self._hanging:
            if not pull.is_told:
                pull.is_told = True
                stuck = PullStuck(pull_id)
                error = pull.error
                is_ours = pull.is_cancelled or error is None
                self._events.append(
                    stuck if is_ours else PullFailed(pull_id, error, False)
                )
        elif pull.is_cancelled or pull.is_told or pull.error is None:
            self._end(pull_id, PullDrained(pull_id))
        else:
            self._end(pull_id, PullFailed(pull_id, pull.error, True))

    def _write(self, pull: _Pull, at: int, token: int) -> None:
        block = pull.blocks[at // self._block_size]
        state = self._state_of(block)
        assert state in (BlockState.RECEIVING, BlockState.QUARANTINED), (
            f"a READ writes to a block that is {state.name}"
        )
        self._write_token(block, at % self._block_size, token)

    def _end(self, pull_id: str, event: Event) -> None:
        del self._pulls[pull_id]
        self._ended[pull_id] = isinstance(event, PullDrained)
        self._events.append(event)
        self.counts[type(event).__name__] += 1

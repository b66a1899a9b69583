"""The table of open pulls, and the times at which their `tick` is due."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from kvcache.transfer.pulls.lease_client import Address
from kvcache.transfer.pulls.messages import PeerKey
from kvcache.transfer.pulls.pull_state import PullState

# Number of ended pulls that are remembered, so that a late `cancel` of an ended pull is
# answered with exactly one PullDrained.
_MAX_ENDED = 16384
_NEVER = float("inf")


class PullTable:
    """The open pulls by id, and the ids of pulls that have ended."""

    def __init__(self) -> None:
        self._pulls: dict[str, PullState] = {}
        self._attempts: dict[str, PullState] = {}  # by attempt id
        self._ticks: list[tuple[float, str]] = []  # heap of (time, pull id)
        # By id of an ended pull, oldest first: whether a PullDrained was emitted.
        self._ended: OrderedDict[str, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pulls)

    def __iter__(self) -> Iterator[PullState]:
        """The open pulls. Pulls may end during the iteration."""
        return iter(list(self._pulls.values()))

    def get(self, pull_id: str) -> PullState | None:
        return self._pulls.get(pull_id)

    def find_by_nonce(self, nonce: str) -> PullState | None:
        """The pull that has sent a message with this nonce; see lease_messages.py."""
        return self._attempts.get(nonce.partition("-")[2])

    def pulls_from(self, address: Address) -> list[PullState]:
        """The open pulls from the engines at an address."""
        return [state for state in self if state.address == address]

    def reading_from(self, key: PeerKey) -> list[PullState]:
        """Those open pulls from a peer that may still have active READs."""
        return [state for state in self if state.is_reading and state.key == key]

    def add(self, state: PullState) -> None:
        self._pulls[state.pull_id] = state
        self._attempts[state.attempt_id] = state

    def end(self, state: PullState) -> None:
        """Removes an ended pull and remembers its id. Repeated calls do nothing."""
        if self._pulls.pop(state.pull_id, None) is not None:
            del self._attempts[state.attempt_id]
            self.remember_ended(state.pull_id, state.is_drained_reported)

    def has_ended(self, pull_id: str) -> bool:
        return pull_id in self._ended

    def is_drained_reported(self, pull_id: str) -> bool:
        """True if the pull has ended, and its PullDrained was emitted."""
        return self._ended.get(pull_id, False)

    def remember_ended(self, pull_id: str, is_drained_reported: bool) -> None:
        self._ended[pull_id] = is_drained_reported
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def schedule(self, state: PullState) -> None:
        """Schedules a tick at the pull's deadline, unless an earlier tick is scheduled.

        If an earlier tick is scheduled, the caller schedules again after that tick.
        """
        tick_time = state.deadline()
        if tick_time < state.scheduled_tick:
            state.scheduled_tick = tick_time
            heapq.heappush(self._ticks, (tick_time, state.pull_id))

    def pop_due(self, now: float) -> PullState | None:
        """Unschedules the next due tick and returns its pull; None if none is due."""
        while self._ticks and self._ticks[0][0] <= now:
            tick_time, pull_id = heapq.heappop(self._ticks)
            state = self._pulls.get(pull_id)
            if state is not None and state.scheduled_tick == tick_time:
                state.scheduled_tick = _NEVER
                return state
        return None

    def next_tick(self) -> float:
        """When the next tick is scheduled; infinity for never."""
        return self._ticks[0][0] if self._ticks else _NEVER

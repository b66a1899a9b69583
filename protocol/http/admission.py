"""Whether a server takes one more request on, or has its client come back: no I/O.

What waits are the tokens of prompts whose first token has not come. The rate at which they get it
is measured while some wait, whatever holds them up: prompts before them, or streams that have the
blocks. So the time that a newcomer would wait is known without a model of what is behind.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from protocol.errors import QueueFull
from protocol.messages import AddRequest
from protocol.settings.options import QueueOptions

MIN_TOKENS = 64  # that a prompt and each of its choices count as: they take memory and time, too
MAX_RETRY_S = 600.0
_WINDOW_S = 0.5  # of waiting, that one sample of the rate takes at least
_SHORT_WINDOW_S = 0.1  # where nothing waits any more: a server that has caught up shall be believed
_WEIGHT = 0.5  # of the newest sample


def waits_elsewhere(request: AddRequest) -> bool:
    """Whether another server computes its prompt meanwhile."""
    return request.remote is not None and request.remote.transfer_id is not None


def num_queued(request: AddRequest) -> int:
    """The tokens that a request counts as while it waits."""
    least = MIN_TOKENS * request.num_choices
    return least if waits_elsewhere(request) else max(len(request.token_ids), least)


class Admission:
    """What waits at one server."""

    def __init__(self, options: QueueOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._places: dict[Place, None] = {}  # the oldest first
        self._tokens = Counter[int]()  # that wait, by priority
        self._token_s: float | None = None  # of one token that waits
        self._served = 0  # tokens, since the window began
        self._waited_s = 0.0  # of the window, before `_since`
        self._since = 0.0  # when something began to wait after nothing did, or the window began
        self._kept_up = False  # nothing waited at some time of the window: it tells a bound only

    @property
    def num_tokens(self) -> int:
        return self._tokens.total()

    def wait_s(self, priority: int | None = None) -> float:
        """Until the prompts that wait, of this priority and more urgent ones, have had their turn;
        0 while the rate is not known."""
        tokens = self.num_tokens
        if priority is not None:
            tokens = sum(count for urgency, count in self._tokens.items() if urgency <= priority)
        return tokens * self._token_s_now()

    def enter(self, num_tokens: int, priority: int = 0, *, goes_on: bool = False) -> "Place":
        """Takes a request on; `num_tokens` may be a guess until `Place.is_of`. Raises QueueFull
        where too much waits before it, unless it `goes_on` from another server."""
        num_tokens = max(num_tokens, MIN_TOKENS)
        wait_s, limit_s = self.wait_s(priority), self._options.max_queue_s
        if wait_s > limit_s and not goes_on:
            raise QueueFull(
                f"the prompts that wait here take {wait_s:.0f} s, the limit is {limit_s:g} s "
                "(--max-queue-s); try again later",
                min(wait_s - limit_s / 2, MAX_RETRY_S),
            )
        if not goes_on:
            self._check_room(num_tokens)
        if not self._places:
            self._since, self._kept_up = self._clock(), bool(self._waited_s)
        place = Place(self, priority, goes_on)
        self._places[place] = None
        self._count(place, num_tokens)
        return place

    def _check_room(self, num_tokens: int) -> None:
        """Raises QueueFull where the queue would have too many tokens; an empty one takes any."""
        waiting, limit = self.num_tokens, self._options.max_queued_tokens
        if waiting and waiting + num_tokens > limit:
            raise QueueFull(
                f"{waiting} tokens of prompts wait here and this request has {num_tokens} more, "
                f"the limit is {limit} (--max-queued-tokens); try again later",
                min(self.wait_s() / 2, MAX_RETRY_S),
            )

    def _count(self, place: "Place", num_tokens: int) -> None:
        self._tokens[place.priority] += num_tokens - place.num_tokens
        place.num_tokens = num_tokens
        if not self._tokens[place.priority]:
            del self._tokens[place.priority]

    def _take_out(self, place: "Place", num_tokens: int, *, served: bool) -> None:
        self._count(place, place.num_tokens - num_tokens)
        if place not in self._places:  # it waits elsewhere
            return
        waited_s, enough_s = self._window_s(), _WINDOW_S
        if place.num_tokens == 0:
            del self._places[place]
        self._served += num_tokens if served else 0
        if not self._places:
            self._waited_s, self._kept_up, enough_s = waited_s, True, _SHORT_WINDOW_S
        if served and self._served and waited_s >= enough_s:
            self._sample(waited_s / self._served)

    def _window_s(self) -> float:
        """How long something waited since the window began; something does."""
        return self._waited_s + self._clock() - self._since

    def _sample(self, token_s: float) -> None:
        if self._token_s is None:
            self._token_s = token_s
        elif self._kept_up:
            self._token_s = min(self._token_s, token_s)
        else:
            self._token_s += _WEIGHT * (token_s - self._token_s)
        self._served, self._waited_s, self._since = 0, 0.0, self._clock()
        self._kept_up = False

    def _token_s_now(self) -> float:
        """As measured, or more where not even the oldest request that waits was as fast."""
        oldest = next(iter(self._places), None)
        if oldest is None or self._token_s is None or self._window_s() < _WINDOW_S:
            return self._token_s or 0.0
        return max(self._token_s, self._window_s() / max(self._served + oldest.num_tokens, 1))


class Place:
    """One request in the queue."""

    def __init__(self, queue: Admission, priority: int, goes_on: bool) -> None:
        self._queue = queue
        self.priority = priority
        self._goes_on = goes_on
        self.num_tokens = 0

    def is_of(self, requests: Iterable[AddRequest]) -> None:
        """What it was a guess for. Raises QueueFull where they have too many tokens."""
        requests = list(requests)
        num_tokens = sum(map(num_queued, requests))
        if all(map(waits_elsewhere, requests)):  # which tells nothing of the rate here
            self._queue._take_out(self, self.num_tokens, served=False)
        self._queue._count(self, 0)
        if not self._goes_on:
            self._queue._check_room(num_tokens)
        self._queue._count(self, num_tokens)

    def served(self, num_tokens: int) -> None:
        """A prompt of so many has had its turn."""
        self._queue._take_out(self, min(num_tokens, self.num_tokens), served=True)

    def leave(self) -> None:
        """The request has ended. Idempotent."""
        self._queue._take_out(self, self.num_tokens, served=False)

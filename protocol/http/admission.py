"""Decides whether a server accepts a new request or refuses it with 429; no I/O.

The queue contains the prompts without a first token. A request enters it when it is
tokenized and valid, with the number of tokens that must be computed for it. The engine
receives the request at the same moment. A request with a grammar enters the queue when
the engine has compiled the grammar. Therefore only the engine determines how long a
request waits here.

While prompts wait, the server measures the rate at which they get their first tokens.
It includes every cause of delay: earlier prompts, and streams that occupy KV blocks.
The wait of a new request is extrapolated from this rate, without a model of the engine.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from protocol.errors import GrammarQueueFull, QueueFull
from protocol.http.prompt_marks import Mark, SharedPrefixes, WaitingPrompt, marks_of
from protocol.messages import AddRequest
from protocol.settings.server_options import QueueOptions

# A prompt, and each of its choices, counts as this many tokens or more, because it also
# takes memory and time.
MIN_TOKENS = 64
_WINDOW_S = 0.5  # minimum waiting time that one sample of the rate covers
_SHORT_WINDOW_S = 0.1  # the same if the queue became empty: the server has caught up
_WEIGHT = 0.5  # of the newest sample


def is_computed_elsewhere(request: AddRequest) -> bool:
    """Returns whether another server is computing the prompt now."""
    return request.remote is not None and request.remote.transfer_id is not None


class Admission:
    """The waiting queue of one server."""

    def __init__(
        self, options: QueueOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._places: dict[Place, None] = {}  # in order of arrival
        self._tokens = Counter[int]()  # waiting tokens by priority
        self._compiling = 0  # tokens of prompts whose grammars are being compiled
        self._prefixes = SharedPrefixes(self._count)
        self._token_s: float | None = None  # measured seconds per token
        self._served = 0  # tokens since the window began
        self._waited_s = 0.0  # waiting time in the window before `_since`
        # Start of the window, or the last time at which the empty queue got a prompt.
        self._since = 0.0
        # The queue was empty at some time in the window, so the rate is a lower bound.
        self._was_empty = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting prompts; tokens that prompts share count once."""
        return self._tokens.total()

    def set_cache_capacity(self, num_tokens: int) -> None:
        """Sets how many tokens the engine's prefix cache holds.

        While it is 0, prompts share no tokens.
        """
        self._prefixes.capacity_tokens = num_tokens

    def wait_s(self, priority: int | None = None) -> float:
        """Returns the predicted seconds until all waiting prompts have a first token.

        Args:
            priority: Count only prompts of this or a more urgent priority.

        Returns:
            0 while the rate is unknown.
        """
        tokens = self.num_tokens
        if priority is not None:
            tokens = sum(
                count for urgency, count in self._tokens.items() if urgency <= priority
            )
        return tokens * self._token_s_now()

    def check_wait(self, priority: int = 0) -> None:
        """Raises QueueFull if the predicted wait exceeds --max-queue-s.

        It changes nothing. The caller can refuse a request before tokenizing it.
        """
        wait_s = self.wait_s(priority)
        limit_s = self._options.max_queue_s
        if wait_s > limit_s:
            raise QueueFull(
                f"the prompts that wait here take {wait_s:.0f} s, the limit is "
                f"{limit_s:g} s (--max-queue-s); try again later",
                wait_s - limit_s / 2,
            )

    def enter(
        self, requests: Sequence[AddRequest], *, is_resumed: bool = False
    ) -> "Place":
        """Accepts the prompts of one call. They all have the same priority.

        Args:
            is_resumed: Another server had accepted the call, so it is never refused.

        Raises:
            QueueFull: The predicted wait is too long, or there are too many tokens.
            GrammarQueueFull: Prompts with uncompiled grammars have too many tokens.
        """
        prompts = {
            request.request_id: self._waiting_prompt(request) for request in requests
        }
        has_grammar = any(request.sampling.grammar is not None for request in requests)
        tells_rate = not all(map(is_computed_elsewhere, requests))
        place = Place(self, prompts if has_grammar else {}, tells_rate=tells_rate)
        if is_resumed:
            self._compiling += _num_counted(place.compiling)
        else:
            self.check_wait(requests[0].priority if requests else 0)
            self._check_tokens(prompts, place)
        if not has_grammar:
            for request_id, prompt in prompts.items():
                self._begin(place, request_id, prompt)
        return place

    def _check_tokens(self, prompts: dict[str, WaitingPrompt], place: "Place") -> None:
        """Raises QueueFull or GrammarQueueFull if there are too many tokens.

        An empty queue accepts prompts of any size.
        """
        waiting = self.num_tokens
        limit = self._options.max_queued_tokens
        for prompt in prompts.values():
            self._prefixes.add(prompt)
        added = self.num_tokens - waiting
        for prompt in prompts.values():
            self._prefixes.remove(prompt, is_computed=False)
            prompt.num_shared = 0
        if waiting and waiting + added > limit:
            raise QueueFull(
                f"{waiting} tokens of prompts wait here and this request has {added} "
                f"more, the limit is {limit} (--max-queued-tokens); try again later",
                self.wait_s() / 2,
            )
        added = _num_counted(place.compiling)
        if self._compiling and self._compiling + added > limit:
            raise GrammarQueueFull(
                f"{self._compiling} tokens of prompts wait for their grammars and this "
                f"request has {added} more, the limit is {limit} "
                "(--max-queued-tokens); try again later"
            )
        self._compiling += added

    def _begin(self, place: "Place", request_id: str, prompt: WaitingPrompt) -> None:
        """Adds a prompt to the queue."""
        place.prompts[request_id] = prompt
        self._prefixes.add(prompt)
        if not place.tells_rate:
            return
        if not self._places:
            self._since = self._clock()
            self._was_empty = bool(self._waited_s)
        self._places[place] = None

    def _waiting_prompt(self, request: AddRequest) -> WaitingPrompt:
        """Returns the queue entry of a request. It takes 10 ms for a million tokens."""
        marks: Sequence[Mark] = ()
        if self._prefixes.capacity_tokens > 0:
            marks = marks_of(request.token_ids, request.cache_salt)
        num_tokens = len(request.token_ids)
        if is_computed_elsewhere(request):
            num_tokens = 0
        return WaitingPrompt(
            priority=request.priority,
            num_tokens=num_tokens,
            min_tokens=MIN_TOKENS * request.num_choices,
            marks=marks,
            # Logprobs of a prompt need every token computed.
            is_shareable=request.num_prompt_logprobs is None,
        )

    def _count(self, prompt: WaitingPrompt, change: int) -> None:
        self._tokens[prompt.priority] += change
        if not self._tokens[prompt.priority]:
            del self._tokens[prompt.priority]

    def _take_out(
        self, place: "Place", request_id: str, num_processed: int | None
    ) -> None:
        """Removes a prompt. Its first token has come if `num_processed` is given."""
        prompt = place.prompts.pop(request_id)
        is_served = num_processed is not None
        self._prefixes.remove(prompt, is_computed=is_served)
        if place not in self._places:
            return
        waited_s = self._window_s()
        enough_s = _WINDOW_S
        if not place.prompts:
            del self._places[place]
        if num_processed is not None:
            self._served += max(num_processed, prompt.min_tokens)
        if not self._places:
            self._waited_s = waited_s
            self._was_empty = True
            enough_s = _SHORT_WINDOW_S
        if is_served and self._served and waited_s >= enough_s:
            self._sample(waited_s / self._served)

    def _window_s(self) -> float:
        """Returns for how many seconds of the window prompts have waited."""
        return self._waited_s + self._clock() - self._since

    def _sample(self, token_s: float) -> None:
        if self._token_s is None:
            self._token_s = token_s
        elif self._was_empty:
            self._token_s = min(self._token_s, token_s)
        else:
            self._token_s += _WEIGHT * (token_s - self._token_s)
        self._served = 0
        self._waited_s = 0.0
        self._since = self._clock()
        self._was_empty = False

    def _token_s_now(self) -> float:
        """Returns the measured seconds per token, or more if the oldest prompt is
        slower.

        The engine has had the oldest prompt since it entered, so its age is a lower
        bound of the engine's time. All its tokens count, because shared tokens are an
        estimate.
        """
        oldest = next(iter(self._places), None)
        if oldest is None or self._token_s is None or self._window_s() < _WINDOW_S:
            return self._token_s or 0.0
        num_tokens = sum(
            max(p.num_tokens, p.min_tokens) for p in oldest.prompts.values()
        )
        return max(self._token_s, self._window_s() / max(self._served + num_tokens, 1))


def _num_counted(prompts: dict[str, WaitingPrompt]) -> int:
    return sum(prompt.num_counted for prompt in prompts.values())


class Place:
    """The prompts of one call in the queue.

    Args:
        compiling: Prompts by engine request id whose grammar is not compiled. The
            engine computes nothing for them, and they delay no other prompt.
        tells_rate: Their waiting time says something about the rate of this server.

    Attributes:
        prompts: Prompts by engine request id without a first token.
    """

    def __init__(
        self, queue: Admission, compiling: dict[str, WaitingPrompt], *, tells_rate: bool
    ) -> None:
        self._queue = queue
        self.compiling = compiling
        self.tells_rate = tells_rate
        self.prompts: dict[str, WaitingPrompt] = {}

    def begin(self, request_id: str) -> None:
        """Moves a prompt with a compiled grammar into the queue. Idempotent."""
        prompt = self.compiling.pop(request_id, None)
        if prompt is not None:
            self._queue._compiling -= prompt.num_counted
            self._queue._begin(self, request_id, prompt)

    def served(self, request_id: str, num_processed: int | None = None) -> None:
        """Removes a prompt whose first token has come. Idempotent.

        Args:
            num_processed: Tokens that were computed and pulled for it, if the engine
                reports that, else the queue's estimate counts.
        """
        self.begin(request_id)
        prompt = self.prompts.get(request_id)
        if prompt is not None:
            num = prompt.num_counted if num_processed is None else num_processed
            self._queue._take_out(self, request_id, num)

    def drop(self, request_id: str) -> None:
        """Removes a prompt that has ended without a token. Idempotent."""
        prompt = self.compiling.pop(request_id, None)
        if prompt is not None:
            self._queue._compiling -= prompt.num_counted
        if request_id in self.prompts:
            self._queue._take_out(self, request_id, None)

    def leave(self) -> None:
        """Removes all prompts of the call. Idempotent."""
        for request_id in [*self.compiling, *self.prompts]:
            self.drop(request_id)

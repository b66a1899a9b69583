"""Decides whether a server accepts one more request or refuses it with 429: no I/O.

The queue consists of prompts whose first token has not come. A request enters it once it is
tokenized, valid and still wanted, with the number of tokens that have to be computed for it, and is
given to the engine at once. One with a grammar enters it when the engine has compiled that. So the
age of whatever waits here is the engine's doing.

The rate at which prompts get their first token is measured while some wait, whatever holds them up:
prompts before them, or streams that have the blocks. The wait of a new request is predicted from
that without a model of the engine.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from protocol.errors import GrammarQueueFull, QueueFull
from protocol.http.prompt_marks import SharedPrefixes, WaitingPrompt, marks_of
from protocol.messages import AddRequest
from protocol.settings.options import QueueOptions

MIN_TOKENS = (
    64  # a prompt and each of its choices count as this: they take memory and time, too
)
_WINDOW_S = 0.5  # least time of waiting that one sample of the rate covers
_SHORT_WINDOW_S = 0.1  # the same where the queue became empty: the server has caught up
_WEIGHT = 0.5  # of the newest sample


def is_computed_elsewhere(request: AddRequest) -> bool:
    """Whether another server computes the prompt at this time."""
    return request.remote is not None and request.remote.transfer_id is not None


class Admission:
    """The queue of one server."""

    def __init__(
        self, options: QueueOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._places: dict[Place, None] = {}  # the oldest first
        self._tokens = Counter[int]()  # waiting tokens by priority
        self._compiling = 0  # tokens of prompts whose grammars are not compiled
        self._prefixes = SharedPrefixes(self._count)
        self._token_s: float | None = None  # measured time of one token
        self._served = 0  # tokens since the window began
        self._waited_s = 0.0  # of the window, before `_since`
        self._since = (
            0.0  # start of the window, or when the queue became non-empty in it
        )
        self._kept_up = (
            False  # the queue was empty during the window: its rate is a lower bound
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting prompts, without what is computed for several of them."""
        return self._tokens.total()

    def set_cache_capacity(self, num_tokens: int) -> None:
        """Sets how many tokens the engine's prefix cache holds. Until then, and with 0, every
        prompt counts in full."""
        self._prefixes.capacity_tokens = num_tokens

    def wait_s(self, priority: int | None = None) -> float:
        """Predicted seconds until the waiting prompts of this or a more urgent priority have their
        first tokens; 0 while the rate is not known."""
        tokens = self.num_tokens
        if priority is not None:
            tokens = sum(
                count for urgency, count in self._tokens.items() if urgency <= priority
            )
        return tokens * self._token_s_now()

    def check_wait(self, priority: int = 0) -> None:
        """Raises QueueFull if the waiting prompts take longer than --max-queue-s. Changes nothing:
        it spares the server the tokenization of a request that would be refused."""
        wait_s = self.wait_s(priority)
        limit_s = self._options.max_queue_s
        if wait_s > limit_s:
            raise QueueFull(
                f"the prompts that wait here take {wait_s:.0f} s, the limit is {limit_s:g} s "
                "(--max-queue-s); try again later",
                wait_s - limit_s / 2,
            )

    def enter(
        self, requests: Sequence[AddRequest], *, is_resumed: bool = False
    ) -> "Place":
        """Accepts the prompts of one call, which all have one priority.

        Args:
            is_resumed: another server had accepted the call, so it is not refused.

        Raises:
            QueueFull: too much waits before it, or the queue would have too many tokens.
            GrammarQueueFull: the same of prompts that wait for their grammars.
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
        """Raises QueueFull where the queue would have too many tokens, GrammarQueueFull where
        prompts whose grammar is not compiled would; an empty queue takes any prompts."""
        waiting, limit = self.num_tokens, self._options.max_queued_tokens
        for prompt in prompts.values():
            self._prefixes.add(prompt)
        added = self.num_tokens - waiting
        for prompt in prompts.values():
            self._prefixes.remove(prompt, is_computed=False)
            prompt.num_shared = 0
        if waiting and waiting + added > limit:
            raise QueueFull(
                f"{waiting} tokens of prompts wait here and this request has {added} more, "
                f"the limit is {limit} (--max-queued-tokens); try again later",
                self.wait_s() / 2,
            )
        added = _num_counted(place.compiling)
        if self._compiling and self._compiling + added > limit:
            raise GrammarQueueFull(
                f"{self._compiling} tokens of prompts wait for their grammars and this request has "
                f"{added} more, the limit is {limit} (--max-queued-tokens); try again later"
            )
        self._compiling += added

    def _begin(self, place: "Place", request_id: str, prompt: WaitingPrompt) -> None:
        """A prompt waits from now on."""
        place.prompts[request_id] = prompt
        self._prefixes.add(prompt)
        if not place.tells_rate:
            return
        if not self._places:
            self._since = self._clock()
            self._kept_up = bool(self._waited_s)
        self._places[place] = None

    def _waiting_prompt(self, request: AddRequest) -> WaitingPrompt:
        """What a request adds to the queue. Takes 10 ms for a million tokens."""
        caches_prefixes = self._prefixes.capacity_tokens > 0
        return WaitingPrompt(
            priority=request.priority,
            num_tokens=0 if is_computed_elsewhere(request) else len(request.token_ids),
            min_tokens=MIN_TOKENS * request.num_choices,
            marks=marks_of(request.token_ids, request.cache_salt)
            if caches_prefixes
            else (),
            is_shareable=request.num_prompt_logprobs
            is None,  # these need every token computed
        )

    def _count(self, prompt: WaitingPrompt, change: int) -> None:
        self._tokens[prompt.priority] += change
        if not self._tokens[prompt.priority]:
            del self._tokens[prompt.priority]

    def _take_out(
        self, place: "Place", request_id: str, num_processed: int | None
    ) -> None:
        """Removes a prompt, whose first token has come if `num_processed` is given."""
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
            self._kept_up = True
            enough_s = _SHORT_WINDOW_S
        if is_served and self._served and waited_s >= enough_s:
            self._sample(waited_s / self._served)

    def _window_s(self) -> float:
        """Seconds in which prompts waited since the window began, while some do."""
        return self._waited_s + self._clock() - self._since

    def _sample(self, token_s: float) -> None:
        if self._token_s is None:
            self._token_s = token_s
        elif self._kept_up:
            self._token_s = min(self._token_s, token_s)
        else:
            self._token_s += _WEIGHT * (token_s - self._token_s)
        self._served = 0
        self._waited_s = 0.0
        self._since = self._clock()
        self._kept_up = False

    def _token_s_now(self) -> float:
        """The measured time of a token, or more where not even the oldest prompt was as fast. The
        engine has had that prompt since it entered, so its age is the engine's doing. All of it
        counts: that other prompts share with it is an estimate."""
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
    """The prompts of one call.

    Args:
        compiling: prompts by the ids of the engine's requests, whose grammar is not there yet: the
            engine computes nothing for them, and they are in the way of no other.
        tells_rate: their waiting tells something of this server's rate.

    Attributes:
        prompts: the same of prompts without a first token.
    """

    def __init__(
        self, queue: Admission, compiling: dict[str, WaitingPrompt], *, tells_rate: bool
    ) -> None:
        self._queue = queue
        self.compiling = compiling
        self.tells_rate = tells_rate
        self.prompts: dict[str, WaitingPrompt] = {}

    def begin(self, request_id: str) -> None:
        """The grammar of a prompt is there: it waits from now on. Idempotent."""
        prompt = self.compiling.pop(request_id, None)
        if prompt is not None:
            self._queue._compiling -= prompt.num_counted
            self._queue._begin(self, request_id, prompt)

    def served(self, request_id: str, num_processed: int | None = None) -> None:
        """The first token of a prompt has come. Idempotent.

        Args:
            num_processed: tokens that were computed and pulled for it, if the engine reports that;
                else the estimate stands.
        """
        self.begin(request_id)
        prompt = self.prompts.get(request_id)
        if prompt is not None:
            num = prompt.num_counted if num_processed is None else num_processed
            self._queue._take_out(self, request_id, num)

    def drop(self, request_id: str) -> None:
        """A prompt has ended without a token. Idempotent."""
        prompt = self.compiling.pop(request_id, None)
        if prompt is not None:
            self._queue._compiling -= prompt.num_counted
        if request_id in self.prompts:
            self._queue._take_out(self, request_id, None)

    def leave(self) -> None:
        """The call has ended. Idempotent."""
        for request_id in [*self.compiling, *self.prompts]:
            self.drop(request_id)

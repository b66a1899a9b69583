"""Decides whether a server accepts a new request or refuses it with 429; no I/O.

The queue contains the prompts that have no first token yet. A request enters the queue
when it is validated and tokenized, and the engine receives the request at the same
moment. If the request has a grammar, it enters the queue when the engine has compiled
the grammar. Therefore the time in the queue depends on the engine alone.

Each prompt counts as the number of tokens that must be computed for it. While prompts
wait, the server measures how fast the engine works through these tokens. The measured
rate includes every cause of delay, such as streams that occupy KV blocks. The wait of a
new request is extrapolated from this rate, without a model of the engine.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from protocol.errors import GrammarQueueFull, QueueFull
from protocol.http.prompt_marks import Mark, SharedPrefixes, WaitingPrompt, marks_of
from protocol.messages import AddRequest
from protocol.settings.server_options import QueueOptions

# A prompt counts as at least this many tokens per choice, because even a short or
# cached prompt takes memory and time.
MIN_TOKENS = 64
# A window ends with a sample only after prompts have waited in it for this long.
_MIN_WINDOW_S = 0.5
_MIN_LAST_WINDOW_S = 0.1  # replaces _MIN_WINDOW_S when the queue becomes empty
_SAMPLE_WEIGHT = 0.5  # weight of a new sample in the moving average


def is_computed_elsewhere(request: AddRequest) -> bool:
    """Returns whether another server is computing the prompt now."""
    return request.remote is not None and request.remote.transfer_id is not None


class Admission:
    """The waiting queue of one server.

    The rate at which the engine works through prompts is measured in windows. A window
    counts only the time during which prompts wait, and ends with a sample of the rate.
    """

    def __init__(
        self, options: QueueOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        # Entries that have waiting prompts and measure the rate, in order of arrival.
        self._entries: dict[QueueEntry, None] = {}
        self._tokens_by_priority = Counter[int]()  # tokens of the waiting prompts
        # Tokens of the prompts that wait for their grammars to be compiled.
        self._compiling_tokens = 0
        self._prefixes = SharedPrefixes(self._change_tokens)
        # The measured average; None before the first sample.
        self._seconds_per_token: float | None = None
        self._served_tokens = 0  # tokens that the engine has processed in the window
        self._waited_s = 0.0  # waiting time in the window before `_waiting_since_s`
        # The later of two times: when the window began, and when a prompt last entered
        # the empty queue.
        self._waiting_since_s = 0.0
        # Whether the queue was empty at some time in the window. The engine then lacked
        # work, so it can be faster than the sample.
        self._was_empty = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all waiting prompts together count as; see
        prompt_marks.py.
        """
        return self._tokens_by_priority.total()

    def set_cache_capacity(self, num_tokens: int) -> None:
        """Sets how many tokens the engine's prefix cache can hold.

        While the capacity is 0, no tokens count as shared.
        """
        self._prefixes.capacity_tokens = num_tokens

    def wait_s(self, priority: int | None = None) -> float:
        """Returns the predicted seconds until all waiting prompts have a first token.

        The result is 0 until the rate has been measured.

        Args:
            priority: Count only prompts with this priority or a more urgent one; None:
                count all.
        """
        tokens = self.num_tokens
        if priority is not None:
            tokens = sum(
                count
                for urgency, count in self._tokens_by_priority.items()
                if urgency <= priority
            )
        return tokens * self._current_seconds_per_token()

    def check_wait(self, priority: int = 0) -> None:
        """Raises QueueFull if the predicted wait exceeds --max-queue-s.

        The queue does not change. Therefore a request can be refused before its prompt
        is tokenized.
        """
        wait_s = self.wait_s(priority)
        limit_s = self._options.max_queue_s
        if wait_s > limit_s:
            raise QueueFull(
                f"the waiting prompts need about {wait_s:.0f} s, the limit is "
                f"{limit_s:g} s (--max-queue-s); try again later",
                wait_s - limit_s / 2,
            )

    def enter(
        self, requests: Sequence[AddRequest], *, is_resumed: bool = False
    ) -> "QueueEntry":
        """Adds the prompts of one HTTP request to the queue and returns their entry.

        Args:
            requests: One per prompt. All have the same priority.
            is_resumed: The request continues from another server, which had accepted
                it. Therefore the request is never refused.

        Raises:
            QueueFull: The predicted wait is too long, or the prompts of the queue would
                have too many tokens.
            GrammarQueueFull: The prompts that wait for their grammars would have too
                many tokens.
        """
        prompts = {
            request.request_id: self._waiting_prompt(request) for request in requests
        }
        has_grammar = any(request.sampling.grammar is not None for request in requests)
        measures_rate = not all(map(is_computed_elsewhere, requests))
        entry = QueueEntry(
            self, prompts if has_grammar else {}, measures_rate=measures_rate
        )
        if is_resumed:
            self._compiling_tokens += _num_counted_tokens(entry.compiling)
        else:
            self.check_wait(requests[0].priority if requests else 0)
            self._reserve_tokens(prompts, entry)
        if not has_grammar:
            for request_id, prompt in prompts.items():
                self._enqueue(entry, request_id, prompt)
        return entry

    def _reserve_tokens(
        self, prompts: dict[str, WaitingPrompt], entry: "QueueEntry"
    ) -> None:
        """Checks --max-queued-tokens, then counts the prompts that wait for grammars.

        An empty queue accepts prompts of any size.

        Raises:
            QueueFull, GrammarQueueFull: The limit would be exceeded.
        """
        waiting_tokens = self.num_tokens
        limit = self._options.max_queued_tokens
        for prompt in prompts.values():
            self._prefixes.add(prompt)
        added = self.num_tokens - waiting_tokens
        for prompt in prompts.values():
            self._prefixes.remove(prompt, is_computed=False)
            prompt.num_shared = 0
        if waiting_tokens and waiting_tokens + added > limit:
            raise QueueFull(
                f"the waiting prompts have {waiting_tokens} tokens and this request "
                f"has {added} more, the limit is {limit} (--max-queued-tokens); try "
                "again later",
                self.wait_s() / 2,
            )
        compiling_tokens = self._compiling_tokens
        added = _num_counted_tokens(entry.compiling)
        if added and compiling_tokens and compiling_tokens + added > limit:
            raise GrammarQueueFull(
                f"the prompts that wait for their grammars have {compiling_tokens} "
                f"tokens and this request has {added} more, the limit is {limit} "
                "(--max-queued-tokens); try again later"
            )
        self._compiling_tokens += added

    def _enqueue(
        self, entry: "QueueEntry", request_id: str, prompt: WaitingPrompt
    ) -> None:
        """Adds a prompt to the queue."""
        entry.prompts[request_id] = prompt
        self._prefixes.add(prompt)
        if not entry.measures_rate:
            return
        if not self._entries:
            self._waiting_since_s = self._clock()
            self._was_empty = bool(self._waited_s)
        self._entries[entry] = None

    def _waiting_prompt(self, request: AddRequest) -> WaitingPrompt:
        """Returns the prompt of a request, with its marks (prompt_marks.py).

        The call takes 10 ms for a million tokens.
        """
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
            # For prompt logprobs, the engine computes every token of the prompt.
            is_shareable=request.num_prompt_logprobs is None,
        )

    def _change_tokens(self, prompt: WaitingPrompt, change: int) -> None:
        self._tokens_by_priority[prompt.priority] += change
        if not self._tokens_by_priority[prompt.priority]:
            del self._tokens_by_priority[prompt.priority]

    def _remove(
        self, entry: "QueueEntry", request_id: str, num_processed: int | None
    ) -> None:
        """Removes a prompt. If it was served, the window may end with a sample.

        Args:
            num_processed: Tokens that the engine computed and pulled for the prompt;
                None if the prompt was not served.
        """
        prompt = entry.prompts.pop(request_id)
        is_served = num_processed is not None
        self._prefixes.remove(prompt, is_computed=is_served)
        if entry not in self._entries:
            return
        waited_s = self._window_s()
        min_window_s = _MIN_WINDOW_S
        if not entry.prompts:
            del self._entries[entry]
        if num_processed is not None:
            self._served_tokens += max(num_processed, prompt.min_tokens)
        if not self._entries:
            self._waited_s = waited_s
            self._was_empty = True
            min_window_s = _MIN_LAST_WINDOW_S
        if is_served and self._served_tokens and waited_s >= min_window_s:
            self._add_sample(waited_s / self._served_tokens)

    def _window_s(self) -> float:
        """Returns the seconds of the window during which prompts have waited."""
        return self._waited_s + self._clock() - self._waiting_since_s

    def _add_sample(self, seconds_per_token: float) -> None:
        """Updates the average with a sample, and begins a new window."""
        if self._seconds_per_token is None:
            self._seconds_per_token = seconds_per_token
        elif self._was_empty:
            self._seconds_per_token = min(self._seconds_per_token, seconds_per_token)
        else:
            change = seconds_per_token - self._seconds_per_token
            self._seconds_per_token += _SAMPLE_WEIGHT * change
        self._served_tokens = 0
        self._waited_s = 0.0
        self._waiting_since_s = self._clock()
        self._was_empty = False

    def _current_seconds_per_token(self) -> float:
        """Returns the average, or the estimate of the unfinished window if higher.

        The result is 0 before the first sample. In the unfinished window, the engine is
        assumed to have processed the served tokens, and at most all tokens of the
        oldest entry. Therefore the window's time divided by the number of these tokens
        is a lower bound. Tokens of the oldest entry that are estimated to be shared
        count too, because the estimate may be wrong.
        """
        average = self._seconds_per_token
        oldest = next(iter(self._entries), None)
        if oldest is None or average is None or self._window_s() < _MIN_WINDOW_S:
            return average or 0.0
        num_tokens = sum(
            max(p.num_tokens, p.min_tokens) for p in oldest.prompts.values()
        )
        num_tokens += self._served_tokens
        return max(average, self._window_s() / max(num_tokens, 1))


def _num_counted_tokens(prompts: dict[str, WaitingPrompt]) -> int:
    return sum(prompt.num_counted for prompt in prompts.values())


class QueueEntry:
    """The prompts of one HTTP request in the queue.

    Args:
        compiling: The prompts that wait for their grammars, by engine request id. The
            engine computes nothing for them, so they do not delay other prompts.
        measures_rate: Whether the waiting time of these prompts depends on the rate of
            this server. False if other servers compute all these prompts.

    Attributes:
        prompts: The prompts in the queue, by engine request id.
    """

    def __init__(
        self,
        queue: Admission,
        compiling: dict[str, WaitingPrompt],
        *,
        measures_rate: bool,
    ) -> None:
        self._queue = queue
        self.compiling = compiling
        self.measures_rate = measures_rate
        self.prompts: dict[str, WaitingPrompt] = {}

    def enqueue(self, request_id: str) -> None:
        """Moves a prompt into the queue when its grammar is compiled. Idempotent."""
        prompt = self.compiling.pop(request_id, None)
        if prompt is not None:
            self._queue._compiling_tokens -= prompt.num_counted
            self._queue._enqueue(self, request_id, prompt)

    def mark_served(self, request_id: str, num_processed: int | None = None) -> None:
        """Removes a prompt that has its first token, or that the engine has completed.
        Idempotent.

        Args:
            num_processed: Tokens that the engine computed and pulled for the prompt;
                None if the engine has not reported this number. The queue then uses its
                estimate.
        """
        self.enqueue(request_id)
        prompt = self.prompts.get(request_id)
        if prompt is not None:
            if num_processed is None:
                num_processed = prompt.num_counted
            self._queue._remove(self, request_id, num_processed)

    def drop(self, request_id: str) -> None:
        """Removes a prompt that was not served. Idempotent."""
        prompt = self.compiling.pop(request_id, None)
        if prompt is not None:
            self._queue._compiling_tokens -= prompt.num_counted
        if request_id in self.prompts:
            self._queue._remove(self, request_id, None)

    def drop_all(self) -> None:
        """Removes all prompts of the HTTP request. Idempotent."""
        for request_id in [*self.compiling, *self.prompts]:
            self.drop(request_id)

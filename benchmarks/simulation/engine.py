"""A simulated engine, which runs steps.

A step contains one token of each stream, and prompts in the order of the waiting queue.
While a server with a target time between tokens has streams, it splits prompts so that
a step stays within the target. A step may exceed the target if prompts have waited
long. The prefix cache of an engine evicts the least recently used blocks.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence

from benchmarks.loads import Request
from benchmarks.simulation.store import SimulatedStore
from benchmarks.simulation.times import EngineTimes, measured_times
from engine.core.budget import step_times
from engine.core.budget.prefill_budget import PrefillBudget
from engine.core.waiting import LONG_PROMPT_TOKENS
from proxy.placement.prefix_index import PrefixIndex
from proxy.placement.server_load import INITIAL_TOKEN_S
from proxy.placement.speed import StepTotals

_MAX_COUNTED_PROMPTS = 256  # as in engine.core.budget.prompt_limit


class Engine:
    """One simulated server.

    Attributes:
        is_prefill: True for a prefill server, False for a decode server or a complete
            server.
        target_s: target time between tokens; None: only `EngineTimes.step_tokens`
            limits the prompt tokens of a step.
        waiting: requests with prompts that this server has to compute, in queue order.
        parked: requests with prompts that a prefill server has computed. They wait for
            free KV capacity on this server.
        held_tokens: tokens of KV of all streams.
        num_deliveries: number of requests that prefill servers have handed over to this
            server since its latest step began.
        busy_until: expected end of the running step.
        after_step: what has to be done when the running step has ended.
        step_prompt_tokens: prompt tokens of the running step.
        gaps: histogram of the times between tokens; a key is a time in units of 0.1 ms.
        store: the KV store of this server's host, if it has one.
    """

    def __init__(
        self,
        index: int,
        is_prefill: bool,
        times: EngineTimes,
        target_s: float | None,
    ) -> None:
        self.index = index
        self.is_prefill = is_prefill
        self.times = times
        self.target_s = target_s
        # This index covers only this server, which is server 0 of the index. As a
        # simplification, cached prefixes always get half of the KV capacity, regardless
        # of the KV that streams hold.
        self._cache = PrefixIndex(times.capacity // 2 // times.block_tokens)
        self.waiting: deque[Request] = deque()
        self.parked: deque[Request] = deque()
        self.streams: list[Request] = []
        self.held_tokens = 0
        self.num_deliveries = 0
        self.is_busy = False
        self.busy_until = 0.0
        self.after_step = deque[Callable[[], None]]()
        self.totals = StepTotals()
        self.gaps = Counter[int]()
        self.step_prompt_tokens = 0
        self.store: SimulatedStore | None = None
        self.prompt_budget: PrefillBudget | None = None
        if target_s is not None:
            step_times_at_start = measured_times(times, target_s)
            self.prompt_budget = PrefillBudget(
                step_times_at_start, target_s, times.step_tokens
            )

    def cached_blocks(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that are cached."""
        return int(self._cache.depths(hashes).get(0, 0))

    def cache(self, hashes: Sequence[int]) -> None:
        """Add blocks to the prefix cache, and to the KV store of the host."""
        self._cache.add(0, hashes)
        if self.store is not None:
            self.store.cache(hashes)

    def queued_s(self) -> float:
        """Return an estimate of the time that the waiting prompts will take."""
        num_tokens = sum(request.uncomputed_tokens for request in self.waiting)
        seconds = num_tokens * INITIAL_TOKEN_S
        if not self.streams or self.target_s is None:
            return seconds
        step_s = self.stream_step_s()
        prompts_s = max(self.target_s - step_s, self.times.min_prompt_share * step_s)
        return seconds * max(1.0, self.target_s / prompts_s)

    def stream_step_s(self) -> float:
        """Return the time of a step with the current streams and no prompts."""
        times = self.times
        return (
            times.step_s
            + len(self.streams) * times.sequence_s
            + self.held_tokens * times.held_token_s
        )

    def admit(self, request: Request) -> None:
        """Queue a prompt in the order of engine.core.waiting.

        A short prompt is placed before long prompts, even before a long prompt that is
        partly computed. Cached blocks are looked up again when the prompt is computed.
        """
        request.uncomputed_tokens = self._uncached_tokens(request)
        position = len(self.waiting)
        while position:
            ahead = self.waiting[position - 1]
            is_long = ahead.prompt_tokens >= LONG_PROMPT_TOKENS
            if not is_long or request.prompt_tokens * 4 > ahead.prompt_tokens:
                break
            overtaken_tokens = ahead.overtaken_tokens + request.prompt_tokens
            if overtaken_tokens > ahead.prompt_tokens:
                break
            ahead.overtaken_tokens = overtaken_tokens
            position -= 1
        self.waiting.insert(position, request)

    def _uncached_tokens(self, request: Request) -> int:
        cached_tokens = self.cached_blocks(request.hashes) * self.times.block_tokens
        return max(request.prompt_tokens - cached_tokens, 1)

    def step(self, now: float) -> tuple[float, list[Request]]:
        """Simulate one step that starts at `now`.

        Returns:
            The time at which the step ends if no other server slows it down, and the
            requests with prompts that the step completes.
        """
        budget = self._prompt_token_budget(now)
        seconds = self.stream_step_s()
        seconds += self.num_deliveries * self.times.handoff_step_s
        self.num_deliveries = 0
        num_prompt_tokens = 0
        completed = list[Request]()
        while self.waiting and num_prompt_tokens < budget:
            request = self.waiting[0]
            if not request.computed_tokens:
                # Blocks of the prompt may have been cached since it was queued.
                request.uncomputed_tokens = min(
                    request.uncomputed_tokens, self._uncached_tokens(request)
                )
                if not self.is_prefill and not self._fits(request, len(completed)):
                    break
            count = min(budget - num_prompt_tokens, request.uncomputed_tokens)
            seconds += self._chunk_s(request, count)
            request.computed_tokens += count
            request.uncomputed_tokens -= count
            num_prompt_tokens += count
            if request.uncomputed_tokens == 0:
                completed.append(self.waiting.popleft())
                self.cache(request.hashes)
        if num_prompt_tokens:
            seconds = max(seconds, self.times.min_prompt_step_s)
        self.step_prompt_tokens = num_prompt_tokens
        return now + seconds, completed

    def _prompt_token_budget(self, now: float) -> int:
        """Return the maximum prompt tokens of the next step."""
        if self.prompt_budget is None or not (self.streams and self.waiting):
            return self.times.step_tokens
        first = self.waiting[0]
        waited_s = sum(
            now - request.arrival_s
            for request in itertools.islice(self.waiting, _MAX_COUNTED_PROMPTS)
            if not request.computed_tokens
        )
        return self.prompt_budget.prompt_tokens(
            len(self.streams),
            self.held_tokens,
            first.prompt_tokens - first.uncomputed_tokens,
            extra_s=waited_s / len(self.streams),
        )

    def _chunk_s(self, request: Request, num_tokens: int) -> float:
        """Return the time to compute the next `num_tokens` of a prompt."""
        num_before = request.prompt_tokens - request.uncomputed_tokens
        num_pairs = num_tokens * (num_before + num_tokens / 2)
        return num_tokens * self.times.token_s + num_pairs * self.times.pair_s

    def record_step(self, seconds: float) -> None:
        """Record the duration of the finished step, for the prompt budget and for
        health reports.
        """
        num_prompt_tokens = self.step_prompt_tokens
        num_streams = len(self.streams)
        if self.prompt_budget is not None:
            load = step_times.Load(num_streams, self.held_tokens, num_prompt_tokens)
            self.prompt_budget.record_step(load, seconds)
        num_tokens = num_streams + num_prompt_tokens
        step = StepTotals(1, num_tokens, num_prompt_tokens, seconds)
        if num_prompt_tokens:
            step = StepTotals(*step[:4], 1, num_tokens, seconds)
        totals = zip(self.totals, step, strict=True)
        self.totals = StepTotals(*(before + added for before, added in totals))

    def generate_tokens(self, now: float) -> list[Request]:
        """Generate one token for each stream. Return the streams that finish."""
        finished = []
        for request in self.streams:
            self.gaps[round((now - request.last_token_s) * 1e4)] += 1
            request.last_token_s = now
            request.generated_tokens += 1
            if request.generated_tokens >= request.output_tokens:
                finished.append(request)
        self.held_tokens += len(self.streams)
        if finished:
            self.streams = [
                request
                for request in self.streams
                if request.generated_tokens < request.output_tokens
            ]
            self.held_tokens -= sum(
                request.prompt_tokens + request.generated_tokens for request in finished
            )
            while self.parked and self._fits(self.parked[0]):
                self.start_stream(self.parked.popleft(), now)
        return finished

    def _fits(self, request: Request, num_starting: int = 0) -> bool:
        """Return whether a request fits: into the KV capacity and the limit of streams.

        Without running streams, every request fits.

        Args:
            num_starting: number of streams that will start before the request.
        """
        if not self.streams:
            return True
        if self.held_tokens + request.prompt_tokens > self.times.capacity:
            return False
        return len(self.streams) + num_starting < self.times.max_streams

    def deliver(self, request: Request, now: float) -> None:
        """Take over a request from the prefill server that has computed its prompt."""
        self.num_deliveries += 1
        if self.parked or not self._fits(request):
            self.parked.append(request)
        else:
            self.start_stream(request, now)

    def start_stream(self, request: Request, now: float) -> None:
        request.first_token_s = request.first_token_s or now
        request.last_token_s = request.last_token_s or now
        request.generated_tokens = max(request.generated_tokens, 1)
        self.streams.append(request)
        self.held_tokens += request.prompt_tokens + request.generated_tokens
        self.cache(request.hashes)

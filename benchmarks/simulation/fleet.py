"""Simulated servers, and the requests that a router sends them.

Each server has an engine, which runs steps, and a frontend, which does the work outside
of the engine. On a CPU, engines and frontends share the processors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from benchmarks.loads import FollowUp, Request
from benchmarks.simulation.contention import Contention, Frontend, SharedDevice
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.events import Events
from benchmarks.simulation.times import EngineTimes


class Router(Protocol):
    """Chooses the servers of each request.

    Attributes:
        lender: the engine from which the last placed request pulls KV, if any.
    """

    lender: Engine | None

    def place_prompt(self, request: Request) -> Engine:
        """Return the server that computes the prompt: a prefill or a decode server."""

    def place_stream(self, request: Request) -> Engine:
        """Return the decode server that generates the tokens."""

    def on_computed(self, request: Request) -> None:
        """Record that the prompt of a request is computed."""

    def on_finished(self, request: Request) -> None:
        """Record that a request has finished."""


class Fleet:
    """Simulates servers and their requests.

    Attributes:
        router: places the requests. The caller must set it before `run`.
        now: the simulated time in seconds.
    """

    router: Router

    def __init__(
        self, engines: list[Engine], times: EngineTimes, follow_up: FollowUp
    ) -> None:
        self.engines = engines
        self.times = times
        self._follow_up = follow_up
        self.prefills = [engine for engine in engines if engine.is_prefill]
        self.decodes = [engine for engine in engines if not engine.is_prefill]
        self.requests: list[Request] = []
        self._events = Events()
        self._device = SharedDevice(self._events)
        processors = SharedDevice(self._events)
        contention = Contention("frontend")
        if times.shares_processors:
            processors = self._device
            contention = times.decode_contention
        self._frontends = {
            engine: Frontend(processors, contention) for engine in engines
        }

    @property
    def now(self) -> float:
        return self._events.now

    def run(self, requests: Sequence[Request]) -> None:
        """Simulate until all requests and their follow-ups have finished."""
        for request in requests:
            self._add(request)
        self._events.run()

    def _add(self, request: Request) -> None:
        self.requests.append(request)
        self._events.schedule(request.arrival_s, partial(self._arrive, request))

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        """Call `event` after some time. Without a delay, call it at once, so that the
        router sees its effect when it places the next request of the same moment.
        """
        if seconds:
            self._events.schedule(self.now + seconds, event)
        else:
            event()

    def _arrive(self, request: Request) -> None:
        engine = self.router.place_prompt(request)
        request.on_decode_server = not engine.is_prefill
        times = self.times
        self._work(
            engine,
            times.request_work_s,
            times.request_s,
            partial(self._pull_prefix, engine, request, self.router.lender),
        )

    def _work(
        self, engine: Engine, work_s: float, total_s: float, then: Callable[[], None]
    ) -> None:
        """Let a server's frontend work for a request, and call `then`.

        Args:
            work_s: processor time of the work.
            total_s: time until `then` is called, if no other work delays it. The part
                of `work_s` beyond `total_s` does not delay this request's `then`.
        """
        frontend = self._frontends[engine]
        first_s = min(work_s, total_s)
        frontend.add(first_s, partial(self._after, total_s - first_s, then))
        frontend.add(work_s - first_s)

    def _pull_prefix(
        self, engine: Engine, request: Request, lender: Engine | None
    ) -> None:
        """Pull a prefix of the prompt from another server or from the host's store, and
        then queue the request.

        Args:
            lender: the other server; None: pull from the store, if that saves time.
        """
        if lender is None:
            pull_s = self._pull_from_store_s(engine, request)
            self._after(pull_s, partial(self._enqueue, engine, request))
            return
        num_lender_blocks = lender.cached_blocks(request.hashes)
        num_missing = num_lender_blocks - engine.cached_blocks(request.hashes)
        num_pulled = max(num_missing, 0)
        if num_pulled:
            # The blocks count as cached immediately, but the request is queued only
            # when they have arrived.
            engine.cache(request.hashes[:num_lender_blocks])
        num_tokens = num_pulled * self.times.block_tokens
        sent_s = num_tokens * self.times.sent_token_s + self.times.lookup_s
        # The lender answers when its running step has ended.
        answered_at = max(lender.busy_until, self.now)
        self._events.schedule(
            answered_at + sent_s, partial(self._enqueue, engine, request)
        )

    def _pull_from_store_s(self, engine: Engine, request: Request) -> float:
        """Pull the blocks that the host's store has and the engine lacks, if a pull is
        faster than their computation. Return the seconds of the pull; 0 without a pull.
        """
        if engine.store is None:
            return 0.0
        num_stored = engine.store.cached_blocks(request.hashes)
        num_missing = num_stored - engine.cached_blocks(request.hashes)
        num_tokens = max(num_missing, 0) * self.times.block_tokens
        pull_s = self.times.lookup_s + num_tokens * self.times.stored_token_s
        if num_tokens * self.times.token_s <= pull_s:
            return 0.0
        engine.cache(request.hashes[:num_stored])
        return pull_s

    def _enqueue(self, engine: Engine, request: Request) -> None:
        engine.admit(request)
        self._start_step(engine)

    def _start_step(self, engine: Engine) -> None:
        if not engine.is_busy and (engine.waiting or engine.streams):
            engine.is_busy = True
            end, computed = engine.step(self.now)
            engine.busy_until = end
            contention = self.times.decode_contention
            if engine.step_prompt_tokens:
                contention = self.times.prompt_contention
            on_end = partial(self._end_step, engine, self.now, computed)
            self._device.start(end - self.now, contention, on_end)

    def _end_step(
        self, engine: Engine, started_at: float, computed: list[Request]
    ) -> None:
        engine.record_step(self.now - started_at)
        self._deliver_tokens(engine)
        for request in engine.generate_tokens(self.now):
            self._finish(request)
        for request in computed:
            if engine.is_prefill:
                self._after(
                    max(self.times.handoff_s - self.times.handoff_work_s, 0.0),
                    partial(self._hand_over, request),
                )
            else:
                self.router.on_computed(request)
                if not self._end_at_first_token(request):
                    engine.start_stream(request, self.now)
        # While these events run, the engine stays busy: the next step starts only when
        # all of their streams have joined.
        while engine.after_step:
            engine.after_step.popleft()()
        engine.is_busy = False
        self._start_step(engine)

    def _deliver_tokens(self, engine: Engine) -> None:
        num_tokens = len(engine.streams)
        if num_tokens:
            work_s = self.times.delivery_s + num_tokens * self.times.delivery_token_s
            self._frontends[engine].add(work_s)

    def _end_at_first_token(self, request: Request) -> bool:
        """End a request with only one output token when its prompt has been computed.
        Return whether the request has ended.
        """
        if request.output_tokens > 1:
            return False
        request.first_token_s = self.now
        request.last_token_s = self.now
        request.generated_tokens = 1
        self._finish(request)
        return True

    def _finish(self, request: Request) -> None:
        self.router.on_finished(request)
        next_request = self._follow_up(request, self.now)
        if next_request is not None:
            self._add(next_request)

    def _hand_over(self, request: Request) -> None:
        """Hand over a request with a computed prompt to its decode server."""
        self.router.on_computed(request)
        engine = self.router.place_stream(request)
        work_s = self.times.handoff_work_s
        total_s = min(work_s, self.times.handoff_s)
        self._work(engine, work_s, total_s, partial(self._accept, engine, request))

    def _accept(self, engine: Engine, request: Request) -> None:
        """Let the decode server accept a request.

        On a CPU, an engine reads its messages only between steps. On a GPU, it also
        reads them while a step runs.
        """
        if engine.is_busy and self.times.shares_processors:
            engine.after_step.append(partial(self._send, engine, request))
        else:
            self._send(engine, request)

    def _send(self, engine: Engine, request: Request) -> None:
        """Deliver the first token, and send the KV of the prompt to a decode server."""
        if self._end_at_first_token(request):
            return
        request.first_token_s = self.now
        request.last_token_s = self.now
        times = self.times
        sent_s = times.sent_s + request.prompt_tokens * times.sent_token_s
        self._after(sent_s, partial(self._deliver, engine, request))

    def _deliver(self, engine: Engine, request: Request) -> None:
        """Start the stream of a request, at the earliest when a running step ends."""
        if engine.is_busy:
            engine.after_step.append(partial(self._join, engine, request))
            return
        self._join(engine, request)
        self._start_step(engine)

    def _join(self, engine: Engine, request: Request) -> None:
        engine.deliver(request, self.now)

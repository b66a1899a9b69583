"""The engine core: takes requests in, runs steps, and sends every token out exactly once.

One thread, one loop:

    inputs (add, abort) -> role.poll (what pulls and leases have done) -> schedule -> launch
    -> result of the step launched before -> tokens out -> ...

When nothing can be computed the loop sleeps on its sockets; the role's threads wake it.

An executor says how many steps may be under way while the next one is planned and launched (its
`depth`): none on a CPU, one on a GPU, where the work of a round hides behind it. A step is then
planned as if no sequence ended in the one before; one that did has its extra token dropped. Where
that cannot be (a preemption may be due, a grammar wants the last token) the round first takes in
the result. The scheduler keeps a released block from everyone until no launched step refers to it
(I8).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass
from typing import Protocol

from engine.batch import PendingStep, StepInput, StepOutput, build_step
from engine.grammar import Ending, GrammarCompiler, StepMasks
from engine.role import CoreServices, KVRole
from engine.scheduler import Plan, Scheduled, Scheduler
from engine.sequence import Phase, Sequence
from engine.shaping import ShapeBook
from kvcache.blocks import BlockState
from protocol.errors import BatonError, ContextLengthExceeded, GrammarFailed
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineInput,
    ErrorInfo,
    ReleaseRemote,
    TokenDelta,
    TokenLogprobs,
)
from protocol.metrics import stat_key

logger = logging.getLogger("baton.engine")

_IDLE_WAIT_S = 1.0  # the loop also looks around this often when nothing wakes it
_STATS_INTERVAL_S = 0.25
_SILENT_S = 1.0  # after which an engine with requests speaks, if only to show that it is alive
_QUIET_S = 5.0  # after which the books are checked, once: for many blocks that takes a while
_TOTALS = (
    "baton_engine_steps",
    "baton_engine_step_tokens",
    "baton_engine_step_seconds",
    "baton_prefix_cache_query_tokens",
    "baton_prefix_cache_hit_tokens",
)


class Executor(Protocol):
    """Runs steps on every rank, in the order of their launches."""

    @property
    def depth(self) -> int:
        """Steps that may be under way when another is launched."""

    def launch(self, step: StepInput) -> PendingStep: ...


@dataclass(frozen=True)
class _Launched:
    scheduled: list[Scheduled]
    pending: PendingStep
    num_tokens: int
    started_s: float


class Transport(Protocol):
    """The core's side of the link to the HTTP process."""

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        """Waits for input or a wake-up. Returns the messages, and whether the link asks to end."""

    def wake(self) -> None: ...

    def send(self, deltas: list[TokenDelta]) -> None: ...

    def send_stats(self, values: dict[str, float]) -> None: ...


class EngineCore(CoreServices):
    """Owns the sequences of one engine. Everything here runs on the thread that calls `run`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        role: KVRole,
        transport: Transport,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.role = role
        self.transport = transport
        self.grammars = grammars
        self.sequences: dict[str, Sequence] = {}
        self._shape_book = ShapeBook()
        self._compiling: dict[Sequence, None] = {}  # to be enqueued once their grammars are there
        self._outbox: list[TokenDelta] = []
        self._launched: deque[_Launched] = deque()
        self._last_finish_s = 0.0
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._last_stats: dict[str, float] = {}
        self._stats_due_s = 0.0
        self._check_due_s = 0.0
        role.bind(self)

    # -- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until the transport says to end."""
        self._report_stats()  # a server that nobody has asked yet has its capacity to show
        progressed = False
        while True:
            messages, ended = self.transport.receive(0.0 if progressed else _IDLE_WAIT_S)
            if ended:
                return
            progressed = self.round(messages)
            self._report_stats()
            self._check_when_quiet(busy=progressed or bool(messages) or not self.is_idle)

    def _check_when_quiet(self, *, busy: bool) -> None:
        now_s = time.monotonic()
        if busy:
            self._check_due_s = now_s + _QUIET_S
        elif now_s >= self._check_due_s:
            self._check_due_s = math.inf
            self.check_integrity()

    def round(self, messages: Sequenceable[EngineInput]) -> bool:
        """One pass of the loop. True if another should follow at once."""
        for message in messages:
            self._take(message)
        self.role.poll()
        for sequence in list(self._compiling):
            self.enqueue(sequence)
        was_under_way = bool(self._launched)
        if was_under_way and self._must_know():
            self._finish_steps(0)
        plan = self.scheduler.schedule()
        self._begin(plan)
        if plan.scheduled:
            masks = self._masks(plan.scheduled)
            step = build_step(plan.scheduled, self._shape_book, masks)
            self._flush()  # first tokens do not wait for the step
            self._launch(plan.scheduled, step)
        self._finish_steps(self.executor.depth if plan.scheduled else 0)
        self._flush()
        return bool(was_under_way or plan.scheduled or plan.receiving or plan.preempted)

    def _must_know(self) -> bool:
        """Whether the next step cannot be planned before the launched one has finished."""
        if not all(sequence.runs_ahead for sequence in self.scheduler.running):
            return True
        return self.scheduler.may_preempt()

    def _launch(self, scheduled: list[Scheduled], step: StepInput) -> None:
        started_s = time.perf_counter()
        pending = self.executor.launch(step)
        self.scheduler.launched(scheduled)
        self._launched.append(_Launched(scheduled, pending, len(step.token_ids), started_s))

    def _finish_steps(self, num_left: int) -> None:
        """Takes in the results of all launched steps but the last `num_left`."""
        while len(self._launched) > num_left:
            step = self._launched.popleft()
            output = step.pending.result()
            now_s = time.perf_counter()
            self._totals["baton_engine_steps"] += 1
            self._totals["baton_engine_step_tokens"] += step.num_tokens
            self._totals["baton_engine_step_seconds"] += now_s - max(
                step.started_s, self._last_finish_s
            )
            self._last_finish_s = now_s
            self.scheduler.step_finished()
            self._commit(step.scheduled, output)

    @property
    def is_idle(self) -> bool:
        return not (self.sequences or self._launched)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()

    # -- requests in -------------------------------------------------------------------------

    def _take(self, message: EngineInput) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AbortRequest):
            self._abort(message.request_id)
        elif isinstance(message, ReleaseRemote):
            self.role.on_release(message.remote)

    def _add(self, request: AddRequest) -> None:
        sequence = Sequence.from_request(request)
        if len(request.token_ids) >= self.scheduler.limits.max_model_len:
            # The HTTP process checks this with a proper message; this is the engine's own guard.
            self._emit_error(sequence, _too_long(request, self.scheduler.limits.max_model_len))
            return
        self.sequences[request.request_id] = sequence
        self.role.on_add(sequence)

    def _abort(self, request_id: str) -> None:
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            self.role.on_abort_unknown(request_id)
            return
        self._compiling.pop(sequence, None)
        if not self.role.on_abort(sequence):
            self.scheduler.finish(sequence)
        sequence.phase = Phase.FINISHED
        self._outbox.append(
            TokenDelta(request_id=request_id, finish_reason="abort", usage=sequence.usage())
        )

    # -- services to the role ----------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        try:
            if not self._prepare_grammar(sequence):
                return
        except GrammarFailed as error:
            self.role.on_abort(sequence)
            self.fail(sequence, error)
            return
        reason = sequence.finish_reason(self.scheduler.limits.max_model_len)
        if reason is not None:  # it ends with the token it came with, and needs no block
            self._emit_first(sequence)
            self._finish(sequence, reason)
            return
        self.scheduler.add(sequence)

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        del self.sequences[sequence.request_id]
        self._compiling.pop(sequence, None)
        self._emit_error(sequence, error)

    def wake(self) -> None:
        self.transport.wake()

    # -- grammars ----------------------------------------------------------------------------

    def _prepare_grammar(self, sequence: Sequence) -> bool:
        """Gives a sequence its place in its grammar, if it has one; False while that is compiled.

        Raises:
            GrammarFailed: it cannot be.
        """
        grammar = sequence.request.sampling.grammar
        if grammar is None or sequence.grammar is not None:
            return True
        if self.grammars is None:
            raise GrammarFailed("this engine follows no grammars")
        if not self.grammars.is_compiled(grammar):
            self._compiling[sequence] = None
            return False
        self._compiling.pop(sequence, None)
        sequence.grammar = self.grammars.state(sequence.request)
        return True

    def _masks(self, scheduled: Sequenceable[Scheduled]) -> StepMasks | None:
        drawing = [item.sequence for item in scheduled if item.samples]
        if self.grammars is None or all(s.request.sampling.grammar is None for s in drawing):
            return None
        return self.grammars.masks([s.grammar for s in drawing])

    def _end_by_grammar(self, sequence: Sequence, ending: Ending) -> None:
        """Nothing could be drawn: the token that was drawn all the same is void."""
        if ending.error is None:
            self._finish(sequence, "stop")
        else:
            self.scheduler.finish(sequence)
            self.fail(sequence, ending.error)

    # -- a round's work ----------------------------------------------------------------------

    def _begin(self, plan: Plan) -> None:
        for sequence in plan.admitted:
            hits = min(sequence.num_computed, sequence.num_prompt_tokens)
            self._totals["baton_prefix_cache_query_tokens"] += sequence.num_prompt_tokens
            self._totals["baton_prefix_cache_hit_tokens"] += hits
            self._emit_first(sequence)
        for sequence in plan.receiving:
            self.role.on_receive(sequence)

    def _commit(self, scheduled: list[Scheduled], output: StepOutput) -> None:
        drawn = iter(zip(output.token_ids, output.logprobs, strict=True))
        for item in scheduled:
            token = next(drawn) if item.samples else None
            if item.sequence.phase is not Phase.RUNNING:
                continue  # it ended after the step was launched
            self.scheduler.computed(item)
            if token is not None:
                self._append(item.sequence, *token)

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if sequence.grammar is not None and sequence.grammar.ending is not None:
            self._end_by_grammar(sequence, sequence.grammar.ending)
            return
        sequence.append_output(token_id)
        if sequence.num_outputs == 1:
            sequence.first_logprobs = logprobs
        reason = sequence.finish_reason(self.scheduler.limits.max_model_len)
        if reason is None:
            self._emit_token(sequence, token_id, logprobs)
        else:
            self._finish(sequence, reason, token_id, logprobs)

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        params = self.role.on_finish(sequence)
        self.scheduler.finish(sequence)
        del self.sequences[sequence.request_id]
        self._outbox.append(
            TokenDelta(
                request_id=sequence.request_id,
                token_ids=[] if token_id is None else [token_id],
                logprobs=None if logprobs is None else [logprobs],
                finish_reason=reason,
                usage=sequence.usage(),
                kv_transfer_params=params,
            )
        )

    # -- out ---------------------------------------------------------------------------------

    def _emit_first(self, sequence: Sequence) -> None:
        """Sends the token that the prefill server drew, once, before any KV has moved."""
        first, sequence.first_token = sequence.first_token, None
        if first is not None:
            self._emit_token(sequence, first.id, first.logprobs)

    def _emit_token(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> None:
        if sequence.request.sampling.num_logprobs is None:
            logprobs = None
        self._outbox.append(
            TokenDelta(
                request_id=sequence.request_id,
                token_ids=[token_id],
                logprobs=None if logprobs is None else [logprobs],
            )
        )

    def _emit_error(self, sequence: Sequence, error: BatonError) -> None:
        info = ErrorInfo(error.code, error.message, error.param)
        self._outbox.append(TokenDelta(request_id=sequence.request_id, error=info))

    def _flush(self) -> None:
        if self._outbox:
            self.transport.send(self._outbox)
            self._outbox = []

    # -- observability -----------------------------------------------------------------------

    def _report_stats(self) -> None:
        now_s = time.monotonic()
        if now_s < self._stats_due_s and not self.is_idle:
            return
        values = self.stats()
        overdue = not self.is_idle and now_s >= self._stats_due_s + _SILENT_S
        if values != self._last_stats or overdue:
            self.transport.send_stats(values)
            self._last_stats = values
            self._stats_due_s = now_s + _STATS_INTERVAL_S

    def stats(self) -> dict[str, float]:
        """Values by series (protocol.metrics)."""
        scheduler = self.scheduler
        counts = scheduler.allocator.counts()
        blocks = {
            stat_key("baton_kv_blocks", state=state.name.lower()): float(counts[state])
            for state in BlockState
        }
        return {
            **blocks,
            "baton_kv_blocks_capacity": float(scheduler.allocator.capacity),
            "baton_kv_block_size_tokens": float(scheduler.limits.block_size),
            "baton_requests_running": float(len(scheduler.running)),
            "baton_requests_waiting": float(len(scheduler.waiting)),
            "baton_requests_receiving": float(len(scheduler.receiving)),
            "baton_preemptions": float(scheduler.num_preemptions),
            **{name: float(value) for name, value in self._totals.items()},
            **self.role.stats(),
        }


def _too_long(request: AddRequest, max_model_len: int) -> BatonError:
    return ContextLengthExceeded(
        f"the prompt has {len(request.token_ids)} tokens and the context {max_model_len}; "
        "shorten the prompt",
        param="prompt",
    )

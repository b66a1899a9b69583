"""The engine core: takes requests in, runs steps, and sends every token out exactly once.

One thread, one loop:

    inputs (add, abort) -> connector.poll (what pulls and leases have done) -> schedule -> launch
    -> result of the step launched before -> tokens out -> ...

When nothing can be computed the loop sleeps on its sockets; the connector's threads wake it.

On a GPU (`Executor.depth`) a step may be under way while the next one is planned and launched, as
if no sequence ended in it; one that did has its extra token dropped. A sequence that cannot be
planned so (its choices fork off with the result) sits a step out, and nothing is planned behind a
long step. Where a preemption may be due the
round first takes in the result. A step with grammars is launched up to its logits; its tokens are
drawn once the masks are known, which follow from the step before.

An exception that is one request's ends that request alone: a step that could not be launched, or
drawn, while the device is well and no other rank has begun it, is taken again one sequence at a
time. Everything else (the device, a collective, the books of the blocks) ends the engine.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.batch import (
    Executor,
    PendingStep,
    StepFailed,
    StepInput,
    StepOutput,
    build_step,
)
from engine.core.connector import CoreServices, KVConnector
from engine.core.core_grammar import CoreGrammars
from engine.core.logits_processing import ShapeBook
from engine.core.output_processor import SILENT_S, CoreStats, Draw, OutputProcessor
from engine.core.scheduler import Plan, Scheduled, Scheduler
from engine.core.sequence import Phase, Sequence
from engine.process.transport import EngineTransport
from kvcache.blocks import BlockError
from protocol.errors import BatonError, GrammarFailed, InternalError, Overloaded
from protocol.messages import (
    MOVED,
    AbortRequest,
    AddRequest,
    EngineInput,
    EngineStats,
    Migrate,
    ReleaseRemote,
    TokenLogprobs,
)

logger = logging.getLogger("baton.engine")

_NAP_S = 0.00005  # between two looks at a step that the device has not ended
_MANY_TOKENS = (
    1024  # from which on a step takes as long as they do; below, as the weights do
)
_LONG_STEP_S = 0.1
_IDLE_WAIT_S = 1.0  # the loop also looks around this often when nothing wakes it
_QUIET_S = (
    5.0  # after which the books are checked, once: for many blocks that takes a while
)


@dataclass(frozen=True)
class _Launched:
    scheduled: list[Scheduled]
    pending: PendingStep
    num_tokens: int
    started_s: float
    late: set[Sequence] = field(
        default_factory=set
    )  # draw nothing: they sit the step out


class EngineCore(CoreServices):
    """Owns the sequences of one engine. Everything here runs on the thread that calls `run`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        connector: KVConnector,
        transport: EngineTransport,
        grammars: CoreGrammars,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.connector = connector
        self.transport = transport
        self.grammars = grammars
        self.sequences: dict[str, Sequence] = {}
        self._seconds_per_token = 0.0  # of the last step of many tokens
        self._shape_book = ShapeBook()
        self._output = OutputProcessor()
        self._launched: deque[_Launched] = deque()
        self._moving: dict[
            str, Sequence
        ] = {}  # that go on elsewhere, as soon as they run
        self._last_finish_s = 0.0
        self._is_last = (
            False  # whether the link asked to end while a step was waited for
        )
        self._stats = CoreStats()
        connector.bind(self)

    def run(self) -> None:
        """Serves until the transport says to end."""
        self._report_stats()  # a server that nobody has asked yet has its capacity to show
        progressed, check_due_s = False, 0.0
        while True:
            messages, ended = self.transport.receive(
                0.0 if progressed else _IDLE_WAIT_S
            )
            if ended:
                return
            progressed = self.round(messages)
            if self._is_last:
                return
            self._report_stats()
            if progressed or messages or not self.is_idle:
                check_due_s = time.monotonic() + _QUIET_S
            elif time.monotonic() >= check_due_s:
                check_due_s = math.inf
                self.scheduler.check_integrity()

    def round(self, messages: Sequenceable[EngineInput]) -> bool:
        """One pass of the loop. True if another should follow at once."""
        for message in messages:
            self._take(message)
        self.connector.poll()
        was_under_way = bool(self._launched)
        if was_under_way and (
            self._is_long(self._launched[-1]) or self.scheduler.may_preempt()
        ):
            self.finish_steps(0)
        if self._moving:
            self._move()
        for sequence in list(self.grammars.compiling):
            self.enqueue(sequence)
        for sequence, error in self.grammars.overdue():
            self.fail(sequence, error)
        plan = self.scheduler.schedule()
        self._begin(plan)
        if plan.scheduled:
            try:
                self._step(plan.scheduled)
            except StepFailed as error:
                self._step_one_by_one(plan.scheduled, error)
        self.finish_steps(self.executor.depth if plan.scheduled else 0)
        self._flush()
        return bool(was_under_way or plan.scheduled or plan.receiving or plan.preempted)

    def _step(self, scheduled: list[Scheduled]) -> None:
        try:
            step = build_step(scheduled, self._shape_book)
        except Exception as error:
            raise StepFailed(f"its arrays could not be made: {error!r}") from error
        self._flush()  # first tokens do not wait for the step
        if step.is_masked:
            self._launch_masked(scheduled, step)
        else:
            self._launch(scheduled, step)

    def _step_one_by_one(self, scheduled: list[Scheduled], error: StepFailed) -> None:
        """Instead of a step that failed."""
        logger.warning(
            "a step of %d sequences is taken one by one", len(scheduled), exc_info=error
        )
        self.finish_steps(0)
        for item in scheduled:
            sequence = item.sequence
            if sequence.phase is not Phase.RUNNING or not sequence.num_uncomputed:
                continue  # it ended with the step before
            try:
                num_tokens = min(item.num_tokens, sequence.num_uncomputed)
                self._step([Scheduled.next_of(sequence, num_tokens)])
            except StepFailed as alone:
                self._give_up(sequence, alone)
            self.finish_steps(0)

    def _launch_masked(self, scheduled: list[Scheduled], step: StepInput) -> None:
        """The masks are found while the step computes its logits: at once, or when the tokens of
        the step before are there."""
        is_first = not self._launched
        if is_first:
            self.grammars.begin_masks(scheduled)
        try:
            pending = self._launch(scheduled, step)
        except StepFailed:
            if is_first:  # other threads fill them, and shall not go on with these
                self.grammars.masks(scheduled, however_late=True)
            raise
        if not is_first:
            self.finish_steps(1)
            self.grammars.begin_masks(scheduled)
        allowed, late = self.grammars.masks(scheduled)
        try:
            pending.draw(allowed)
        except StepFailed:
            self._launched.pop()  # no other was under way
            self.scheduler.step_undrawn(scheduled)
            raise
        for sequence in late:  # its last token is to be computed again
            sequence.unlaunch(1, drew=True)
        self._launched[-1].late.update(late)

    def _launch(self, scheduled: list[Scheduled], step: StepInput) -> PendingStep:
        started_s = time.perf_counter()
        pending = self.executor.launch(step)
        self.scheduler.launched(scheduled)
        self._launched.append(
            _Launched(scheduled, pending, len(step.token_ids), started_s)
        )
        return pending

    def finish_steps(self, num_left: int) -> None:
        """Takes in the results of all launched steps but the last `num_left`."""
        while len(self._launched) > num_left:
            self._wait_for(self._launched[0].pending)
            step = self._launched.popleft()
            output = step.pending.result()
            now_s = time.perf_counter()
            seconds = now_s - max(step.started_s, self._last_finish_s)
            num_of_prompts = sum(
                item.num_tokens for item in step.scheduled if item.is_prompt
            )
            self._stats.step_ended(step.num_tokens, num_of_prompts, seconds)
            if step.num_tokens >= _MANY_TOKENS:
                self._seconds_per_token = seconds / step.num_tokens
            self._last_finish_s = now_s
            self.scheduler.step_finished(seconds)
            self._commit(step, output)

    def _wait_for(self, pending: PendingStep) -> None:
        """Until a launched step has ended. Who comes meanwhile has their pull begun at once, which
        is over, mostly, before the next step is planned; their first tokens go out."""
        silent_from_s = (
            time.monotonic() + SILENT_S
        )  # an engine that hangs shall not seem alive
        while not pending.has_ended():
            if time.monotonic() < silent_from_s:
                self._hear()
            time.sleep(_NAP_S)

    def _is_long(self, step: _Launched) -> bool:
        """Whether it takes so long that the next one is planned when it has ended: who comes
        meanwhile waits for one step then, not for two, which is worth the millisecond."""
        is_large = step.num_tokens >= _MANY_TOKENS
        return is_large and step.num_tokens * self._seconds_per_token > _LONG_STEP_S

    def _hear(self) -> None:
        messages, is_last = self.transport.receive(0.0)
        self._is_last = self._is_last or is_last
        num_waiting = len(self.scheduler.waiting)
        for message in messages:
            self._take(message)
        self.connector.poll()
        if len(self.scheduler.waiting) > num_waiting:
            self._begin(self.scheduler.admit_remote())
        self._flush()

    @property
    def is_idle(self) -> bool:
        return not (self.sequences or self._launched)

    def _take(self, message: EngineInput) -> None:
        match message:
            case AddRequest():  # the HTTP process has refused what no engine of this size answers
                sequence = self.sequences[message.request_id] = Sequence.from_request(
                    message
                )
                self.connector.on_add(sequence)
            case AbortRequest(request_id, choice):
                self._abort(request_id, choice)
            case Migrate(request_id):
                if found := self.sequences.get(request_id):
                    self._moving[request_id] = found
            case ReleaseRemote(remote):
                self.connector.on_release(remote)

    def _abort(self, request_id: str, choice: int | None) -> None:
        first = self.sequences.get(request_id)
        if first is not None:
            wanted = (
                first.choices if choice is None else first.choices[choice : choice + 1]
            )
            self._end_choices([(sequence, "abort") for sequence in wanted])
        elif choice is None:
            self.connector.on_abort_unknown(request_id)

    def _move(self) -> None:
        """Hands over what runs and has an output: its client knows all that its KV is of."""
        self.finish_steps(0)
        for name, sequence in list(self._moving.items()):
            left = [choice for choice in sequence.choices if not choice.has_ended]
            if left and all(
                one.phase is Phase.RUNNING and one.is_decoding for one in left
            ):
                left[0].is_moving = True
                for choice in left:
                    self.grammars.forget(choice)
                try:
                    self._end_choices([(choice, MOVED) for choice in left])
                except (BlockError, AssertionError):
                    raise
                except Exception as error:
                    self._give_up(sequence, error)
                left = []
            if not left:
                del self._moving[name]

    # -- services to the connector -----------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        try:
            if not self.grammars.prepare(sequence):
                return
        except GrammarFailed as error:
            self.fail(sequence, error)
            return
        self._output.compiled(sequence)
        self.found(sequence)
        if sequence.phase is not Phase.FINISHED:
            self.scheduler.add(sequence)

    def found(self, sequence: Sequence) -> None:
        ends = [(choice, self._finish_reason(choice)) for choice in sequence.choices]
        ending = [(choice, reason) for choice, reason in ends if reason is not None]
        if ending or sequence.phase is Phase.RECEIVING:
            self._output.found_elsewhere(sequence)
        self._end_choices(ending)  # with the token they came with: they need no block

    def _forget(self, sequence: Sequence) -> None:
        self.sequences.pop(sequence.request_id, None)
        if sequence.request.transfer_id is not None:
            self.connector.on_end(sequence)

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        for choice in sequence.choices:
            choice.has_ended = True
            self._stop(choice)
        self._forget(sequence)
        self._output.error(sequence, error)

    def wake(self) -> None:
        self.transport.wake()

    def _begin(self, plan: Plan) -> None:
        for sequence in plan.stuck:
            num = self.scheduler.allocator.capacity
            told = f"this request needs more than all {num} KV blocks: it would wait for ever"
            self.fail(
                sequence, Overloaded(f"{told}; raise --kv-cache-tokens or shorten it")
            )
        for sequence in plan.admitted:
            self._stats.admitted(sequence)
            self._output.found_elsewhere(sequence)
        if plan.receiving:
            self._flush()  # nor do they wait for a pull to be begun
        for sequence in plan.receiving:
            self.connector.on_receive(sequence)

    def _commit(self, step: _Launched, output: StepOutput) -> None:
        drawn = iter(zip(output.token_ids, output.logprobs, strict=True))
        scores = iter(output.scores)
        for item in step.scheduled:
            tokens = [next(drawn) for _ in item.draws]
            scored = next(scores) if item.scored else []
            if item.sequence in step.late:
                item, tokens = (
                    replace(item, num_tokens=item.num_tokens - 1, draws=()),
                    [],
                )
            if item.sequence.phase is not Phase.RUNNING:
                continue  # it ended after the step was launched
            try:
                self._commit_one(item, tokens, scored)
            except (BlockError, AssertionError):
                raise
            except Exception as error:
                self._give_up(item.sequence, error)

    def _commit_one(
        self,
        item: Scheduled,
        tokens: list[tuple[int, TokenLogprobs | None]],
        scored: list[TokenLogprobs],
    ) -> None:
        sequence = item.sequence
        self.scheduler.computed(item)
        if sequence.request.transfer_id is not None:
            self.connector.on_computed(sequence)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += scored
            self._output.prompt_logprobs(sequence)
        draws = [
            self._draw(choice, *token)
            for choice, token in zip(item.draws, tokens, strict=True)
            if not choice.has_ended
        ]
        if draws and sequence.times.drawn is None:
            sequence.times.drawn = time.monotonic()
        self.scheduler.fork_choices(sequence)
        for draw in draws:
            if draw.sequence.phase is Phase.FINISHED:
                continue  # another choice's error has ended the request
            if draw.error is not None:
                self.fail(draw.sequence, draw.error)
            elif draw.reason is None:
                self._output.token(draw)
            else:
                self._end(draw)
        if sequence.request.max_tokens == 0 and self._finish_reason(sequence):
            self._end_choices([(choice, "length") for choice in sequence.choices])

    def _draw(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> Draw:
        """Appends what was drawn. A choice that ends with it is marked, and told of later."""
        if sequence.grammar is not None and sequence.grammar.ending is not None:
            sequence.has_ended = (
                True  # nothing could be drawn: what was drawn all the same is void
            )
            return Draw(sequence, None, None, "stop", sequence.grammar.ending.error)
        sequence.token_ids.append(token_id)
        if sequence.num_outputs == 1:
            sequence.first_logprobs = logprobs
        reason = self._finish_reason(sequence)
        sequence.has_ended = reason is not None
        return Draw(sequence, token_id, logprobs, reason)

    def _finish_reason(self, sequence: Sequence) -> str | None:
        return sequence.finish_reason(self.scheduler.limits.max_model_len)

    # -- ends --------------------------------------------------------------------------------

    def _end_choices(self, ends: Sequenceable[tuple[Sequence, str]]) -> None:
        """Ends those of some choices that have not ended; first all are marked, so that a parent
        knows whether it has children left."""
        ending = [
            Draw(choice, reason=reason)
            for choice, reason in ends
            if not choice.has_ended
        ]
        for end in ending:
            end.sequence.has_ended = True
        for end in ending:
            self._end(end)

    def _end(self, end: Draw) -> None:
        """Lets go of a choice that is marked as ended, and says so."""
        params: dict[str, Any] | None = None
        choice = end.sequence
        parent = choice.choices[0]
        if choice.children:
            choice.end_but_for_children()
        elif not choice.is_forked:
            choice.phase = Phase.FINISHED
            if parent.has_ended and not parent.children:
                self._stop(parent)
        elif end.reason == "abort" or choice.phase is Phase.RECEIVING:
            self._stop(choice)
        else:
            params = self.connector.on_finish(choice)
            self.scheduler.finish(choice)
        self._output.token(end, params)
        if all(other.has_ended for other in choice.choices):
            self._forget(choice)

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        """Ends a request that the engine failed on, whatever became of its choices."""
        logger.error("request %s is ended alone", sequence.request_id, exc_info=error)
        reason = str(error).partition("\n")[0]
        self.fail(
            sequence, InternalError(f"The engine failed on this request: {reason}")
        )

    def _stop(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is."""
        if sequence.phase is Phase.FINISHED:
            return
        self.grammars.forget(sequence)
        if not self.connector.on_abort(sequence):
            self.scheduler.finish(sequence)
        sequence.phase = Phase.FINISHED

    def _flush(self) -> None:
        outputs = self._output.take()
        if outputs is not None:
            self.transport.send(outputs)

    def _report_stats(self) -> None:
        if news := self._stats.news(self.stats, is_idle=self.is_idle):
            self.transport.send(EngineStats(news))

    def stats(self) -> dict[str, float]:
        """Values by series (protocol.metrics)."""
        return {
            **self.scheduler.stats(),
            **self._stats.totals(),
            **self.connector.stats(),
        }

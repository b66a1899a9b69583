"""The engine core: receives requests, runs steps, and sends every token exactly once.

The engine core is one loop on one thread:

    inputs (add, abort) -> connector.poll (events of pulls and leases) -> schedule
    -> launch -> result of the previous step -> tokens out -> ...

When nothing can be computed, the loop sleeps until a message arrives or another thread
wakes it. Steps overlap as step_runner.py describes. If the next step may preempt a
sequence, the loop first waits for the results of all launched steps.

An exception that concerns one request ends only that request. Every other exception
(of the device, a collective, the accounting of blocks) ends the engine.
"""

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequenceable
from typing import Any

from engine.core.batch import Executor, StepOutput
from engine.core.connector import CoreServices, KVConnector
from engine.core.core_grammar import CoreGrammars, num_masked_draws
from engine.core.output_processor import Draw, OutputProcessor
from engine.core.scheduler import Plan, Scheduled, Scheduler
from engine.core.sequence import Phase, Sequence
from engine.core.state.choices import ChoiceState
from engine.core.stats import CoreStats, scheduler_stats
from engine.core.step_runner import InFlightStep, StepRunner
from engine.process.transport import EngineTransport
from engine.speculation.speculator import Speculator
from kvcache.blocks import BlockError
from protocol.errors import BatonError, GrammarFailed, InternalError, Overloaded
from protocol.messages import (
    CACHE_MISS,
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

_IDLE_WAIT_S = 1.0  # longest time that an idle loop waits for input
# The accounting of blocks is checked once when the engine has been idle for this time,
# because the check of many blocks would delay requests.
_IDLE_BEFORE_CHECK_S = 5.0


class EngineCore(CoreServices):
    """Owns the sequences of one engine. All methods run on the thread that calls `run`,
    except `wake`.

    Args:
        rank_stats: returns the values that rank 0 measures outside of the core, by
            metric series.

    Attributes:
        sequences: choice 0 of each open request, by request id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        connector: KVConnector,
        transport: EngineTransport,
        grammars: CoreGrammars,
        speculator: Speculator | None = None,
        rank_stats: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.connector = connector
        self.transport = transport
        self.grammars = grammars
        self.speculator = speculator or Speculator(scheduler.limits)
        self.sequences: dict[str, Sequence] = {}
        # Choice 0 of each request that migrates to another server as soon as its
        # choices decode, by request id.
        self._migrating: dict[str, Sequence] = {}
        self._output = OutputProcessor()
        self._stats = CoreStats(rank_stats)
        self._steps = StepRunner(
            scheduler, executor, grammars, self._stats, self, self.speculator
        )
        # Whether the transport was closed while a step was in flight.
        self._is_closed = False
        connector.bind(self)

    def run(self) -> None:
        """Serves until the transport is closed."""
        self._report_stats()  # a server without requests must report its capacity
        self.connector.poll()  # connects to a KV store before the first request
        has_progressed = False
        check_due_s = 0.0
        while True:
            timeout_s = 0.0 if has_progressed else _IDLE_WAIT_S
            messages, is_closed = self.transport.receive(timeout_s)
            if is_closed:
                return
            has_progressed = self.round(messages)
            if not has_progressed:
                self._steps.mark_idle()
            if self._is_closed:
                return
            self._report_stats()
            if has_progressed or messages or not self.is_idle:
                check_due_s = time.monotonic() + _IDLE_BEFORE_CHECK_S
            elif time.monotonic() >= check_due_s:
                check_due_s = math.inf
                self.scheduler.check_integrity()

    def round(self, messages: Sequenceable[EngineInput]) -> bool:
        """Runs one pass of the loop. Returns whether the next pass should follow
        immediately, without waiting for input."""
        for message in messages:
            self._handle(message)
        self.connector.poll()
        had_step_in_flight = bool(self._steps.in_flight)
        if had_step_in_flight and (
            self._steps.is_long_step_in_flight()
            or self.scheduler.may_preempt()
            or self.speculator.needs_results(self.scheduler.running)
        ):
            self.finish_steps(0)
        if self._migrating:
            self._migrate()
        for sequence in list(self.grammars.compiling):
            self.enqueue(sequence)
        for sequence, error in self.grammars.take_overdue():
            self.fail(sequence, error)
        self.speculator.propose(self.scheduler.running)
        plan = self.scheduler.schedule()
        self._apply_plan(plan)
        if plan.scheduled:
            is_delayed = self.speculator.take_delay()
            self._steps.run(plan.scheduled, is_delayed=is_delayed)
        self.finish_steps(self.executor.depth if plan.scheduled else 0)
        self.flush()
        has_changed = plan.admitted or plan.preempted or plan.stuck
        return bool(had_step_in_flight or plan.scheduled or has_changed)

    @property
    def is_idle(self) -> bool:
        return not (self.sequences or self._steps.in_flight)

    def finish_steps(self, num_left: int) -> None:
        """Waits for all launched steps except the last `num_left`, and commits their
        results."""
        self._steps.finish_steps(num_left)

    def _apply_plan(self, plan: Plan) -> None:
        """Starts the pulls of a plan, counts its admissions, and fails its stuck
        requests. The caller runs the plan's step."""
        for sequence in plan.stuck:
            capacity = self.scheduler.allocator.capacity
            error = Overloaded(
                f"this request needs more than the {capacity} KV blocks of this "
                "server, so it can never run; raise --kv-cache-tokens, or shorten the "
                "request"
            )
            self.fail(sequence, error)
        for sequence in plan.admitted:
            self._stats.count_admission(sequence)
            if self._end_if_not_cached(sequence):
                for choice in sequence.choices:
                    plan.remove(choice)
                continue
            self._output.add_remote_results(sequence)
        if plan.receiving:
            self.flush()  # first tokens must not wait for a pull to start
        for sequence in plan.receiving:
            self.connector.on_receive(sequence)

    # -- messages -----------------------------------------------------------------

    def _handle(self, message: EngineInput) -> None:
        match message:
            case AddRequest():
                # The HTTP process has already refused requests that are too large for
                # this engine.
                sequence = Sequence.from_request(message)
                self.sequences[message.request_id] = sequence
                self.connector.on_add(sequence)
            case AbortRequest(request_id, choice):
                self._abort(request_id, choice)
            case Migrate(request_id):
                if parent := self.sequences.get(request_id):
                    self._migrating[request_id] = parent
            case ReleaseRemote(remote):
                self.connector.on_release(remote)

    def _abort(self, request_id: str, choice: int | None) -> None:
        parent = self.sequences.get(request_id)
        if parent is not None:
            choices = list(parent.choices)
            if choice is not None:
                choices = choices[choice : choice + 1]
            self._end_choices([(sequence, "abort") for sequence in choices])
        elif choice is None:
            self.connector.on_abort_unknown(request_id)

    def _migrate(self) -> None:
        """Hands over each migrating request if all its open choices decode. Finishes
        all launched steps first, so that the client receives every token that has KV.
        """
        self.finish_steps(0)
        for request_id, parent in list(self._migrating.items()):
            open_choices = parent.choices.open_choices
            if not open_choices:
                del self._migrating[request_id]
            elif all(c.phase is Phase.RUNNING and c.is_decoding for c in open_choices):
                self._hand_over(parent, open_choices)
                del self._migrating[request_id]

    def _hand_over(self, parent: Sequence, open_choices: list[Sequence]) -> None:
        parent.choices.migrating = open_choices[0]
        for choice in open_choices:
            self.grammars.forget(choice)
        try:
            self._end_choices([(choice, MOVED) for choice in open_choices])
        except (BlockError, AssertionError):
            raise
        except Exception as error:
            self.give_up(parent, error)

    # -- services to the connector ------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        try:
            if not self.grammars.prepare(sequence):
                return
        except GrammarFailed as error:
            self.fail(sequence, error)
            return
        self._output.add_compiled(sequence)
        self.accept_first_tokens(sequence)
        if sequence.pull is not None and sequence.phase is not Phase.FINISHED:
            self._end_if_not_cached(sequence)
        if sequence.phase is not Phase.FINISHED:
            if sequence.times.queued is None:
                sequence.times.queued = time.monotonic()
            self.scheduler.add(sequence)

    def _end_if_not_cached(self, sequence: Sequence) -> bool:
        """Ends a request with too few cached tokens. Returns whether the request was
        ended. A request with a pull is checked before it waits for blocks. Any other
        request is checked at each admission, also after a preemption or failed pull."""
        if not sequence.has_too_few_cached_tokens:
            return False
        self._end_choices([(choice, CACHE_MISS) for choice in sequence.choices])
        return True

    def accept_first_tokens(self, sequence: Sequence) -> None:
        ends = []
        for choice in sequence.choices:
            reason = self._finish_reason(choice)
            if reason is not None:
                ends.append((choice, reason))
        if ends or sequence.phase is Phase.RECEIVING:
            self._output.add_remote_results(sequence)
        # A choice that ends with a first token from another server needs no blocks.
        self._end_choices(ends)

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        if sequence.request_id not in self.sequences:
            return  # the request has already ended
        sequence.choices.end_all()
        for choice in sequence.choices:
            self._stop(choice)
        self._forget(sequence)
        self._output.add_error(sequence, error)

    def wake(self) -> None:
        self.transport.wake()

    # -- services to the step runner ----------------------------------------------

    def serve_during_step(self) -> None:
        messages, is_closed = self.transport.receive(0.0)
        self._is_closed = self._is_closed or is_closed
        num_waiting = len(self.scheduler.waiting)
        for message in messages:
            self._handle(message)
        self.connector.poll()
        if len(self.scheduler.waiting) > num_waiting:
            self._apply_plan(self.scheduler.admit_remote())
        self.flush()

    def flush(self) -> None:
        outputs = self._output.take()
        if outputs is not None:
            if not self.sequences:
                self._report_stats()  # metrics must include the final outputs
            self.transport.send(outputs)

    def commit(self, step: InFlightStep, output: StepOutput) -> None:
        drawn = iter(zip(output.token_ids, output.logprobs, strict=True))
        scores = iter(output.scores)
        for item in step.scheduled:
            tokens = [next(drawn) for _ in item.draws]
            item_scores = next(scores) if item.scored else []
            if item.sequence in step.skipped:
                item = item.without_draws()
                tokens = []
            if item.sequence.phase is not Phase.RUNNING:
                continue  # the sequence ended after the step was launched
            try:
                if item.proposals:
                    self._commit_verification(item, tokens)
                else:
                    self._commit_item(item, tokens, item_scores)
            except (BlockError, AssertionError):
                raise
            except Exception as error:
                self.give_up(item.sequence, error)

    def step_committed(self, step: InFlightStep, cycle_s: float) -> None:
        self.speculator.record_step(step.scheduled, cycle_s, is_delayed=step.is_delayed)

    def _commit_item(
        self,
        item: Scheduled,
        tokens: list[tuple[int, TokenLogprobs | None]],
        scores: list[TokenLogprobs],
    ) -> None:
        sequence = item.sequence
        self.scheduler.commit(item)
        self.connector.on_computed(sequence)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs.add(scores)
            self._output.add_prompt_logprobs(sequence)
        draws = [
            self._append_draw(choice, token_id, logprobs)
            for choice, (token_id, logprobs) in zip(item.draws, tokens, strict=True)
            if not choice.choice_state.has_ended
        ]
        if draws and sequence.times.drawn is None:
            sequence.times.drawn = time.monotonic()
        self.scheduler.fork_choices(sequence)
        self._send_draws(draws)
        if sequence.request.max_tokens == 0 and self._finish_reason(sequence):
            self._end_choices([(choice, "length") for choice in sequence.choices])

    def _commit_verification(
        self, item: Scheduled, tokens: list[tuple[int, TokenLogprobs | None]]
    ) -> None:
        """Appends the tokens of a step that verified proposals, up to and including the
        first draw that differs from its proposal or ends the sequence."""
        sequence = item.sequence
        draws: list[Draw] = []
        num_accepted = 0
        num_masked = num_masked_draws(sequence, item.proposals)
        for index, (token_id, logprobs) in enumerate(tokens[:num_masked]):
            draws.append(self._append_draw(sequence, token_id, logprobs))
            is_accepted = item.proposals[index : index + 1] == (token_id,)
            num_accepted += is_accepted
            if draws[-1].reason is not None or not is_accepted:
                break
        # The commit publishes blocks by their tokens, so the tokens are appended first.
        self.scheduler.commit(item, num_committed=len(draws))
        self.connector.on_computed(sequence)
        self.speculator.record(sequence, item.proposals, num_accepted)
        self._send_draws(draws)

    def _send_draws(self, draws: list[Draw]) -> None:
        for draw in draws:
            if draw.sequence.phase is Phase.FINISHED:
                continue  # the error of another choice has ended the request
            if draw.error is not None:
                self.fail(draw.sequence, draw.error)
            elif draw.reason is None:
                self._output.add_token(draw)
            else:
                self._end(draw)

    def _append_draw(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> Draw:
        """Appends a drawn token to its choice. If the choice ends with this token,
        marks the choice as ended; the caller sends the end.
        """
        sampling = sequence.sampling
        if sampling.grammar is not None and sampling.grammar.ending is not None:
            # The grammar allowed no token, so the drawn token is dropped.
            sequence.choices.end(sequence)
            return Draw(sequence, None, None, "stop", sampling.grammar.ending.error)
        sequence.token_ids.append(token_id)
        if sequence.num_outputs == 1:
            sampling.first_logprobs = logprobs
        reason = self._finish_reason(sequence)
        if reason is not None:
            sequence.choices.end(sequence)
        return Draw(sequence, token_id, logprobs, reason)

    def _finish_reason(self, sequence: Sequence) -> str | None:
        return sequence.finish_reason(self.scheduler.limits.max_model_len)

    # -- ends ---------------------------------------------------------------------

    def _end_choices(self, ends: Sequenceable[tuple[Sequence, str]]) -> None:
        """Ends the given choices, except those that have already ended. First marks all
        these choices as ended, because the end of a parent depends on whether it has
        children left."""
        open_ends = [
            Draw(choice, reason=reason)
            for choice, reason in ends
            if not choice.choice_state.has_ended
        ]
        for end in open_ends:
            end.sequence.choices.end(end.sequence)
        for end in open_ends:
            self._end(end)

    def _end(self, end: Draw) -> None:
        """Ends a choice that is marked as ended: leases or releases its blocks, and
        sends its end to the client. A parent with children that have not forked keeps
        its blocks, and continues to compute the prompt for the children.
        """
        params: dict[str, Any] | None = None
        choice = end.sequence
        parent = choice.choices.parent
        if choice is parent and choice.choices.children:
            choice.continue_for_children()
        elif not choice.has_prompt:
            choice.phase = Phase.FINISHED
            is_prefilling = parent.choice_state is ChoiceState.PREFILLS_FOR_CHILDREN
            if is_prefilling and not parent.choices.children:
                parent.choices.end_prefill()
                self._stop(parent)
        elif end.reason in ("abort", CACHE_MISS) or choice.phase is Phase.RECEIVING:
            self._stop(choice)
        else:
            params = self.connector.on_finish(choice)
            self.scheduler.finish(choice)
        self._output.add_token(end, params)
        if not choice.choices.open_choices:
            self._forget(choice)

    def give_up(self, sequence: Sequence, error: Exception) -> None:
        """Ends a request because of an exception that concerns only this request."""
        logger.error(
            "The engine failed on request %s; ending this request alone.",
            sequence.request_id,
            exc_info=error,
        )
        reason = str(error).partition("\n")[0]
        self.fail(
            sequence, InternalError(f"The engine failed on this request: {reason}")
        )

    def _stop(self, sequence: Sequence) -> None:
        """Finishes a sequence in any phase and releases its blocks, without sending
        anything to the client."""
        if sequence.phase is Phase.FINISHED:
            return
        self.grammars.forget(sequence)
        if not self.connector.on_abort(sequence):
            self.scheduler.finish(sequence)
        sequence.phase = Phase.FINISHED

    def _forget(self, sequence: Sequence) -> None:
        """Removes a request after all its choices have ended."""
        self.sequences.pop(sequence.request_id, None)
        self.connector.on_end(sequence)

    # -- statistics ---------------------------------------------------------------

    def _report_stats(self) -> None:
        if values := self._stats.take_due_report(self.stats, len(self.sequences)):
            host_tier = self.connector.host_tier_report()
            self.transport.send(EngineStats(values, host_tier))

    def stats(self) -> dict[str, float]:
        """The metric values by series (protocol.metrics)."""
        return {
            **scheduler_stats(self.scheduler),
            **self._stats.totals(),
            **self.connector.stats(),
            **self.speculator.stats(),
        }

"""Launches steps and waits for their results.

On a GPU, the next step is planned and launched while a step is in flight
(`Executor.depth`). The plan assumes that no sequence ends in the step in flight. If a
sequence does end, the token that the next step draws for it is dropped. If the next
tokens of a sequence depend on the result of the step in flight, the sequence skips the
next step (`Sequence.awaits_result`). While a long step is in flight, no step is planned
(`is_long_step_in_flight`).

A step with grammars is launched up to its logits. The masks of the grammars depend on
the tokens of the previous step. When the masks are ready, the step's tokens are drawn.

If a step raises StepFailed, its sequences are retried one at a time.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.batch import (
    Executor,
    PendingStep,
    StepFailed,
    StepInput,
    StepOutput,
    build_step,
)
from engine.core.core_grammar import CoreGrammars
from engine.core.logits_processing import RowAllocator
from engine.core.plan import Scheduled
from engine.core.scheduler import Scheduler
from engine.core.sequence import Phase, Sequence
from engine.core.stats import MAX_SILENCE_S, CoreStats

logger = logging.getLogger("baton.engine")

_POLL_INTERVAL_S = 0.00005  # between two checks whether a step has ended
# The duration of a step with at least this many tokens is proportional to their number.
# The duration of a smaller step is mostly the time to read the weights.
_PROPORTIONAL_TOKENS = 1024
_LONG_STEP_S = 0.1  # no step is planned while a step with a longer expected time runs


@dataclass(frozen=True)
class InFlightStep:
    """A launched step. Its result has not been committed."""

    scheduled: list[Scheduled]
    pending: PendingStep
    num_tokens: int
    started_s: float
    is_delayed: bool  # see Speculator.take_delay
    # Sequences that draw no token in this step, because a mask was not ready.
    skipped: set[Sequence] = field(default_factory=set)
    # Steps of drafters that were launched directly after this step; see
    # StateSteps.follow.
    followers: list[PendingStep] = field(default_factory=list)


class StepCallbacks(Protocol):
    """The methods of the engine core that the step runner calls."""

    def flush(self) -> None:
        """Sends the collected outputs."""

    def serve_during_step(self) -> None:
        """Receives messages and starts pulls while a step is in flight."""

    def commit(self, step: InFlightStep, output: StepOutput) -> None:
        """Applies the result of a step to its sequences."""

    def step_committed(self, step: InFlightStep, cycle_s: float) -> None:
        """Records a step after its result was committed.

        Args:
            cycle_s: seconds from the end of the previous step to the end of this step,
                including the time that the host took to plan it.
        """

    def give_up(self, sequence: Sequence, error: Exception) -> None:
        """Ends a request because of an exception that concerns only this request."""


class StateSteps(Protocol):
    """The work of drafters that read hidden states (engine/speculation)."""

    def prepare(self, scheduled: Sequenceable[Scheduled], step: StepInput) -> StepInput:
        """Returns a step that also stores the hidden states that drafters need."""

    def follow(self) -> list[PendingStep]:
        """Launches the steps of drafters that directly follow a prepared step. Called
        after the prepared step has drawn, because a step must draw before any other
        step is launched."""


class StepRunner:
    """Launches the steps of one core, and commits their results in order.

    Attributes:
        in_flight: launched steps with results that are not committed, oldest first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        grammars: CoreGrammars,
        stats: CoreStats,
        core: StepCallbacks,
        states: StateSteps,
    ) -> None:
        self.in_flight: deque[InFlightStep] = deque()
        self._scheduler = scheduler
        self._executor = executor
        self._grammars = grammars
        self._stats = stats
        self._core = core
        self._states = states
        self._row_allocator = RowAllocator()
        # Measured in the last step of at least _PROPORTIONAL_TOKENS tokens.
        self._seconds_per_token = 0.0
        self._last_finish_s = 0.0  # when the last committed step finished
        # When the last committed step finished; None if the engine was idle since then.
        self._cycle_start_s: float | None = None
        self._is_delayed = False  # whether the step to be launched is delayed

    def run(self, scheduled: list[Scheduled], *, is_delayed: bool = False) -> None:
        """Launches a step. If the launch fails, runs its sequences one at a time.

        Args:
            is_delayed: see Speculator.take_delay.
        """
        self._is_delayed = is_delayed
        try:
            self._build_and_launch(scheduled)
        except StepFailed as error:
            self._retry_one_by_one(scheduled, error)

    def _build_and_launch(self, scheduled: list[Scheduled]) -> None:
        try:
            step = build_step(scheduled, self._row_allocator)
        except Exception as error:
            raise StepFailed(f"building the step's arrays failed: {error!r}") from error
        step = self._states.prepare(scheduled, step)
        self._core.flush()  # first tokens of other servers must not wait for the step
        if step.is_masked:
            self._launch_masked(scheduled, step)
        else:
            self._launch(scheduled, step)
        self.in_flight[-1].followers.extend(self._states.follow())

    def _retry_one_by_one(self, scheduled: list[Scheduled], error: StepFailed) -> None:
        logger.warning(
            "A step of %d sequences failed; retrying one sequence at a time.",
            len(scheduled),
            exc_info=error,
        )
        self.finish_steps(0)
        for item in scheduled:
            sequence = item.sequence
            if sequence.phase is not Phase.RUNNING or not sequence.num_uncomputed:
                continue  # the sequence ended with the previous step
            num_tokens = min(item.num_tokens, sequence.num_uncomputed)
            try:
                single = Scheduled.from_next_tokens(sequence, num_tokens)
                self._build_and_launch([single])
            except StepFailed as single_error:
                self._core.give_up(sequence, single_error)
            self.finish_steps(0)

    def _launch_masked(self, scheduled: list[Scheduled], step: StepInput) -> None:
        """Launches a step up to its logits, while other threads compute its masks.
        Draws its tokens when the masks are ready. If another step is in flight, the
        threads start when the tokens of that step are known.
        """
        is_only = not self.in_flight
        if is_only:
            self._grammars.begin_masks(scheduled)
        try:
            pending = self._launch(scheduled, step)
        except StepFailed:
            if is_only:
                # Wait for the threads that compute the masks, because a retry must
                # begin the masks anew.
                self._grammars.wait_for_masks(scheduled, wait_for_all=True)
            raise
        if not is_only:
            self.finish_steps(1)
            self._grammars.begin_masks(scheduled)
        masks, skipped = self._grammars.wait_for_masks(scheduled)
        try:
            pending.draw(masks)
        except StepFailed:
            self.in_flight.pop()  # the failed step, which was the only one in flight
            self._scheduler.draw_failed(scheduled)
            raise
        for item in scheduled:
            if item.sequence in skipped:
                # A later step computes these tokens again, and then draws.
                num_tokens = item.num_drawing_tokens
                item.sequence.unlaunch(num_tokens, num_awaited=num_tokens)
                item.sequence.speculation.is_paused = True
        self.in_flight[-1].skipped.update(skipped)

    def _launch(self, scheduled: list[Scheduled], step: StepInput) -> PendingStep:
        started_s = time.perf_counter()
        pending = self._executor.launch(step)
        self._scheduler.step_launched(scheduled)
        num_tokens = len(step.token_ids)
        self.in_flight.append(
            InFlightStep(scheduled, pending, num_tokens, started_s, self._is_delayed)
        )
        return pending

    def finish_steps(self, num_left: int) -> None:
        """Waits for all launched steps except the last `num_left`, and commits their
        results."""
        while len(self.in_flight) > num_left:
            self._wait_for(self.in_flight[0].pending)
            step = self.in_flight.popleft()
            output = step.pending.result()
            if any(item.sequence.request.retain_kv for item in step.scheduled):
                # The draft KV must be complete, because peers may read it once the step
                # is committed.
                for follower in step.followers:
                    follower.result()
            now_s = time.perf_counter()
            seconds = now_s - max(step.started_s, self._last_finish_s)
            num_prompt_tokens = sum(
                item.num_tokens for item in step.scheduled if item.is_prompt
            )
            self._stats.count_step(step.num_tokens, num_prompt_tokens, seconds)
            if step.num_tokens >= _PROPORTIONAL_TOKENS:
                self._seconds_per_token = seconds / step.num_tokens
            cycle_start_s = self._cycle_start_s or step.started_s
            self._last_finish_s = now_s
            self._cycle_start_s = now_s
            self._scheduler.step_finished(seconds)
            self._core.commit(step, output)
            self._core.step_committed(step, now_s - cycle_start_s)

    def mark_idle(self) -> None:
        """Records that the engine waits for requests, so that this time is not counted
        as part of a step."""
        self._cycle_start_s = None

    def _wait_for(self, pending: PendingStep) -> None:
        """Waits until a launched step has ended.

        Requests that arrive while a step runs start their pulls immediately, and their
        first tokens are sent. Most pulls finish before the next step is planned.
        """
        # While messages are served, the engine appears to be alive. If the device
        # hangs, the engine must not appear to be alive, so serving ends at this time.
        serve_until_s = time.monotonic() + MAX_SILENCE_S
        while not pending.has_ended():
            if time.monotonic() < serve_until_s:
                self._core.serve_during_step()
            time.sleep(_POLL_INTERVAL_S)

    def is_long_step_in_flight(self) -> bool:
        """Whether the last launched step is long, so that the next step must be planned
        only after its end.

        Requests that arrive while the long step runs then wait for one step instead of
        two. The price is that the device is idle for about a millisecond.
        """
        if not self.in_flight:
            return False
        num_tokens = self.in_flight[-1].num_tokens
        expected_s = num_tokens * self._seconds_per_token
        return num_tokens >= _PROPORTIONAL_TOKENS and expected_s > _LONG_STEP_S

"""Measures the durations of steps when an engine starts. The budget for prompt tokens
(engine/core/budget) is based on these durations.

Rank 0 runs the steps through the executor that later serves requests. All ranks
therefore take part, and steps are launched ahead as they are for requests. Token ids
are random, because equal tokens would all be routed to the same experts.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from engine.core.batch import Executor, PendingStep, StepFailed, StepInput
from engine.core.budget.measurement import StepSizes, measure
from engine.core.budget.step_target import StepTarget
from engine.core.budget.step_times import Load, Point, Polyline, StepTimes
from engine.worker.runner import ModelRunner
from engine.worker.warm_up import WarmUpSizes

logger = logging.getLogger("baton.engine")

# Time limit in seconds of all measurements together, by device. A measurement that is
# expected to exceed the limit is skipped. The limits are short compared to the start of
# a server, which takes a few seconds on a CPU and half a minute on a GPU.
MAX_MEASUREMENT_S: Final = {"cpu": 0.25, "cuda": 3.0}
# Shorter steps are repeated, because a disturbance may last as long as the step itself.
_SHORT_STEP_S: Final = 0.03
_REPETITIONS: Final = 3


class StepTimer:
    """Implements measurement.TimeStep for an engine without blocks in use.

    Args:
        sizes: the limits within which steps are built.
        max_seconds: time limit of all measurements together, which starts with the call
            of the constructor.
    """

    def __init__(
        self,
        executor: Executor,
        sizes: WarmUpSizes,
        vocab_size: int,
        max_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._clock = clock
        self._end_s = clock() + max_seconds
        self._rng = np.random.default_rng(0)
        # The last measured duration for each number of tokens of a step.
        self._measured: dict[int, Point] = {}

    def __call__(self, load: Load, *, is_required: bool = False) -> float | None:
        """Measures a step with this load, and returns its duration in seconds. Returns
        None if the measurement is not required and is expected to exceed the time
        limit.

        Raises:
            StepFailed: the step could not be launched.
        """
        if not is_required and self._clock() + self._expected_s(load) > self._end_s:
            return None
        step = self._build(load)
        seconds = self._run(step, 1)
        if seconds <= _SHORT_STEP_S:
            seconds = self._run(step, _REPETITIONS)
        self._measured[load.tokens] = Point(load.tokens, seconds)
        return seconds

    def warm_up(self) -> None:
        """Runs a small step without measuring it, because the first step is slower than
        later steps. On a CPU, the engine has run no other warm-up before."""
        self._run(self._build(Load(1, 1, 8)), 1)

    def _expected_s(self, load: Load) -> float:
        """The expected duration of a step in seconds, estimated from earlier
        measurements; infinity if there are fewer than two."""
        if len(self._measured) < 2:
            return math.inf
        return Polyline(self._measured.values())(load.tokens)

    def _build(self, load: Load) -> StepInput:
        lens = [1] * load.streams
        stored = [max(load.context_tokens // max(load.streams, 1) - 1, 0)] * len(lens)
        if load.prompt_tokens:
            lens.append(load.prompt_tokens)
            stored.append(int(load.prompt_start))
        step = self._sizes.step(lens, stored)
        token_ids = self._rng.integers(0, self._vocab_size, len(step.token_ids))
        return replace(step, token_ids=token_ids)

    def _run(self, step: StepInput, repetitions: int) -> float:
        """Launches the same step several times. Returns its median duration in
        seconds."""
        depth = self._executor.depth if repetitions > 1 else 0
        launched: deque[PendingStep] = deque()
        ends_s = [self._clock()]
        for _ in range(repetitions + depth):
            launched.append(self._executor.launch(step))
            if len(launched) > depth:
                launched.popleft().result()
                ends_s.append(self._clock())
        while launched:
            launched.popleft().result()
            ends_s.append(self._clock())
        # If steps are launched ahead, the first interval also includes the launch of
        # the first step, so the median excludes this interval.
        first = depth
        return statistics.median(
            end_s - start_s for start_s, end_s in pairwise(ends_s[first:])
        )


def measure_steps(
    runner: ModelRunner, executor: Executor, target: StepTarget
) -> StepTimes | None:
    """Measures the durations of an engine's steps. Must be called while no block is in
    use. Warns if even the shortest step with a prompt exceeds the target of
    --itl-target-s.

    Returns:
        The durations, or None if a step could not be launched.
    """
    started_s = time.monotonic()
    try:
        times = _measure(runner, executor, target.seconds)
    except StepFailed as error:
        logger.warning(
            "Measuring the durations of steps failed: %s. The number of prompt tokens "
            "per step starts at a default and adapts to the durations of later steps.",
            error,
        )
        return None
    finally:
        runner.memory.pool.mark_unused()
    max_tokens = runner.config.max_num_batched_tokens
    logger.info(
        "measured the durations of steps in %.1f s: %.4g s for decoding one sequence, "
        "%.4g s with 16 prompt tokens in addition, %.4g s with %d in addition",
        time.monotonic() - started_s,
        times.decode_s(1, 1),
        times.seconds(Load(1, 1, 16)),
        times.seconds(Load(1, 1, max_tokens)),
        max_tokens,
    )
    if target.is_explicit:
        warn_of_impossible_target(target.seconds, times)
    return times


def _measure(runner: ModelRunner, executor: Executor, target_s: float) -> StepTimes:
    sizes = WarmUpSizes.of(runner)
    timer = StepTimer(
        executor,
        sizes,
        runner.model_config.vocab_size,
        MAX_MEASUREMENT_S[runner.device.type],
    )
    pool_blocks = (sizes.num_blocks - 1) // sizes.num_groups
    step_sizes = StepSizes(
        max_streams=sizes.max_seqs,
        max_tokens=sizes.max_tokens,
        max_len=sizes.max_len,
        pool_tokens=max(1, pool_blocks) * sizes.block_size,
        captured_tokens=runner.captured_prompt_tokens,
        target_s=target_s,
    )
    timer.warm_up()
    return measure(timer, step_sizes)


def warn_of_impossible_target(target_s: float, times: StepTimes) -> None:
    """Warns if the shortest step with a prompt takes longer than the target."""
    shortest_s = times.seconds(Load(streams=1, context_tokens=1, prompt_tokens=1))
    if target_s >= shortest_s:
        return
    logger.warning(
        "--itl-target-s %g cannot be kept: the shortest step that decodes one sequence "
        "and computes a prompt takes %.4g s, and a step that only decodes %.4g s. "
        "Prompts are computed in the smallest useful steps. Raise --itl-target-s to "
        "%.3g or more.",
        target_s,
        shortest_s,
        times.decode_s(1, 1),
        2 * shortest_s,
    )

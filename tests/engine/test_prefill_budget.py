"""The prompt tokens in steps that also decode: measured durations, budget and target.

A synthetic device with its own clock runs the measured steps, and then serves random
loads. The step durations of this device are formulas, so the true budget is known.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine.core.batch import StepInput, StepOutput
from engine.core.budget.measurement import StepSizes, measure
from engine.core.budget.prefill_budget import UNMEASURED, PrefillBudget
from engine.core.budget.step_times import (
    Load,
    MixedTimes,
    Point,
    Polyline,
    StepTimes,
    StreamTimes,
)
from engine.core.sequence import Phase
from engine.worker.step_timer import MAX_MEASUREMENT_S, StepTimer
from engine.worker.warm_up import WarmUpSizes
from tests.rigs.shadow import add, expected_output, make_core, run_until_idle


def h200(load: Load) -> float:
    """Seconds of a step of an 8B model on an H200 (docs/performance.md).

    Steps without prompts and small steps with prompts are CUDA graphs. Larger steps
    with prompts are launched kernel by kernel, which takes 13 ms.
    """
    seconds = (
        4.0e-3
        + 11e-6 * load.streams
        + 31e-9 * load.context_tokens
        + 23e-6 * load.prompt_tokens
        + 0.16e-9 * load.prompt_tokens * (load.prompt_start + load.prompt_tokens / 2)
    )
    if load.prompt_tokens and load.tokens > 768:
        return max(seconds, 13e-3)
    return seconds


def launch_bound(load: Load) -> float:
    """A small model on a fast GPU, without graphs for prompts."""
    seconds = (
        1.0e-3
        + 5e-6 * load.streams
        + 8e-9 * load.context_tokens
        + 6e-6 * load.prompt_tokens
    )
    return max(seconds, 12e-3) if load.prompt_tokens else seconds


def cpu(load: Load) -> float:
    return 0.035 + 2e-3 * load.streams + 1.4e-3 * load.prompt_tokens


def superlinear(load: Load) -> float:
    """Attention dominates: each prompt token reads all tokens before it."""
    pairs = load.prompt_tokens * (load.prompt_start + load.prompt_tokens / 2)
    return (
        2e-3
        + 20e-6 * load.streams
        + 60e-9 * load.context_tokens
        + 8e-6 * load.prompt_tokens
        + 8e-9 * pairs
    )


@dataclass
class SyntheticDevice:
    """An executor with step durations from a formula, and 3 % of noise.

    Attributes:
        depth: 1 if the next step is launched while a step runs, as on a GPU, else 0.
        now_s: the device's clock.
        free_s: the time at which the last launched step ends.
    """

    seconds: Callable[[Load], float]
    depth: int = 1
    now_s: float = 0.0
    free_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def clock(self) -> float:
        return self.now_s

    def noisy_s(self, load: Load) -> float:
        return self.seconds(load) * self.rng.uniform(0.97, 1.03)

    def launch(self, step: StepInput) -> "SyntheticStep":
        starts = step.context_lens - step.query_lens
        is_stream = (step.query_lens == 1) & (starts > 0)
        prompt_tokens = int(step.query_lens[~is_stream].sum())
        load = Load(
            int(is_stream.sum()),
            int(step.context_lens[is_stream].sum()),
            prompt_tokens,
            float(starts[~is_stream].sum()),  # a step has at most one prompt
        )
        assert len(np.unique(step.token_ids)) > len(step.token_ids) // 4
        self.free_s = max(self.free_s, self.now_s) + self.noisy_s(load)
        return SyntheticStep(self, self.free_s)


@dataclass
class SyntheticStep:
    device: SyntheticDevice
    end_s: float

    def draw(self, masks: object) -> None:
        raise AssertionError("no measured step has masks")

    def has_ended(self) -> bool:
        return self.device.now_s >= self.end_s

    def result(self) -> StepOutput:
        self.device.now_s = max(self.device.now_s, self.end_s)
        return StepOutput([], [])


def measure_device(
    device: SyntheticDevice,
    target_s: float,
    max_tokens: int,
    max_seconds: float,
    *,
    captured_tokens: int = 0,
) -> StepTimes:
    sizes = WarmUpSizes(
        num_blocks=8192,
        block_size=64,
        max_len=65536,
        max_tokens=max_tokens,
        max_seqs=256,
    )
    timer = StepTimer(device, sizes, 128_000, max_seconds, device.clock)
    step_sizes = StepSizes(
        max_streams=256,
        max_tokens=max_tokens,
        max_len=sizes.max_len,
        pool_tokens=8191 * 64,
        captured_tokens=captured_tokens,
        target_s=target_s,
    )
    return measure(timer, step_sizes)


DEVICES = {
    # formula, depth, maximum tokens of a step, captured tokens, targets
    "h200": (h200, 1, 8192, 768, [0.015, 0.025, 0.06]),
    "launch bound": (launch_bound, 1, 8192, 0, [0.014, 0.025]),
    "cpu": (cpu, 0, 512, 0, [0.3, 0.5]),
    "superlinear": (superlinear, 1, 8192, 0, [0.025, 0.08]),
}
CASES = [
    pytest.param(*device, target_s, id=f"{name}-{target_s}")
    for name, (*device, targets) in DEVICES.items()
    for target_s in targets
]


def true_budget(
    seconds: Callable[[Load], float], load: Load, target_s: float, max_tokens: int
) -> int:
    """Returns the maximum number of prompt tokens (a multiple of 8) with which the step
    takes at most `target_s` by the device's formula, or 0 if there is none."""
    fitting = 0
    for num_tokens in range(8, max_tokens + 1, 8):
        if seconds(load._replace(prompt_tokens=num_tokens)) <= target_s:
            fitting = num_tokens
    return fitting


@pytest.mark.parametrize(
    ("seconds", "depth", "max_tokens", "captured", "target_s"), CASES
)
def test_prompts_get_what_the_target_allows_and_steps_keep_it(
    seconds, depth, max_tokens, captured, target_s
):
    """The number of streams, contexts and prompts vary. One step in 50 is disturbed.
    All steps are 10 % slower than in the measurement.
    """
    device = SyntheticDevice(seconds, depth)
    limit_s = MAX_MEASUREMENT_S["cuda" if depth else "cpu"]
    times = measure_device(
        device, target_s, max_tokens, limit_s, captured_tokens=captured
    )
    budget = PrefillBudget(times, target_s, max_tokens)
    rng = random.Random(1)
    slowdown = 1.1

    def actual_s(load: Load) -> float:
        return slowdown * seconds(load)

    streams = 8
    max_streams = 200 if depth else 64  # a CPU server has fewer streams
    context = 1500
    excesses = []
    granted_tokens = 0.0
    allowed_tokens = 0.0
    for step in range(1500):
        streams = min(max(streams + rng.choice([-3, -1, 0, 1, 3]), 1), max_streams)
        context = min(max(context + rng.choice([-100, 0, 100]), 100), 4000)
        start = rng.choice([0, 0, 0, 2000, 8000])
        load = Load(streams, streams * context, 0, start)
        allowed = budget.prompt_tokens(streams, load.context_tokens, start)
        is_long = rng.random() < 0.7
        num_tokens = allowed if is_long else min(allowed, rng.randrange(1, 200))
        load = load._replace(prompt_tokens=num_tokens)
        fitting = true_budget(actual_s, load, target_s, max_tokens)
        if step > 200 and fitting >= 16:
            granted_tokens += min(allowed, fitting)
            allowed_tokens += fitting
            # Prompts get a fifth of the step, even if streams alone take nearly the
            # target time.
            minimum_s = 1.25 * actual_s(load._replace(prompt_tokens=0))
            excesses.append(actual_s(load) / max(target_s, minimum_s))
        disturbance = 20 if rng.random() < 0.02 else 1
        noise = rng.uniform(0.97, 1.03)
        budget.record_step(load, actual_s(load) * noise * disturbance)
    assert len(excesses) > 300
    assert granted_tokens >= 0.9 * allowed_tokens
    assert sum(excess > 1.1 for excess in excesses) <= 0.05 * len(excesses)


@pytest.mark.parametrize(("seconds", "depth"), [(h200, 1), (cpu, 0)])
def test_measurement_ends_in_time(seconds, depth):
    limit_s = MAX_MEASUREMENT_S["cuda" if depth else "cpu"]
    device = SyntheticDevice(seconds, depth)
    measure_device(device, 0.025, 8192 if depth else 512, limit_s, captured_tokens=768)
    assert device.now_s < 1.5 * limit_s


def test_slow_device_measures_only_the_smallest_steps():
    device = SyntheticDevice(lambda load: 1.0 + 0.1 * load.prompt_tokens, depth=0)
    times = measure_device(device, 0.5, 512, 0.25)
    assert device.now_s < 8.0
    assert times.seconds(Load(1, 16, 400)) == pytest.approx(41.0, rel=0.2)


@pytest.mark.parametrize(
    ("max_streams", "max_tokens", "max_len", "pool_tokens"),
    [(1, 1, 2, 1), (1, 8, 8, 8), (3, 16, 20, 40), (64, 512, 100, 6400)],
)
def test_any_size_of_engine_is_measured(max_streams, max_tokens, max_len, pool_tokens):
    loads = []

    def time_step(load: Load, *, is_required: bool = False) -> float:
        loads.append(load)
        return h200(load)

    times = measure(time_step, StepSizes(max_streams, max_tokens, max_len, pool_tokens))
    assert times.decode_s(1, 1) > 0
    assert all(load.streams <= max(1, max_streams) for load in loads)
    assert all(load.prompt_tokens <= max_len for load in loads)


def test_without_a_measurement_the_moving_average_finds_the_speed():
    for seconds, target_s, max_tokens in [(h200, 0.025, 8192), (cpu, 0.5, 512)]:
        budget = PrefillBudget(UNMEASURED, target_s, max_tokens)
        for _ in range(400):
            load = Load(8, 8 * 500, budget.prompt_tokens(8, 8 * 500))
            budget.record_step(load, seconds(load))
        assert seconds(load) == pytest.approx(target_s, rel=0.1)


def test_one_disturbed_step_changes_the_budget_little():
    budget = PrefillBudget(UNMEASURED, 0.05, 8192)
    before = budget.prompt_tokens(8, 0)
    load = Load(8, 0, before)
    budget.record_step(load, 100 * budget.seconds(load))
    assert budget.prompt_tokens(8, 0) > 0.95 * before


def test_small_steps_do_not_correct_the_durations():
    budget = PrefillBudget(UNMEASURED, 0.05, 8192)
    before = budget.prompt_tokens(8, 0)
    load = Load(8, 0, before // 3)
    for _ in range(100):
        budget.record_step(load, 2 * budget.seconds(load))
    assert budget.prompt_tokens(8, 0) == before


def test_prompts_progress_with_streams_that_exceed_the_target():
    times = StepTimes(
        [StreamTimes(64, Polyline([Point(0, 0.080)]))],
        MixedTimes(64, 64_000, Polyline([Point(64, 0.080), Point(164, 0.180)])),
    )
    budget = PrefillBudget(times, 0.010, 512)
    assert 16 <= budget.prompt_tokens(64, 64_000) <= 40


def test_budget_above_the_target_includes_all_tokens_that_cost_no_time():
    """Every step with prompts takes 12 ms, so smaller steps would not help streams."""
    device = SyntheticDevice(launch_bound)
    times = measure_device(device, 0.005, 8192, 3.0)
    budget = PrefillBudget(times, 0.005, 8192)
    assert budget.prompt_tokens(1, 100) > 1000


def test_durations_between_points_are_linear():
    points = [Point(20, 3.0), Point(10, 1.0), Point(30, 2.0)]
    line = Polyline(points)
    assert [line(5), line(15), line(20), line(25), line(40)] == [
        0.0,
        2.0,
        3.0,
        2.5,
        2.5,
    ]
    bounded = Polyline(points, is_extended=False)
    assert [bounded(5), bounded(25), bounded(40)] == [1.0, 2.5, 2.0]
    assert Polyline(points[:1])(1000) == 3.0


def test_jump_between_the_last_points_is_not_extrapolated():
    """Steps above 2,048 tokens are not CUDA graphs. Only one such step was measured."""
    line = Polyline([Point(17, 0.013), Point(2048, 0.045), Point(2049, 0.060)])
    assert line(8192) == pytest.approx(0.060 + 6143 * 0.047 / 2032)


def test_largest_step_is_measured_beyond_a_jump_in_the_durations():
    """A jump at the limit of CUDA graphs must not make the expected durations of longer
    steps so large that these steps are not measured."""
    device = SyntheticDevice(
        lambda load: 0.01 + 2e-5 * load.tokens + 0.05 * (load.prompt_tokens > 2000)
    )
    times = measure_device(device, 0.0, 8192, 3.0, captured_tokens=2048)
    load = Load(1, 1, 8191)
    assert times.seconds(load) == pytest.approx(device.seconds(load), rel=0.05)


def test_budget_stays_below_a_jump_in_the_durations():
    """Beyond 768 tokens a step is not a CUDA graph and takes 19 ms at least."""
    points = [
        Point(17, 0.006),
        Point(768, 0.012),
        Point(769, 0.019),
        Point(2048, 0.030),
    ]
    times = StepTimes(
        [StreamTimes(1, Polyline([Point(0, 0.003)]))],
        MixedTimes(1, 0, Polyline(points)),
    )
    full_load = Load(1, 0, 8192)
    assert times.max_prompt_tokens(full_load, 0.018) == pytest.approx(767, abs=1)
    assert times.max_prompt_tokens(full_load, 0.005) == 0
    assert times.max_prompt_tokens(full_load, math.inf) == 8192


def test_decode_server_cuts_prompts_only_while_streams_run():
    core, executor, out = make_core(
        num_blocks=200, max_num_batched_tokens=256, max_model_len=512, itl_target_s=1e-6
    )
    prompts = [*range(200)], [*range(300, 500)]
    core.round([add("a", prompts[0], 40)])
    assert executor.max_tokens_in_step == 200
    core.round([add("b", prompts[1], 4)])
    waiting = core.sequences["b"]
    assert waiting.phase is Phase.RUNNING
    assert waiting.num_computed <= 64
    assert len(out.tokens("a")) == 2, "the step also computed a token of the stream"
    run_until_idle(core)
    for name, prompt, count in zip("ab", prompts, (40, 4), strict=True):
        assert out.tokens(name) == expected_output(prompt, count)

"""The token limit of steps with streams, and waiting prompts that may exceed it."""

import pytest

from engine.core.budget.prompt_limit import PromptLimit
from engine.core.budget.step_target import StepTarget
from engine.core.budget.step_times import (
    Load,
    MixedTimes,
    Point,
    Polyline,
    StepTimes,
    StreamTimes,
)
from engine.core.plan import Scheduled
from engine.core.sequence import Sequence
from protocol.messages import ResumedChoice
from tests.rigs.engines import make_config
from tests.rigs.memory_pair import REMOTE
from tests.rigs.shadow import add, make_core

MAX_TOKENS = 8192
# A step without prompts takes 5 ms. In a step with prompts, each token adds 20 us.
TIMES = StepTimes(
    [StreamTimes(1, Polyline([Point(0, 0.005)]))],
    MixedTimes(1, 0, Polyline([Point(0, 0.005), Point(8192, 0.005 + 8192 * 20e-6)])),
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def sequence(name: str, **fields: object) -> Sequence:
    return Sequence.from_request(add(name, range(1000), 4, **fields))


def streams(count: int) -> list[Scheduled]:
    """Returns streams that are scheduled with one token each."""
    return [
        Scheduled(sequence("stream"), start=1000, num_tokens=1, draws=())
        for _ in range(count)
    ]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_limit(target: StepTarget | None, clock: Clock) -> PromptLimit:
    return PromptLimit(target, MAX_TOKENS, TIMES, clock)


def step_seconds(num_streams: int, prompt_tokens: int) -> float:
    return TIMES.seconds(Load(num_streams, 0, prompt_tokens))


def test_without_a_target_nothing_is_limited(clock):
    assert not make_limit(None, clock).is_active


def test_decode_server_is_not_limited_until_a_prefill_server_sends_kv(clock):
    limit = make_limit(StepTarget(0.025, only_in_pair=True), clock)
    limit.on_queued(sequence("a"))
    assert not limit.is_active
    limit.on_queued(sequence("b", remote=REMOTE))
    assert limit.is_active
    clock.now_s += 59
    assert limit.is_active
    clock.now_s += 2
    assert not limit.is_active, "no prefill server has computed a prompt for a minute"


def test_stream_resumed_after_a_failover_is_no_sign_of_a_prefill_server(clock):
    limit = make_limit(StepTarget(0.025, only_in_pair=True), clock)
    resumed = [ResumedChoice(token_ids=[5])]
    limit.on_queued(sequence("a", remote=REMOTE, resumed_choices=resumed))
    assert not limit.is_active


def test_step_keeps_the_target_while_no_prompt_waits(clock):
    limit = make_limit(StepTarget(0.025), clock)
    allowed = limit.prompt_tokens(streams(8), [], [])
    assert step_seconds(8, allowed) == pytest.approx(0.025, rel=0.01)


def test_step_exceeds_the_target_by_the_waiting_time_divided_by_the_streams(clock):
    limit = make_limit(StepTarget(0.025), clock)
    waiting = [sequence("a"), sequence("b")]
    for prompt in waiting:
        limit.on_queued(prompt)
    clock.now_s += 0.1
    allowed = limit.prompt_tokens(streams(8), [], waiting)
    assert step_seconds(8, allowed) == pytest.approx(0.025 + 2 * 0.1 / 8, rel=0.01)
    few_streams = limit.prompt_tokens(streams(1), [], waiting)
    assert few_streams == MAX_TOKENS, "a burst is computed at full speed"


def test_prompt_whose_kv_is_pulled_does_not_wait_for_steps(clock):
    limit = make_limit(StepTarget(0.025), clock)
    prompt = sequence("a", remote=REMOTE)
    limit.on_queued(prompt)
    clock.now_s += 10
    assert limit.prompt_tokens(streams(8), [], [prompt]) < 1100


def test_explicit_target_holds_however_long_prompts_wait(clock):
    limit = make_limit(StepTarget(0.025, is_explicit=True), clock)
    prompt = sequence("a")
    limit.on_queued(prompt)
    clock.now_s += 1000
    allowed = limit.prompt_tokens(streams(8), [], [prompt])
    assert step_seconds(8, allowed) == pytest.approx(0.025, rel=0.01)


def test_preempted_sequence_waits_from_then_on():
    core, _, _ = make_core(num_blocks=12, max_num_batched_tokens=64, itl_target_s=1.0)
    core.round([add("a", range(16), 40), add("b", range(100, 116), 40)])
    parent = core.sequences["b"]
    first_queued_s = parent.queued_s
    while not core.scheduler.num_preemptions:
        core.round([])
    assert core.scheduler.waiting[0].queued_s > first_queued_s


def test_prompts_that_wait_for_sequences_or_blocks_do_not_raise_the_budget():
    """A larger step would not compute such prompts earlier."""
    core, _, _ = make_core(max_num_seqs=1, itl_target_s=1.0)
    core.round([add("a", range(4), 40), add("b", range(4), 4)])
    scheduler = core.scheduler
    assert len(scheduler.waiting) == 1
    assert not scheduler._waiting_if_admissible()
    core, _, _ = make_core(num_blocks=12, max_num_batched_tokens=64, itl_target_s=1.0)
    core.round([add("a", range(16), 40), add("b", range(100, 140), 4)])
    assert len(core.scheduler.waiting) == 1
    assert not core.scheduler._waiting_if_admissible()


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({"role": "decode", "device": "cuda"}, StepTarget(0.025, only_in_pair=True)),
        ({"role": "both", "device": "cuda"}, None),
        ({"role": "prefill", "device": "cuda"}, None),
        ({"role": "prefill", "itl_target_s": 0.1}, None),
        ({"role": "decode"}, StepTarget(0.5)),
        ({"role": "both"}, StepTarget(0.5)),
        ({"role": "both", "itl_target_s": 0.1}, StepTarget(0.1, is_explicit=True)),
        ({"role": "decode", "device": "cuda", "itl_target_s": 0.1},
         StepTarget(0.1, is_explicit=True)),
    ],
)  # fmt: skip
def test_target_follows_from_role_device_and_option(options, target):
    config = make_config(**options)
    assert config.step_target == target
    reported_s = config.geometry["itl_target_s"]
    assert reported_s == (target.seconds if target is not None else 1.0)

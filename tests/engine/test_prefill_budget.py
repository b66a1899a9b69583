"""The model of step times, and the tokens of prompts that it allows beside streams."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest

from engine.core.prefill_budget import Load, PrefillBudget
from engine.core.sequence import Phase
from tests.rigs.shadow import add, expected_output, make_core, run_until_idle


def h200(load: Load) -> float:
    """Seconds of a step of an 8B shape (docs/performance.md)."""
    seconds = (
        4.0e-3
        + 11e-6 * load.streams
        + 31e-9 * load.context_tokens
        + 23e-6 * load.prompt_tokens
    )
    return max(seconds, 18e-3) if load.prompt_tokens else seconds


def cpu(load: Load) -> float:
    return 0.035 + 2e-3 * load.streams + 1.4e-3 * load.prompt_tokens


@pytest.mark.parametrize(
    ("seconds", "target_s"), [(h200, 0.025), (h200, 0.04), (cpu, 0.5)]
)
def test_steps_keep_the_target_once_some_were_measured(seconds, target_s):
    """Streams come and go, most prompts are long, one step in 50 is disturbed."""
    rng, pace, streams, shares = random.Random(1), PrefillBudget(target_s, 2048), 8, []
    for step in range(800):
        streams = min(max(streams + rng.choice([-1, 0, 1]), 1), 64)
        held = streams * 1500
        room = pace.prompt_tokens(streams, held)
        prompts = min(room, rng.choice([0, 100, 2048, 2048, 2048]))
        load = Load(streams, held, prompts)
        if step > 100 and prompts == room:
            shares.append(seconds(load) / target_s)
        disturbed = 20 if rng.random() < 0.02 else 1
        pace.record_step(load, seconds(load) * rng.uniform(0.97, 1.03) * disturbed)
    shares.sort()
    assert 0.8 < shares[len(shares) // 20] and shares[-len(shares) // 20] < 1.15


def test_prompts_progress_beside_streams_that_are_past_the_target():
    pace, ends = PrefillBudget(0.010, 512), random.Random(1)
    for _ in range(300):
        prompts = min(
            pace.prompt_tokens(64, 64_000), ends.choice([0, 5, 12, 2048, 2048])
        )
        pace.record_step(Load(64, 64_000, prompts), 0.080 + 1e-3 * prompts)
    assert 16 <= pace.prompt_tokens(64, 64_000) <= 40


def test_a_decode_server_cuts_prompts_while_streams_run_and_only_then(monkeypatch):
    ticks = map((0.001).__mul__, itertools.count())  # each step takes one
    times = SimpleNamespace(perf_counter=ticks.__next__, monotonic=time.monotonic)
    monkeypatch.setattr("engine.core.core.time", times)
    core, executor, out = make_core(
        num_blocks=200, max_num_batched_tokens=256, max_model_len=512, itl_target_s=1e-6
    )
    prompts = [*range(200)], [*range(300, 500)]
    core.round([add("a", prompts[0], 40)])
    assert executor.max_tokens_in_step == 200
    core.round([add("b", prompts[1], 4)])
    waiting = core.sequences["b"]
    assert waiting.phase is Phase.RUNNING and waiting.num_computed <= 64
    assert len(out.tokens("a")) == 2, "the step had a token for the stream"
    run_until_idle(core)
    for name, prompt, count in zip("ab", prompts, (40, 4), strict=True):
        assert out.tokens(name) == expected_output(prompt, count)

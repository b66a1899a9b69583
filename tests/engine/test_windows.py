"""The core over a shadow cache of several KV groups: what a window has passed goes home, and no
step reads it, whatever hits, choices, preemptions and ends come together."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.core.scheduler import Plan
from kvcache.blocks import BlockState
from kvcache.groups import KVGroups
from protocol.messages import AbortRequest
from tests.rigs.engines import smallest
from tests.rigs.examples import examples
from tests.rigs.shadow import (
    add,
    assert_all_blocks_free,
    make_core,
    run_until_idle,
    windowed_output,
)

HYBRID = KVGroups((None, 6, 6))
GROUPS = [HYBRID, KVGroups((None, 3)), KVGroups((7,)), KVGroups((None, 2, 9))]
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("evicted", [0, 1, 2, 3, 5, 40])
def test_a_hit_ends_where_the_windows_are_still_there(depth: int, evicted: int) -> None:
    core, _, out = make_core(num_blocks=40, depth=depth, groups=HYBRID)
    prompt = list(range(40))
    run_until_idle(core, add("a", prompt, 1))
    allocator = core.scheduler.allocator
    free = allocator.counts()[BlockState.FREE]
    allocator.release(allocator.allocate(min(free + evicted, allocator.num_available)))
    run_until_idle(core, add("b", [*prompt, 1, 2], 5))
    assert out.tokens("b") == windowed_output([*prompt, 1, 2], 5, HYBRID)
    usage = out.terminals("b")[0].usage
    assert usage is not None
    # What the prompt's windows passed went first, and nobody misses it.
    assert usage.skipped == (40 if evicted <= 5 else 0)
    assert_all_blocks_free(core)


@given(st.data())
@examples(60)
def test_no_step_reads_what_a_window_has_dropped(data: st.DataObject) -> None:
    """Prompts that share prefixes, choices, aborts and preemptions in a pool that is too small for
    all: from the smallest that an engine takes sequences of 40 tokens with. None is stuck there."""
    groups = data.draw(st.sampled_from(GROUPS))
    size = data.draw(st.integers(1, 5))
    step = data.draw(st.sampled_from([4, 7, 16]))
    lends = data.draw(st.booleans())
    least = smallest(groups, step, size, 40)
    core, _, out = make_core(
        groups=groups, block_size=size, num_blocks=least + 1 + data.draw(st.integers(0, 2 * least)),
        max_num_batched_tokens=step, max_num_seqs=data.draw(st.sampled_from([3, 8])),
        max_model_len=40, depth=data.draw(st.integers(0, 1)),
        prefix_caching=data.draw(st.booleans()),
    )  # fmt: skip
    noise = random.Random(data.draw(st.integers(0, 1 << 20)))
    asked, gone = {}, set()
    for index in range(data.draw(st.integers(2, 9))):
        shared = noise.randrange(0, 26)
        prompt = [
            *range(shared),
            *(noise.randrange(3) for _ in range(noise.randrange(1, 8))),
        ]
        num, choices = noise.randrange(1, 9), noise.choice([1, 1, 1, 3])
        asked[str(index)] = prompt, num, choices
        members = {"retain_kv": lends and noise.random() < 0.5}
        core.round([add(str(index), prompt, num, num_choices=choices, **members)])
        for _ in range(noise.randrange(3)):
            core.round([])
        _disturb(core, noise, gone)
        core.scheduler.check_integrity()
    run_until_idle(core)
    for name, (prompt, num, choices) in asked.items():
        for choice in range(choices):
            expected = windowed_output(prompt, num, groups, choice)
            found = out.tokens(name, choice)
            assert found == expected[: len(found)]
            assert found == expected or name in gone
    assert_all_blocks_free(core)


def _disturb(core: EngineCore, noise: random.Random, gone: set[str]) -> None:
    running = core.scheduler.running
    if running and noise.random() < 0.2:
        name = noise.choice(running).request_id
        gone.add(name)
        core.round([AbortRequest(name)])
    elif running and noise.random() < 0.3:
        core.finish_steps(0)
        if core.scheduler.running:
            core.scheduler._preempt(core.scheduler.running[-1], Plan(0))

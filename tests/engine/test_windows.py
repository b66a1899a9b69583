"""The engine core over a shadow KV cache with several KV groups.

Blocks before all windows are released, and no step reads them, with any combination of
cache hits, choices, preemptions and aborts.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.core.scheduler import Plan
from kvcache.blocks import BlockState
from kvcache.groups import KVGroups
from protocol.messages import AbortRequest
from tests.rigs.engines import min_num_blocks
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


@pytest.mark.parametrize("num_evicted", [0, 1, 2, 3, 5, 40])
def test_prefix_hit_ends_at_the_last_token_with_complete_windows(
    depth: int, num_evicted: int
) -> None:
    core, _, out = make_core(num_blocks=40, depth=depth, groups=HYBRID)
    prompt = list(range(40))
    run_until_idle(core, add("a", prompt, 1))
    allocator = core.scheduler.allocator
    num_free = allocator.counts()[BlockState.FREE]
    num_allocated = min(num_free + num_evicted, allocator.num_available)
    allocator.release(allocator.allocate(num_allocated))
    run_until_idle(core, add("b", [*prompt, 1, 2], 5))
    assert out.tokens("b") == windowed_output([*prompt, 1, 2], 5, HYBRID)
    usage = out.terminals("b")[0].usage
    assert usage is not None
    # Blocks before the prompt's windows are evicted first, and a hit does not need
    # them.
    assert usage.skipped == (40 if num_evicted <= 5 else 0)
    assert_all_blocks_free(core)


@given(st.data())
@examples(60)
def test_no_step_reads_blocks_before_its_windows(data: st.DataObject) -> None:
    """Prompts with shared prefixes, choices, aborts and preemptions run in a small
    pool.

    The pool may be the smallest with which an engine accepts sequences of 40 tokens.
    Every request must end even in this pool.
    """
    groups = data.draw(st.sampled_from(GROUPS))
    block_size = data.draw(st.integers(1, 5))
    step_tokens = data.draw(st.sampled_from([4, 7, 16]))
    retains_kv = data.draw(st.booleans())
    min_blocks = min_num_blocks(groups, step_tokens, block_size, 40)
    core, _, out = make_core(
        groups=groups,
        block_size=block_size,
        num_blocks=min_blocks + 1 + data.draw(st.integers(0, 2 * min_blocks)),
        max_num_batched_tokens=step_tokens,
        max_num_seqs=data.draw(st.sampled_from([3, 8])),
        max_model_len=40,
        depth=data.draw(st.integers(0, 1)),
        prefix_caching=data.draw(st.booleans()),
    )
    rng = random.Random(data.draw(st.integers(0, 1 << 20)))
    requests: dict[str, tuple[list[int], int, int]] = {}
    aborted: set[str] = set()
    for index in range(data.draw(st.integers(2, 9))):
        name = str(index)
        num_shared = rng.randrange(0, 26)
        prompt = [
            *range(num_shared),
            *(rng.randrange(3) for _ in range(rng.randrange(1, 8))),
        ]
        max_tokens = rng.randrange(1, 9)
        num_choices = rng.choice([1, 1, 1, 3])
        requests[name] = (prompt, max_tokens, num_choices)
        retain_kv = retains_kv and rng.random() < 0.5
        core.round(
            [
                add(
                    name,
                    prompt,
                    max_tokens,
                    num_choices=num_choices,
                    retain_kv=retain_kv,
                )
            ]
        )
        for _ in range(rng.randrange(3)):
            core.round([])
        _abort_or_preempt(core, rng, aborted)
        core.scheduler.check_integrity()
    run_until_idle(core)
    for name, (prompt, max_tokens, num_choices) in requests.items():
        for choice in range(num_choices):
            expected = windowed_output(prompt, max_tokens, groups, choice)
            tokens = out.tokens(name, choice)
            assert tokens == expected[: len(tokens)]
            assert tokens == expected or name in aborted
    assert_all_blocks_free(core)


def _abort_or_preempt(core: EngineCore, rng: random.Random, aborted: set[str]) -> None:
    """Sometimes aborts or preempts a running request. Adds the name of an aborted
    request to `aborted`."""
    running = core.scheduler.running
    if running and rng.random() < 0.2:
        name = rng.choice(running).request_id
        aborted.add(name)
        core.round([AbortRequest(name)])
    elif running and rng.random() < 0.3:
        core.finish_steps(0)
        if core.scheduler.running:
            core.scheduler._preempt(core.scheduler.running[-1], Plan(0))

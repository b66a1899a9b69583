"""Several choices of one prompt, and logprobs of its tokens, over a shadow KV cache.

Choices fork off one prefill, share its full blocks and copy the last one; whatever is aborted,
preempted or ends early, each choice's text is its own and every block comes home.
"""

import pytest

from engine.core.scheduler import Plan
from engine.core.sequence import Phase, Sequence
from kvcache.blocks import BlockState
from protocol.errors import InternalError
from protocol.messages import AbortRequest, KVUsage
from tests.rigs.shadow import (
    add,
    assert_all_blocks_home,
    expected_output,
    expected_scores,
    make_core,
    run_until_idle,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 10])
def test_choices_differ_and_their_prompt_is_computed_once(depth: int, length: int) -> None:
    prompt = PROMPT[:length]
    core, executor, out = make_core(depth=depth)
    core.round([add("a", prompt, 5, num_choices=3)])
    run_until_idle(core)
    for choice in range(3):
        assert out.tokens("a", choice) == expected_output(prompt, 5, choice=choice)
    assert [d.choice for d in out.terminals("a")] == [0, 1, 2]
    assert {d.usage for d in out.terminals("a")} == {KVUsage(recomputed=length)}
    assert executor.num_tokens == length + 3 * 4
    assert_all_blocks_home(core)


def test_full_blocks_are_shared_and_only_the_last_is_copied() -> None:
    core, _, _ = make_core(num_blocks=32, block_size=4)
    core.round([add("a", PROMPT, 20, num_choices=4)])
    assert core.scheduler.allocator.counts()[BlockState.USED] == 2 + 4
    tables = [sequence.block_ids for sequence in core.scheduler.running]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 4


def test_a_prompt_is_held_once_for_all_choices_that_wait() -> None:
    first = Sequence.from_request(add("a", PROMPT, 20, num_choices=8))
    assert sum(len(choice.token_ids) for choice in first.choices) == len(PROMPT)


def test_first_tokens_come_in_the_order_of_the_choices() -> None:
    core, _, out = make_core()
    core.round([add("a", PROMPT, 2, num_choices=3, num_prompt_logprobs=1)])
    run_until_idle(core)
    assert [bool(d.prompt_logprobs) for d in out.deltas[:2]] == [True, False]
    assert [d.choice for d in out.deltas[1:4]] == [0, 1, 2]


@pytest.mark.parametrize("survivor", [0, 1, 2])
def test_a_choice_that_ends_with_its_first_token_leaves_the_others_alone(survivor: int) -> None:
    first = [expected_output(PROMPT, 1, choice=choice)[0] for choice in range(3)]
    stop = [token for choice, token in enumerate(first) if choice != survivor]
    assert first[survivor] not in stop
    core, _, out = make_core()
    core.round([add("a", PROMPT, 6, num_choices=3, stop_token_ids=stop)])
    run_until_idle(core)
    expected = expected_output(PROMPT, 6, stop, choice=survivor)
    for choice in range(3):
        assert out.tokens("a", choice) == (expected if choice == survivor else [first[choice]])
    assert_all_blocks_home(core)


@pytest.mark.parametrize("gone", [[0], [1], [0, 2], [2, 1], [0, 1, 2], [2, 1, 0]])
@pytest.mark.parametrize("rounds", [0, 1, 2, 4])
def test_single_choices_can_be_aborted_at_any_time(gone: list[int], rounds: int) -> None:
    core, _, out = make_core(max_num_batched_tokens=5)
    core.round([add("a", PROMPT, 8, num_choices=3)])
    for _ in range(rounds):
        core.round([])
    for choice in gone:
        core.round([AbortRequest("a", choice)])
        core.scheduler.check_integrity()
    core.round([AbortRequest("a", 7)])  # no such choice
    run_until_idle(core)
    ends = {d.choice: d.finish_reason for d in out.terminals("a")}
    assert ends == {c: "abort" if c in gone else "length" for c in range(3)}
    assert len(out.terminals("a")) == 3
    for choice in range(3):
        tokens = out.tokens("a", choice)
        expected = expected_output(PROMPT, 8, choice=choice)
        assert tokens == (expected[: len(tokens)] if choice in gone else expected)
    assert core.is_idle
    assert_all_blocks_home(core)


def test_an_abort_of_the_request_ends_every_choice() -> None:
    core, _, out = make_core()
    core.round([add("a", PROMPT, 30, num_choices=3)])
    core.round([AbortRequest("a")])
    ends = {d.choice: d.finish_reason for d in out.terminals("a")}
    assert ends == dict.fromkeys(range(3), "abort") and len(out.terminals("a")) == 3
    assert core.is_idle
    assert_all_blocks_home(core)


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "preempts"),
    [
        pytest.param(10, 20, True, id="preempted, they are computed again by themselves"),
        pytest.param(4, 2, False, id="without a block for its copy, each waits for one"),
    ],
)
def test_choices_in_a_small_pool(num_blocks: int, max_tokens: int, preempts: bool) -> None:
    core, _, out = make_core(num_blocks=num_blocks, max_model_len=min(32, 4 * (num_blocks - 1)))
    core.round([add("a", PROMPT, max_tokens, num_choices=3)])
    run_until_idle(core)
    assert (core.scheduler.num_preemptions > 0) is preempts
    for choice in range(3):
        assert out.tokens("a", choice) == expected_output(PROMPT, max_tokens, choice=choice)
    assert_all_blocks_home(core)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_error_of_one_choice_ends_the_others_and_frees_their_blocks(depth: int) -> None:
    core, _, out = make_core(depth=depth)
    core.round([add("a", PROMPT, 50, num_choices=3)])
    choices = core.sequences["a"].choices
    while not all(choice.phase is Phase.RUNNING for choice in choices):
        core.round([])
    core.scheduler.finish(choices[1])
    core.fail(choices[1], InternalError("it cannot go on"))
    run_until_idle(core)
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "internal_error"
    assert core.is_idle and core.scheduler.is_idle
    assert_all_blocks_home(core)


def test_choices_count_as_sequences_at_admission() -> None:
    core, _, out = make_core(max_num_seqs=4)
    core.round([add("a", PROMPT, 4, num_choices=3), add("b", [7, 8], 4, num_choices=2)])
    assert core.scheduler.waiting[0].request_id == "b"
    run_until_idle(core)
    assert out.tokens("b", 1) == expected_output([7, 8], 4, choice=1)


# -- logprobs of the prompt ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 23])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_every_prompt_token_is_scored_once_in_order(
    depth: int, length: int, max_tokens: int
) -> None:
    core, _, out = make_core(depth=depth, max_num_batched_tokens=8)
    prompt = [(11 * at) % 50 for at in range(length)]
    core.round([add("a", prompt, max_tokens, num_prompt_logprobs=2)])
    run_until_idle(core)
    assert out.prompt_logprobs("a") == expected_scores(prompt, 2)
    assert out.tokens("a") == expected_output(prompt, max_tokens)
    (end,) = out.terminals("a")
    assert end.finish_reason == "length" and end.usage == KVUsage(recomputed=length)
    assert_all_blocks_home(core)


def test_a_prompt_to_be_scored_takes_no_cached_blocks_and_leaves_some() -> None:
    core, _, out = make_core()
    for name, top in (("a", None), ("b", 0), ("c", None)):
        core.round([add(name, PROMPT, 0, num_prompt_logprobs=top)])
        run_until_idle(core)
    skipped = [out.terminals(name)[0].usage.skipped for name in "abc"]  # type: ignore[union-attr]
    assert skipped == [0, 0, 8]
    assert out.prompt_logprobs("b") == expected_scores(PROMPT, 0)


def test_a_prompt_may_fill_the_context_when_nothing_is_drawn() -> None:
    core, _, out = make_core(max_model_len=10)
    core.round([add("a", PROMPT, 0, num_prompt_logprobs=0)])
    run_until_idle(core)
    assert out.prompt_logprobs("a") == expected_scores(PROMPT, 0)


@pytest.mark.parametrize("cached", [True, False])
def test_a_prompt_that_is_preempted_while_it_is_scored_goes_on_where_it_was(cached: bool) -> None:
    core, _, out = make_core(max_num_batched_tokens=5)
    prompt = [*PROMPT, *PROMPT]
    core.round([add("a", prompt, 3, num_prompt_logprobs=1)])
    core.round([])
    assert len(out.prompt_logprobs("a")) == 11
    core.scheduler._preempt(core.sequences["a"], Plan(0))
    if not cached:
        assert core.scheduler.prefix is not None
        core.scheduler.prefix.clear()
    run_until_idle(core)
    assert out.prompt_logprobs("a") == expected_scores(prompt, 1)
    assert out.tokens("a") == expected_output(prompt, 3)
    assert_all_blocks_home(core)

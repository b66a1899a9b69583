"""Several choices of one prompt, and logprobs of its tokens, over a shadow KV cache.

Choices fork off one prefill, share its full blocks and copy the last one; whatever is aborted,
preempted or ends early, each choice's text is its own and every block comes home. Any workload is
answered right.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.scheduler import Plan
from engine.core.sequence import Phase, Sequence
from kvcache.blocks import BlockState
from protocol.errors import InternalError
from protocol.messages import AbortRequest, AddRequest, EngineInput, KVUsage, SamplingParams
from tests.rigs.shadow import (
    SIZES,
    MemoryTransport,
    Sizes,
    add,
    assert_all_blocks_home,
    expected_output,
    expected_scores,
    make_core,
    play,
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


def test_more_choices_than_sequences_are_refused() -> None:
    core, _, out = make_core(max_num_seqs=4)
    core.round([add("a", PROMPT, 4, num_choices=5)])
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.param == "n" and "1 to 4" in end.error.message
    assert core.is_idle


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
    core.round([add("a", PROMPT, 0, num_prompt_logprobs=0), add("b", [*PROMPT, 1], 0)])
    run_until_idle(core)
    assert out.prompt_logprobs("a") == expected_scores(PROMPT, 0)
    assert out.terminals("b")[0].error is not None


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


# -- any mixture ---------------------------------------------------------------------------------

_SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=2.0, min_tokens=3),
    SamplingParams(temperature=0.0, min_tokens=2),
]
_PREFIXES = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [6] * 13]


@st.composite
def _workloads(draw: st.DrawFn) -> list[list[EngineInput]]:
    rounds: list[list[EngineInput]] = []
    names = itertools.count()
    for _ in range(draw(st.integers(1, 10))):
        messages: list[EngineInput] = []
        for _ in range(draw(st.integers(0, 3))):
            tail = draw(st.lists(st.integers(0, 49), min_size=1, max_size=10))
            prompt = draw(st.sampled_from([[], *_PREFIXES])) + tail
            messages.append(
                add(
                    str(next(names)),
                    prompt,
                    draw(st.integers(0, 12)),
                    sampling=draw(st.sampled_from(_SAMPLING)),
                    num_choices=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
                    num_prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
                    stop_token_ids=draw(st.lists(st.integers(0, 49), max_size=6)),
                )
            )
        if draw(st.booleans()):
            choice = draw(st.sampled_from([None, 0, 1, 3]))
            messages.append(AbortRequest(str(draw(st.integers(0, 12))), choice))
        rounds.append(messages)
    return rounds


@settings(deadline=None, max_examples=300)
@given(workload=_workloads(), sizes=SIZES)
def test_any_workload_of_choices_and_scores_is_answered_right(
    workload: list[list[EngineInput]], sizes: Sizes
) -> None:
    out = play(workload, sizes)
    for message in itertools.chain.from_iterable(workload):
        if isinstance(message, AddRequest):
            _check_answer(message, out, sizes.max_model_len, sizes.max_num_seqs)


def _check_answer(
    request: AddRequest, out: MemoryTransport, max_len: int, max_num_seqs: int
) -> None:
    name, prompt = request.request_id, request.token_ids
    ends = out.terminals(name)
    if len(prompt) + min(request.max_tokens, 1) > max_len or request.num_choices > max_num_seqs:
        assert [end.error is not None for end in ends] == [True]
        return
    assert sorted(end.choice for end in ends) == list(range(request.num_choices))
    for end in ends:
        assert end.error is None
        tokens = out.tokens(name, end.choice)
        limit = min(request.max_tokens, max_len - len(prompt))
        min_tokens = request.sampling.min_tokens
        expected = expected_output(prompt, limit, request.stop_token_ids, end.choice, min_tokens)
        if end.finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    scores = out.prompt_logprobs(name)
    if request.num_prompt_logprobs is None:
        assert scores == []
    else:
        wanted = expected_scores(prompt, request.num_prompt_logprobs)
        was_cut = any(end.choice == 0 and end.finish_reason == "abort" for end in ends)
        assert scores == (wanted[: len(scores)] if was_cut else wanted)

"""ModelDrafter with shadow models for the engine and for the draft model.

A slot of the draft model's KV holds a token. So a wrong block, a wrong position or KV
of other tokens changes the proposals. Reading a slot that was never written fails.
"""

import random
from collections.abc import Sequence as Sequenceable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.core.scheduler import Plan
from engine.core.sequence import Sequence
from engine.speculation.catch_up import CatchUpBudget
from kvcache.groups import ONE_GROUP, KVGroups
from protocol.messages import AbortRequest
from tests.rigs.draft_shadow import draft_output, make_drafter
from tests.rigs.drafters import VerifyEverything
from tests.rigs.examples import examples
from tests.rigs.shadow import (
    VOCAB,
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
    run_until_idle,
)

MAX_LEN = 48
GROUPS = [ONE_GROUP, KVGroups((None, 6)), KVGroups((5, None, None))]


def decoding(core: EngineCore) -> list[Sequence]:
    return [sequence for sequence in core.scheduler.running if sequence.is_decoding]


def assert_right(
    sequences: Sequenceable[Sequence],
    proposals: Sequenceable[list[int]],
    limits: Sequenceable[int],
) -> None:
    for sequence, proposed, limit in zip(sequences, proposals, limits, strict=True):
        assert len(proposed) <= max(0, limit)
        choice = sequence.sampling.params.choice_index
        assert proposed == draft_output(sequence.token_ids, len(proposed), choice)


def run_to_decoding(core: EngineCore, *prompts: list[int]) -> list[Sequence]:
    """Run requests until all of them decode. Return them in the order of `prompts`."""
    names = [f"r{index}" for index in range(len(prompts))]
    core.round(
        [add(name, prompt, 30) for name, prompt in zip(names, prompts, strict=True)]
    )
    sequences = [core.sequences[name] for name in names]
    while not all(sequence.is_decoding for sequence in sequences):
        core.round([])
    return sequences


@given(st.data())
@examples(150)
def test_proposals_are_those_of_the_draft_model_alone(data: st.DataObject) -> None:
    """Sequences with shared prefixes, choices, aborts and preemptions decode in a small
    pool. In random rounds, tokens are proposed for some of them."""
    rng = random.Random(data.draw(st.integers(0, 1 << 20)))
    groups = data.draw(st.sampled_from(GROUPS))
    blocks_per_block = data.draw(st.sampled_from([1, 2]))
    block_size = blocks_per_block * data.draw(st.integers(1, 4))
    num_blocks = 1 + groups.count * (-(-MAX_LEN // block_size) + rng.randint(4, 12))
    max_proposals = data.draw(st.integers(1, 6))
    max_len = data.draw(st.sampled_from([MAX_LEN, MAX_LEN - 20]))
    core, _, _ = make_core(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=6,
        max_model_len=MAX_LEN,
        groups=groups,
        prefix_caching=data.draw(st.booleans()),
    )
    drafter, executor = make_drafter(
        num_blocks=num_blocks,
        block_size=block_size,
        blocks_per_block=blocks_per_block,
        max_proposals=max_proposals,
        max_seqs=6,
        max_len=max_len,
        max_step_tokens=data.draw(st.sampled_from([6, 16])),
        max_graph_rows=data.draw(st.sampled_from([0, 6])),
        depth=data.draw(st.integers(0, 1)),
        groups=groups,
    )
    share = data.draw(st.sampled_from([0.3, 1.0]))
    prefix = [rng.randrange(VOCAB) for _ in range(20)]
    unsent = []
    for number in range(8):
        prompt = prefix[: rng.randint(0, 20)] + [rng.randrange(VOCAB)] * 3
        choices = rng.choice([1, 1, 3])
        max_tokens = rng.choice([3, 20])
        unsent.append(add(f"r{number}", prompt, max_tokens, num_choices=choices))
    while unsent or not core.is_idle:
        messages: list = [unsent.pop()] if unsent and rng.random() < 0.4 else []
        if rng.random() < 0.02:
            messages.append(AbortRequest(f"r{rng.randrange(8)}", None))
        core.round(messages)
        if rng.random() < share:
            sequences = [s for s in decoding(core) if rng.random() < 0.9]
            limits = [rng.randint(0, 7) for _ in sequences]
            proposals = drafter.propose(sequences, limits)
            assert_right(sequences, proposals, limits)
            for sequence, proposed in zip(sequences, proposals, strict=True):
                num_tokens = len(sequence.token_ids) + len(proposed)
                assert not proposed or num_tokens <= max_len + 1
    assert not executor.in_flight


@pytest.mark.parametrize("seed", range(4))
def test_engine_with_a_draft_model_draws_the_same_tokens(depth, seed) -> None:
    """The draft model is right in two of three cases. Requests share prefixes, have
    several choices, and are preempted."""
    rng = random.Random(seed)
    drafter, draft_executor = make_drafter(
        num_blocks=18, max_seqs=4, max_graph_rows=rng.choice([0, 8]), depth=depth
    )
    core, executor, out = make_core(
        num_blocks=18,
        max_num_seqs=4,
        depth=depth,
        drafters=[drafter],
        policy=VerifyEverything(),
    )
    prefix = [rng.randrange(VOCAB) for _ in range(12)]
    requests = [
        add(
            f"r{number}",
            [*prefix[: rng.randint(0, 12)], number],
            30,
            num_choices=rng.choice([1, 1, 2]),
        )
        for number in range(8)
    ]
    unsent = list(requests)
    while unsent or not core.is_idle:
        core.round([unsent.pop()] if unsent and rng.random() < 0.3 else [])
        core.scheduler.check_integrity()
    run_until_idle(core)
    for request in requests:
        for choice in range(request.num_choices):
            tokens = out.tokens(request.request_id, choice)
            assert tokens == expected_output(request.token_ids, 30, choice=choice)
    ends = [end for request in requests for end in out.terminals(request.request_id)]
    num_accepted = sum(end.accepted_tokens for end in ends)
    num_rejected = sum(end.rejected_tokens for end in ends)
    assert 2 * num_accepted > num_rejected > 0
    assert draft_executor.num_steps and executor.num_steps
    assert_all_blocks_free(core)


def test_engine_proposes_only_for_sequences_without_awaited_tokens(depth) -> None:
    """Otherwise, the draft model would compute tokens that the engine does not use."""
    drafter, draft_executor = make_drafter(depth=depth, max_step_tokens=64)
    propose = drafter.propose

    def checked_propose(
        sequences: Sequenceable[Sequence], limits: Sequenceable[int]
    ) -> list[list[int]]:
        assert not any(sequence.num_launched for sequence in sequences)
        return propose(sequences, limits)

    drafter.propose = checked_propose  # type: ignore[method-assign]
    core, _, out = make_core(depth=depth, drafters=[drafter], policy=VerifyEverything())
    run_until_idle(core, add("a", [1, 2, 3], 30), add("b", [4], 30))
    assert out.tokens("a") == expected_output([1, 2, 3], 30)
    assert all(end.accepted_tokens for name in "ab" for end in out.terminals(name))
    assert draft_executor.num_steps


@pytest.mark.parametrize("num_launches", [0, 1, 6])
def test_failed_step_of_the_draft_model_changes_no_stream(
    depth, num_launches, caplog
) -> None:
    drafter, draft_executor = make_drafter(depth=depth, max_step_tokens=64)
    draft_executor.num_launches_left = num_launches
    core, _, out = make_core(depth=depth, drafters=[drafter], policy=VerifyEverything())
    run_until_idle(core, add("a", [1, 2, 3], 30), add("b", [4], 30))
    assert out.tokens("a") == expected_output([1, 2, 3], 30)
    assert out.tokens("b") == expected_output([4], 30)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1 and "'model' failed" in errors[0].getMessage()
    assert_all_blocks_free(core)


def test_every_stream_gets_all_requested_proposals_once_its_prompt_is_computed() -> (
    None
):
    core, _, _ = make_core(max_num_batched_tokens=64)
    drafter, executor = make_drafter(max_step_tokens=64)
    sequences = run_to_decoding(core, list(range(9)), [3], list(range(20, 35)))
    for _ in range(20):
        proposals = drafter.propose(sequences, [4, 2, 3])
        assert [len(proposed) for proposed in proposals] == [4, 2, 3]
        assert_right(sequences, proposals, [4, 2, 3])
        core.round([])
    # After the first round, each round has one step for the missing tokens, which also
    # proposes one token, and one step for each further proposal.
    assert executor.num_steps == 20 * 4


def test_long_prompt_is_computed_in_pieces_while_other_streams_get_proposals() -> None:
    core, _, _ = make_core(max_num_batched_tokens=64)
    drafter, executor = make_drafter(max_step_tokens=10, max_proposals=2)
    short, long = run_to_decoding(core, [1, 2, 3], list(range(40)))
    lens = []
    while not lens or not lens[-1]:
        proposals = drafter.propose([long, short], [2, 2])
        assert_right([long, short], proposals, [2, 2])
        assert len(proposals[1]) == 2
        lens.append(len(proposals[0]))
    # A step has 10 tokens: 4 of `short` in the first step, 1 of `short` in later steps.
    assert len(lens) == 5
    assert executor.max_tokens_in_step <= 10


def test_accepted_proposals_are_not_computed_again() -> None:
    core, _, _ = make_core(block_size=32, max_model_len=300, num_blocks=32)
    drafter, executor = make_drafter(block_size=32, max_len=300)
    (sequence,) = run_to_decoding(core, [7, 8, 9])
    drafter.propose([sequence], [4])
    for _ in range(6):
        proposals = drafter.propose([sequence], [4])[0]
        num_before = executor.num_tokens
        position = len(sequence.token_ids)
        for _ in range(4):
            core.round([])
        drawn = sequence.token_ids[position:]
        num_accepted = next(
            (i for i in range(3) if drawn[i] != proposals[i]), 3
        )  # the last proposal was not computed
        drafter.propose([sequence], [1])
        assert executor.num_tokens - num_before == len(drawn) - num_accepted


def test_second_turn_of_a_conversation_uses_draft_kv_of_the_first() -> None:
    core, _, _ = make_core(num_blocks=40, max_num_batched_tokens=64)
    drafter, executor = make_drafter(num_blocks=40, max_step_tokens=64)
    prompt = [index % 11 for index in range(40)]
    (first,) = run_to_decoding(core, prompt)
    drafter.propose([first], [4])
    core.round([AbortRequest("r0", None)])
    core.round([add("next", [*prompt, 5, 6, 7], 5)])
    second = core.sequences["next"]
    assert second.is_decoding
    num_before = executor.num_tokens
    proposals = drafter.propose([second], [1])
    assert_right([second], proposals, [1])
    assert executor.num_tokens - num_before == len(second.token_ids) - 40


def test_blocks_with_other_tokens_are_not_taken_for_drafted_ones() -> None:
    """The pool has blocks for one prompt, so each prompt replaces the previous one."""
    core, _, _ = make_core(num_blocks=8, prefix_caching=False)
    drafter, _ = make_drafter(num_blocks=8, max_step_tokens=64)
    for number in range(4):
        prompt = [number, *range(14)]
        core.round([add(f"r{number}", prompt, 5)])
        while not (sequences := decoding(core)):
            core.round([])
        proposals = drafter.propose(sequences, [4])
        assert len(proposals[0]) == 4
        assert_right(sequences, proposals, [4])
        core.round([AbortRequest(f"r{number}", None)])


def test_choices_share_the_draft_kv_of_their_prompt() -> None:
    core, _, _ = make_core(max_num_batched_tokens=64, num_blocks=60)
    drafter, executor = make_drafter(max_step_tokens=64, num_blocks=60)
    prompt = [index % 7 for index in range(40)]
    core.round([add("r", prompt, 9, num_choices=4)])
    while len(decoding(core)) < 4:
        core.round([])
    sequences = decoding(core)
    for _ in range(2):
        proposals = drafter.propose(sequences, [1] * 4)
    assert [len(proposed) for proposed in proposals] == [1] * 4
    assert_right(sequences, proposals, [1] * 4)
    # The full blocks of the prompt were computed once.
    assert executor.num_tokens <= 40 + 4 * 6


def test_more_streams_than_scratch_blocks_propose_up_to_the_end_of_their_blocks() -> (
    None
):
    core, _, _ = make_core(max_num_batched_tokens=64, num_blocks=60)
    drafter, _ = make_drafter(max_step_tokens=64, num_blocks=60, max_seqs=2)
    # Each stream has one more token than its blocks can hold.
    prompts = [[number] * 8 for number in range(4)]
    sequences = run_to_decoding(core, *prompts)
    proposals = drafter.propose(sequences, [4] * 4)
    assert sorted(len(proposed) for proposed in proposals) == [0, 0, 4, 4]
    assert_right(sequences, proposals, [4] * 4)
    core.round([])
    proposals = drafter.propose(sequences, [4] * 4)
    assert sorted(len(proposed) for proposed in proposals) == [3, 3, 4, 4]
    assert_right(sequences, proposals, [4] * 4)


def test_tokens_outside_one_of_the_vocabularies_are_never_used() -> None:
    core, _, _ = make_core(max_num_batched_tokens=64)
    small_target, _ = make_drafter(max_step_tokens=64, target_vocab_size=20)
    small_draft, executor = make_drafter(max_step_tokens=64, vocab_size=20)
    sequences = run_to_decoding(core, [1, 2, 3])
    for _ in range(12):
        (proposals,) = small_target.propose(sequences, [4])
        expected = draft_output(sequences[0].token_ids, 4)
        is_usable = [token < 20 for token in expected]
        num_usable = (*is_usable, False).index(False)
        assert proposals == expected[:num_usable]
        core.round([])
    sequences[0].num_drafted = 0
    assert max(sequences[0].token_ids) >= 20
    assert small_draft.propose(sequences, [4]) == [[]]
    assert not executor.num_steps


def test_number_of_catch_up_tokens_follows_their_measured_duration() -> None:
    budget = CatchUpBudget(max_seconds=0.02, max_tokens=2048)
    for seconds_per_token in (1e-5, 1e-4):
        for _ in range(12):
            budget.record(budget.num_tokens, budget.num_tokens * seconds_per_token)
        assert budget.num_tokens * seconds_per_token <= 0.0201
        assert budget.num_tokens in (200, 1999, 2000)
    budget.record(5, 0.001)  # a small step does not measure the speed of large steps
    assert budget.num_tokens in (199, 200)
    budget.record(200, 10.0)
    assert budget.num_tokens == 16


def test_preempted_sequence_computes_its_draft_kv_again() -> None:
    core, _, _ = make_core(block_size=32, num_blocks=8, prefix_caching=False)
    drafter, executor = make_drafter(block_size=32, num_blocks=8)
    (sequence,) = run_to_decoding(core, [1, 2, 3])
    while True:
        ((proposal, *_),) = drafter.propose([sequence], [4])
        core.round([])
        if sequence.token_ids[-1] == proposal:
            break
    # Without a preemption, the next round would reuse the KV of the accepted proposal.
    core.scheduler._preempt(sequence, Plan(0))
    executor.pool[:] = -1
    while not sequence.is_decoding:
        core.round([])
    proposals = drafter.propose([sequence], [4])
    assert len(proposals[0]) == 4
    assert_right([sequence], proposals, [4])

"""Verification of proposals in the engine core, against a shadow of the KV cache
(tests/rigs/shadow.py).

Whatever a drafter proposes, every request gets the same tokens, KV, penalties and end
as without a drafter.
"""

import random

import pytest

from kvcache.groups import KVGroups
from protocol.messages import SamplingParams
from tests.rigs.drafters import FailingDrafter, RandomDrafter, VerifyEverything
from tests.rigs.shadow import (
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
    next_token,
    run_until_idle,
    seen,
    windowed_output,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_right_proposals_save_steps_and_are_counted(depth):
    drafter = RandomDrafter(1.0, random.Random(1))
    core, executor, out = make_core(
        depth=depth, drafters=[drafter], policy=VerifyEverything()
    )
    run_until_idle(core, add("a", PROMPT, 40))
    assert out.tokens("a") == expected_output(PROMPT, 40)
    assert executor.num_steps < 25
    (end,) = out.terminals("a")
    assert end.accepted_tokens > 15
    assert end.rejected_tokens == 0
    stats = core.stats()
    accepted = stats["baton_speculative_accepted_tokens{drafter=random}"]
    assert accepted == end.accepted_tokens
    assert stats["baton_speculative_proposed_tokens{drafter=random}"] == accepted


def test_wrong_proposals_change_nothing_and_are_counted(depth):
    drafter = RandomDrafter(0.0, random.Random(2))
    core, _, out = make_core(depth=depth, drafters=[drafter], policy=VerifyEverything())
    run_until_idle(core, add("a", PROMPT, 20))
    assert out.tokens("a") == expected_output(PROMPT, 20)
    (end,) = out.terminals("a")
    assert end.accepted_tokens == 0
    assert end.rejected_tokens > 0
    assert_all_blocks_free(core)


def test_stop_token_inside_an_accepted_run_ends_the_output(depth):
    full = expected_output(PROMPT, 30)
    for position in range(2, 12):
        stop = full[position]
        core, _, out = make_core(
            depth=depth,
            drafters=[RandomDrafter(1.0, random.Random(position))],
            policy=VerifyEverything(),
        )
        run_until_idle(core, add("a", PROMPT, 30, stop_token_ids=[stop]))
        assert out.tokens("a") == full[: full.index(stop) + 1]
        assert out.terminals("a")[0].finish_reason == "stop"
        assert_all_blocks_free(core)


def test_drafter_that_raises_is_turned_off_and_no_request_notices(depth, caplog):
    failing = FailingDrafter()
    working = RandomDrafter(1.0, random.Random(3))
    core, executor, out = make_core(
        depth=depth, drafters=[failing, working], policy=VerifyEverything()
    )
    run_until_idle(core, add("a", PROMPT, 20))
    assert out.tokens("a") == expected_output(PROMPT, 20)
    assert failing.num_calls == 1
    assert executor.num_steps < 19
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "'failing' failed" in errors[0].getMessage()


def test_proposals_preempt_no_sequence(depth):
    """The pool has just enough blocks for both sequences without proposals."""
    drafter = RandomDrafter(1.0, random.Random(4))
    core, _, out = make_core(
        depth=depth,
        num_blocks=13,
        block_size=4,
        drafters=[drafter],
        policy=VerifyEverything(),
    )
    run_until_idle(core, add("a", PROMPT, 14), add("b", PROMPT[::-1], 14))
    assert out.tokens("a") == expected_output(PROMPT, 14)
    assert out.tokens("b") == expected_output(PROMPT[::-1], 14)
    assert core.stats()["baton_preemptions"] == 0


def test_accepted_tokens_are_found_in_the_prefix_cache_afterwards(depth):
    drafter = RandomDrafter(0.7, random.Random(5))
    core, _, out = make_core(
        depth=depth, num_blocks=64, drafters=[drafter], policy=VerifyEverything()
    )
    run_until_idle(core, add("a", PROMPT, 22))
    conversation = [*PROMPT, *out.tokens("a")]
    run_until_idle(core, add("b", [*conversation, 7], 8))
    assert out.tokens("b") == expected_output([*conversation, 7], 8)
    usage = out.terminals("b")[0].usage
    assert usage is not None
    assert usage.skipped == (len(conversation) - 1) // 4 * 4


@pytest.mark.parametrize("seed", range(8))
def test_windows_are_right_after_rejected_proposals(depth, seed):
    groups = KVGroups((None, 6, 3))
    rng = random.Random(seed)

    def right_token(sequence, tokens):
        return next_token(seen(tokens, groups), sequence.choice)

    drafter = RandomDrafter(0.7, rng, right_token)
    core, _, out = make_core(
        depth=depth,
        num_blocks=64,
        groups=groups,
        drafters=[drafter],
        policy=VerifyEverything(),
    )
    run_until_idle(core, add("a", PROMPT, 30, num_choices=2), add("b", PROMPT[3:], 30))
    for choice in range(2):
        expected = windowed_output(PROMPT, 30, groups, choice)
        assert out.tokens("a", choice) == expected
    assert out.tokens("b") == windowed_output(PROMPT[3:], 30, groups)
    assert_all_blocks_free(core)


@pytest.mark.parametrize("share_right", [0.0, 0.6, 1.0])
def test_penalties_count_the_tokens_that_were_kept(depth, share_right):
    """The executor asserts that the penalties of each draw count all of its context."""
    drafter = RandomDrafter(share_right, random.Random(6))
    core, _, out = make_core(
        depth=depth, num_blocks=64, drafters=[drafter], policy=VerifyEverything()
    )
    sampling = SamplingParams(presence_penalty=0.5, min_tokens=5)
    stop = [1, 2, 3]
    request = add("a", PROMPT, 40, sampling, stop_token_ids=stop, num_choices=2)
    run_until_idle(core, request)
    for choice in range(2):
        expected = expected_output(PROMPT, 40, stop, choice, min_tokens=5)
        assert out.tokens("a", choice) == expected

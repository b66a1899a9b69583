"""The order of those that wait: short prompts before long ones, and nobody waits for ever."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.sequence import Sequence
from engine.core.waiting import LONG_PROMPT_TOKENS, MAX_OVERTAKEN, enqueue
from protocol.messages import ResumedChoice
from tests.rigs.shadow import add, assert_all_blocks_free, make_core, run_until_idle


def waits(tokens: int, priority: int = 0, **members: Any) -> Sequence:
    return Sequence.from_request(add("", [0] * tokens, 1, priority=priority, **members))


def order_of(sequences: list[Sequence]) -> list[int]:
    waiting = deque[Sequence]()
    for sequence in sequences:
        enqueue(waiting, sequence)
    return [
        next(at for at, one in enumerate(sequences) if one is each) for each in waiting
    ]


def test_prompts_whose_logprobs_are_wanted_count_as_more_work():
    scored = {"num_prompt_logprobs": 20}
    assert order_of([waits(8000, **scored), waits(8000)]) == [1, 0]
    assert order_of([waits(8000, **scored), waits(2000, **scored)]) == [1, 0]
    assert order_of([waits(8000), waits(2000, **scored)]) == [0, 1]
    assert order_of([waits(8000, **scored), *(waits(8000) for _ in range(5))]) == [
        1,
        2,
        3,
        4,
        0,
        5,
    ]


def test_keys_that_wait_are_served_in_turn_whatever_each_has_sent():
    keys = "aaaaabbc"
    order = order_of([waits(500, share=key) for key in keys])
    assert "".join(keys[at] for at in order) == "abcabaaa"
    long = [
        waits(900, share="a"),
        waits(900, share="a"),
        *(waits(300, share="b") for _ in "123"),
    ]
    assert order_of(long) == [2, 3, 0, 4, 1]  # by work, not by number


def test_an_urgent_request_goes_before_the_turns_of_keys():
    sequences = [waits(500, share="a"), waits(500, 1, share="b"), waits(500, share="a")]
    assert order_of(sequences) == [0, 2, 1]


def test_turns_of_other_keys_are_bounded():
    sequences = [waits(500, share="a"), waits(500, share="a")]
    sequences += [waits(500, share=f"{key}") for key in range(2 * MAX_OVERTAKEN)]
    assert order_of(sequences).index(1) == MAX_OVERTAKEN + 1


@pytest.mark.parametrize(
    ("lengths", "order"),
    [
        ([8192, 100, 100], [1, 2, 0]),
        ([8192, 2048, 2049], [1, 0, 2]),  # a quarter, and not quite
        ([8192, 2000, 400], [2, 1, 0]),
        ([800, 8], [0, 1]),  # is served so soon that it does not matter
        ([4096, *[1024] * 6], [1, 2, 3, 4, 0, 5, 6]),  # as much as itself
        ([8192, *[1] * 70], [*range(1, MAX_OVERTAKEN + 1), 0, *range(65, 71)]),
    ],
)
def test_much_shorter_prompts_go_first_for_as_long_as_they_would_have_waited(
    lengths, order
):
    waiting, sequences = deque[Sequence](), [waits(length) for length in lengths]
    for sequence in sequences:
        enqueue(waiting, sequence)
    assert [sequences.index(sequence) for sequence in waiting] == order


lengths = st.sampled_from([1, 100, 255, 256, 300, LONG_PROMPT_TOKENS, 4096, 8192])


@given(
    st.lists(
        st.tuples(lengths, st.sampled_from([0, 0, 0, 1]), st.booleans()), max_size=60
    )
)
def test_nobody_waits_for_more_than_its_own_length_of_others_that_came_later(asked):
    waiting, passed = deque[Sequence](), dict[int, list[Sequence]]()
    for tokens, priority, is_served in asked:
        new, before = waits(tokens, priority), list(waiting)
        enqueue(waiting, new)
        assert [each for each in waiting if each is not new] == before, (
            "others keep their order"
        )
        for each in before[list(map(id, waiting)).index(id(new)) :]:
            passed.setdefault(id(each), []).append(new)
            equals = [
                p
                for p in passed[id(each)]
                if p.request.priority == each.request.priority
            ]
            assert sum(len(p.token_ids) for p in equals) <= len(each.token_ids)
            assert len(passed[id(each)]) <= MAX_OVERTAKEN
        if is_served:
            passed.pop(id(waiting.popleft()), None)


def test_answers_that_go_on_here_wait_in_their_order_and_before_all_others():
    core, _, out = make_core(max_num_seqs=1)
    core.round([add("first", [1] * 9, 9)])
    core.round([add("urgent", [2] * 9, 2, priority=-9)])
    for name in "abc":
        core.round([add(name, [3] * 9, 4, resumed_choices=[ResumedChoice([1, 2])])])
    run_until_idle(core)
    assert list(dict.fromkeys(d.request_id for d in out.deltas)) == [
        "first",
        *"abc",
        "urgent",
    ]
    assert_all_blocks_free(core)


def test_a_short_prompt_shares_the_next_step_of_a_long_one_that_is_under_way():
    core, _, out = make_core(
        num_blocks=1200, max_num_batched_tokens=512, max_model_len=4096
    )
    core.round([add("long", range(1, 3001), 1)])
    core.finish_steps(0)
    core.round([add(name, [ord(name)] * 100, 1) for name in "abc"])
    core.finish_steps(0)
    assert [delta.request_id for delta in out.deltas] == ["a", "b"], (
        "half of a step at most"
    )
    assert core.sequences["long"].num_computed == 2 * 512 - 200
    run_until_idle(core)
    assert [delta.request_id for delta in out.deltas] == ["a", "b", "c", "long"]
    assert_all_blocks_free(core)

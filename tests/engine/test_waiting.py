"""The order of the waiting queue: short prompts precede long ones, and every request is
served."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.sequence import Sequence
from engine.core.waiting import LONG_PROMPT_TOKENS, MAX_OVERTAKEN, enqueue
from protocol.messages import ResumedChoice
from tests.rigs.shadow import add, assert_all_blocks_free, make_core, run_until_idle


def make_sequence(num_tokens: int, priority: int = 0, **fields: Any) -> Sequence:
    request = add("", [0] * num_tokens, 1, priority=priority, **fields)
    return Sequence.from_request(request)


def queue_order(sequences: list[Sequence]) -> list[int]:
    """Enqueues sequences in order. Returns their indices in the order of the queue."""
    waiting = deque[Sequence]()
    for sequence in sequences:
        enqueue(waiting, sequence)
    return [sequences.index(sequence) for sequence in waiting]


def test_prompts_with_logprobs_count_as_more_work():
    scored = {"num_prompt_logprobs": 20}
    long = make_sequence(8000)
    long_scored = make_sequence(8000, **scored)
    assert queue_order([long_scored, long]) == [1, 0]
    long_scored = make_sequence(8000, **scored)
    assert queue_order([long_scored, make_sequence(2000, **scored)]) == [1, 0]
    long = make_sequence(8000)
    assert queue_order([long, make_sequence(2000, **scored)]) == [0, 1]
    long_scored = make_sequence(8000, **scored)
    unscored = [make_sequence(8000) for _ in range(5)]
    assert queue_order([long_scored, *unscored]) == [1, 2, 3, 4, 0, 5]


def test_keys_get_equal_shares_of_work_however_many_requests_each_has():
    keys = "aaaaabbc"
    order = queue_order([make_sequence(500, share=key) for key in keys])
    assert "".join(keys[index] for index in order) == "abcabaaa"
    sequences = [make_sequence(900, share="a") for _ in range(2)]
    sequences += [make_sequence(300, share="b") for _ in range(3)]
    # The work of a key counts, not the number of its requests.
    assert queue_order(sequences) == [2, 3, 0, 4, 1]


def test_urgent_request_precedes_less_urgent_ones_of_other_keys():
    sequences = [
        make_sequence(500, share="a"),
        make_sequence(500, 1, share="b"),
        make_sequence(500, share="a"),
    ]
    assert queue_order(sequences) == [0, 2, 1]


def test_requests_of_other_keys_overtake_a_limited_number_of_times():
    sequences = [make_sequence(500, share="a"), make_sequence(500, share="a")]
    for key in range(2 * MAX_OVERTAKEN):
        sequences.append(make_sequence(500, share=f"{key}"))
    assert queue_order(sequences).index(1) == MAX_OVERTAKEN + 1


@pytest.mark.parametrize(
    ("lengths", "order"),
    [
        ([8192, 100, 100], [1, 2, 0]),
        ([8192, 2048, 2049], [1, 0, 2]),  # only 2048 is at most a quarter of 8192
        ([8192, 2000, 400], [2, 1, 0]),
        ([800, 8], [0, 1]),  # 800 tokens are not a long prompt
        ([4096, *[1024] * 6], [1, 2, 3, 4, 0, 5, 6]),  # overtaken by 4096 tokens
        ([8192, *[1] * 70], [*range(1, MAX_OVERTAKEN + 1), 0, *range(65, 71)]),
    ],
)
def test_much_shorter_prompts_overtake_a_long_prompt_up_to_its_work(lengths, order):
    assert queue_order([make_sequence(length) for length in lengths]) == order


lengths = st.sampled_from([1, 100, 255, 256, 300, LONG_PROMPT_TOKENS, 4096, 8192])


@given(
    st.lists(
        st.tuples(lengths, st.sampled_from([0, 0, 0, 1]), st.booleans()), max_size=60
    )
)
def test_work_that_overtakes_a_prompt_does_not_exceed_its_work(requests):
    waiting = deque[Sequence]()
    overtaken_by: dict[Sequence, list[Sequence]] = {}
    for num_tokens, priority, is_served in requests:
        new = make_sequence(num_tokens, priority)
        before = list(waiting)
        enqueue(waiting, new)
        others = [sequence for sequence in waiting if sequence is not new]
        assert others == before, "the other sequences keep their order"
        for overtaken in before[waiting.index(new) :]:
            overtaking = overtaken_by.setdefault(overtaken, [])
            overtaking.append(new)
            num_equally_urgent = sum(
                len(sequence.token_ids)
                for sequence in overtaking
                if sequence.request.priority == overtaken.request.priority
            )
            assert num_equally_urgent <= len(overtaken.token_ids)
            assert len(overtaking) <= MAX_OVERTAKEN
        if is_served:
            overtaken_by.pop(waiting.popleft(), None)


def test_resumed_requests_precede_all_others_in_their_order_of_arrival():
    core, _, out = make_core(max_num_seqs=1)
    core.round([add("first", [1] * 9, 9)])
    core.round([add("urgent", [2] * 9, 2, priority=-9)])
    for name in "abc":
        core.round([add(name, [3] * 9, 4, resumed_choices=[ResumedChoice([1, 2])])])
    run_until_idle(core)
    assert list(dict.fromkeys(delta.request_id for delta in out.deltas)) == [
        "first",
        *"abc",
        "urgent",
    ]
    assert_all_blocks_free(core)


def test_short_prompts_share_the_next_step_of_a_running_long_prompt():
    core, _, out = make_core(
        num_blocks=1200, max_num_batched_tokens=512, max_model_len=4096
    )
    core.round([add("long", range(1, 3001), 1)])
    core.finish_steps(0)
    core.round([add(name, [ord(name)] * 100, 1) for name in "abc"])
    core.finish_steps(0)
    assert [delta.request_id for delta in out.deltas] == ["a", "b"], (
        "short prompts take at most half of a step"
    )
    assert core.sequences["long"].num_computed == 2 * 512 - 200
    run_until_idle(core)
    assert [delta.request_id for delta in out.deltas] == ["a", "b", "c", "long"]
    assert_all_blocks_free(core)

"""Drafters that copy earlier tokens, compared with a search through all tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.sequence import Phase, Sequence
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import (
    MAX_INDEXED_PER_CALL,
    MAX_LEAD_OUTPUTS,
    MAX_UNSORTED_TOKENS,
    NgramDrafter,
    PredictionDrafter,
)
from engine.speculation.ngram_index import (
    MAX_CANDIDATES,
    MAX_MATCH_TOKENS,
    MAX_SORTED_TOKENS,
    NGRAM_TOKENS,
)
from tests.rigs.shadow import add

SHORT_TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def decoding(
    prompt: list[int],
    outputs: list[int],
    *,
    prediction: list[int] | None = None,
    name: str = "a",
) -> Sequence:
    """Returns a sequence that decodes and has these outputs."""
    request = add(name, prompt, 1000, prediction=prediction or [])
    sequence = Sequence.from_request(request)
    sequence.token_ids += outputs
    sequence.phase = Phase.RUNNING
    return sequence


def proposal(drafter: Drafter, sequence: Sequence, limit: int = 16) -> list[int]:
    (tokens,) = drafter.propose([sequence], [limit])
    return tokens


def best_occurrence(
    text: list[int], suffix: list[int], last_end: int
) -> tuple[int, int] | None:
    """Finds the occurrence in `text` of the longest end of `suffix`. Returns the end
    and the length of this occurrence.

    Only the latest MAX_CANDIDATES occurrences that end at or before `last_end` count.
    """
    suffix = suffix[-MAX_MATCH_TOKENS:]
    ends = [
        end
        for end in range(last_end, NGRAM_TOKENS - 1, -1)
        if text[end - NGRAM_TOKENS : end] == suffix[-NGRAM_TOKENS:]
    ]
    matches = []
    for end in ends[:MAX_CANDIDATES]:
        length = NGRAM_TOKENS
        while (
            length < min(end, len(suffix)) and text[end - length - 1] == suffix[~length]
        ):
            length += 1
        matches.append((length, end))
    if not matches:
        return None
    length, end = max(matches)
    return end, length


def expected_copy(tokens: list[int], limit: int) -> list[int]:
    occurrence = best_occurrence(tokens, tokens, len(tokens) - 1)
    if occurrence is None:
        return []
    end, length = occurrence
    text = list(tokens)
    for index in range(min(limit, length)):
        text.append(text[end + index])
    return text[len(tokens) :]


def test_longest_occurrence_is_copied_even_if_a_shorter_one_is_later():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 90, 3, 4, 5, 91, 92]
    drafter = NgramDrafter()
    assert proposal(drafter, decoding(prompt, [2, 3, 4, 5])) == [6, 7, 8, 90]
    assert proposal(drafter, decoding(prompt, [0, 3, 4, 5])) == [91, 92, 0]
    assert proposal(drafter, decoding(prompt, [0, 4, 5])) == []


def test_proposal_is_at_most_as_long_as_its_match_and_its_limit():
    prompt = list(range(40))
    drafter = NgramDrafter()
    for num_outputs in range(1, 20):
        sequence = decoding(prompt, prompt[:num_outputs])
        for limit in range(17):
            tokens = proposal(drafter, sequence, limit)
            num_tokens = min(limit, num_outputs) if num_outputs >= NGRAM_TOKENS else 0
            assert tokens == prompt[num_outputs : num_outputs + num_tokens]


def test_repetition_continues_beyond_the_last_token():
    sequence = decoding([5, 6], [1, 2, 1, 2, 1, 2, 1])
    assert proposal(NgramDrafter(), sequence, 4) == [2, 1, 2, 1]


@given(
    prompt=SHORT_TEXTS,
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=20),
    limit=st.integers(1, 16),
    replaced=st.sets(st.integers(0, 19)),
)
def test_proposals_equal_those_of_a_search_through_all_tokens(
    prompt, pieces, limit, replaced
):
    """Before some of the calls, the last token is replaced, as when the first token of
    another server is discarded."""
    sequence = decoding(prompt, [0])
    drafter = NgramDrafter()
    for step, piece in enumerate(pieces):
        if step in replaced:
            sequence.token_ids.pop()
        sequence.token_ids += piece
        expected = expected_copy(sequence.token_ids, limit)
        assert proposal(drafter, sequence, limit) == expected


@given(
    prompt=SHORT_TEXTS,
    edits=st.lists(st.tuples(st.integers(0, 30), SHORT_TEXTS), max_size=10),
)
def test_proposals_are_copies_whichever_tokens_are_replaced(prompt, edits):
    sequence = decoding(prompt, [0])
    drafter = NgramDrafter()
    for num_dropped, added in edits:
        num_outputs = sequence.num_outputs - 1
        del sequence.token_ids[
            len(sequence.token_ids) - min(num_dropped, num_outputs) :
        ]
        sequence.token_ids += added
        text = sequence.token_ids
        tokens = proposal(drafter, sequence)
        continued = [*text, *tokens]
        assert not tokens or any(
            text[end - NGRAM_TOKENS : end] == text[-NGRAM_TOKENS:]
            and continued[end : end + len(tokens)] == tokens
            for end in range(NGRAM_TOKENS, len(text))
        )


def test_tokens_of_a_very_long_prompt_are_found_up_to_the_limit():
    prompt = list(range(MAX_SORTED_TOKENS + 100))
    drafter = NgramDrafter()
    assert proposal(drafter, decoding(prompt, [102, 103, 104]), 2) == [105, 106]
    assert proposal(drafter, decoding(prompt, [90, 91, 92]), 2) == []


def test_a_call_indexes_a_bounded_number_of_tokens():
    half = MAX_INDEXED_PER_CALL // 2
    sequences = [
        decoding([*range(half), 7, 8, 9], [1, 7, 8, 9], name=name) for name in "abcd"
    ]
    drafter = NgramDrafter()
    limits = [1] * len(sequences)
    assert drafter.propose(sequences, limits) == [[1], [1], [], []]
    assert drafter.propose(sequences, limits) == [[1]] * 4


def test_many_outputs_are_found_again():
    rng = random.Random(1)
    sequence = decoding([1, 2, 3], [4])
    drafter = NgramDrafter()
    outputs = [rng.randrange(50_000) for _ in range(3 * MAX_UNSORTED_TOKENS)]
    for start in range(0, len(outputs), 1000):
        sequence.token_ids += outputs[start : start + 1000]
        proposal(drafter, sequence)
        history = drafter._indexes.get(sequence)
        assert history is not None
        assert history.num_unsorted < MAX_UNSORTED_TOKENS + 1000
    for start in range(0, len(outputs) - 10, 1001):
        sequence.token_ids += outputs[start : start + 5]
        expected = outputs[start + 5 : start + 8]
        assert proposal(drafter, sequence, 3) == expected


def test_a_preempted_sequence_continues_with_its_index():
    sequence = decoding([1, 2, 3, 4, 5, 6], [7, 1, 2, 3])
    drafter = NgramDrafter()
    assert proposal(drafter, sequence) == [4, 5, 6]
    sequence.reset_blocks()
    sequence.phase = Phase.WAITING
    sequence.phase = Phase.RUNNING
    sequence.token_ids.append(4)
    assert proposal(drafter, sequence) == [5, 6, 7, 1]


@pytest.mark.parametrize("drafter_class", [NgramDrafter, PredictionDrafter])
def test_indexes_of_finished_sequences_are_dropped(drafter_class):
    drafter = drafter_class()
    tables = vars(drafter).values()
    for number in range(50):
        sequences = [
            decoding(
                [1, 2, 3], [1, 2, 3], prediction=[1, 2, 3, 4], name=f"{number}.{i}"
            )
            for i in range(3)
        ]
        drafter.propose(sequences, [4] * 3)
        assert [len(table) for table in tables] == [3]
        for sequence in sequences:
            sequence.phase = Phase.FINISHED


@pytest.mark.parametrize("drafter_class", [NgramDrafter, PredictionDrafter])
def test_indexes_of_finished_sequences_do_not_wait_for_the_next_index(drafter_class):
    """The next request with a prediction may arrive much later, so indexes must not
    stay in memory until then."""
    drafter = drafter_class()
    sequences = [
        decoding([1, 2, 3], [1, 2, 3], prediction=[1, 2, 3, 4], name=str(i))
        for i in range(3)
    ]
    drafter.propose(sequences, [4] * 3)
    sequences[0].phase = sequences[1].phase = Phase.FINISHED
    drafter.propose(sequences[2:], [0])
    assert [len(table) for table in vars(drafter).values()] == [1]


# -- predictions ------------------------------------------------------------------


def test_request_without_a_prediction_gets_no_proposal_from_it():
    drafter = PredictionDrafter()
    sequence = decoding([1, 2, 3, 1, 2, 3], [1, 2, 3])
    assert proposal(drafter, sequence) == []


def test_prediction_is_copied_from_its_beginning_to_its_end():
    prediction = list(range(100, 130))
    sequence = decoding([1, 2], [100], prediction=prediction)
    drafter = PredictionDrafter()
    num_steps = 0
    while sequence.token_ids[-1] != 129:
        sequence.token_ids += proposal(drafter, sequence, 8)
        num_steps += 1
    assert sequence.token_ids[2:] == prediction
    assert num_steps == 5  # 1 + 3 + 4 + 8 + 8 + 6 tokens
    assert proposal(drafter, sequence) == []


def test_prediction_continues_after_a_difference():
    prediction = list(range(100, 130))
    outputs = [*prediction[:10], 1, 2, *prediction[12:15]]
    sequence = decoding([1, 2], outputs[:-1], prediction=prediction)
    drafter = PredictionDrafter()
    assert proposal(drafter, sequence) == []
    sequence.token_ids.append(outputs[-1])
    assert proposal(drafter, sequence) == prediction[15:18]


def test_beginning_is_proposed_while_no_output_matches():
    """An answer may begin with a few words before the predicted text."""
    prediction = list(range(100, 130))
    sequence = decoding([1, 2], [7], prediction=prediction)
    drafter = PredictionDrafter()
    for _ in range(MAX_LEAD_OUTPUTS):
        assert proposal(drafter, sequence) == [100, 101, 102]
        sequence.token_ids.append(7)
    assert proposal(drafter, sequence) == []
    sequence.token_ids += [100, 101, 102]
    assert proposal(drafter, sequence) == [103, 104, 105]


def test_prompt_is_not_searched_for_the_prediction():
    """A match must not begin in the prompt and end in the outputs."""
    sequence = decoding([100, 101], [102], prediction=[100, 101, 102, 103, 104])
    assert proposal(PredictionDrafter(), sequence) == [100, 101, 102]


@given(
    prediction=SHORT_TEXTS,
    outputs=st.lists(st.integers(0, 3), min_size=MAX_LEAD_OUTPUTS + 1, max_size=80),
    limit=st.integers(1, 16),
)
def test_predicted_tokens_equal_those_of_a_search_through_all_of_them(
    prediction, outputs, limit
):
    sequence = decoding([9], outputs, prediction=prediction)
    occurrence = best_occurrence(prediction, outputs, len(prediction))
    expected = []
    if occurrence is not None:
        end, length = occurrence
        expected = prediction[end : end + min(limit, length)]
    assert proposal(PredictionDrafter(), sequence, limit) == expected


def test_choices_of_a_request_are_searched_separately():
    request = add("a", [1, 2, 3, 4, 5], 100, num_choices=2, prediction=[6, 7, 8, 9])
    parent = Sequence.from_request(request)
    _, child = parent.choices
    child.fork_from(parent)
    parent.token_ids += [1, 2, 3]
    child.token_ids += [6, 2, 3, 4]
    pair = [parent, child]
    assert NgramDrafter().propose(pair, [3, 3]) == [[4, 5, 1], [5, 6, 2]]
    child.token_ids[-3:] = [7, 8]
    assert PredictionDrafter().propose(pair, [3, 3]) == [[6, 7, 8], [9]]


def test_choices_of_a_request_share_the_index_of_its_prediction():
    """Otherwise, a long prediction with many choices would delay all streams."""
    prediction = [*range(MAX_INDEXED_PER_CALL)]
    request = add("a", [5], 100, num_choices=3, prediction=prediction)
    parent = Sequence.from_request(request)
    for child in parent.choices.children[:]:
        child.fork_from(parent)
    for choice in parent.choices:
        choice.token_ids += prediction[:3]
    drafter = PredictionDrafter()
    expected = prediction[3:5]
    assert drafter.propose([*parent.choices], [2] * 3) == [expected] * 3
    parent.phase = Phase.FINISHED
    _, *children = parent.choices
    assert drafter.propose(children, [2] * 2) == [expected] * 2

"""For decode kernels, contexts are cut into pieces that are computed in parallel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.base import AttentionBatch
from attention.pieces import (
    TILE,
    max_num_pieces,
    max_num_results,
    max_run_rows,
    plan_pieces,
    plan_size,
    rows_of_runs,
)
from tests.rigs.examples import examples


def decode_batch(tables, lens):
    """Returns a decode step of rows with these block tables and lengths."""
    width = max(map(len, tables))
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    return AttentionBatch(
        query_lens=np.ones(len(lens), np.int32),
        context_lens=np.array(lens, np.int32),
        block_tables=np.array(padded, np.int32),
        slot_mapping=np.zeros(len(lens), np.int64),
    )


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 9)), min_size=1, max_size=40
    ),
    st.integers(1, 32),
    st.integers(1, 140),
    st.sampled_from([1, 2, 4, 8, 16, 64]),
)
def test_pieces_cover_each_context_once_and_are_as_short_as_possible(
    contexts, heads, sms, group
):
    """Each context has as many rows as it has in `contexts`, one token apart."""
    rows = [
        (index, length + row)
        for index, (length, num_rows) in enumerate(contexts)
        for row in range(num_rows)
    ]
    lens = np.array([length for _, length in rows], np.int32)
    max_pieces = max_num_pieces(len(lens), heads, sms)
    max_rows = max_run_rows(group * heads, heads)
    assert max_rows == max(1, 32 // group)
    max_results = max_num_results(len(lens), max_rows, heads, sms)
    # Contexts have different blocks.
    batch = decode_batch([[index + 1] for index, _ in rows], lens)
    run_rows = rows_of_runs(batch, max_rows)
    expected = []
    for _, num_rows in contexts:
        expected += [max_rows] * (num_rows // max_rows)
        if num_rows % max_rows:
            expected.append(num_rows % max_rows)
    assert run_rows.tolist() == expected
    plan = plan_pieces(lens, run_rows, max_pieces, max_results)
    assert len(plan) == plan_size(len(lens), heads, sms)
    tokens = int(plan[0])
    seqs = plan[1 : 1 + max_pieces]
    assert tokens % TILE == 0
    of_rows = plan[1 + max_pieces :].reshape(4, -1)
    results = []
    next_piece = 0
    last_rows = np.cumsum(run_rows) - 1
    for last, num_rows in zip(last_rows, run_rows, strict=True):
        first = last + 1 - num_rows
        for row in range(first, last + 1):
            count, first_piece, num_pieces, first_result = of_rows[:, row].tolist()
            assert (count, first_piece) == (num_rows, next_piece)
            results += [first_result + num_rows * index for index in range(num_pieces)]
        assert (num_pieces - 1) * tokens < lens[last] <= num_pieces * tokens
        assert (seqs[next_piece : next_piece + num_pieces] == first).all()
        next_piece += num_pieces
    assert next_piece <= max_pieces
    assert (seqs[next_piece:] == -1).all()
    # Every partial result has memory of its own.
    assert sorted(results) == list(range(len(results)))
    assert len(results) <= max_results
    shorter = tokens - TILE
    if shorter:
        counts = -(-lens[last_rows] // shorter)
        is_too_many = counts.sum() > max_pieces
        assert is_too_many or (counts * run_rows).sum() > max_results


@pytest.mark.parametrize(
    ("tables", "lens", "num_rows"),
    [
        ([[1, 2, 3]] * 3 + [[7]], [1, 2, 3, 1], [3, 1]),
        ([[1, 2, 3], [1, 2, 3], [1, 5, 3]], [1, 2, 3], [2, 1]),  # the copy of a block
        ([[1, 2], [1, 2]], [2, 2], [1, 1]),  # two choices that share a prompt
        ([[1, 2, 3, 4]] * 2, [2, 4], [1, 1]),
        ([[1, 2, 3]] * 2, [3, 2], [1, 1]),
        ([[9]], [1], [1]),
    ],
)
def test_only_rows_that_see_the_same_blocks_and_one_token_more_form_a_run(
    tables, lens, num_rows
):
    batch = decode_batch(tables, lens)
    assert rows_of_runs(batch, 8).tolist() == num_rows
    assert rows_of_runs(batch, 1).tolist() == [1] * len(tables)

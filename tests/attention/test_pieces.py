"""For decode kernels, contexts are cut into pieces that are computed in parallel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.base import Pages
from attention.pieces import (
    TILE,
    max_num_pieces,
    max_num_results,
    max_run_rows,
    plan_pieces,
    rows_of_runs,
)
from tests.rigs.examples import examples


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 9)), min_size=1, max_size=40
    ),
    st.integers(1, 32),
    st.integers(1, 140),
    st.sampled_from([1, 2, 4, 8, 16]),
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
    max_results = max_num_results(len(lens), group * heads, heads, sms)
    max_rows = max_run_rows(group * heads, heads)
    assert max_rows == max(1, 8 // group)
    # Contexts have different blocks.
    tables = [range(10_000 * index, 10_000 * index + length) for index, length in rows]
    run_rows = rows_of_runs(pages_of(tables), lens, max_rows)
    expected = []
    for _, num_rows in contexts:
        expected += [max_rows] * (num_rows // max_rows)
        if num_rows % max_rows:
            expected.append(num_rows % max_rows)
    assert run_rows.tolist() == expected
    plan = plan_pieces(lens, run_rows, max_pieces, max_results)
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


def pages_of(tables):
    """Returns the pages of rows with blocks of one token."""
    indptr = np.cumsum([0, *map(len, tables)], dtype=np.int32)
    indices = np.array([block for table in tables for block in table], np.int32)
    return Pages(indptr, indices, np.ones(len(tables), np.int32))


@pytest.mark.parametrize(
    ("tables", "num_rows"),
    [
        ([[1], [1, 2], [1, 2, 3], [7]], [3, 1]),
        ([[1], [1, 2], [1, 5, 3]], [2, 1]),  # the copy of a block
        ([[1, 2], [1, 2]], [1, 1]),  # two choices that share a prompt
        ([[1, 2], [1, 2, 3, 4]], [1, 1]),
        ([[1, 2, 3], [1, 2]], [1, 1]),
        ([[9]], [1]),
    ],
)
def test_only_rows_that_see_the_same_blocks_and_one_token_more_form_a_run(
    tables, num_rows
):
    lens = np.array([len(table) for table in tables], np.int32)
    pages = pages_of(tables)
    assert rows_of_runs(pages, lens, 8).tolist() == num_rows
    assert rows_of_runs(pages, lens, 1).tolist() == [1] * len(tables)

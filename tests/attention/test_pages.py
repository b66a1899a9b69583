"""Block tables as compressed rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.pages import num_leading_decodes, pages_of


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_only_the_blocks_of_the_context_are_kept() -> None:
    tables = np.array([[7, 8, 9], [3, 0, 0], [4, 5, 0]], np.int32)
    pages = pages_of(tables, ints(9, 1, 8), block_size=4)
    assert pages.indptr.tolist() == [0, 3, 4, 6]
    assert pages.indices.tolist() == [7, 8, 9, 3, 4, 5]
    assert pages.last_page_lens.tolist() == [1, 1, 4]


@settings(deadline=None)
@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_head_and_tail_are_the_pages_of_their_sequences(
    lens: list[int], block_size: int, data: st.DataObject
) -> None:
    context_lens = ints(*lens)
    width = -(-max(lens) // block_size) + 1
    tables = np.random.default_rng(0).integers(1, 99, (len(lens), width)).astype(np.int32)
    pages = pages_of(tables, context_lens, block_size)
    split = data.draw(st.integers(0, len(lens)))
    for part, rows in (
        (pages.head(split), slice(0, split)),
        (pages.tail(split), slice(split, None)),
    ):
        expected = pages_of(tables[rows], context_lens[rows], block_size)
        assert part.indptr.tolist() == expected.indptr.tolist()
        assert part.indices.tolist() == expected.indices.tolist()
        assert part.last_page_lens.tolist() == expected.last_page_lens.tolist()
    full = (np.diff(pages.indptr) - 1) * block_size + pages.last_page_lens
    assert full.tolist() == lens


def test_decodes_that_lead_a_step() -> None:
    assert num_leading_decodes(ints(1, 1, 5, 1)) == 2
    assert num_leading_decodes(ints(1, 1)) == 2
    assert num_leading_decodes(ints(3)) == 0

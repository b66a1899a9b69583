import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.transfer.link.read_window import Post, ReadWindow, cut
from kvcache.transfer.plan.block_copy import ReadDescriptors


def read_of(lengths: list[int], rank: int = 0) -> ReadDescriptors:
    sizes = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    return ReadDescriptors(rank, (ends - sizes) * 2 + 1000, ends - sizes, sizes)


def as_pairs(posts: list[Post]) -> list[tuple[int, int, int]]:
    """(rank, remote byte, local byte) of every byte moved."""
    return [
        (post.remote_rank, remote + i, local + i)
        for post in posts
        for remote, local, length in zip(
            post.remote_offsets.tolist(),
            post.local_offsets.tolist(),
            post.lengths.tolist(),
            strict=True,
        )
        for i in range(length)
    ]


@given(
    reads=st.lists(st.lists(st.integers(1, 60), max_size=12), max_size=3),
    max_bytes=st.integers(1, 100),
    max_runs=st.integers(1, 5),
)
@settings(deadline=None)
def test_property_posts_move_each_byte_once_within_their_limits(
    reads: list[list[int]], max_bytes: int, max_runs: int
) -> None:
    whole = [read_of(lengths, rank) for rank, lengths in enumerate(reads)]
    posts = list(cut(whole, ReadWindow(max_bytes, max_runs)))
    uncut = [Post(r.remote_rank, r.local_offsets, r.remote_offsets, r.lengths) for r in whole]
    assert as_pairs(posts) == as_pairs(uncut)
    for post in posts:
        assert 0 < post.nbytes <= max_bytes
        assert 0 < len(post.lengths) <= max_runs
        assert post.lengths.min() > 0


def test_no_more_posts_than_the_limits_ask_for() -> None:
    posts = list(cut([read_of([10] * 100)], ReadWindow(max_bytes=250, max_runs=1000)))
    assert [post.nbytes for post in posts] == [250] * 4
    (one,) = cut([read_of([10] * 100)], ReadWindow())
    assert one.nbytes == 1000


def test_posts_become_smaller_when_a_batch_begins_in_between() -> None:
    lengths = np.full(8, 100, np.int64)
    read = ReadDescriptors(0, np.arange(8) * 1000, np.arange(8) * 100, lengths)
    bounds = iter([700, 400, 200, 200, 200])
    posts = list(cut([read], ReadWindow(700, 1024, 8), lambda: next(bounds)))
    assert [post.nbytes for post in posts] == [400, 200, 200]
    assert np.concatenate([post.remote_offsets for post in posts]).tolist() == [
        1000 * index for index in range(8)
    ]

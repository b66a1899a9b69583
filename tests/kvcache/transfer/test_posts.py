from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache.transfer.agent import PostLimits, Throttle
from kvcache.transfer.plan.block_copy import ReadDescriptors


def read_of(lengths: list[int], rank: int = 0) -> ReadDescriptors:
    sizes = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    return ReadDescriptors(rank, (ends - sizes) * 2 + 1000, ends - sizes, sizes)


def as_pairs(posts: list[ReadDescriptors]) -> list[tuple[int, int, int]]:
    """Returns (rank, remote byte, local byte) for every byte that is moved."""
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
def test_property_posts_move_each_byte_once_and_are_as_large_as_their_limits(
    reads, max_bytes, max_runs
):
    whole = [read_of(lengths, rank) for rank, lengths in enumerate(reads)]
    posts = list(Throttle(PostLimits(max_bytes, max_runs)).cut(whole))
    assert as_pairs(posts) == as_pairs(whole)
    for post in posts:
        assert 0 < post.nbytes <= max_bytes
        assert 0 < len(post.lengths) <= max_runs
        assert post.lengths.min() > 0
    for before, after in pairwise(posts):
        is_full = (
            len(before.lengths) == max_runs
            or before.nbytes + after.lengths[0] > max_bytes
        )
        assert is_full or before.remote_rank != after.remote_rank


def test_reads_are_paced_only_while_a_batch_is_computed():
    busy = False
    throttle = Throttle(PostLimits(max_bytes=1 << 30), lambda: busy)
    (post,) = throttle.cut([read_of([200 << 20])])
    throttle.posted(post.nbytes, 10.0)
    assert throttle.admits(10.0)
    busy = True
    assert [each.nbytes >> 20 for each in throttle.cut([read_of([200 << 20])])] == [
        64,
        64,
        64,
        8,
    ]
    now = 10.0
    moved = 0
    while now < 11.0:
        if throttle.admits(now):
            throttle.posted(10**8, now)
            moved += 10**8
        now += 0.0003  # like a thread that checks periodically
    assert 0.7 * 110e9 < moved <= 1.001 * 110e9
    throttle.posted(33 * 10**6, 20.0, staged=True)  # staged bytes have a lower rate
    assert not throttle.admits(20.0009) and throttle.admits(20.0011)
    busy = False
    throttle.posted(1 << 50, 20.1)
    assert throttle.admits(20.1)

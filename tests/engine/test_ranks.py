"""Rank 0 and its followers agree before they compute."""

import threading
from pathlib import Path

import pytest

from engine.ranks import Follower, Leader, RankTimeout


def test_followers_learn_the_port_and_the_smallest_number_of_blocks(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/ranks"
    leader = Leader(address, 3, timeout_s=30)
    learned: dict[int, tuple[int, int]] = {}

    def follow(rank: int) -> None:
        follower = Follower(address, rank)
        learned[rank] = follower.join(), follower.agree_on_blocks(100 * rank)
        follower.close()

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    leader.share_port(4711)
    assert leader.agree_on_blocks(150) == 100
    for thread in threads:
        thread.join(30)
    assert learned == {1: (4711, 100), 2: (4711, 100)}
    leader.close()


def test_a_rank_that_never_comes_is_a_typed_error(tmp_path: Path) -> None:
    leader = Leader(f"ipc://{tmp_path}/ranks", 2, timeout_s=0.05)
    with pytest.raises(RankTimeout, match="Join"):
        leader.share_port(4711)
    leader.close()

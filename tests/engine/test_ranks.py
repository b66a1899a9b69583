"""Rank 0 and its followers agree before they compute."""

import threading
from pathlib import Path

import numpy as np
import pytest

from engine.batch import PendingStep, StepInput, StepOutput
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


class _Step:
    def __init__(self, runner: "_AheadRunner") -> None:
        self._runner = runner

    def result(self) -> StepOutput:
        self._runner.num_under_way -= 1
        return StepOutput([], [])


class _AheadRunner:
    """Launches and remembers."""

    depth = 1

    def __init__(self) -> None:
        self.token_ids: list[list[int]] = []
        self.num_under_way = self.most_under_way = 0

    def check(self, step: StepInput) -> None:
        pass

    def launch(self, step: StepInput) -> _Step:
        self.token_ids.append(step.token_ids.tolist())
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        return _Step(self)


def test_followers_launch_ahead_as_far_as_rank_0_does(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/ranks"
    leader, follower = Leader(address, 2, timeout_s=30), Follower(address, 1)
    ours, theirs = _AheadRunner(), _AheadRunner()
    leader.runner = ours  # type: ignore[assignment]

    def follow() -> None:
        follower.join()
        follower.run(theirs)  # type: ignore[arg-type]

    thread = threading.Thread(target=follow)
    thread.start()
    leader.share_port(4711)
    assert leader.depth == 1
    under_way: list[PendingStep] = []
    for index in range(5):
        one = np.ones(1, np.int32)
        step = StepInput(np.array([-1 if index else 7]), one, one, one[None], one * 0, [])
        under_way.append(leader.launch(step))
        if len(under_way) > leader.depth:
            under_way.pop(0).result()
    leader.close()
    thread.join(30)
    assert not thread.is_alive()
    follower.close()
    assert ours.token_ids == theirs.token_ids == [[7], [-1], [-1], [-1], [-1]]
    assert ours.most_under_way == theirs.most_under_way == 2

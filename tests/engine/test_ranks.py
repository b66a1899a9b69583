"""The ranks of an engine agree before they compute, follow rank 0, and know whose end it was."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.core.batch import PendingStep, StepInput, StepOutput
from engine.worker.ranks import RankExecutor, RankLinks, RankLost, RankTimeout, blame

_TIMEOUT_S = 30.0
_FAILURE = RuntimeError("a collective broke")


class _AheadRunner:
    """Launches and remembers."""

    depth = 1

    def __init__(self, size: int = 2) -> None:
        self.model = SimpleNamespace(parallel=SimpleNamespace(size=size))
        self.token_ids: list[list[int]] = []
        self.num_under_way = self.most_under_way = 0

    def launch(self, step: StepInput) -> Any:
        self.token_ids.append(step.token_ids.tolist())
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        return SimpleNamespace(result=self._finish)

    def _finish(self) -> StepOutput:
        self.num_under_way -= 1
        return StepOutput([], [])


def _step(token_ids: list[int]) -> StepInput:
    one = np.ones(1, np.int32)
    return StepInput(np.array(token_ids), one, one, one[None], one * 0, [])


Follow = Callable[[int, Callable[[RankLinks], Any]], Future[Any]]


@pytest.fixture
def follow(socket_folder: Path) -> Iterator[Follow]:
    """Runs what another rank does, in a thread; its links are closed at the end."""
    with ThreadPoolExecutor() as pool:

        def run(rank: int, act: Callable[[RankLinks], Any]) -> Any:
            links = RankLinks(f"ipc://{socket_folder}/ranks", rank, 3)
            try:
                return act(links)
            finally:
                links.close()

        yield lambda rank, act: pool.submit(run, rank, act)


def _obey(links: RankLinks, runner: Any) -> None:
    links.agree(0, int, max)
    links.follow(runner)


def _rank_0(socket_folder: Path, size: int, timeout_s: float = _TIMEOUT_S) -> RankLinks:
    return RankLinks(f"ipc://{socket_folder}/ranks", 0, size, timeout_s=timeout_s)


def test_all_ranks_take_the_port_of_rank_0_and_the_smallest_number_of_blocks(socket_folder, follow):
    def agree(links: RankLinks, port: int, blocks: int) -> tuple[int, int]:
        return links.agree(port, int, max), links.agree(blocks, int, min)

    links = _rank_0(socket_folder, 3)
    others = [follow(rank, lambda links, n=100 * rank: agree(links, 0, n)) for rank in (1, 2)]  # type: ignore[misc]
    assert agree(links, 4711, 150) == (4711, 100)
    assert [other.result(_TIMEOUT_S) for other in others] == [(4711, 100)] * 2
    links.close()
    alone = RankLinks("", 0, 1)
    assert alone.agree(7, int, min) == 7
    alone.close()


def test_every_rank_has_a_further_socket_of_its_own_to_rank_0(socket_folder, follow):
    def hear(links: RankLinks) -> bytes:
        links.agree(0, int, max)
        (further,) = links.further()
        with further:
            links.agree(0, int, max)  # what was said over others is none of its business
            return further.recv(9)

    links = _rank_0(socket_folder, 3)
    others = [follow(rank, hear) for rank in (1, 2)]
    links.agree(0, int, max)
    for end, word in zip(links.further(), (b"one", b"other"), strict=True):
        with end:
            end.send(word)
    links.agree(0, int, max)
    assert {other.result(_TIMEOUT_S) for other in others} == {b"one", b"other"}
    links.close()


def test_a_rank_that_never_comes_is_a_typed_error(socket_folder):
    links = _rank_0(socket_folder, 2, timeout_s=0.05)
    with pytest.raises(RankTimeout, match="no rank joined"):
        links.agree(4711, int, max)
    links.close()


def test_a_rank_that_goes_silent_is_a_typed_error(socket_folder, follow):
    links = _rank_0(socket_folder, 2, timeout_s=0.2)
    other = follow(1, lambda links: links.agree(1, int, min) + links._receive()[0])
    assert links.agree(5, int, min) == 1
    with pytest.raises(RankTimeout, match="a rank said nothing for"):
        links.agree(5, int, min)
    links.send(b"\x01")
    assert other.result(_TIMEOUT_S) == 2
    links.close()


def test_other_ranks_launch_ahead_as_far_as_rank_0_does(socket_folder, follow):
    links, ours, theirs = _rank_0(socket_folder, 2), _AheadRunner(), _AheadRunner()

    other = follow(1, partial(_obey, runner=theirs))
    links.agree(1, int, max)
    executor = RankExecutor(ours, links)  # type: ignore[arg-type]
    under_way: list[PendingStep] = []
    for index in range(5):
        under_way.append(executor.launch(_step([-1 if index else 7])))
        if len(under_way) > executor.depth:
            under_way.pop(0).result()
    links.close()
    other.result(_TIMEOUT_S)
    assert ours.token_ids == theirs.token_ids == [[7], [-1], [-1], [-1], [-1]]
    assert ours.most_under_way == theirs.most_under_way == 2


def test_a_step_of_any_size_arrives_whole_and_the_end_of_rank_0_is_told(
    socket_folder, follow, monkeypatch
):
    monkeypatch.setattr("engine.worker.ranks._TORN_DOWN_S", 0.0)
    links, theirs, token_ids = _rank_0(socket_folder, 2), _AheadRunner(), list(range(1 << 20))

    other = follow(1, partial(_obey, runner=theirs))
    links.agree(1, int, max)
    RankExecutor(_AheadRunner(), links).launch(_step(token_ids))  # type: ignore[arg-type]
    links._links[0].close()
    with pytest.raises(RankLost, match="rank 0 has ended"):
        other.result(_TIMEOUT_S)
    assert theirs.token_ids == [token_ids]
    links._links.clear()
    links.close()


# -- what became of the other ranks ---------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "600"])
    yield started
    started.kill()
    started.wait()


def test_a_failure_beside_living_ranks_is_no_other_s(process):
    blame(_FAILURE, 0, [None, process.pid, None])


@pytest.mark.parametrize("is_reaped", [True, False])
def test_the_rank_that_ended_is_named_and_never_oneself(process, is_reaped):
    process.kill()
    if is_reaped:
        process.wait()
    with pytest.raises(RankLost, match="rank 2 has ended") as raised:
        blame(_FAILURE, 1, [os.getpid(), process.pid, process.pid])
    assert raised.value.__cause__ is _FAILURE
    blame(_FAILURE, 0, [process.pid])


def test_a_rank_that_is_being_torn_down_is_waited_for(process, monkeypatch):
    """Its GPU memory takes a while, and only its end says how it ended."""
    monkeypatch.setattr("engine.worker.ranks.is_ending", lambda pid: True)
    ending = threading.Timer(0.3, process.kill)
    ending.start()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        blame(_FAILURE, 0, [None, process.pid])
    assert process.poll() is not None, "its end came first"

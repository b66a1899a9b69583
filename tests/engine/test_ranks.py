"""The ranks of an engine agree before they compute, follow rank 0, and know whose end it was."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.core.batch import PendingStep, StepInput, StepOutput
from engine.worker.ranks import OtherRanks, RankExecutor, RankLinks, RankLost, RankTimeout
from protocol.handshake import ProcessRecord
from protocol.ipc.processes import own_record

_TIMEOUT_S = 30.0
_FAILURE = RuntimeError("a collective broke")


class _AheadRunner:
    """Launches and remembers."""

    depth = 1

    def __init__(self, size: int = 2) -> None:
        self.model = SimpleNamespace(parallel=SimpleNamespace(size=size))
        self.token_ids: list[list[int]] = []
        self.num_under_way = self.most_under_way = 0

    def check(self, step: StepInput) -> None:
        pass

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


def _rank_0(socket_folder: Path, size: int, timeout_s: float = _TIMEOUT_S) -> RankLinks:
    return RankLinks(f"ipc://{socket_folder}/ranks", 0, size, timeout_s=timeout_s)


def test_all_ranks_take_the_port_of_rank_0_and_the_smallest_number_of_blocks(
    socket_folder: Path, follow: Follow
) -> None:
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


def test_a_rank_that_never_comes_is_a_typed_error(socket_folder: Path) -> None:
    links = _rank_0(socket_folder, 2, timeout_s=0.05)
    with pytest.raises(RankTimeout, match="no rank joined"):
        links.agree(4711, int, max)
    links.close()


def test_a_rank_that_goes_silent_is_a_typed_error(socket_folder: Path, follow: Follow) -> None:
    links = _rank_0(socket_folder, 2, timeout_s=0.2)
    other = follow(1, lambda links: links.agree(1, int, min) + links._links[0].receive()[0])
    assert links.agree(5, int, min) == 1
    with pytest.raises(RankTimeout, match="a rank said nothing for"):
        links.agree(5, int, min)
    links.send(b"\x01")
    assert other.result(_TIMEOUT_S) == 2
    links.close()


def test_other_ranks_launch_ahead_as_far_as_rank_0_does(
    socket_folder: Path, follow: Follow
) -> None:
    links, ours, theirs = _rank_0(socket_folder, 2), _AheadRunner(), _AheadRunner()

    def act(links: RankLinks) -> None:
        links.agree(0, int, max)
        links.follow(theirs)  # type: ignore[arg-type]

    other = follow(1, act)
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
    socket_folder: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.ranks._TORN_DOWN_S", 0.0)
    links, theirs, token_ids = _rank_0(socket_folder, 2), _AheadRunner(), list(range(1 << 20))

    def act(links: RankLinks) -> None:
        links.agree(0, int, max)
        links.follow(theirs)  # type: ignore[arg-type]

    other = follow(1, act)
    links.agree(1, int, max)
    RankExecutor(_AheadRunner(), links).launch(_step(token_ids))  # type: ignore[arg-type]
    links._links[0].close()
    with pytest.raises(RankLost, match="rank 0 has ended"):
        other.result(_TIMEOUT_S)
    assert theirs.token_ids == [token_ids]
    links._links.clear()
    links.close()


# -- what became of the other ranks ---------------------------------------------------------------


_ALIVE = """
import sys
from msgspec.json import encode
from protocol.ipc.processes import own_record
print(encode(own_record()).decode(), flush=True)
sys.stdin.readline()
"""


class _Process:
    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen([sys.executable, "-c", _ALIVE], stdin=pipe, stdout=pipe)
        assert self._popen.stdout is not None
        self.record = msgspec.json.decode(self._popen.stdout.readline(), type=ProcessRecord)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.communicate()


@pytest.fixture
def process() -> Iterator[_Process]:
    started = _Process()
    yield started
    started.kill()


def test_a_failure_beside_living_ranks_is_no_other_s(process: _Process) -> None:
    OtherRanks(0, [None, process.record, None]).blame(_FAILURE)


def test_a_rank_never_blames_itself(process: _Process) -> None:
    process.kill()
    OtherRanks(0, [process.record]).blame(_FAILURE)


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("was_known", [True, False])
def test_the_rank_that_ended_is_named(process: _Process, own: int, was_known: bool) -> None:
    if not was_known:
        process.kill()
    others = OtherRanks(own, [own_record(), own_record(), process.record])
    process.kill()
    with pytest.raises(RankLost, match="rank 2 has ended") as raised:
        others.blame(_FAILURE)
    assert raised.value.__cause__ is _FAILURE


def test_a_rank_that_is_being_torn_down_is_waited_for(
    process: _Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU memory takes a while, and only its end says how it ended."""
    asked: list[int] = []

    def is_ending(pid: int) -> bool:
        asked.append(pid)
        if len(asked) == 3:
            os.kill(pid, signal.SIGKILL)
        return True

    monkeypatch.setattr("engine.worker.ranks.is_ending", is_ending)
    with pytest.raises(RankLost, match="rank 1 has ended"):
        OtherRanks(0, [None, process.record]).blame(_FAILURE)
    assert len(asked) >= 3

"""The ranks of an engine agree before they compute, follow rank 0, and know whose end it was."""

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.core.batch import PendingStep, StepInput, StepOutput
from engine.worker.ranks import (
    RankExecutor,
    RankLinks,
    RankLost,
    RankTimeout,
    raise_if_rank_lost,
)

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


def _close(links: RankLinks) -> None:
    links.close()
    for pull in links.pulls:
        pull.close()


@pytest.fixture
def follow() -> Iterator[Callable[..., tuple[RankLinks, list[Future[Any]]]]]:
    """Makes rank 0's links, and runs what other ranks do, each in a thread; their links are closed
    at its end."""

    def run(links: RankLinks, act: Callable[[RankLinks], Any]) -> Any:
        try:
            return act(links)
        finally:
            _close(links)

    with ThreadPoolExecutor() as pool:

        def begin(
            *acts: Callable[[RankLinks], Any], timeout_s: float = _TIMEOUT_S
        ) -> tuple[RankLinks, list[Future[Any]]]:
            pairs = [[socket.socketpair(), socket.socketpair()] for _ in acts]
            ours = [end for two in pairs for end, _ in two]
            others = [
                RankLinks(1 + at, [end for _, end in two])
                for at, two in enumerate(pairs)
            ]
            links = RankLinks(0, ours, timeout_s=timeout_s)
            return links, [
                pool.submit(run, *each) for each in zip(others, acts, strict=True)
            ]

        yield begin


def _obey(links: RankLinks, runner: Any) -> None:
    links.agree(0, int, max)
    links.run_steps(runner)


def test_all_ranks_take_the_smallest_number_of_blocks(follow):
    agree = partial(RankLinks.agree, kind=int, combine=min)
    links, others = follow(*(partial(agree, value=n) for n in (100, 200)))
    assert agree(links, value=150) == 100
    assert [other.result(_TIMEOUT_S) for other in others] == [100] * 2
    _close(links)
    assert RankLinks(0, []).agree(7, int, min) == 7


def test_every_rank_has_a_socket_to_rank_0_for_pulls_of_its_own(follow):
    def hear(links: RankLinks) -> bytes:
        links.agree(0, int, max)  # what was said over others is none of its business
        return links.pulls[0].recv(9)

    links, others = follow(hear, hear)
    for end, word in zip(links.pulls, (b"one", b"other"), strict=True):
        end.send(word)
    links.agree(0, int, max)
    assert [other.result(_TIMEOUT_S) for other in others] == [b"one", b"other"]
    _close(links)


def test_a_rank_that_goes_silent_is_a_typed_error(follow):
    def agree_once(links: RankLinks) -> int:
        return links.agree(1, int, min) + links._receive()[0]

    links, (other,) = follow(agree_once, timeout_s=0.2)
    assert links.agree(5, int, min) == 1
    with pytest.raises(RankTimeout, match="a rank sent nothing for"):
        links.agree(5, int, min)
    links.send(b"\x01")
    assert other.result(_TIMEOUT_S) == 2
    _close(links)


def test_other_ranks_launch_ahead_as_far_as_rank_0_does(follow):
    ours, theirs = _AheadRunner(), _AheadRunner()
    links, (other,) = follow(partial(_obey, runner=theirs))
    links.agree(1, int, max)
    executor = RankExecutor(ours, links)  # type: ignore[arg-type]
    under_way: list[PendingStep] = []
    for index in range(5):
        under_way.append(executor.launch(_step([-1 if index else 7])))
        if len(under_way) > executor.depth:
            under_way.pop(0).result()
    _close(links)
    other.result(_TIMEOUT_S)
    assert ours.token_ids == theirs.token_ids == [[7], [-1], [-1], [-1], [-1]]
    assert ours.most_under_way == theirs.most_under_way == 2


def test_a_step_of_any_size_arrives_whole_and_the_end_of_rank_0_is_told(
    follow, monkeypatch
):
    monkeypatch.setattr("engine.worker.ranks._TEARDOWN_TIMEOUT_S", 0.0)
    theirs, token_ids = _AheadRunner(), list(range(1 << 20))
    links, (other,) = follow(partial(_obey, runner=theirs))
    links.agree(1, int, max)
    RankExecutor(_AheadRunner(), links).launch(_step(token_ids))  # type: ignore[arg-type]
    links._links[0].close()
    with pytest.raises(RankLost, match="rank 0 has ended"):
        other.result(_TIMEOUT_S)
    assert theirs.token_ids == [token_ids]
    links._links.clear()
    _close(links)


# -- what became of the other ranks ---------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "600"])
    yield started
    started.kill()
    started.wait()


@pytest.mark.parametrize("is_reaped", [True, False])
def test_the_rank_that_ended_is_named_and_no_living_one_nor_oneself(process, is_reaped):
    raise_if_rank_lost(_FAILURE, 0, [None, process.pid, None])
    process.kill()
    if is_reaped:
        process.wait()
    with pytest.raises(RankLost, match="rank 2 has ended") as raised:
        raise_if_rank_lost(_FAILURE, 1, [os.getpid(), process.pid, process.pid])
    assert raised.value.__cause__ is _FAILURE
    raise_if_rank_lost(_FAILURE, 0, [process.pid])


def test_a_rank_that_is_being_torn_down_is_waited_for(process, monkeypatch):
    """Its GPU memory takes a while, and only its end says how it ended."""
    monkeypatch.setattr("engine.worker.ranks.is_exiting", lambda pid: True)
    ending = threading.Timer(0.3, process.kill)
    ending.start()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        raise_if_rank_lost(_FAILURE, 0, [None, process.pid])
    assert process.poll() is not None, "its end came first"

"""The ranks of an engine agree on values, execute the steps of rank 0, and report which
rank has exited."""

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
_FAILURE = RuntimeError("a collective failed")


class _FakeRunner:
    """A runner that launches one step ahead, and records the launches."""

    depth = 1

    def __init__(self, size: int = 2) -> None:
        self.model = SimpleNamespace(parallel=SimpleNamespace(size=size))
        self.draft: _FakeRunner | None = None
        self.token_ids: list[list[int]] = []
        self.num_in_flight = 0
        self.max_in_flight = 0

    def launch(self, step: StepInput) -> Any:
        self.token_ids.append(step.token_ids.tolist())
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        return SimpleNamespace(result=self._finish)

    def _finish(self) -> StepOutput:
        self.num_in_flight -= 1
        return StepOutput([], [])


def _step(token_ids: list[int]) -> StepInput:
    ones = np.ones(1, np.int32)
    return StepInput(np.array(token_ids), ones, ones, ones[None], ones * 0, [])


def _close(links: RankLinks) -> None:
    links.close()
    for pull in links.pulls:
        pull.close()


@pytest.fixture
def follow() -> Iterator[Callable[..., tuple[RankLinks, list[Future[Any]]]]]:
    """Makes the links of rank 0, and runs a function for each other rank in a thread.
    The links of the other ranks are closed when their functions return.
    """

    def run(links: RankLinks, function: Callable[[RankLinks], Any]) -> Any:
        try:
            return function(links)
        finally:
            _close(links)

    with ThreadPoolExecutor() as pool:

        def begin(
            *functions: Callable[[RankLinks], Any], timeout_s: float = _TIMEOUT_S
        ) -> tuple[RankLinks, list[Future[Any]]]:
            leader_sockets = []
            futures = []
            for rank, function in enumerate(functions, start=1):
                step_pair = socket.socketpair()
                pull_pair = socket.socketpair()
                leader_sockets += [step_pair[0], pull_pair[0]]
                links = RankLinks(rank, [step_pair[1], pull_pair[1]])
                futures.append(pool.submit(run, links, function))
            return RankLinks(0, leader_sockets, timeout_s=timeout_s), futures

        yield begin


def _follow_steps(links: RankLinks, runner: Any) -> None:
    links.agree(0, int, max)
    links.run_steps(runner)


def test_all_ranks_agree_on_the_smallest_number_of_blocks(follow):
    agree = partial(RankLinks.agree, kind=int, combine=min)
    links, others = follow(*(partial(agree, value=n) for n in (100, 200)))
    assert agree(links, value=150) == 100
    assert [other.result(_TIMEOUT_S) for other in others] == [100] * 2
    _close(links)
    assert RankLinks(0, []).agree(7, int, min) == 7


def test_each_rank_has_a_second_socket_to_rank_0_for_pulls(follow):
    def receive_pull_message(links: RankLinks) -> bytes:
        links.agree(0, int, max)  # these messages use the first socket
        return links.pulls[0].recv(9)

    links, others = follow(receive_pull_message, receive_pull_message)
    for end, message in zip(links.pulls, (b"one", b"other"), strict=True):
        end.send(message)
    links.agree(0, int, max)
    assert [other.result(_TIMEOUT_S) for other in others] == [b"one", b"other"]
    _close(links)


def test_silent_rank_raises_rank_timeout(follow):
    def agree_once(links: RankLinks) -> int:
        return links.agree(1, int, min) + links._receive()[0]

    links, (other,) = follow(agree_once, timeout_s=0.2)
    assert links.agree(5, int, min) == 1
    with pytest.raises(RankTimeout, match="a rank sent nothing for"):
        links.agree(5, int, min)
    links.send(b"\x01")
    assert other.result(_TIMEOUT_S) == 2
    _close(links)


def test_draft_steps_run_in_the_draft_model_of_each_rank(follow):
    runners = [_FakeRunner(), _FakeRunner()]
    for runner in runners:
        runner.draft = _FakeRunner()
    links, (other,) = follow(partial(_follow_steps, runner=runners[1]))
    links.agree(1, int, max)
    executor = RankExecutor(runners[0], links)  # type: ignore[arg-type]
    executor.launch(_step([7])).result()
    executor.launch(replace(_step([8]), is_draft=True)).result()
    _close(links)
    other.result(_TIMEOUT_S)
    for runner in runners:
        assert runner.token_ids == [[7]]
        assert runner.draft is not None and runner.draft.token_ids == [[8]]


def test_failed_launch_of_one_of_several_ranks_fails_all_later_launches(follow):
    """The other ranks may still wait in collectives of the failed step."""
    runner = _FakeRunner()
    runner.launch = Mock(side_effect=_FAILURE)  # type: ignore[method-assign]
    links, (other,) = follow(partial(_follow_steps, runner=_FakeRunner()))
    links.agree(1, int, max)
    executor = RankExecutor(runner, links)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a collective failed"):
            executor.launch(_step([7]))
    assert runner.launch.call_count == 1
    _close(links)
    other.result(_TIMEOUT_S)


def test_other_ranks_launch_as_many_steps_ahead_as_rank_0(follow):
    leader_runner = _FakeRunner()
    follower_runner = _FakeRunner()
    links, (other,) = follow(partial(_follow_steps, runner=follower_runner))
    links.agree(1, int, max)
    executor = RankExecutor(leader_runner, links)  # type: ignore[arg-type]
    in_flight: list[PendingStep] = []
    for index in range(5):
        in_flight.append(executor.launch(_step([-1 if index else 7])))
        if len(in_flight) > executor.depth:
            in_flight.pop(0).result()
    _close(links)
    other.result(_TIMEOUT_S)
    assert leader_runner.token_ids == [[7], [-1], [-1], [-1], [-1]]
    assert follower_runner.token_ids == leader_runner.token_ids
    assert leader_runner.max_in_flight == follower_runner.max_in_flight == 2


def test_large_step_arrives_complete_and_exit_of_rank_0_raises_rank_lost(
    follow, monkeypatch
):
    monkeypatch.setattr("engine.worker.ranks._TEARDOWN_TIMEOUT_S", 0.0)
    follower_runner = _FakeRunner()
    token_ids = list(range(1 << 20))
    links, (other,) = follow(partial(_follow_steps, runner=follower_runner))
    links.agree(1, int, max)
    RankExecutor(_FakeRunner(), links).launch(_step(token_ids))  # type: ignore[arg-type]
    links._links[0].close()
    with pytest.raises(RankLost, match="rank 0 has ended"):
        other.result(_TIMEOUT_S)
    assert follower_runner.token_ids == [token_ids]
    links._links.clear()
    _close(links)


# -- exits of other ranks --------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "600"])
    yield started
    started.kill()
    started.wait()


@pytest.mark.parametrize("is_reaped", [True, False])
def test_rank_lost_names_the_exited_rank_only(process, is_reaped):
    """Neither a running rank nor the failed rank itself is named."""
    raise_if_rank_lost(_FAILURE, 0, [None, process.pid, None])
    process.kill()
    if is_reaped:
        process.wait()
    with pytest.raises(RankLost, match="rank 2 has ended") as raised:
        raise_if_rank_lost(_FAILURE, 1, [os.getpid(), process.pid, process.pid])
    assert raised.value.__cause__ is _FAILURE
    raise_if_rank_lost(_FAILURE, 0, [process.pid])


def test_rank_lost_is_raised_after_the_other_rank_has_exited(process, monkeypatch):
    """An exiting process first releases its GPU memory, which takes time. Its exit
    status is known only afterwards."""
    monkeypatch.setattr("engine.worker.ranks.is_exiting", lambda pid: True)
    killer = threading.Timer(0.3, process.kill)
    killer.start()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        raise_if_rank_lost(_FAILURE, 0, [None, process.pid])
    assert process.poll() is not None, "RankLost comes only after the process exits"

import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from kvcache.transfer.pulls.messages import Command, RankEnded, Report, StopPull
from kvcache.transfer.pulls.rank_links import RankLinks, WorkerLink
from tests.rigs.memory_pair import DEADLINE_S


class Links:
    """Both ends of the links between the coordinator and two ranks."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.received: list[Report] = []
        self.selector = selectors.DefaultSelector()
        self.links = RankLinks(
            [coordinator_end for coordinator_end, _ in pairs],
            self.selector,
            self.received.append,
        )
        self.ranks = [WorkerLink(worker_end) for _, worker_end in pairs]

    def run_round(self, timeout_s: float = DEADLINE_S) -> None:
        for key, _ in self.selector.select(timeout_s):
            key.data()

    def reports(self, count: int) -> list[Report]:
        while len(self.received) < count:
            self.run_round()
        return self.received

    def commands(self, rank: int, count: int) -> list[str]:
        received: list[Command] = []
        while len(received) < count:
            # This sends commands for which the socket had no space before.
            self.run_round(0.0)
            received += self.ranks[rank].receive(DEADLINE_S)
        return [
            command.pull_id for command in received if isinstance(command, StopPull)
        ]

    def close(self) -> None:
        for link in (self.links, self.selector, *self.ranks):
            link.close()


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.close()


def rank_ended(rank: int, pull_id: str = "p") -> RankEnded:
    return RankEnded(pull_id=pull_id, rank=rank, complete=True)


def test_busy_rank_loses_no_command(links):
    # These commands are more than the socket's buffer can hold.
    names = [str(index) * 1000 for index in range(5000)]
    for name in names:
        links.links.broadcast(StopPull(name))
    assert links.commands(0, len(names)) == names


def test_end_of_a_rank_is_not_an_error(links):
    ended_rank, stays = links.ranks
    ended_rank.close()
    links.run_round()
    links.links.broadcast(StopPull("a"))
    assert links.commands(1, 1) == ["a"] and not links.received
    links.links.close()
    # For a rank, the end of rank 0 is not an error either.
    assert stays.receive(DEADLINE_S) == []
    stays.report(rank_ended(1))
    links.links = stays


def test_delayed_reports_reach_rank_0_without_a_second_command(links):
    link = links.ranks[0]
    num_reports = 0
    while link._wire is None or not link._wire.has_unsent:
        link.report(rank_ended(0, "p" * 1000))
        num_reports += 1
    stopping = threading.Event()

    def idle() -> None:  # does what a worker without a pull does
        while not stopping.is_set():
            link.receive(DEADLINE_S)

    thread = threading.Thread(target=idle)
    thread.start()
    try:
        assert len(links.reports(num_reports)) == num_reports
    finally:
        stopping.set()
        link.wake()
        thread.join()

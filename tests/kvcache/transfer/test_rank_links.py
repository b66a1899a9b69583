import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from kvcache.transfer.pulls.messages import Command, RankEnded, Report, StopPull
from kvcache.transfer.pulls.rank_links import RankLinks, WorkerLink
from tests.rigs.memory_pair import DEADLINE_S


class Links:
    """The coordinator's end and those of two ranks."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.found: list[Report] = []
        self.selector = selectors.DefaultSelector()
        self.links = RankLinks(
            [ours for ours, _ in pairs], self.selector, self.found.append
        )
        self.ranks = [WorkerLink(theirs) for _, theirs in pairs]

    def go_on(self, timeout_s: float = DEADLINE_S) -> None:
        for key, _ in self.selector.select(timeout_s):
            key.data()

    def reports(self, count: int) -> list[Report]:
        while len(self.found) < count:
            self.go_on()
        return self.found

    def commands(self, rank: int, count: int) -> list[str]:
        found: list[Command] = []
        while len(found) < count:
            self.go_on(0.0)  # sends what there was no room for
            found += self.ranks[rank].receive(DEADLINE_S)
        return [command.pull_id for command in found if isinstance(command, StopPull)]

    def close(self) -> None:
        for link in (self.links, self.selector, *self.ranks):
            link.close()


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.close()


def ended(rank: int, pull_id: str = "p") -> RankEnded:
    return RankEnded(pull_id=pull_id, rank=rank, complete=True)


def test_a_rank_that_is_busy_loses_no_command(links):
    names = [str(index) * 1000 for index in range(5000)]  # more than the kernel keeps
    for name in names:
        links.links.broadcast(StopPull(name))
    assert links.commands(0, len(names)) == names


def test_a_rank_that_ends_is_no_error(links):
    gone, stays = links.ranks
    gone.close()
    links.go_on()
    links.links.broadcast(StopPull("a"))
    assert links.commands(1, 1) == ["a"] and not links.found
    links.links.close()
    assert stays.receive(DEADLINE_S) == []  # nor is the end of rank 0
    stays.report(ended(1))
    links.links = stays


def test_reports_that_rank_0_had_no_room_for_reach_it_without_another_command(links):
    link, num_reports = links.ranks[0], 0
    while link._wire is None or not link._wire.has_unsent:
        link.report(ended(0, "p" * 1000))
        num_reports += 1
    stopping = threading.Event()

    def idle() -> None:  # as a worker without a pull
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

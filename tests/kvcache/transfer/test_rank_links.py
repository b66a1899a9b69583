import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.transfer.pulls import rank_links
from kvcache.transfer.pulls.messages import Command, RankEnded, Report, StopPull
from kvcache.transfer.pulls.rank_links import InsideLink, OutsideLink, RankLinks, WorkerLink
from protocol.ipc.wire import wait_readable

DEADLINE_S = 20.0


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, socket_folder: Path) -> Iterator[str]:
    yield "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{socket_folder}/pulls"
    assert not list(socket_folder.iterdir())  # nothing stays


def opened(links: RankLinks, rank: int) -> OutsideLink:
    link = OutsideLink(links.address)
    link.open(rank, threading.Event())
    return link


def reports(links: RankLinks, count: int) -> list[Report]:
    found: list[Report] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} reports"
        wait_readable(links, timeout_s=0.5)
        found += links.receive()
    return found


def commands(link: WorkerLink, count: int) -> list[str]:
    found: list[Command] = []
    while len(found) < count:
        link.wait(DEADLINE_S)
        found += link.receive()
    return [command.pull_id for command in found if isinstance(command, StopPull)]


def ended(rank: int) -> RankEnded:
    return RankEnded(pull_id="p", rank=rank, complete=True)


def test_commands_wait_for_a_rank_to_appear(address: str) -> None:
    links = RankLinks(address, 2, {})
    links.broadcast(StopPull("early"))
    ranks = [opened(links, rank) for rank in range(2)]
    for rank, link in enumerate(ranks):
        link.report(ended(rank))
    assert sorted(report.rank for report in reports(links, 2)) == [0, 1]
    links.broadcast(StopPull("late"))
    assert [commands(link, 2) for link in ranks] == [["early", "late"]] * 2
    for link in (links, *ranks):
        link.close()


def test_a_rank_that_is_busy_loses_no_command(address: str) -> None:
    links = RankLinks(address, 1, {})
    link = opened(links, 0)
    link.report(ended(0))
    reports(links, 1)
    names = [str(index) * 1000 for index in range(5000)]  # more than the kernel keeps
    for name in names:
        links.broadcast(StopPull(name))
    found = []
    while len(found) < len(names):
        links.receive()  # sends what did not fit
        link.wait(DEADLINE_S)
        found += [each.pull_id for each in link.receive()]
    assert found == names
    links.close()
    link.close()


def test_a_rank_inside_is_reached_without_a_socket() -> None:
    link, told = InsideLink(), threading.Event()
    link.on_report = told.set
    links = RankLinks("nowhere", 1, {0: link})
    links.broadcast(StopPull("a"))
    links.broadcast(StopPull("b"))
    assert commands(link, 2) == ["a", "b"]
    link.report(ended(0))
    assert told.is_set() and links.receive() == [ended(0)]
    links.close()
    link.close()


def test_a_rank_that_ends_is_no_error(address: str) -> None:
    links = RankLinks(address, 2, {})
    gone, stays = opened(links, 0), opened(links, 1)
    for rank, link in enumerate((gone, stays)):
        link.report(ended(rank))
    reports(links, 2)
    gone.close()
    wait_readable(links, timeout_s=DEADLINE_S)
    assert links.receive() == []
    links.broadcast(StopPull("a"))
    assert commands(stays, 1) == ["a"]
    links.close()
    stays.wait(DEADLINE_S)
    assert stays.receive() == []  # nor is the end of rank 0
    stays.report(ended(1))
    stays.close()


def test_reports_that_rank_0_had_no_room_for_reach_it_without_another_command(
    address: str,
) -> None:
    links = RankLinks(address, 1, {})
    link = opened(links, 0)
    num_reports = 0
    while link._wire is None or not link._wire.has_unsent:
        link.report(RankEnded(pull_id="p" * 1000, rank=0, complete=True))
        num_reports += 1
    stopping = threading.Event()

    def idle() -> None:  # as a worker without a pull
        while not stopping.is_set():
            link.wait(None)
            link.receive()

    thread = threading.Thread(target=idle)
    thread.start()
    try:
        assert len(reports(links, num_reports)) == num_reports
    finally:
        stopping.set()
        link.waker.wake()
        thread.join()
        links.close()
        link.close()


def test_a_command_sent_while_a_rank_goes_to_sleep_or_wakes_up_is_not_slept_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any line of `wait`, as another thread may."""
    num_lines = 0
    for number in range(100):
        link, lines, slept_through = InsideLink(), [], []

        def sleep(
            *_: Any, timeout_s: float | None, link: Any = link, found: Any = slept_through
        ) -> None:
            awake = select.select([link.waker], [], [], 0)[0]
            found.append(bool(link._commands) and not awake)

        def send(
            frame: Any, event: str, _: Any, link: Any = link, at: int = number, seen: Any = lines
        ) -> Any:
            if frame.f_code is not InsideLink.wait.__code__:
                return None
            if event == "line":
                seen.append(frame.f_lineno)
                if len(seen) == at + 1:
                    link.send(StopPull("a"))
            return send

        monkeypatch.setattr(rank_links, "wait_readable", sleep)
        before = sys.gettrace()
        for _ in range(2):  # as a worker does
            sys.settrace(send)
            try:
                link.wait(None)
            finally:
                sys.settrace(before)
        assert not any(slept_through), f"sent before line {lines[number]}"
        link.close()
        num_lines = len(lines)
        if number >= num_lines:
            break
    assert 8 <= num_lines < 100

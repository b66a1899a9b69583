"""The coordinator's end of the link to a transfer worker, played by a test."""

import selectors
import socket
from collections import deque

from kvcache.transfer.pulls.messages import Report
from kvcache.transfer.pulls.rank_links import RankLinks
from tests.rigs.memory_pair import DEADLINE_S


class Orders:
    """The coordinator's end of the link to one worker, played by a test.

    Attributes:
        theirs: the worker's end.
        reports: reports of the worker that `report` has not returned yet.
    """

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.reports: deque[Report] = deque()
        self._selector = selectors.DefaultSelector()
        self._links = RankLinks([ours], self._selector, self.reports.append)
        self.send = self._links.broadcast

    def report(self) -> Report:
        while not self.reports:
            ready = self._selector.select(DEADLINE_S)
            assert ready, "the worker sends no report"
            for key, _ in ready:
                key.data()
        return self.reports.popleft()

    def close(self) -> None:
        self._links.close()
        self._selector.close()

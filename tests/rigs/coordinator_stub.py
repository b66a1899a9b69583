"""A stand-in for the pull coordinator, linked to one transfer worker."""

import selectors
import socket
from collections import deque

from kvcache.transfer.pulls.messages import PeerPrepared, PullReport, Report
from kvcache.transfer.pulls.rank_links import RankLinks
from tests.rigs.memory_pair import DEADLINE_S


class CoordinatorStub:
    """Sends a worker the coordinator's commands and receives the worker's reports.

    Attributes:
        worker_end: the socket for the worker.
        reports: received reports about pulls that `report` has not returned yet.
        prepared: received reports that a peer is prepared.
    """

    def __init__(self) -> None:
        coordinator_end, self.worker_end = socket.socketpair()
        self.reports: deque[PullReport] = deque()
        self.prepared: list[PeerPrepared] = []
        self._selector = selectors.DefaultSelector()
        self._links = RankLinks([coordinator_end], self._selector, self._on_report)
        self.send = self._links.broadcast

    def _on_report(self, report: Report) -> None:
        if isinstance(report, PeerPrepared):
            self.prepared.append(report)
        else:
            self.reports.append(report)

    def report(self) -> PullReport:
        while not self.reports:
            ready = self._selector.select(DEADLINE_S)
            assert ready, "the worker sent no report"
            for key, _ in ready:
                key.data()
        return self.reports.popleft()

    def close(self) -> None:
        self._links.close()
        self._selector.close()

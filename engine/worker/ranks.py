"""The links between the ranks of an engine: a socket from rank 0 to each other one, which connects.

First the ranks agree: on the port where their collectives meet, on the blocks that all can hold, on
where everybody's KV lies. Each tells rank 0, which tells all of them the outcome. Then come steps,
and at the end an empty one. Steps are not answered: rank 0 takes part in each of them, and the
collectives of the forward pass keep all ranks together: a step whose tokens rank 0 has drawn was
computed on all. A rank that dies ends the engine (its parent watches every rank).
"""

import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import TypeVar

import msgspec

from engine.core.batch import PendingStep, StepInput, step_from_bytes, step_to_bytes
from engine.process.transport import MAX_BYTES, path_of
from engine.worker.runner import ModelRunner
from protocol.handshake import ProcessRecord
from protocol.ipc.processes import ProcessEnded, ProcessGone, Watched, is_ending
from protocol.ipc.wire import Wire, WireClosed, wait_readable

logger = logging.getLogger("baton.engine")

_JOIN_TIMEOUT_S = 600.0  # loading the model included
_END_DELAY_S = 0.1  # for a rank to begin to end, where a collective heard of it first
_TORN_DOWN_S = 10.0
_POLL_INTERVAL_S = 0.005
_RETRY_DELAY_S = 0.02  # while rank 0 does not listen yet

_T = TypeVar("_T")


class RankTimeout(Exception):
    """A rank did not answer in time."""


class RankLost(Exception):
    """Another rank has ended, and with it the engine; what failed here came of that."""


class OtherRanks:
    """The processes of an engine's other ranks, to tell what failed here from what failed because
    one of them is gone. Those that cannot be watched are taken to live. `processes` are by rank."""

    def __init__(self, own: int, processes: Sequence[ProcessRecord | None]) -> None:
        self._watched: dict[int, tuple[int, Watched]] = {}
        self._ended: int | None = None  # before it could be watched
        for rank, record in enumerate(processes):
            if rank == own or record is None:
                continue
            try:
                self._watched[rank] = record.pid, Watched([record])
            except ProcessEnded:
                self._ended = rank
            except ProcessGone as error:
                logger.debug("rank %d: %s", rank, error)

    def blame(self, error: Exception) -> None:
        """To be called when something has failed: raises RankLost, from `error`, where another
        rank has ended. One that is being torn down is waited for, so that whoever started the ranks
        knows why it ended before this one ends of it."""
        if self._ended is not None:
            raise RankLost(f"rank {self._ended} has ended") from error
        started = time.monotonic()
        while self._watched and (waited_s := time.monotonic() - started) < _TORN_DOWN_S:
            for rank, (_, process) in self._watched.items():
                if not process.all_alive():
                    raise RankLost(f"rank {rank} has ended") from error
            if waited_s > _END_DELAY_S and not any(is_ending(p) for p, _ in self._watched.values()):
                return
            time.sleep(_POLL_INTERVAL_S)


class _Link:
    """A connected rank, which errors call `peer`. Both directions wait."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self._wire = Wire(connected, MAX_BYTES)
        self._room = select.poll()
        self._room.register(self._wire, select.POLLOUT)
        self._peer = peer
        self._received: deque[bytes] = deque()
        self.close = self._wire.close

    def send(self, message: bytes) -> None:
        """Raises WireClosed: the rank has ended."""
        self._wire.send(message)
        while self._wire.has_unsent:
            self._room.poll()
            self._wire.flush()

    def receive(self, timeout_s: float = inf) -> bytes:
        """The next message.

        Raises:
            RankTimeout: none came.
            RankLost: the rank has ended; whoever started the ranks had time to hear why.
        """
        until_s = time.monotonic() + timeout_s
        try:
            while not self._received:
                if time.monotonic() > until_s:
                    raise RankTimeout(f"{self._peer} said nothing for {timeout_s:g} s")
                wait_readable(self._wire, timeout_s=timeout_s)
                self._received += self._wire.receive()
        except WireClosed as error:
            time.sleep(_TORN_DOWN_S)
            raise RankLost(f"{self._peer} has ended") from error
        return self._received.popleft()


class RankLinks:
    """One rank's: rank 0 has a link to every other rank, each of them one to rank 0.

    Args:
        address: where rank 0 listens; not used by an engine of one rank.
        rank, size: this one, of how many.
    """

    def __init__(
        self, address: str, rank: int, size: int, *, timeout_s: float = _JOIN_TIMEOUT_S
    ) -> None:
        self.others = OtherRanks(rank, [])
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._listener = socket.socket(socket.AF_UNIX)
        self._links: list[_Link] = []
        if rank:
            self._links.append(_Link(_connected(path_of(address)), "rank 0"))
        elif size > 1:
            self._listener.bind(path_of(address))
            self._listener.listen(size)
            self._listener.settimeout(timeout_s)

    def agree(self, own: _T, kind: type[_T], combine: Callable[[list[_T]], _T]) -> _T:
        """What rank 0's `combine` makes of all ranks' `own`, in any order."""
        if self._rank:
            self._links[0].send(msgspec.msgpack.encode(own))
            return msgspec.msgpack.decode(self._links[0].receive(), type=kind)
        self._wait_for_all()
        told = [link.receive(self._timeout_s) for link in self._links]
        agreed = combine([own, *(msgspec.msgpack.decode(one, type=kind) for one in told)])
        self.send(msgspec.msgpack.encode(agreed))
        return agreed

    def know(self, processes: Sequence[ProcessRecord | None]) -> None:
        """Of all ranks."""
        self.others = OtherRanks(self._rank, processes)

    def send(self, message: bytes) -> None:
        for link in self._links:
            link.send(message)

    def follow(self, runner: ModelRunner) -> None:
        """Executes steps until rank 0 has no more, launching ahead as rank 0 does."""
        launched: deque[PendingStep] = deque()
        while data := self._links[0].receive():
            launched.append(runner.launch(step_from_bytes(data)))
            while len(launched) > runner.depth:
                launched.popleft().result()

    def close(self) -> None:
        for link in self._links:
            if not self._rank:
                with suppress(WireClosed):
                    link.send(b"")
            link.close()
        self._listener.close()

    def _wait_for_all(self) -> None:
        while len(self._links) < self._size - 1:
            try:
                self._links.append(_Link(self._listener.accept()[0], "a rank"))
            except TimeoutError:
                raise RankTimeout(f"no rank joined within {self._timeout_s:g} s") from None


class RankExecutor:
    """Rank 0's: sends a step to the other ranks, then runs its own share."""

    def __init__(self, runner: ModelRunner, links: RankLinks) -> None:
        self._runner = runner
        self._links = links
        self._num_others = runner.model.parallel.size - 1
        self.depth = runner.depth

    def launch(self, step: StepInput) -> PendingStep:
        self._runner.check(step)
        if self._num_others:
            self._links.send(step_to_bytes(step))
        return self._runner.launch(step)


def _connected(path: str) -> socket.socket:
    """Waits for rank 0 to listen."""
    until_s = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(path)
            return link
        except OSError as error:
            link.close()
            if time.monotonic() > until_s:
                raise RankTimeout(f"rank 0 did not listen within {_JOIN_TIMEOUT_S:g} s") from error
            time.sleep(_RETRY_DELAY_S)

"""How rank 0 drives the other ranks of its engine: a socket for each follower, which connects.

    0 -> follower   Port: where the collectives' ranks meet
    follower -> 0   Blocks: how many I could hold
    0 -> follower   Blocks: how many all ranks take
    follower -> 0   Allocated: where my KV lies
    0 -> follower   Begin: which processes the ranks are
    0 -> follower   Step ... Step, an empty one

Steps are not answered: rank 0 takes part in each of them, and the collectives of the forward pass
keep all ranks together: a step whose tokens rank 0 has drawn was computed on all. A follower that
dies ends the engine (its parent watches every rank).
"""

import logging
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import TypeVar

import msgspec

from engine.core.batch import PendingStep, StepInput, step_from_bytes, step_to_bytes
from engine.process.transport import MAX_BYTES, path_of
from engine.worker.runner import ModelRunner
from protocol.handshake import ProcessRecord, RankMetadata
from protocol.ipc.processes import ProcessEnded, ProcessGone, Watched, is_ending
from protocol.ipc.wire import Wire, WireClosed, wait_readable

logger = logging.getLogger("baton.engine")

_JOIN_TIMEOUT_S = 600.0  # loading the model included
_END_DELAY_S = 0.1  # for a rank to begin to end, where a collective heard of it first
_TORN_DOWN_S = 10.0
_POLL_INTERVAL_S = 0.005
_RETRY_DELAY_S = 0.02  # while rank 0 does not listen yet


class Port(msgspec.Struct, frozen=True, tag=True):
    port: int


class Blocks(msgspec.Struct, frozen=True, tag=True):
    num_blocks: int  # of a rank's pool, the null block included


class Allocated(msgspec.Struct, frozen=True, tag=True):
    metadata: RankMetadata


class Begin(msgspec.Struct, frozen=True, tag=True):
    processes: list[ProcessRecord | None]  # by rank


class Step(msgspec.Struct, frozen=True, tag=True):
    data: bytes  # batch.step_to_bytes; empty: there is no more


Message = Port | Blocks | Allocated | Begin | Step
_M = TypeVar("_M", Port, Blocks, Allocated, Begin, Step)
_encode = msgspec.msgpack.Encoder().encode


class RankTimeout(Exception):
    """A rank did not answer in time."""


class RankLost(Exception):
    """Another rank has ended, and with it the engine; what failed here came of that."""


class OtherRanks:
    """The processes of an engine's other ranks, to tell what failed here from what failed because
    one of them is gone. Those that cannot be watched are taken to live.

    Args:
        own: this rank.
        processes: by rank.
    """

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
        """To be called when something has failed. A rank that is being torn down is waited for, so
        that whoever started the ranks knows why it ended before this one ends of it.

        Raises:
            RankLost: from `error`; another rank has ended.
        """
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
    """A connected rank. Both directions wait.

    Args:
        peer: who that is, for errors.
    """

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self._wire = Wire(connected, MAX_BYTES)
        self._room = select.poll()
        self._room.register(self._wire, select.POLLOUT)
        self._peer = peer
        self._received: deque[bytes] = deque()

    def send(self, message: Message) -> None:
        """Raises WireClosed: the rank has ended."""
        self._wire.send(_encode(message))
        while self._wire.has_unsent:
            self._room.poll()
            self._wire.flush()

    def receive(self, kind: type[_M], timeout_s: float = inf) -> _M:
        """The next message.

        Raises:
            RankTimeout: none came.
            RankLost: the rank has ended; whoever started the ranks had time to hear why.
        """
        until_s = time.monotonic() + timeout_s
        try:
            while not self._received:
                if time.monotonic() > until_s:
                    told = f"no {kind.__name__} from {self._peer} within {timeout_s:g} s"
                    raise RankTimeout(told)
                wait_readable(self._wire, timeout_s=timeout_s)
                self._received += self._wire.receive()
        except WireClosed as error:
            time.sleep(_TORN_DOWN_S)
            raise RankLost(f"{self._peer} has ended") from error
        return msgspec.msgpack.decode(self._received.popleft(), type=kind)

    def close(self) -> None:
        self._wire.close()


class Leader:
    """Rank 0's end. Also the engine core's executor: sends a step on, then runs its own share.

    Args:
        address: where followers connect to; not used by an engine of one rank.
        num_ranks: tensor parallelism of the engine.
    """

    def __init__(self, address: str, num_ranks: int, *, timeout_s: float = _JOIN_TIMEOUT_S) -> None:
        self._num_followers = num_ranks - 1
        self._timeout_s = timeout_s
        self._links: list[_Link] = []
        self._listener = socket.socket(socket.AF_UNIX)
        if self._num_followers:
            self._listener.bind(path_of(address))
            self._listener.listen(self._num_followers)
            self._listener.settimeout(timeout_s)
        self.runner: ModelRunner | None = None
        self.others = OtherRanks(0, [])

    def share_port(self, port: int) -> None:
        """Waits for every rank to join and tells it where the collectives' ranks meet."""
        while len(self._links) < self._num_followers:
            try:
                self._links.append(_Link(self._listener.accept()[0], "a rank"))
            except TimeoutError:
                raise RankTimeout(f"no rank joined within {self._timeout_s:g} s") from None
        self._send_all(Port(port))

    def agree_on_blocks(self, num_blocks: int) -> int:
        """The largest number of blocks that every rank can hold."""
        found = [link.receive(Blocks, self._timeout_s).num_blocks for link in self._links]
        num_blocks = min([num_blocks, *found])
        self._send_all(Blocks(num_blocks))
        return num_blocks

    def collect(self, own: RankMetadata) -> list[RankMetadata]:
        """Metadata of all ranks, in order."""
        found = [link.receive(Allocated, self._timeout_s).metadata for link in self._links]
        ranks = sorted([own, *found], key=lambda metadata: metadata.rank)
        processes = [metadata.process for metadata in ranks]
        self._send_all(Begin(processes))
        self.others = OtherRanks(0, processes)
        return ranks

    @property
    def depth(self) -> int:
        assert self.runner is not None, "the runner is set once its pool is allocated"
        return self.runner.depth

    def launch(self, step: StepInput) -> PendingStep:
        assert self.runner is not None, "the runner is set once its pool is allocated"
        self.runner.check(step)
        if self._links:
            self._send_all(Step(step_to_bytes(step)))
        return self.runner.launch(step)

    def close(self) -> None:
        for link in self._links:
            with suppress(WireClosed):
                link.send(Step(b""))
            link.close()
        self._listener.close()

    def _send_all(self, message: Message) -> None:
        for link in self._links:
            link.send(message)


class Follower:
    """The other end."""

    def __init__(self, address: str, rank: int) -> None:
        self._rank = rank
        self.others = OtherRanks(rank, [])
        self._link = _Link(_connected(path_of(address)), "rank 0")

    def join(self) -> int:
        """The port where the collectives' ranks meet."""
        return self._link.receive(Port).port

    def agree_on_blocks(self, num_blocks: int) -> int:
        self._link.send(Blocks(num_blocks))
        return self._link.receive(Blocks).num_blocks

    def announce(self, own: RankMetadata) -> None:
        self._link.send(Allocated(own))

    def run(self, runner: ModelRunner) -> None:
        """Executes steps until rank 0 has no more, launching ahead as rank 0 does."""
        self.others = OtherRanks(self._rank, self._link.receive(Begin).processes)
        launched: deque[PendingStep] = deque()
        while data := self._link.receive(Step).data:
            launched.append(runner.launch(step_from_bytes(data)))
            while len(launched) > runner.depth:
                launched.popleft().result()

    def close(self) -> None:
        self._link.close()


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

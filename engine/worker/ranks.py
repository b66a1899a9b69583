"""How rank 0 drives the other ranks of its engine: one ROUTER, one DEALER per follower.

    follower -> 0   Join: who I am
    0 -> follower   Store: the port where the collectives' ranks meet
    follower -> 0   Hello: how many blocks I could hold
    0 -> follower   Allocate: the number of blocks all ranks take
    follower -> 0   Allocated: where my KV lies
    0 -> follower   Begin: which processes the ranks are
    0 -> follower   Step ... Step, Stop

Steps are not answered: rank 0 takes part in each of them, and the collectives of the forward pass
keep all ranks together: a step whose tokens rank 0 has drawn was computed on all. A follower that
dies ends the engine (its parent watches every rank).
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import zmq

from engine.core.batch import PendingStep, StepInput, step_from_bytes, step_to_bytes
from engine.worker.runner import ModelRunner
from kvcache.transfer.processes import ProcessEnded, ProcessGone, Watched, is_ending
from protocol.handshake import ProcessRecord, RankMetadata

logger = logging.getLogger("baton.engine")

_SOON_S = 0.1  # for a rank to begin to end, where a collective heard of it first
_TORN_DOWN_S = 10.0
_LOOK_S = 0.005


class Join(msgspec.Struct, frozen=True, tag="join"):
    rank: int


class Store(msgspec.Struct, frozen=True, tag="store"):
    port: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    rank: int
    num_blocks: int  # what this rank's memory allows, the null block included


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    num_blocks: int


class Allocated(msgspec.Struct, frozen=True, tag="allocated"):
    metadata: RankMetadata


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    processes: list[ProcessRecord | None]  # by rank


class Step(msgspec.Struct, frozen=True, tag="step"):
    data: bytes  # batch.step_to_bytes


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


_M = TypeVar("_M", Join, Hello, Allocated)
_encode = msgspec.msgpack.Encoder().encode
_from_follower = msgspec.msgpack.Decoder(Join | Hello | Allocated).decode
_from_leader = msgspec.msgpack.Decoder(Store | Allocate | Begin | Step | Stop).decode


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
            if waited_s > _SOON_S and not any(is_ending(p) for p, _ in self._watched.values()):
                return
            time.sleep(_LOOK_S)


class Leader:
    """Rank 0's end. Also the engine core's executor: sends a step on, then runs its own share.

    Args:
        address: where followers connect to; not used by an engine of one rank.
        num_ranks: tensor parallelism of the engine.
    """

    def __init__(self, address: str, num_ranks: int, *, timeout_s: float = 600.0) -> None:
        self._num_followers = num_ranks - 1
        self._timeout_ms = int(timeout_s * 1000)
        self._identities: dict[int, bytes] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if self._num_followers:
            self._socket.bind(address)
        self.runner: ModelRunner | None = None
        self.others = OtherRanks(0, [])

    def share_port(self, port: int) -> None:
        """Waits for every rank to join and tells it where the collectives' ranks meet."""
        for _ in range(self._num_followers):
            identity, message = self._receive(Join)
            self._identities[message.rank] = identity
        self._send_all(Store(port))

    def agree_on_blocks(self, num_blocks: int) -> int:
        """The largest number of blocks that every rank can hold."""
        for _ in range(self._num_followers):
            message = self._receive(Hello)[1]
            num_blocks = min(num_blocks, message.num_blocks)
        self._send_all(Allocate(num_blocks))
        return num_blocks

    def collect(self, own: RankMetadata) -> list[RankMetadata]:
        """Metadata of all ranks, in order."""
        others = [self._receive(Allocated)[1].metadata for _ in range(self._num_followers)]
        ranks = sorted([own, *others], key=lambda metadata: metadata.rank)
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
        if self._identities:
            self._send_all(Step(step_to_bytes(step)))
        return self.runner.launch(step)

    def close(self) -> None:
        self._send_all(Stop())
        self._socket.close(linger=1000)
        self._context.term()

    def _send_all(self, message: Store | Allocate | Begin | Step | Stop) -> None:
        data = _encode(message)
        for identity in self._identities.values():
            self._socket.send_multipart([identity, data])

    def _receive(self, kind: type[_M]) -> tuple[bytes, _M]:
        if not self._socket.poll(self._timeout_ms):
            raise RankTimeout(f"no {kind.__name__} from a rank within {self._timeout_ms / 1e3} s")
        identity, data = self._socket.recv_multipart()
        message = _from_follower(data)
        assert isinstance(message, kind), message
        return identity, message


class Follower:
    """The other end: follows rank 0 until Stop."""

    def __init__(self, address: str, rank: int) -> None:
        self._rank = rank
        self.others = OtherRanks(rank, [])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)

    def join(self) -> int:
        """The port where the collectives' ranks meet."""
        self._socket.send(_encode(Join(self._rank)))
        message = _from_leader(self._socket.recv())
        assert isinstance(message, Store), message
        return message.port

    def agree_on_blocks(self, num_blocks: int) -> int:
        self._socket.send(_encode(Hello(self._rank, num_blocks)))
        message = _from_leader(self._socket.recv())
        assert isinstance(message, Allocate), message
        return message.num_blocks

    def announce(self, own: RankMetadata) -> None:
        self._socket.send(_encode(Allocated(own)))

    def run(self, runner: ModelRunner) -> None:
        """Executes steps until rank 0 says to stop, launching ahead as rank 0 does."""
        launched: deque[PendingStep] = deque()
        while True:
            message = _from_leader(self._socket.recv())
            if isinstance(message, Stop):
                return
            if isinstance(message, Begin):
                self.others = OtherRanks(self._rank, message.processes)
                continue
            assert isinstance(message, Step), message
            launched.append(runner.launch(step_from_bytes(message.data)))
            while len(launched) > runner.depth:
                launched.popleft().result()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

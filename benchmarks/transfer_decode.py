"""D of the transfer benchmark: the servers' own coordinator and workers, without the engines.

Rank 0 and the coordinator are in this process, the other ranks in processes of their own, as in a
server. So a pull is timed from its order to the fence's answer.
"""

import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.transfer_prefill import (
    SECRET,
    WAIT_S,
    RankMemory,
    Remote,
    Side,
    Size,
    new_agent,
    use_device,
)
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.place import Placer
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import Event, PeerReady, PullDone
from kvcache.transfer.worker.peer import MappedPath
from kvcache.transfer.worker.worker import TransferWorker
from protocol.ipc.wire import allow_short_naps
from protocol.messages import RemotePrefill

_LOOP_ROUNDS = 100_000


class Setup(NamedTuple):
    """How every rank of D pulls."""

    size: Size
    devices: tuple[str, ...]  # of D's ranks, taken in turn
    mapped: bool  # by the mapped path; else by NIXL
    staging_bytes: int

    def device(self, rank: int) -> str:
        return self.devices[rank % len(self.devices)]


class DecodeRank:
    """One rank of D: its pool and its worker."""

    def __init__(self, rank: int, side: Side, setup: Setup, address: str) -> None:
        device = setup.device(rank)
        use_device(device)
        self._memory = RankMemory(side, setup.size, rank, device)
        pool = self._memory.pool
        placer = Placer(pool) if device == "cpu" else CudaPlacer(pool)
        self._worker = TransferWorker(
            rank,
            side.tp,
            setup.size.heads,
            new_agent("bench-d", device),
            pool,
            address,
            staging_bytes=None if setup.mapped else setup.staging_bytes,
            mapped=MappedPath(placer, required=True) if setup.mapped else None,
        )
        self._worker.start()
        self.is_filled, self.close = self._memory.is_filled, self._worker.close

    def loop_ms(self) -> float:
        """Of the processors that the pull thread and the calling one are on, the slower's."""
        return max(map(loop_ms_beside, (self._worker.native_id, threading.get_native_id())))


class Decode:
    """D for one case.

    Attributes:
        holds: leases are held before they are pulled, as those of an unknown P, or of a request
            that waits for blocks; else with the pull.
    """

    holds = True

    def __init__(self, side: Side, setup: Setup) -> None:
        self._side, self._size = side, setup.size
        self._woken, self._count = threading.Event(), 0
        address = f"ipc://\0baton-bench-{uuid.uuid4().hex}"  # of no file
        self._coordinator = PullCoordinator(
            address,
            side.tp,
            setup.size.compat,
            SECRET,
            on_event=self._woken.set,
        )
        self._coordinator.start()
        self._others = [Remote(DecodeRank, r, side, setup, address) for r in range(1, side.tp)]
        self._first = DecodeRank(0, side, setup, address)
        self.of_ranks("is_filled")  # all are there
        allow_short_naps()

    def of_ranks(self, method: str) -> list[Any]:
        """What DecodeRank's method says on every rank."""
        others = (other.call(method) for other in self._others)
        return [getattr(self._first, method)(), *others]

    def connect(self, remote: RemotePrefill) -> None:
        self._coordinator.connect(remote)
        if not isinstance(event := self._wait(), PeerReady):
            raise RuntimeError(f"the handshake failed: {event}")

    def pull(self, remote: RemotePrefill) -> tuple[float, PullDone]:
        """Seconds from the order to the end of the pull, fence included."""
        self._count += 1
        pull_id = str(self._count)
        blocks = self._side.blocks(self._size, remote.num_tokens).tolist()
        if self.holds:
            self._coordinator.hold(pull_id, remote)
        # The lease's first renewal, which no pull waits for. The thread that orders pulls works
        # until then, as an engine's does: one that sleeps for 2 ms takes longer to order.
        renewed = time.perf_counter() + 0.002
        while time.perf_counter() < renewed:
            time.sleep(0.00002)
        started = time.perf_counter()
        self._coordinator.pull(pull_id, remote, 0, remote.num_tokens, blocks)
        event = self._wait()
        seconds = time.perf_counter() - started
        if not isinstance(event, PullDone):
            raise RuntimeError(f"the pull failed: {event}")
        return seconds, event

    def check(self) -> None:
        if not all(found := self.of_ranks("is_filled")):
            raise RuntimeError(f"what arrived is not what was sent, by rank: {found}")

    def _wait(self) -> Event:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if self._woken.wait(1.0):
                self._woken.clear()
                for event in self._coordinator.drain():
                    return event
        raise RuntimeError(f"no event within {WAIT_S} s")

    def close(self) -> None:
        self._coordinator.close()
        self._first.close()
        for other in self._others:
            other.close()


# -- processors: of a virtual machine each may be one thread of a core whose other thread is a
# neighbour's. While that one works, Python here takes twice as long; a fixed loop tells.


def loop_ms_on(processor: int) -> float:
    """What a loop of Python takes there, the best of three."""
    allowed, found = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, {processor})
    try:
        for _ in range(3):
            started, total = time.perf_counter(), 0
            for number in range(_LOOP_ROUNDS):
                total += number & 7
            found.append((time.perf_counter() - started) * 1e3)
    finally:
        os.sched_setaffinity(0, allowed)
    return min(found)


def loop_ms_beside(thread_id: int | None) -> float:
    """What it takes on the processor that a thread of this process was on last.

    Args:
        thread_id: as the system numbers it.
    """
    stat = Path(f"/proc/self/task/{thread_id}/stat").read_text()
    return loop_ms_on(int(stat.rpartition(")")[2].split()[36]))

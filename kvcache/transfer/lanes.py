"""Threads that post READs, for transports whose READ copies in the thread that posts it.

Between CPUs of one host a READ is a copy by the processor that posts it. Staged transfers read up
to twice what they want, and place it with a second copy; two threads that each read and place every
other chunk use two processors for that. READs without staging stay in the caller's thread: they
copy each byte only once, and the engine's steps need the processors, too.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvcache.transfer.agent import (
    Addresses,
    MemoryKind,
    ReadHandle,
    ReadState,
    Region,
    TransferAgent,
)
from kvcache.transfer.copy_thread import copy_thread
from kvcache.transfer.ucx_log import UcxRead
from protocol.logging import get_logger

logger = get_logger(__name__)


@dataclass(eq=False)
class _Lane:
    """An agent, which one thread at a time uses, and the thread that posts with it."""

    agent: TransferAgent
    thread: ThreadPoolExecutor
    lock: threading.Lock


@dataclass(eq=False)
class _Posted:
    lane: _Lane
    future: "Future[None] | None" = None  # while it is not known to have been posted
    inner: ReadHandle | None = None
    failed: bool = False  # what followed the READ did


class LanedAgent(TransferAgent):
    """Several agents of one process as one: the first is the one that peers know.

    Args:
        agents: one for each lane; owned from here on. Memory is registered with all of them.
    """

    def __init__(self, agents: Sequence[TransferAgent]) -> None:
        self.name = agents[0].name
        self._lanes = [
            _Lane(agent, copy_thread(f"post-{lane}"), threading.Lock())
            for lane, agent in enumerate(agents)
        ]

    def bind_thread(self) -> None:
        for lane in self._lanes:
            lane.agent.bind_thread()

    def register(
        self, address: int, nbytes: int, *, device_id: int = 0, kind: MemoryKind = "DRAM"
    ) -> Region:
        regions = self._each(
            lambda agent: agent.register(address, nbytes, device_id=device_id, kind=kind)
        )
        return Region(address, nbytes, device_id, kind, regions)

    def deregister(self, region: Region) -> None:
        for lane, each in zip(self._lanes, region.key, strict=True):
            with lane.lock:
                lane.agent.deregister(each)

    def metadata(self) -> bytes:
        with self._lanes[0].lock:
            return self._lanes[0].agent.metadata()

    def add_peer(self, metadata: bytes) -> str:
        names: list[str] = self._each(lambda agent: agent.add_peer(metadata))
        return names[0]

    def remove_peer(self, peer: str) -> None:
        self._each(lambda agent: agent.remove_peer(peer))

    def read(
        self,
        peer: str,
        local_addresses: Addresses,
        remote_addresses: Addresses,
        lengths: Addresses,
        *,
        local_device: int = 0,
        remote_device: int = 0,
        kinds: Sequence[MemoryKind] = ("DRAM", "DRAM"),
    ) -> ReadHandle:
        lane = self._lanes[0]
        with lane.lock:
            inner = lane.agent.read(
                peer,
                local_addresses,
                remote_addresses,
                lengths,
                local_device=local_device,
                remote_device=remote_device,
                kinds=kinds,
            )
        return ReadHandle(peer, inner.state, _Posted(lane, inner=inner))

    def read_beside(
        self,
        lane: int,
        peer: str,
        local_addresses: Addresses,
        remote_addresses: Addresses,
        lengths: Addresses,
        then: Callable[[ReadState], None],
        **options: Any,
    ) -> ReadHandle:
        chosen = self._lanes[lane % len(self._lanes)]

        posted = _Posted(chosen)

        def post() -> None:
            with chosen.lock:
                posted.inner = chosen.agent.read(
                    peer, local_addresses, remote_addresses, lengths, **options
                )
            then(posted.inner.state)

        posted.future = chosen.thread.submit(post)
        return ReadHandle(peer, ReadState.ACTIVE, posted)

    def poll(self, handle: ReadHandle) -> ReadState:
        if not handle.ended:
            handle.state = self._state(handle.key)
        return handle.state

    def _state(self, posted: _Posted) -> ReadState:
        if posted.future is not None:
            if not posted.future.done():
                return ReadState.ACTIVE
            failed = posted.future.exception()
            posted.future = None
            if failed is not None:
                logger.warning("posting a READ: %s", failed)
                posted.failed = True
        if posted.inner is None:  # nothing was posted
            return ReadState.ERROR
        state = self._inner_state(posted.lane, posted.inner)
        return ReadState.ERROR if posted.failed and state is ReadState.DONE else state

    @staticmethod
    def _inner_state(lane: _Lane, inner: ReadHandle) -> ReadState:
        if inner.ended or not lane.lock.acquire(blocking=False):
            return inner.state
        try:
            return lane.agent.poll(inner)
        finally:
            lane.lock.release()

    def way_of_reading(self, kinds: Sequence[MemoryKind]) -> UcxRead | None:
        with self._lanes[0].lock:
            return self._lanes[0].agent.way_of_reading(kinds)

    def release(self, handle: ReadHandle) -> None:
        if not handle.ended:
            raise RuntimeError(f"released an active READ from {handle.peer}")
        posted, handle.key = handle.key, None
        if posted is not None and posted.inner is not None:
            posted.lane.thread.submit(_release, posted.lane, posted.inner)

    def close(self) -> None:
        for lane in self._lanes:
            lane.thread.shutdown()  # what was posted there has been, or never will be
            lane.agent.close()

    def _each(self, call: Callable[[TransferAgent], Any]) -> list[Any]:
        found = []
        for lane in self._lanes:
            with lane.lock:
                found.append(call(lane.agent))
        return found


def _release(lane: _Lane, handle: ReadHandle) -> None:
    with lane.lock:
        lane.agent.release(handle)

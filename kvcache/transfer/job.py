"""One pull on one rank: a job that the worker (worker.py) drives.

A job posts READs, or queues launches of copies out of mapped memory. A READ has ended
when it is done or when its link is closed. On a GPU, a launch has ended when its CUDA
event has occurred (invariant I7 in docs/design.md). The death of the peer does not end
a launch, because mapped memory stays readable until it is unmapped. But the copied
bytes are not used, because a dead peer cannot confirm that the lease was held.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvcache.transfer.agent import ReadHandle, ReadState
from kvcache.transfer.move.place import split_into_launches
from kvcache.transfer.peer import Peer
from kvcache.transfer.peer_link import PeerLink
from kvcache.transfer.plan.block_copy import BlockCopy, ReadDescriptors, ScaleFactors
from kvcache.transfer.plan.plan import TransferPlan
from kvcache.transfer.plan.steps import Step
from kvcache.transfer.pulls.messages import Pull
from protocol.errors import (
    BatonError,
    InternalError,
    PeerIncompatible,
    TransferFailed,
)
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# A job hangs if it has active READs, but for this long no READ was posted and none has
# ended.
HANGS_S = 1.0
# Limit on the number of a job's launches that are queued at the same time. Several are
# queued, so that the device begins the next launch as soon as the previous one ends.
MAX_LAUNCHES = 4


class TransferJob(ABC):
    """The share of one rank in a pull.

    Attributes:
        path: one of messages.PATHS.
        nbytes: bytes of the wanted tokens, in the peer's dtype.
        bytes_read: bytes to read from the peer's memory, unwanted bytes included. Like
            `nbytes`, it is 0 before the pull is planned.
        num_descriptors: runs in all steps that have begun; 0 for a mapped job.
        waits_for_link: nothing can be posted before the link is ready. When it is
            ready, the link's thread wakes the worker.
        began_s: when the job was created, by time.perf_counter.
        is_stopping: the job posts nothing more.
        is_failure_reported: a RankFailing was sent to the coordinator.
        error: why the job is stopping; None if the coordinator has stopped it.
    """

    path = "none"
    nbytes = 0
    bytes_read = 0
    num_descriptors = 0
    waits_for_link = False

    def __init__(self, pull: Pull, peer: Peer) -> None:
        self.pull = pull
        self.pull_id = pull.pull_id
        self.peer = peer
        self.began_s = time.perf_counter()
        self._active: deque[Any] = deque()  # READs or launches, oldest first
        self.is_stopping = False
        self.is_failure_reported = False
        self.error: BatonError | None = None

    @property
    def num_active(self) -> int:
        """Number of READs or launches that have not ended."""
        return len(self._active)

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """True if nothing is active and nothing more will be posted.

        If a job has ended and is not stopping, every byte is in its place.
        """

    @abstractmethod
    def post(self) -> bool:
        """Posts the next READ, or queues launches, if the limits allow it.

        Must not be called after `stop`.

        Returns:
            True if something was posted.

        Raises:
            BatonError: the pull cannot be carried out.
        """

    @abstractmethod
    def poll(self) -> bool:
        """Polls READs or launches; returns True if any has ended."""

    def release_staging(self) -> None:  # noqa: B027 - mapped jobs use no staging memory
        """Releases the staging memory. Called after the job has ended."""

    def stop(self, error: BatonError | None = None) -> None:
        """Makes the job post nothing more. `error` is kept if the job has none yet."""
        self.is_stopping = True
        self.waits_for_link = False
        self.error = self.error or error

    def take_exception(self, exception: Exception) -> BatonError:
        """Turns an unexpected exception in a method of this job into the pull's error.

        A mapped job that has begun also marks its peer as stale.
        """
        return InternalError(f"the transfer thread failed: {exception!r}")

    @property
    def idle_s(self) -> float:
        """Seconds since the last post or end of a READ; 0 if no READ is active."""
        return 0.0

    @property
    def hangs(self) -> bool:
        """True if READs are active, but no READ was posted or has ended for HANGS_S."""
        return self.idle_s >= HANGS_S


@dataclass(eq=False)
class _BegunStep:
    """A step of the plan that has begun: its READs, and its slot if it is staged.

    After the last READ of a staged step, the step's slot is copied into the pool.

    Attributes:
        unposted: READs that have not been posted.
        base_address: address of the pool or of the slot. Local offsets count from here.
        step: the staged step, to be placed after its READs; None for a direct step.
        slot: number of the step's slot of staging memory; -1 for a direct step.
        num_active: number of posted READs that have not ended.
    """

    unposted: deque[ReadDescriptors]
    base_address: int
    step: Step | None = None
    slot: int = -1
    num_active: int = 0


class ReadJob(TransferJob):
    """A pull with READs, straight into the pool or through slots of staging memory."""

    def __init__(self, pull: Pull, peer: Peer) -> None:
        super().__init__(pull, peer)
        self.waits_for_link = True
        self._link: PeerLink | None = None
        self._plan: TransferPlan | None = None
        self._staging = peer.rank.staging
        self._slot_bytes = 0
        self._num_begun_steps = 0
        self._current = _BegunStep(deque(), 0)
        self._active: deque[tuple[ReadHandle, _BegunStep]]
        # Numbers of the staging slots that are being copied into the pool.
        self._placing: list[int] = []
        # Time of the last post or end of a READ, by time.monotonic.
        self._progress_s = 0.0

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._progress_s if self._active else 0.0

    @property
    def has_ended(self) -> bool:
        if self.waits_for_link or self._active or self._placing:
            return False
        if self.is_stopping:
            return True
        if self._plan is None or self._num_begun_steps < len(self._plan.steps):
            return False
        return not self._current.unposted

    def bypass_staging(self) -> bool:
        """Makes a job that waits for staging memory read straight into the pool.

        The READs may then have many more runs than through staging memory.

        Returns:
            False if the job has to keep waiting, because only the copies out of staging
            memory can convert its KV.
        """
        if self._plan is None or self._staging is None or self.is_stopping:
            return True
        if self._staging.owner == self.pull_id:
            return True
        if self._plan.transfer.converts:
            return False
        self._staging.leave_queue(self.pull_id)
        self._staging = None
        return True

    def stop(self, error: BatonError | None = None) -> None:
        if self._link is not None and not self.is_stopping:
            # READs of a stopped job do not count against the link's limit, so that
            # other jobs may post.
            self._link.num_active -= len(self._active)
        super().stop(error)

    def release_staging(self) -> None:
        if self._staging is not None:
            self._staging.leave_queue(self.pull_id)

    def post(self) -> bool:
        link = self._link or self.peer.connect()
        if link is None:
            return False
        if self._link is None:
            self._begin(link)
        throttle = self.peer.rank.throttle
        now_s = time.perf_counter()
        is_full = link.num_active >= throttle.limits.max_active
        if link.is_closing or is_full or not throttle.admits(now_s):
            return False
        while not self._current.unposted:
            begun = self._begin_step()
            if begun is None:
                return False
            self._current = begun
        begun = self._current
        read = begun.unposted.popleft()
        try:
            handle = link.read(read, begun.base_address)
        except TransferFailed as error:
            link.close(error)
            raise
        begun.num_active += 1
        link.num_active += 1
        self._active.append((handle, begun))
        self._progress_s = time.monotonic()
        throttle.posted(read.nbytes, now_s, staged=begun.step is not None)
        return True

    def poll(self) -> bool:
        link = self._link
        if link is None:
            return False
        if link.is_closing:
            if not self.is_stopping:
                self.stop(link.error)
            has_ended = self._end_reads(
                link, list(self._active) if link.is_closed else []
            )
        else:
            has_ended = self._poll_reads(link)
        return self._poll_placing() or has_ended

    def _poll_reads(self, link: PeerLink) -> bool:
        """Ends the READs that are done; closes the link if a READ has failed."""
        done: list[tuple[ReadHandle, _BegunStep]] = []
        error: TransferFailed | None = None
        for read in self._active:
            handle = read[0]
            state = link.agent.poll(handle)
            if state is ReadState.DONE:
                done.append(read)
            elif state is ReadState.ERROR:
                # Some runs may continue, so the READ is active until the link is
                # closed.
                error = TransferFailed(f"a READ from {handle.peer} failed")
        has_ended = self._end_reads(link, done)
        if error is not None:
            link.close(error)
            self.stop(error)
        return has_ended

    def _end_reads(
        self, link: PeerLink, reads: list[tuple[ReadHandle, _BegunStep]]
    ) -> bool:
        for read in reads:
            self._end_read(link, read)
        return bool(reads)

    def _poll_placing(self) -> bool:
        """Removes the slots that have been copied into the pool from `_placing`.

        Returns:
            True if any slot was removed.
        """
        if self._staging is None:
            return False
        placed = [slot for slot in self._placing if self._staging.is_free(slot)]
        self._placing = [slot for slot in self._placing if slot not in placed]
        return bool(placed)

    def _begin(self, link: PeerLink) -> None:
        """Plans the pull over the ready link, and queues it for staging memory."""
        self._link = link
        self.waits_for_link = False
        plan = self.peer.plan(self.pull, link)
        self._plan = plan
        self.path = plan.path
        self.nbytes = plan.useful_bytes
        self.bytes_read = plan.bytes_read
        self._slot_bytes = plan.slot_bytes
        if not self._slot_bytes:
            self._staging = None
        elif self._staging is not None:
            self._staging.join_queue(self.pull_id)

    def _begin_step(self) -> _BegunStep | None:
        """Begins the next step: counts its descriptors and cuts its READs into posts.

        Returns:
            None if there is no further step, if the step's slot is in use, or if a
            different pull owns the staging memory.
        """
        plan = self._plan
        index = self._num_begun_steps
        staging = self._staging
        if plan is None or index == len(plan.steps):
            return None
        step = plan.steps[index]
        if staging is None or step.slot is None:
            reads = step.unstaged.reads
            begun = _BegunStep(deque(), self.peer.rank.pool.base_address)
        else:
            slot = index % staging.num_slots(self._slot_bytes)
            is_filling = any(active.slot == slot for _, active in self._active)
            if is_filling or slot in self._placing or staging.owner != self.pull_id:
                return None
            reads = step.reads
            slot_address = staging.base_address + slot * self._slot_bytes
            begun = _BegunStep(deque(), slot_address, step, slot)
        self._num_begun_steps += 1
        self.num_descriptors += sum(len(read.lengths) for read in reads)
        begun.unposted.extend(self.peer.rank.throttle.cut(reads))
        return begun

    def _end_read(self, link: PeerLink, read: tuple[ReadHandle, _BegunStep]) -> None:
        """Counts a READ as ended.

        After the last READ of a staged step, begins to copy the step's slot into the
        pool. A job that is stopping copies nothing.
        """
        handle, begun = read
        if not link.is_closing:
            link.agent.release(handle)
        self._active.remove(read)
        begun.num_active -= 1
        self._progress_s = time.monotonic()
        if not self.is_stopping:
            link.num_active -= 1
            is_read = not (begun.unposted or begun.num_active)
            if is_read and begun.step is not None and self._staging is not None:
                self._placing.append(begun.slot)
                self._staging.place(begun.step, begun.slot, self._slot_bytes)


class MappedJob(TransferJob):
    """A pull from mapped memory: launches of copies into the pool.

    The size of a launch is bounded, so that a stopped job ends soon.
    """

    path = "mapped"

    def __init__(self, pull: Pull, peer: Peer) -> None:
        super().__init__(pull, peer)
        assert peer.rank.placer is not None
        self._placer = peer.rank.placer
        self._has_begun = False
        self._pending: deque[tuple[BlockCopy, ScaleFactors]] = deque()

    @property
    def has_ended(self) -> bool:
        if self._active:
            return False
        return self.is_stopping or (self._has_begun and not self._pending)

    def take_exception(self, exception: Exception) -> BatonError:
        if not self._has_begun:
            return super().take_exception(exception)
        self.peer.is_stale = True
        return TransferFailed(f"copying mapped KV failed: {exception!r}")

    def post(self) -> bool:
        if not self._has_begun:
            self._begin()
        has_posted = False
        while self._pending and len(self._active) < MAX_LAUNCHES:
            if not self._launch():
                break
            has_posted = True
        return has_posted

    def poll(self) -> bool:
        num_before = len(self._active)
        self._placer.retire(self._active)
        return len(self._active) < num_before

    def _begin(self) -> None:
        peer = self.peer
        if peer.refusal is not None:
            raise PeerIncompatible(
                f"KV of prefill server {peer.engine_id} cannot be mapped: "
                f"{peer.refusal}. Use --transfer auto or nixl.",
                param="transfer",
            )
        for transfer in peer.transfers(self.pull):
            copies = split_into_launches(transfer.copies(), self._placer.launch_bytes)
            self._pending.extend((copy, transfer.scale_factors) for copy in copies)
            self.nbytes += transfer.useful_bytes
        self.bytes_read = self.nbytes
        self._has_begun = True

    def _launch(self) -> bool:
        """Launches the next pending copy, or as much of it as the placer accepts now.

        Returns:
            False if the placer accepts nothing now.
        """
        copy, scale_factors = self._pending[0]
        max_bytes = self._placer.claim_launch_bytes(copy, scale_factors)
        if max_bytes == 0:
            return False
        # A copy is launched in whole pieces: at least one piece, even if the piece
        # exceeds the limit.
        num_pieces = max(max_bytes // copy.piece_bytes, 1)
        self._pending.popleft()
        if num_pieces < len(copy.sources):
            num_left = len(copy.sources) - num_pieces
            rest = copy.part(num_pieces, num_left)
            self._pending.appendleft((rest, scale_factors))
            copy = copy.part(0, num_pieces)
        memory = self.peer.memories[copy.owner]
        self._active.append(self._placer.launch(copy, memory, scale_factors))
        return True


def transport_of(job: TransferJob) -> str:
    """The transport of a job: "mapped", or UCX's name, such as "cma/memory".

    UCX reports its choice for a peer only at the first READs. The name is then stored
    in the Peer.
    """
    if not isinstance(job, ReadJob):
        return "mapped"
    peer = job.peer
    if not peer.transport and peer.link is not None:
        transport = peer.link.transport
        peer.transport = transport.transport if transport else ""
    return peer.transport or "unknown"


def log_speed(job: TransferJob, seconds: float) -> None:
    peer = job.peer
    path = "mapped memory"
    if isinstance(job, ReadJob):
        transport = peer.link.transport if peer.link else None
        path = f"NIXL, {job.path}, by {transport or 'unknown transport'}"
    gb_per_s = job.bytes_read / seconds / 1e9
    logger.info("prefill server %s: %s, %.2f GB/s", peer.engine_id, path, gb_per_s)

"""One pull on one rank: a job driven by the worker, with READs or launches out of mapped memory.

A READ has ended when it is done or its link is closed, a launch when its event has happened (I7).
The death of the peer ends no launch: mapped memory stays readable until it is unmapped. Its bytes
are not used, since a dead peer does not answer the fence.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvcache.transfer.agent import ReadHandle, ReadState
from kvcache.transfer.move.place import launches
from kvcache.transfer.peer import Peer, PeerLink
from kvcache.transfer.plan.block_copy import BlockCopy, ReadDescriptors, Transfer
from kvcache.transfer.plan.plan import Step, TransferPlan
from kvcache.transfer.pulls.messages import Pull
from protocol.errors import BatonError, InternalError, PeerIncompatible, TransferFailed

HANGS_S = (
    1.0  # a job hangs when none of its READs has been posted or has ended for this long
)
MAX_LAUNCHES = 4  # queued at once: the device goes from one to the next without waiting


class TransferJob(ABC):
    """
    Attributes:
        path: one of messages.PATHS.
        nbytes: bytes of the wanted tokens, in the peer's dtype.
        bytes_read: bytes read of the peer's memory, unwanted ones included.
        is_stopping: no more is posted.
        error: the reason for stopping; None after a StopPull.
        waits: for the link, whose thread wakes the worker.
    """

    path = "none"
    nbytes = bytes_read = descriptors = 0
    waits = False

    def __init__(self, pull: Pull, peer: Peer) -> None:
        self.pull, self.pull_id, self.peer = pull, pull.pull_id, peer
        self.began = time.perf_counter()
        self._active: deque[Any] = deque()  # READs or launches, oldest first
        self.is_stopping = self.is_failure_told = False
        self.error: BatonError | None = None

    @property
    def active(self) -> int:
        """READs or launches that have not ended."""
        return len(self._active)

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Nothing is active or will be. Unless the job was stopped, every byte is in its place."""

    @abstractmethod
    def post(self) -> bool:
        """Posts the next piece, if there is room; whether it did. Not to be called once stopped.

        Raises:
            BatonError: the pull cannot be carried out.
        """

    @abstractmethod
    def poll(self) -> bool:
        """Looks for READs or launches that have ended; whether there were any."""

    def leave(self) -> None:  # noqa: B027 - mapped jobs borrow nothing
        """Hands the staging memory back, after the end."""

    def stop(self, error: BatonError | None = None) -> None:
        """No more is posted. The first error is kept."""
        self.is_stopping, self.waits = True, False
        self.error = self.error or error

    def fault(self, error: Exception) -> BatonError:
        """The pull's error for an unexpected exception of `post`, `poll` or `leave`."""
        return InternalError(f"the transfer thread failed: {error!r}")

    @property
    def still_s(self) -> float:
        """Seconds since a READ was posted or ended; 0 while none is active."""
        return 0.0

    @property
    def hangs(self) -> bool:
        return self.still_s >= HANGS_S


@dataclass(eq=False)
class _Posting:
    """The READs of one step of the plan. A staged step is placed after its last READ."""

    posts: deque[ReadDescriptors]  # still to be posted
    base_address: int  # of the pool, or of the slot: local offsets count from here
    step: Step | None = None  # a staged step
    slot: int = -1  # of staging memory, for a staged step
    active: int = 0


class ReadJob(TransferJob):
    """READs straight into the pool, and through slots of staging memory."""

    def __init__(self, pull: Pull, peer: Peer) -> None:
        super().__init__(pull, peer)
        self.waits = True
        self._link: PeerLink | None = None
        self._plan: TransferPlan | None = None
        self._staging = peer.rank.staging
        self._slot_bytes = 0
        self._num_begun = 0  # of the plan's steps
        self._now = _Posting(deque(), 0)
        self._active: deque[tuple[ReadHandle, _Posting]]
        self._placing: list[int] = []  # slots whose placement has not ended
        self._moved_s = 0.0  # time.monotonic of the last READ that was posted or ended

    @property
    def still_s(self) -> float:
        return time.monotonic() - self._moved_s if self._active else 0.0

    @property
    def ended(self) -> bool:
        if self.waits or self._active or self._placing:
            return False
        all_begun = self._plan is not None and self._num_begun == len(self._plan.steps)
        return self.is_stopping or (all_begun and not self._now.posts)

    def pass_staging_by(self) -> bool:
        """Stops waiting for staging memory that another pull owns: reads straight into the pool, in
        however many runs. False if that is impossible, as the KV has to be converted."""
        if self._plan is None or self._staging is None or self.is_stopping:
            return True
        if self._staging.owner == self.pull_id:
            return True
        if self._plan.transfer.converts:
            return False
        self._staging.leave(self.pull_id)
        self._staging = None
        return True

    def stop(self, error: BatonError | None = None) -> None:
        if self._link is not None and not self.is_stopping:
            self._link.active -= len(
                self._active
            )  # other pulls may post in their stead
        super().stop(error)

    def leave(self) -> None:
        if self._staging is not None:
            self._staging.leave(self.pull_id)

    def post(self) -> bool:
        link = self._link or self.peer.connect()
        if link is None:
            return False
        if self._link is None:
            self._begin(link)
        throttle, now_s = self.peer.rank.throttle, time.perf_counter()
        is_full = link.active >= throttle.window.max_active
        if link.is_closing or is_full or not throttle.admits(now_s):
            return False
        while not self._now.posts:
            posting = self._next()
            if posting is None:
                return False
            self._now = posting
        now, post = self._now, self._now.posts.popleft()
        try:
            handle = link.read(post, now.base_address)
        except TransferFailed as error:
            link.close(error)
            raise
        now.active += 1
        link.active += 1
        self._active.append((handle, now))
        self._moved_s = time.monotonic()
        throttle.posted(post.nbytes, now_s, staged=now.step is not None)
        return True

    def poll(self) -> bool:
        link, ended, failed = self._link, [], None
        if link is None:
            return False
        if link.is_closing:
            if not self.is_stopping:
                self.stop(link.error)
            ended = list(self._active) if link.is_closed else []
        else:
            for read in self._active:
                state = link.agent.poll(read[0])
                if state is ReadState.DONE:
                    ended.append(read)
                elif (
                    state is ReadState.ERROR
                ):  # runs may go on: active until the link is closed
                    failed = TransferFailed(f"a READ from {read[0].peer} failed")
        for read in ended:
            self._end(link, read)
        if failed is not None:
            link.close(failed)
            self.stop(failed)
        placed = [
            slot
            for slot in self._placing
            if self._staging and self._staging.is_free(slot)
        ]
        self._placing = [slot for slot in self._placing if slot not in placed]
        return bool(ended or placed)

    def _begin(self, link: PeerLink) -> None:
        self._link, self.waits = link, False
        plan = self._plan = self.peer.plan(self.pull, link)
        self.path, self.nbytes, self.bytes_read = (
            plan.path,
            plan.useful_bytes,
            plan.bytes_read,
        )
        self._slot_bytes = plan.slot_bytes
        if not self._slot_bytes:
            self._staging = None
        elif self._staging is not None:
            self._staging.enter(self.pull_id)

    def _next(self) -> _Posting | None:
        """The READs of the next step; None after the last step, or while its slot is in use."""
        plan, index, staging = self._plan, self._num_begun, self._staging
        if plan is None or index == len(plan.steps):
            return None
        step = plan.steps[index]
        if staging is None or step.slot is None:
            reads = step.unstaged.reads
            posting = _Posting(deque(), self.peer.rank.pool.base_address)
        else:
            slot = index % staging.num_slots(self._slot_bytes)
            filling = any(active.slot == slot for _, active in self._active)
            if filling or slot in self._placing or staging.owner != self.pull_id:
                return None
            reads = step.reads
            posting = _Posting(
                deque(), staging.base_address + slot * self._slot_bytes, step, slot
            )
        self._num_begun += 1
        self.descriptors += sum(len(read.lengths) for read in reads)
        posting.posts.extend(self.peer.rank.throttle.cut(reads))
        return posting

    def _end(self, link: PeerLink, read: tuple[ReadHandle, _Posting]) -> None:
        """Counts a READ as ended, and places its step if that was the step's last READ."""
        handle, posting = read
        if not link.is_closing:
            link.agent.release(handle)
        self._active.remove(read)
        posting.active -= 1
        self._moved_s = time.monotonic()
        if not self.is_stopping:
            link.active -= 1
            is_read = not (posting.posts or posting.active)
            if is_read and posting.step is not None and self._staging is not None:
                self._placing.append(posting.slot)
                self._staging.place(posting.step, posting.slot, self._slot_bytes)


class MappedJob(TransferJob):
    """Launches that copy out of mapped memory, of bounded size: a stopped pull ends soon."""

    path = "mapped"

    def __init__(self, pull: Pull, peer: Peer) -> None:
        super().__init__(pull, peer)
        assert peer.rank.placer is not None
        self._placer = peer.rank.placer
        self._transfer: Transfer | None = None
        self._pending: deque[BlockCopy] = deque()

    @property
    def ended(self) -> bool:
        has_begun = self._transfer is not None
        return not self._active and (
            self.is_stopping or (has_begun and not self._pending)
        )

    def fault(self, error: Exception) -> BatonError:
        if self._transfer is None:
            return super().fault(error)
        self.peer.is_stale = True
        return TransferFailed(f"gathering mapped KV failed: {error!r}")

    def post(self) -> bool:
        transfer, posted = self._transfer or self._begin(), False
        while (
            self._pending
            and len(self._active) < MAX_LAUNCHES
            and self._launch(transfer)
        ):
            posted = True
        return posted

    def poll(self) -> bool:
        before = len(self._active)
        self._placer.retire(self._active)
        return len(self._active) < before

    def _begin(self) -> Transfer:
        peer = self.peer
        if peer.refusal is not None:
            raise PeerIncompatible(
                f"KV of prefill server {peer.engine_id} cannot be mapped: {peer.refusal}. "
                "Use --transfer auto or nixl.",
                param="transfer",
            )
        transfers = peer.transfers(self.pull)
        for transfer in transfers:
            self._pending.extend(launches(transfer.copies(), self._placer.launch_bytes))
            self.nbytes += transfer.useful_bytes
        self.bytes_read, self._transfer = self.nbytes, transfers[0]
        return transfers[0]

    def _launch(self, transfer: Transfer) -> bool:
        """Queues the next launch, or its first part if the placer has no room for all of it."""
        placer, copy, factors = self._placer, self._pending[0], transfer.factors
        room = placer.room(copy, factors)
        fitting = max(
            room // copy.piece_bytes, min(room, 1)
        )  # a piece may exceed the room
        if fitting == 0:
            return False
        self._pending.popleft()
        if fitting < len(copy.sources):
            self._pending.appendleft(copy.part(fitting, len(copy.sources) - fitting))
            copy = copy.part(0, fitting)
        self._active.append(
            placer.launch(copy, self.peer.memories[copy.owner], factors)
        )
        return True

"""READs of one rank's pulls: posted one at a time, polled until their state says they ended."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcache.transfer.link.agent import ReadHandle, ReadState
from kvcache.transfer.link.peer_link import PeerLink
from kvcache.transfer.link.read_throttle import Throttle
from kvcache.transfer.link.read_window import Post, ReadWindow
from kvcache.transfer.pulls.messages import PeerKey
from kvcache.transfer.worker.job_maker import Job
from kvcache.transfer.worker.job_peer import JobPeer
from kvcache.transfer.worker.read_job import ReadJob, Step
from protocol.errors import TransferFailed


@dataclass
class _Read:
    handle: ReadHandle
    link: PeerLink
    peer: JobPeer
    job: ReadJob
    step: Step


class Reads:
    """Driven by the worker's thread. A READ that fails stays active until its link is closed: some
    of its runs may go on.

    Args:
        limits: READs of jobs that were given up do not count as active: a peer that hangs takes
            none of what others may have.
        throttle: bounds the rate beside a batch.
        broken: is told of a peer of which a READ failed, or could not be posted.
        counters: `posts` are counted here.
    """

    def __init__(
        self,
        limits: ReadWindow,
        broken: Callable[[JobPeer, TransferFailed], None],
        counters: Counter[str],
        throttle: Throttle | None = None,
    ) -> None:
        self._limits = limits
        self._broken = broken
        self._active: list[_Read] = []
        self._ended: list[_Read] = []  # not yet released
        self._counters = counters
        self._throttle = throttle

    def poll(self) -> bool:
        """Ends the READs that have ended; whether anything happened."""
        before = len(self._active)
        failed: list[_Read] = []
        for read in list(self._active):
            if read.link.is_closing:
                if read.link.is_closed:
                    self._end(read)
            elif (state := read.link.agent.poll(read.handle)) is ReadState.DONE:
                self._end(read)
            elif state is ReadState.ERROR:
                failed.append(read)
        for read in failed:
            self._broken(read.peer, TransferFailed(f"a READ from {read.handle.peer} failed"))
        return len(self._active) < before or bool(failed)

    def post_one(self, jobs: Iterable[tuple[Job, JobPeer]]) -> ReadJob | None:
        """Posts one piece of the first job that has one now; whose it was."""
        if self._throttle is not None and not self._throttle.admits(time.perf_counter()):
            return None
        full = self._full_peers()
        for job, peer in jobs:
            if not isinstance(job, ReadJob) or peer.key in full:
                continue
            found = job.next_post()
            if found is not None:
                self._post(job, peer, *found)
                return job
        return None

    def release_ended(self) -> None:
        """Gives back what ended READs took: later, as a fence may wait for their end."""
        while self._ended:
            read = self._ended.pop()
            if not read.link.is_closing:
                read.link.agent.release(read.handle)

    def _full_peers(self) -> set[PeerKey]:
        """Those from which nothing more may be read for now."""
        if len(self._active) < self._limits.max_active:
            return set()
        counts = Counter(read.peer.key for read in self._active if not read.job.stopping)
        return {key for key, count in counts.items() if count >= self._limits.max_active}

    def _post(self, job: ReadJob, peer: JobPeer, step: Step, post: Post) -> None:
        assert peer.link is not None, "its pulls wait for it"
        started = time.perf_counter()
        try:
            handle = peer.link.read(post, step.base_address)
        except TransferFailed as error:
            self._broken(peer, error)
            return
        job.read_posted(step)
        self._counters["posts"] += 1
        if self._throttle is not None:
            self._throttle.posted(post.nbytes, started, staged=step.chunk is not None)
        read = _Read(handle, peer.link, peer, job, step)
        self._active.append(read)
        if handle.state is ReadState.DONE:
            self._end(read)

    def _end(self, read: _Read) -> None:
        """Nothing is written for it any more."""
        self._active.remove(read)
        self._ended.append(read)
        read.job.read_ended(read.step)

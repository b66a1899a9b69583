"""READs of one rank's pulls: posted one at a time, polled until their state says they ended."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcache.pool import KVPool
from kvcache.transfer.agent import MemoryKind, ReadHandle, ReadState, TransferAgent
from kvcache.transfer.job_maker import Job
from kvcache.transfer.job_peer import JobPeer
from kvcache.transfer.posts import Post, PostLimits
from kvcache.transfer.pull import PeerKey
from kvcache.transfer.pull_job import PullJob, Step
from kvcache.transfer.read_throttle import Throttle
from protocol.errors import BatonError, TransferFailed


@dataclass
class _Read:
    handle: ReadHandle
    peer: JobPeer
    job: PullJob
    step: Step
    started: float


class Reads:
    """Driven by the worker's thread, which owns the agent.

    Args:
        limits: READs of jobs that were given up do not count as active: a peer that hangs takes
            none of what others may have.
        throttle: bounds the rate beside a batch.
        failed: is told of a job of which a READ failed, or could not be posted.
        counters: `posts` are counted here.
    """

    def __init__(
        self,
        agent: TransferAgent,
        pool: KVPool,
        limits: PostLimits,
        failed: Callable[[PullJob, BatonError], None],
        counters: Counter[str],
        throttle: Throttle | None = None,
    ) -> None:
        self._agent = agent
        self._kind: MemoryKind = "VRAM" if pool.device.type == "cuda" else "DRAM"
        self._device_id = pool.device_id
        self._limits = limits
        self._failed = failed
        self._active: list[_Read] = []
        self._counters = counters
        self._throttle = throttle

    def poll(self) -> bool:
        """Ends the READs that have ended; whether any had."""
        before = len(self._active)
        for read in list(self._active):
            if self._agent.poll(read.handle) is not ReadState.ACTIVE:
                self._active.remove(read)
                self._end(read)
        return len(self._active) < before

    def post_one(self, jobs: Iterable[tuple[Job, JobPeer]]) -> PullJob | None:
        """Posts one piece of the first job that has one now; whose it was."""
        if self._throttle is not None and not self._throttle.admits(time.perf_counter()):
            return None
        full = self._full_peers()
        for job, peer in jobs:
            if not isinstance(job, PullJob) or peer.key in full:
                continue
            found = job.next_post()
            if found is not None:
                self._post(job, peer, *found)
                return job
        return None

    def _full_peers(self) -> set[PeerKey]:
        """Those from which nothing more may be read for now."""
        if len(self._active) < self._limits.max_active:
            return set()
        counts = Counter(read.peer.key for read in self._active if not read.job.stopping)
        return {key for key, count in counts.items() if count >= self._limits.max_active}

    def _post(self, job: PullJob, peer: JobPeer, step: Step, post: Post) -> None:
        try:
            started = time.perf_counter()
            handle = self._read(peer, step.base_address, post)
        except BatonError as error:
            self._failed(job, error)
            return
        job.read_posted(step, handle)
        self._counters["posts"] += 1
        if self._throttle is not None:
            staged = step.chunk is not None
            self._throttle.posted(post.nbytes, started, staged=staged)
        read = _Read(handle, peer, job, step, started)
        if handle.ended:
            self._end(read)
        else:
            self._active.append(read)

    def _read(self, peer: JobPeer, base_address: int, post: Post) -> ReadHandle:
        remote = peer.metadata.ranks[post.remote_rank]
        name = peer.names.get(remote.rank)
        if name is None:
            name = peer.names[remote.rank] = self._agent.add_peer(remote.agent_metadata)
        return self._agent.read(
            name,
            post.local_offsets + base_address,
            post.remote_offsets + remote.base_address,
            post.lengths,
            local_device=self._device_id,
            remote_device=remote.device_id,
            kinds=(self._kind, "VRAM" if remote.device_kind == "cuda" else "DRAM"),
        )

    def _end(self, read: _Read) -> None:
        if read.handle.state is ReadState.ERROR:
            self._failed(read.job, TransferFailed(f"a READ from {read.handle.peer} failed"))
        try:
            self._agent.release(read.handle)
        finally:
            read.step.seconds += time.perf_counter() - read.started
            read.job.read_ended(read.step)

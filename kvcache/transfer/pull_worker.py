"""A rank's transfer thread: drives every job piece by piece and reports.

It blocks while there is nothing to do, and looks at commands between any two posts, so that a pull
stops within one post. A READ that does not end keeps its pull here until it does (I7).
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from kvcache.pool import KVPool
from kvcache.transfer.agent import MemoryKind, TransferAgent
from kvcache.transfer.job_maker import Job, JobMaker
from kvcache.transfer.job_peer import JobPeer
from kvcache.transfer.link_log import log_first_pull
from kvcache.transfer.mapped import MappedJob, MappedPath
from kvcache.transfer.move.staging import StagingBuffer, placing
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import Endpoint
from kvcache.transfer.posts import GPU_LIMITS, PostLimits
from kvcache.transfer.probe_job import ProbeJob
from kvcache.transfer.pull import (
    AddPeer,
    Command,
    DropPeer,
    PeerKey,
    Pull,
    RankEnded,
    RankFailing,
    StopPull,
    error_info,
)
from kvcache.transfer.pull_job import PullJob
from kvcache.transfer.rank_links import InsideLink, OutsideLink, WorkerLink
from kvcache.transfer.read_throttle import Throttle
from kvcache.transfer.reads import Reads
from kvcache.transfer.starved import starved
from kvcache.transfer.threads import allow_short_naps, use_one_core
from kvcache.transfer.ucx_log import UcxRead
from kvcache.transfer.watch import Watch
from protocol.errors import BatonError, InternalError, TransferFailed
from protocol.handshake import EngineMetadata
from protocol.process.logging import get_logger
from protocol.process.vital_threads import VitalThread

logger = get_logger(__name__)

_POLL_S = {"DRAM": (0.0002, 0.001), "VRAM": (0.00002, 0.00005)}  # shortest and longest nap
_SAMPLE_BYTES = 1 << 20  # less says nothing about speed
_MAX_FAILURES = 100  # rounds in a row, which take two seconds
_POLL_STUCK_S = 0.02  # when all that is left are READs of pulls that were given up


class PullWorker:
    """One rank's end of every pull.

    Args:
        tp_size, total_kv_heads, dcp: geometry of this engine; dcp as of Endpoint.
        agent: not yet used for reads; the worker registers the pool and owns the agent from
            `start` on, its `close` included.
        connect_address: the coordinator's `worker_address`.
        staging_bytes: bound of the memory for staged transfers; None plans direct ones only.
        convert: accept a peer with another KV dtype.
        costs: of every link; None measures each peer at first contact.
        mapped: takes the pulls from peers that it can map; the agent moves the others.
        inside: the link to the coordinator, where that is in this process.
        busy: whether this rank's engine computes: READs between GPUs then leave it room.
    """

    def __init__(
        self,
        rank: int,
        tp_size: int,
        total_kv_heads: int,
        agent: TransferAgent,
        pool: KVPool,
        connect_address: str,
        *,
        dcp: int = 1,
        staging_bytes: int | None = None,
        convert: bool = False,
        costs: CostModel | None = None,
        limits: PostLimits | None = None,
        mapped: MappedPath | None = None,
        inside: InsideLink | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._endpoint = Endpoint(pool.layout, rank, tp_size, pool.scales, dcp)
        self._agent = agent
        self._pool = pool
        self._kind: MemoryKind = "VRAM" if pool.device.type == "cuda" else "DRAM"
        self._staging = (
            StagingBuffer(staging_bytes, pool, placing(pool, convert=convert))
            if staging_bytes
            else None
        )
        limits = limits or (GPU_LIMITS if self._kind == "VRAM" else PostLimits())
        self._mapped = mapped
        throttle = Throttle(busy, limits.max_bytes) if self._kind == "VRAM" else None
        self._maker = JobMaker(
            self._endpoint,
            total_kv_heads,
            pool,
            self._staging,
            limits,
            convert=convert,
            costs=costs,
            mapped=mapped,
            throttle=throttle,
        )
        self._link: WorkerLink = inside or OutsideLink(connect_address)
        self._commands: deque[Command] = deque()  # not yet obeyed
        self._peers: dict[PeerKey, JobPeer] = {}
        self._jobs: OrderedDict[str, tuple[Job, JobPeer]] = OrderedDict()
        self._poll_min_s, self._poll_max_s = _POLL_S[self._kind]
        self._idle_s = self._poll_min_s
        self.counters: Counter[str] = Counter(posts=0, internal_errors=0)
        self._reads = Reads(agent, pool, limits, self._fail, self.counters, throttle)
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, f"pull-{rank}")
        self._watch = Watch(self._thread.name)
        self._register()

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    @property
    def native_id(self) -> int | None:
        """Of the thread, as the system numbers it; None before it runs."""
        return self._thread.native_id

    def close(self) -> None:
        """Ends the thread and closes the agent; READs still active stay the transport's."""
        self._stopping.set()
        self._link.waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._watch.close()
        self._link.close()
        self._agent.close()

    def _register(self) -> None:
        register, device, kind = self._agent.register, self._pool.device_id, self._kind
        for memory in (self._pool, self._staging):
            if memory is not None:
                register(memory.base_address, memory.nbytes, device_id=device, kind=kind)

    def _run(self) -> None:
        allow_short_naps()
        use_one_core()
        self._agent.bind_thread()
        self._maker.measure_copies()
        if self._staging is not None:
            self._staging.bind_thread()
        if self._mapped is not None:
            self._mapped.bind_thread()
        self._watch.resting = True
        self._link.open(self._endpoint.rank, self._stopping)
        num_failures = 0  # since a round went well
        while not self._stopping.is_set():
            self._watch.at += 1
            self._watch.resting = False
            try:
                self._wait(self._round())
                num_failures = 0
            except Exception as error:  # our bug; no pull may hang for it
                num_failures += 1
                if num_failures == _MAX_FAILURES:  # nor does any end
                    raise
                self._survive(error)
                time.sleep(_POLL_STUCK_S)
        if self._mapped is not None and not self._jobs:
            self._mapped.close()

    def _round(self) -> bool:
        """Does all there is to do now; whether anything happened."""
        self._commands += self._link.receive()
        while self._commands:
            self._obey(self._commands.popleft())
        return self._progress()

    def _survive(self, error: Exception) -> None:
        logger.exception("pull worker")
        self.counters["internal_errors"] += 1
        for job, _ in self._jobs.values():
            job.stop(InternalError(f"the transfer thread failed: {error!r}"))

    def _wait(self, progressed: bool) -> None:
        """Until there is, or may be, something to do."""
        if progressed:
            self._idle_s = self._poll_min_s
        elif self._jobs:
            time.sleep(self._nap_s())
        else:
            self._watch.resting = True
            self._link.wait(None)

    def _nap_s(self) -> float:
        nap_s, is_wanted = self._idle_s, not all(job.stopping for job, _ in self._jobs.values())
        self._idle_s = min(nap_s * 1.5, self._poll_max_s if is_wanted else _POLL_STUCK_S)
        return nap_s

    def _obey(self, command: Command) -> None:
        match command:
            case Pull():
                self._begin(command)
            case StopPull(pull_id):
                if pull_id in self._jobs:
                    self._jobs[pull_id][0].stop()
                else:
                    self._stop_waiting(pull_id)
            case AddPeer(metadata):
                self._add_peer(metadata)
            case DropPeer(engine_id, incarnation):
                peer = self._peers.get((engine_id, incarnation))
                if peer is not None:
                    peer.dropped = True
                    self._clean(peer)

    def _add_peer(self, metadata: EngineMetadata) -> None:
        key = (metadata.engine_id, metadata.incarnation)
        if key in self._peers:
            self._peers[key].dropped = False
            return
        try:
            peer = self._peers[key] = JobPeer.of(metadata)
        except ValueError as error:  # its pulls fail: not connected
            logger.error("prefill server %s: %s", metadata.engine_id, error)
            return
        owners = self._maker.owners(metadata.tp_size)
        if self._mapped is not None and self._mapped.meet(metadata, owners):
            self._maker.prepare(peer, mapped=True)
        else:
            self._maker.prepare(peer, mapped=False)
            self._probe(peer, min(owners))

    def _probe(self, peer: JobPeer, rank: int) -> None:
        if (job := self._maker.probe(peer, rank)) is not None:
            peer.users += 1
            peer.probe = job
            self._jobs[job.pull_id] = (job, peer)

    def _stop_waiting(self, pull_id: str) -> None:
        """Says that no READ of it is active: again, if it has ended here already."""
        for peer in self._peers.values():
            if peer.probe is not None:
                peer.probe.waiting.pop(pull_id, None)
        self._tell_end(pull_id, None, None)

    def _probed(self, job: ProbeJob, peer: JobPeer) -> None:
        peer.probe = None
        try:
            self._maker.learn(job, peer, self._way_of_reading(peer))
        finally:
            for pull in job.waiting.values():
                self._begin(pull)

    def _begin(self, pull: Pull) -> None:
        peer = self._peers.get((pull.engine_id, pull.incarnation))
        if peer is None:
            told = f"prefill server {pull.engine_id} is not connected any more"
            self._tell_end(pull.pull_id, None, TransferFailed(told))
            return
        if peer.probe is not None and peer.probe.delays(pull):
            return
        try:
            job = self._maker.make(pull, peer)
        except BatonError as error:
            self._tell_end(pull.pull_id, None, error)
        except Exception as error:
            logger.exception("planning pull %s", pull.pull_id)
            self._tell_end(pull.pull_id, None, InternalError(f"planning failed: {error!r}"))
        else:
            peer.users += 1
            self._jobs[pull.pull_id] = (job, peer)
            self._start(job, peer)
            if not job.stopping:
                self._pool.use(max(pull.local_block_ids, default=-1))

    def _start(self, job: Job, peer: JobPeer) -> None:
        """Before all else: the link idles."""
        if isinstance(job, MappedJob):
            self._advance_one(job)
        else:
            self._reads.post_one([(job, peer)])

    def _progress(self) -> bool:
        """Polls, posts at most one piece, ends what has ended; whether anything happened."""
        polled = self._reads.poll() | self._advance()
        for job in starved(self._staging, self._jobs):
            self._fail(job, TransferFailed("READs that hang have the staging memory"))
        posted = self._reads.post_one(self._jobs.values())
        if posted is not None and posted.pull_id in self._jobs:
            self._jobs.move_to_end(posted.pull_id)  # pulls take turns
        ended = [job for job, _ in self._jobs.values() if job.ended]
        for job in ended:
            self._end(job)
        jobs = (job for job, _ in self._jobs.values() if isinstance(job, PullJob))
        return polled or posted is not None or bool(ended) or any(job.prepare() for job in jobs)

    def _advance(self) -> bool:
        """Lets every mapped pull go on."""
        progressed = False
        for job, _ in list(self._jobs.values()):
            if isinstance(job, MappedJob):
                progressed |= self._advance_one(job)
        return progressed

    def _advance_one(self, job: MappedJob) -> bool:
        try:
            return job.advance()
        except Exception as error:
            logger.exception("pull %s", job.pull_id)
            self._fail(job, TransferFailed(f"gathering mapped KV failed: {error!r}"))
            return True

    def _fail(self, job: Job, error: BatonError) -> None:
        job.stop(error)
        _, peer = self._jobs[job.pull_id]
        peer.stale = True
        if job.active and not job.failure_told and not isinstance(job, ProbeJob):
            job.failure_told = True
            report = RankFailing(job.pull_id, self._endpoint.rank, error_info(error))
            self._link.report(report)

    def _end(self, job: Job) -> None:
        _, peer = self._jobs.pop(job.pull_id)
        peer.users -= 1
        seconds = time.perf_counter() - job.began
        is_read = job.complete and not isinstance(job, ProbeJob)
        if is_read:  # first of all: the fence waits for it
            self._tell_end(job.pull_id, job, None)
        try:
            job.leave()
            self._clean(peer)
        finally:
            if isinstance(job, ProbeJob):
                self._probed(job, peer)
            elif not is_read:
                self._tell_end(job.pull_id, job, job.error)
        if is_read and not peer.speed_told and job.plan.bytes_read >= _SAMPLE_BYTES:
            peer.speed_told = True
            way = self._way_of_reading(peer) if isinstance(job, PullJob) else None
            log_first_pull(
                peer.metadata.engine_id, job.plan.path, way, job.plan.bytes_read / seconds
            )

    def _way_of_reading(self, peer: JobPeer) -> UcxRead | None:
        on_gpu = peer.metadata.ranks[0].device_kind == "cuda"
        return self._agent.way_of_reading((self._kind, "VRAM" if on_gpu else "DRAM"))

    def _clean(self, peer: JobPeer) -> None:
        if peer.users or not (peer.stale or peer.dropped):
            return
        for name in peer.names.values():
            self._agent.remove_peer(name)
        peer.names.clear()
        peer.stale = False
        if self._mapped is not None:
            self._mapped.forget((peer.metadata.engine_id, peer.metadata.incarnation))
        if peer.dropped:
            self._peers.pop((peer.metadata.engine_id, peer.metadata.incarnation), None)

    def _tell_end(self, pull_id: str, job: Job | None, error: BatonError | None) -> None:
        complete = job is not None and job.complete
        ended = RankEnded(
            pull_id=pull_id,
            rank=self._endpoint.rank,
            complete=complete,
            error=error_info(error) if error else None,
            nbytes=job.plan.useful_bytes if job and complete else 0,
            descriptors=job.plan.descriptors if job and complete else 0,
            path=job.plan.path if job and job.plan.useful_bytes else "none",
        )
        self._link.report(ended)

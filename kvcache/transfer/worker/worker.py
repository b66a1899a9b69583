"""A rank's transfer thread: drives every job piece by piece and reports.

It blocks while there is nothing to do, and looks at commands between any two posts, so that a pull
stops within one post. A READ that does not end keeps its pull here until it does (I7).
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from kvcache.pool import KVPool
from kvcache.transfer.link.agent import MemoryKind, TransferAgent
from kvcache.transfer.link.peer_link import SCRATCH_BYTES, LocalEnd, PeerLink
from kvcache.transfer.link.read_throttle import Throttle
from kvcache.transfer.link.read_window import GPU_LIMITS, ReadWindow
from kvcache.transfer.link.threads import allow_short_naps, use_one_core
from kvcache.transfer.link.ucx_log import UcxRead
from kvcache.transfer.move.staging import StagingBuffer, staging_placer
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import Endpoint
from kvcache.transfer.pulls.messages import (
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
from kvcache.transfer.pulls.rank_links import WorkerLink
from kvcache.transfer.worker.hang_watch import HangWatch
from kvcache.transfer.worker.job_maker import Job, JobMaker
from kvcache.transfer.worker.job_peer import JobPeer
from kvcache.transfer.worker.link_log import log_first_pull
from kvcache.transfer.worker.mapped_job import MappedJob, MappedPath
from kvcache.transfer.worker.read_job import ReadJob
from kvcache.transfer.worker.reads import Reads
from kvcache.transfer.worker.starved import starved
from protocol.errors import BatonError, InternalError, PullWithheld, TransferFailed
from protocol.handshake import EngineMetadata
from protocol.process.lifecycle import VitalThread
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# Shortest and longest nap; on a GPU longer ones leave the interpreter's lock to a busy engine.
_POLL_S = {"DRAM": (0.0002, 0.001), "VRAM": (0.00002, 0.00005)}
_SAMPLE_BYTES = 1 << 20  # less says nothing about speed
_MAX_FAILURES = 100  # rounds in a row, which take two seconds
_TEAR_DOWN_S = 10.0  # after which READs that nobody wants and that hang end with their link
_POLL_STUCK_S = 0.02  # when all that is left are READs of pulls that were given up


class TransferWorker:
    """One rank's end of every pull.

    Args:
        tp_size, total_kv_heads, dcp: geometry of this engine; dcp as of Endpoint.
        agent: reads nothing; another of it is made for each peer that is read from. Owned from
            `start` on, its `close` included.
        connect_address: the coordinator's `worker_address`.
        staging_bytes: bound of the memory for staged transfers; None plans direct ones only.
        convert: accept a peer with another KV dtype.
        costs: of every link; None measures each peer at first contact.
        mapped: takes the pulls from peers that it can map; the agent moves the others.
        busy: whether this rank's engine computes: READs between GPUs then leave it room.
        connect_timeout_s: longest wait of a pull for the connection to its peer.
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
        limits: ReadWindow | None = None,
        mapped: MappedPath | None = None,
        busy: Callable[[], bool] = lambda: False,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._endpoint = Endpoint(pool.layout, rank, tp_size, pool.scales, dcp)
        self._agent = agent
        self._pool = pool
        self._kind: MemoryKind = "VRAM" if pool.device.type == "cuda" else "DRAM"
        self._staging = (
            StagingBuffer(staging_bytes, pool, staging_placer(pool, convert=convert))
            if staging_bytes
            else None
        )
        limits = limits or (GPU_LIMITS if self._kind == "VRAM" else ReadWindow())
        self._mapped, self._busy = mapped, busy
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
        self._link = WorkerLink(connect_address)
        self._commands: deque[Command] = deque()  # not yet obeyed
        self._peers: dict[PeerKey, JobPeer] = {}
        self._jobs: OrderedDict[str, tuple[Job, JobPeer]] = OrderedDict()
        self._poll_min_s, self._poll_max_s = _POLL_S[self._kind]
        self._idle_s = self._poll_min_s
        self.counters: Counter[str] = Counter(posts=0, internal_errors=0)
        # Where every peer is mapped nothing is read over links.
        self._here = None if mapped and mapped.required else LocalEnd(pool, self._staging)
        self._connect_timeout_s = connect_timeout_s
        self._links: list[PeerLink] = []
        self._unsettled: set[JobPeer] = set()  # whose links connect or end
        self._reads = Reads(limits, self._break_link, self.counters, throttle)
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, f"pull-{rank}")
        self._watch = HangWatch(self._thread.name)

    @staticmethod
    def reserved_bytes(staging_bytes: int | None) -> int:
        """What a worker takes of its device's memory; with None there are no READs."""
        return 0 if staging_bytes is None else staging_bytes + SCRATCH_BYTES

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    @property
    def native_id(self) -> int | None:
        """Of the thread, as the system numbers it; None before it runs."""
        return self._thread.native_id

    def close(self) -> None:
        """Ends the thread, and every READ."""
        self._stopping.set()
        self._link.waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._watch.close()
        for link in self._links:
            link.close()
        for link in self._links:
            link.join()
        self._link.close()
        self._agent.close()

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
        self._link.open(self._stopping)
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
            self._link.wait(self._patience_s())

    def _nap_s(self) -> float:
        nap_s, longest_s = self._idle_s, self._poll_max_s
        if all(job.stopping for job, _ in self._jobs.values()):
            longest_s = _POLL_STUCK_S
        elif self._kind == "VRAM" and not self._busy():
            longest_s = self._poll_min_s
        self._idle_s = min(nap_s * 1.5, longest_s)
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
                    self._refuse(peer, _not_connected(engine_id))
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
        self._maker.prepare(peer)
        if not self._is_mapped(peer):
            self._link_to(peer)

    def _stop_waiting(self, pull_id: str) -> None:
        """Says that no READ of it is active: again, if it has ended here already."""
        for peer in self._peers.values():
            peer.waiting.pop(pull_id, None)
        self._tell_end(pull_id, None, None)

    # -- links

    def _is_mapped(self, peer: JobPeer) -> bool:
        """Its pulls go without a link, or fail for want of a mapping."""
        if self._mapped is None:
            return False
        owners = self._maker.owners(peer.metadata.tp_size)
        return self._mapped.meet(peer.metadata, owners) or self._mapped.required

    def _link_to(self, peer: JobPeer) -> PeerLink:
        """Begins to connect, unless that was done."""
        if peer.link is None:
            assert self._here is not None
            owners = sorted(self._maker.owners(peer.metadata.tp_size))
            peer.link = PeerLink(
                self._agent,
                self._here,
                peer.metadata,
                [peer.endpoints[rank] for rank in owners],
                self._connect_timeout_s,
                self._link.waker.wake,
                probes=self._maker.measures or peer.suspect,
            )
            self._unsettled.add(peer)
            self._links = [*(link for link in self._links if not link.is_closed), peer.link]
        return peer.link

    def _is_linked(self, peer: JobPeer, pull: Pull) -> bool:
        """Where it is not, the pull waits for that, or has ended."""
        link = self._link_to(peer)
        if link.is_ready and not link.is_closing:
            return True
        if link.error is not None and link.is_connecting:
            self._tell_end(pull.pull_id, None, link.error)
        else:
            peer.waiting[pull.pull_id] = pull
        return False

    def _settle(self) -> bool:
        """Takes in what became of links; whether anything has."""
        before = len(self._unsettled)
        for peer in list(self._unsettled):
            link = peer.link
            assert link is not None
            if link.is_closed:
                self._unsettled.remove(peer)
                peer.link = None
                if peer.waiting:
                    self._link_to(peer)
            elif link.is_closing:
                continue
            elif link.is_ready:
                self._unsettled.remove(peer)
                self._linked(peer, link)
            elif link.error is not None:
                logger.warning("%s", link.error.message)
                peer.suspect = True
                self._refuse(peer, link.error)
                link.close()
        return len(self._unsettled) != before

    def _linked(self, peer: JobPeer, link: PeerLink) -> None:
        peer.suspect = False
        try:
            if link.samples is not None and self._maker.measures:
                self._maker.learn(peer, link.samples, self._way_of_reading(peer))
        finally:
            self._commands += peer.waiting.values()
            peer.waiting.clear()

    def _refuse(self, peer: JobPeer, error: BatonError) -> None:
        """Ends the pulls that wait for a link: nothing of them was posted."""
        waiting, peer.waiting = peer.waiting, {}
        for pull_id in waiting:
            self._tell_end(pull_id, None, error)

    def _patience_s(self) -> float | None:
        """Until a link counts as failed; None: nothing but news is waited for."""
        links = [peer.link for peer in self._unsettled if peer.link and not peer.link.is_closing]
        first = min((link.deadline for link in links), default=None)
        return None if first is None else max(first - time.monotonic(), 0.0)

    def _break_hung(self) -> None:
        """Ends the READs of pulls that were given up and that hang, with all else of their link."""
        hung = [
            peer
            for job, peer in self._jobs.values()
            if isinstance(job, ReadJob) and job.stopping and job.still_s >= _TEAR_DOWN_S
        ]
        for peer in hung:
            reading = [job for job in self._reading(peer) if job.active]
            if all(job.still_s >= _TEAR_DOWN_S for job in reading):
                self._break_link(peer, TransferFailed("READs hang"))

    def _reading(self, peer: JobPeer) -> list[ReadJob]:
        jobs = list(self._jobs.values())
        return [job for job, whose in jobs if whose is peer and isinstance(job, ReadJob)]

    def _break_link(self, peer: JobPeer, error: TransferFailed) -> None:
        """Whatever is read over it has failed, and ends when it has."""
        if peer.link is None or peer.link.is_closing:
            return
        logger.warning("prefill server %s: %s", peer.metadata.engine_id, error.message)
        peer.link.close()
        peer.suspect = True
        self._unsettled.add(peer)
        for job in self._reading(peer):
            self._fail(job, error)

    # -- pulls

    def _begin(self, pull: Pull) -> None:
        peer = self._peers.get((pull.engine_id, pull.incarnation))
        if peer is None:
            self._tell_end(pull.pull_id, None, _not_connected(pull.engine_id))
            return
        try:
            if not self._is_mapped(peer) and not self._is_linked(peer, pull):
                return
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
        polled = self._reads.poll() | self._advance() | self._settle() | self._end_ended()
        self._break_hung()
        for job in starved(self._staging, self._jobs):
            self._fail(job, PullWithheld("READs that hang have the staging memory"))
        posted = self._reads.post_one(self._jobs.values())
        if posted is not None and posted.pull_id in self._jobs:
            self._jobs.move_to_end(posted.pull_id)  # pulls take turns
        ended = self._end_ended()  # of those that had nothing left to post
        self._reads.release_ended()
        jobs = (job for job, _ in self._jobs.values() if isinstance(job, ReadJob))
        return polled or posted is not None or ended or any(job.prepare() for job in jobs)

    def _end_ended(self) -> bool:
        ended = [job for job, _ in self._jobs.values() if job.ended]
        for job in ended:
            self._end(job)
        return bool(ended)

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
            self._jobs[job.pull_id][1].stale = True
            self._fail(job, TransferFailed(f"gathering mapped KV failed: {error!r}"))
            return True

    def _fail(self, job: Job, error: BatonError) -> None:
        job.stop(error)
        if job.active and not job.failure_told:
            job.failure_told = True
            report = RankFailing(job.pull_id, self._endpoint.rank, error_info(error))
            self._link.report(report)

    def _end(self, job: Job) -> None:
        _, peer = self._jobs.pop(job.pull_id)
        peer.users -= 1
        seconds = time.perf_counter() - job.began
        is_read = job.complete
        if is_read:  # first of all: the fence waits for it
            self._tell_end(job.pull_id, job, None)
        try:
            job.leave()
            self._clean(peer)
        finally:
            if not is_read:
                self._tell_end(job.pull_id, job, job.error)
        if is_read and not peer.speed_told and job.plan.bytes_read >= _SAMPLE_BYTES:
            peer.speed_told = True
            way = self._way_of_reading(peer) if isinstance(job, ReadJob) else None
            log_first_pull(
                peer.metadata.engine_id, job.plan.path, way, job.plan.bytes_read / seconds
            )

    def _way_of_reading(self, peer: JobPeer) -> UcxRead | None:
        on_gpu = peer.metadata.ranks[0].device_kind == "cuda"
        return self._agent.way_of_reading((self._kind, "VRAM" if on_gpu else "DRAM"))

    def _clean(self, peer: JobPeer) -> None:
        if peer.users or not (peer.stale or peer.dropped):
            return
        peer.stale = False
        if self._mapped is not None:
            self._mapped.forget(peer.key)
        if peer.dropped:
            if peer.link is not None:
                peer.link.close()
            self._unsettled.discard(peer)
            self._peers.pop(peer.key, None)

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


def _not_connected(engine_id: str) -> TransferFailed:
    return TransferFailed(f"prefill server {engine_id} is not connected any more")

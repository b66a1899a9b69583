"""A rank's transfer thread: owns the agent, posts READs in bounded pieces, polls, reports.

It blocks while there is nothing to do, and looks at commands between any two posts, so that a pull
stops within one post. A READ that does not end keeps its pull here until it does (I7).
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.prefault import Prefault
from kvcache.transfer import reformat
from kvcache.transfer.agent import MemoryKind, ReadHandle, ReadState, TransferAgent
from kvcache.transfer.copy_thread import use_one_core
from kvcache.transfer.link_log import log_first_pull, log_measured
from kvcache.transfer.mapped import MappedJob, MappedPath
from kvcache.transfer.pace import Speed, allow_short_naps
from kvcache.transfer.plan import (
    DEFAULT_COSTS,
    CostModel,
    Endpoint,
    PlanError,
    check_transfer,
    plan_transfer,
)
from kvcache.transfer.posts import GPU_LIMITS, Post, PostLimits
from kvcache.transfer.probe_job import ProbeJob
from kvcache.transfer.pull import (
    AddPeer,
    Command,
    DropPeer,
    PeerKey,
    Pull,
    RankEnded,
    RankEnding,
    RankFailing,
    StopPull,
    error_info,
)
from kvcache.transfer.pull_job import PullJob, Step
from kvcache.transfer.rank_links import InsideLink, OutsideLink, WorkerLink
from kvcache.transfer.staging import Staging
from kvcache.transfer.topology import head_groups
from protocol.errors import BatonError, InternalError, PeerIncompatible, TransferFailed
from protocol.handshake import EngineMetadata

logger = logging.getLogger(__name__)

_POLL_S = {"DRAM": (0.0002, 0.001), "VRAM": (0.00002, 0.0001)}  # shortest and longest nap
_MIN_PROBE_BYTES = 4 << 20  # of staging memory: less tells nothing
_FENCE_S = 0.0005  # so long after a pull the thread looks for the fence's answer itself
_ALERT_NAP_S = 0.000003
_POLL_STUCK_S = 0.02  # when all that is left are READs of pulls that were given up


Job = PullJob | MappedJob


@dataclass
class _Peer:
    metadata: EngineMetadata
    endpoints: tuple[Endpoint, ...]
    costs: CostModel | None = None  # as measured
    probe: ProbeJob | None = None  # measuring them
    names: dict[int, str] = field(default_factory=dict)  # of its agents, by rank, once read from
    users: int = 0  # jobs
    speed: Speed = field(default_factory=Speed)
    stale: bool = False  # connect anew when nobody uses it
    dropped: bool = False  # forget when nobody uses it


@dataclass
class _Read:
    handle: ReadHandle
    job: PullJob
    step: Step
    started: float


class PullWorker:
    """One rank's end of every pull.

    Args:
        tp_size, total_kv_heads: geometry of this engine.
        agent: not yet used for reads; the worker registers the pool and owns the agent from
            `start` on, its `close` included.
        connect_address: the coordinator's `worker_address`.
        staging_bytes: bound of the memory for staged transfers; None plans direct ones only.
        convert: accept a peer with another KV dtype.
        costs: of every link; None measures each peer at first contact.
        mapped: takes the pulls from peers that it can map; the agent moves the others.
        inside: the link to the coordinator, where that is in this process.
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
        staging_bytes: int | None = None,
        convert: bool = False,
        costs: CostModel | None = None,
        limits: PostLimits | None = None,
        mapped: MappedPath | None = None,
        inside: InsideLink | None = None,
    ) -> None:
        self._endpoint = Endpoint(pool.layout, rank, tp_size, pool.scales)
        self._total_kv_heads = total_kv_heads
        self._agent = agent
        self._pool = pool
        self._kind: MemoryKind = "VRAM" if pool.device.type == "cuda" else "DRAM"
        self._staging = Staging(staging_bytes, pool) if staging_bytes else None
        self._convert = convert
        self._costs = costs
        if costs is not None:
            logger.info("every link, as configured: %s", costs)
        self._limits = limits or (GPU_LIMITS if self._kind == "VRAM" else PostLimits())
        self._mapped = mapped
        self._reformat_bytes_per_s = DEFAULT_COSTS["cuda"].reformat_bytes_per_s
        self._link: WorkerLink = inside or OutsideLink(connect_address)
        self._peers: dict[PeerKey, _Peer] = {}
        self._jobs: OrderedDict[str, tuple[Job, _Peer]] = OrderedDict()
        self._reads: list[_Read] = []
        self._poll_min_s, self._poll_max_s = _POLL_S[self._kind]
        self._idle_s = self._poll_min_s
        self._ended_at = float("-inf")  # when the last pull did
        self.counters: Counter[str] = Counter(posts=0, internal_errors=0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pull-{rank}", daemon=True)
        on_cpu = self._kind == "DRAM"
        self._prefault = Prefault(pool.base_address, pool.layout) if on_cpu else None
        self._register()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes the agent; READs still active stay the transport's."""
        self._stopping.set()
        self._link.waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._link.close()
        if self._staging is not None:
            self._staging.close()
        self._agent.close()

    def _register(self) -> None:
        pool, device = self._pool, self._pool.device_id
        self._agent.register(pool.base_address, pool.nbytes, device_id=device, kind=self._kind)
        staging = self._staging
        if staging is not None:
            self._agent.register(
                staging.base_address, staging.nbytes, device_id=device, kind=self._kind
            )

    def _run(self) -> None:
        allow_short_naps()
        use_one_core()
        self._agent.bind_thread()
        if self._measures and self._kind == "DRAM":
            self._reformat_bytes_per_s = reformat.measure()
        if self._mapped is not None:
            self._mapped.bind_thread()
        self._link.open(self._endpoint.rank, self._stopping)
        while not self._stopping.is_set():
            try:
                self._wait(self._progress())
                for command in self._link.receive():
                    self._obey(command)
            except Exception as error:  # our bug; no pull may hang for it
                logger.exception("pull worker")
                self.counters["internal_errors"] += 1
                for job, _ in self._jobs.values():
                    job.stop(InternalError(f"the transfer thread failed: {error!r}"))
                time.sleep(_POLL_STUCK_S)
        if self._mapped is not None and not self._jobs:
            self._mapped.close()

    def _wait(self, progressed: bool) -> None:
        """Until there is, or may be, something to do."""
        if progressed:
            self._idle_s = self._poll_min_s
        elif self._jobs:
            time.sleep(self._nap_s())
        elif self._is_alert():
            time.sleep(_ALERT_NAP_S)
        elif self._prefault is not None and not self._prefault.done:
            self._link.wait(self._prefault.pause_s)
            self._prefault.step()
        else:
            self._link.wait(None)

    def _is_alert(self) -> bool:
        """Whether a command or a fence's answer is so near that to sleep would take longer."""
        now = time.perf_counter()
        if self._ended_at + _FENCE_S > now and self._link.awaits_fence():
            return True
        return self._kind == "VRAM" and now < self._link.expected_until

    def _nap_s(self) -> float:
        now = time.perf_counter()
        naps = [job.pace.nap_s(now) for job, _ in self._jobs.values() if not job.stopping]
        known = [nap for nap in naps if nap is not None]
        if known and self._kind == "VRAM":
            return min(known)
        nap_s = self._idle_s
        self._idle_s = min(nap_s * 1.5, self._poll_max_s if naps else _POLL_STUCK_S)
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
        tp = metadata.tp_size
        try:
            layouts = [KVLayout.from_record(rank.layout) for rank in metadata.ranks]
        except ValueError as error:  # its pulls fail: not connected
            logger.error("prefill server %s: %s", metadata.engine_id, error)
            return
        scales = metadata.compat.kv_scales
        endpoints = tuple(Endpoint(layout, rank, tp, scales) for rank, layout in enumerate(layouts))
        peer = self._peers[key] = _Peer(metadata, endpoints)
        owners = self._owners(tp)
        if self._mapped is None or not self._mapped.meet(metadata, owners):
            self._probe(peer, min(owners))

    @property
    def _measures(self) -> bool:
        room = self._staging.nbytes if self._staging else 0
        return self._costs is None and room >= _MIN_PROBE_BYTES

    def _probe(self, peer: _Peer, rank: int) -> None:
        """Begins to measure the link to a peer, unless its costs are configured."""
        staging = self._staging
        if staging is None or not self._measures:
            return
        name = f"probe {peer.metadata.engine_id} {peer.metadata.incarnation}"
        try:
            job = ProbeJob(name, self._endpoint, peer.endpoints[rank], staging, self._limits)
        except Exception:
            logger.exception("%s; the usual costs are assumed", name)
            return
        peer.users += 1
        peer.probe = job
        self._jobs[name] = (job, peer)

    def _stop_waiting(self, pull_id: str) -> None:
        for peer in self._peers.values():
            if peer.probe is not None and pull_id in peer.probe.waiting:
                del peer.probe.waiting[pull_id]
                self._tell_end(pull_id, None, None)

    def _probed(self, job: ProbeJob, peer: _Peer) -> None:
        peer.probe = None
        self._learn(job, peer)
        for pull in job.waiting.values():
            self._begin(pull)

    def _learn(self, job: ProbeJob, peer: _Peer) -> None:
        costs = peer.costs = job.costs(self._reformat_bytes_per_s)
        if costs is None:
            logger.info("%s came to nothing; the usual costs are assumed", job.pull_id)
            return
        between_gpus = self._kind == "VRAM" and peer.metadata.ranks[0].device_kind == "cuda"
        log_measured(peer.metadata.engine_id, costs, between_gpus=between_gpus)

    def _owners(self, remote_tp: int) -> set[int]:
        """Ranks of a peer that hold heads of ours."""
        ours = self._endpoint.heads(self._total_kv_heads)
        groups = head_groups(ours, remote_tp, self._total_kv_heads)
        return {owner for group in groups for owner in group.owners}

    def _begin(self, pull: Pull) -> None:
        try:
            peer = self._peers.get((pull.engine_id, pull.incarnation))
            if peer is None:
                raise TransferFailed(f"prefill server {pull.engine_id} is not connected any more")
            if peer.probe is not None and peer.probe.delays(pull):
                return
            job = self._plan(pull, peer)
        except BatonError as error:
            self._tell_end(pull.pull_id, None, error)
        except Exception as error:
            logger.exception("planning pull %s", pull.pull_id)
            self._tell_end(pull.pull_id, None, InternalError(f"planning failed: {error!r}"))
        else:
            job.pace.expected_s = peer.speed.expected_s(job.plan.bytes_read)
            peer.users += 1
            self._jobs[pull.pull_id] = (job, peer)
            if self._prefault is not None:
                self._prefault.reach(max(pull.local_block_ids, default=-1))

    def _plan(self, pull: Pull, peer: _Peer) -> Job:
        try:
            job: Job = self._map(pull, peer) or self._plan_reads(pull, peer)
        except PlanError as error:
            raise PeerIncompatible(str(error)) from error
        logger.debug("pull %s: %s", pull.pull_id, job.plan.why)
        return job

    def _map(self, pull: Pull, peer: _Peer) -> MappedJob | None:
        if self._mapped is None:
            return None
        transfer = check_transfer(
            self._endpoint,
            peer.endpoints,
            self._total_kv_heads,
            (pull.token_start, pull.token_stop),
            pull.local_block_ids,
            pull.remote_block_ids,
            lease_hash=pull.lease_hash,
            convert=self._convert,
        )
        return self._mapped.job(pull.pull_id, peer.metadata, transfer)

    def _plan_reads(self, pull: Pull, peer: _Peer) -> PullJob:
        both_cuda = self._kind == "VRAM" and peer.metadata.ranks[0].device_kind == "cuda"
        plan = plan_transfer(
            self._endpoint,
            peer.endpoints,
            self._total_kv_heads,
            pull.token_start,
            pull.token_stop,
            pull.local_block_ids,
            pull.remote_block_ids,
            costs=self._costs or peer.costs or DEFAULT_COSTS["cuda" if both_cuda else "cpu"],
            lease_hash=pull.lease_hash,
            staging_bytes=self._staging.nbytes if self._staging else None,
            convert=self._convert,
            allow_mixed=True,
        )
        return PullJob(pull.pull_id, plan, self._pool.base_address, self._staging, self._limits)

    def _progress(self) -> bool:
        """Polls, posts at most one piece, ends what has ended; whether anything happened."""
        polled = self._poll_reads() | self._advance()
        posted = self._post_one()
        ended = [job for job, _ in self._jobs.values() if job.ended]
        for job in ended:
            self._end(job)
        self._announce_ends()
        return polled or posted or bool(ended)

    def _announce_ends(self) -> None:
        now = time.perf_counter()
        for job, _ in self._jobs.values():
            if job.all_begun and not job.end_announced and job.pace.is_ending(now):
                job.end_announced = True
                self._link.report(RankEnding(job.pull_id, self._endpoint.rank))

    def _advance(self) -> bool:
        """Lets every mapped pull go on."""
        progressed = False
        for job, _ in list(self._jobs.values()):
            if isinstance(job, MappedJob):
                try:
                    progressed |= job.advance()
                except Exception as error:
                    logger.exception("pull %s", job.pull_id)
                    self._fail(job, TransferFailed(f"gathering mapped KV failed: {error!r}"))
        return progressed

    def _poll_reads(self) -> bool:
        before = len(self._reads)
        for read in list(self._reads):
            if self._agent.poll(read.handle) is not ReadState.ACTIVE:
                self._reads.remove(read)
                self._read_ended(read)
        return len(self._reads) < before

    def _read_ended(self, read: _Read) -> None:
        if read.handle.state is ReadState.ERROR:
            self._fail(read.job, TransferFailed(f"a READ from {read.handle.peer} failed"))
        self._agent.release(read.handle)
        read.step.seconds += time.perf_counter() - read.started
        read.job.read_ended(read.step)

    def _post_one(self) -> bool:
        if len(self._reads) >= self._limits.max_active:
            return False
        for pull_id, (job, peer) in self._jobs.items():
            if isinstance(job, MappedJob):
                continue
            found = job.next_post()
            if found is None:
                continue
            self._post(job, peer, *found)
            self._jobs.move_to_end(pull_id)  # pulls take turns
            return True
        return False

    def _post(self, job: PullJob, peer: _Peer, step: Step, post: Post) -> None:
        try:
            started = time.perf_counter()
            handle = self._read(peer, job, step, post)
        except BatonError as error:
            self._fail(job, error)
            return
        job.read_posted(step, handle)
        self.counters["posts"] += 1
        read = _Read(handle, job, step, started)
        if handle.ended:
            self._read_ended(read)
        else:
            self._reads.append(read)

    def _read(self, peer: _Peer, job: PullJob, step: Step, post: Post) -> ReadHandle:
        remote = peer.metadata.ranks[post.remote_rank]
        name = peer.names.get(remote.rank)
        if name is None:
            name = peer.names[remote.rank] = self._agent.add_peer(remote.agent_metadata)
        return job.read_with(self._agent, step)(
            name,
            post.local_offsets + step.base_address,
            post.remote_offsets + remote.base_address,
            post.lengths,
            local_device=self._pool.device_id,
            remote_device=remote.device_id,
            kinds=(self._kind, "VRAM" if remote.device_kind == "cuda" else "DRAM"),
        )

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
        job.leave()
        peer.users -= 1
        self._clean(peer)
        if isinstance(job, ProbeJob):
            self._probed(job, peer)
        else:
            if job.complete:
                self._learn_speed(job, peer)
            self._tell_end(job.pull_id, job, job.error)

    def _learn_speed(self, job: Job, peer: _Peer) -> None:
        was_known = peer.speed.bytes_per_s > 0
        peer.speed.learn(job.plan.bytes_read, time.perf_counter() - job.pace.began)
        if not was_known and peer.speed.bytes_per_s > 0:
            log_first_pull(peer.metadata.engine_id, job.plan.path, peer.speed.bytes_per_s)

    def _clean(self, peer: _Peer) -> None:
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
        self._ended_at = time.perf_counter()

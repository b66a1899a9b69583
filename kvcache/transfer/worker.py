"""A rank's transfer thread, which drives jobs piece by piece and reports their ends.

A job is one rank's part of a pull. The thread blocks while it is idle. It reads
commands between any two posts, so that a cancelled pull stops within one post. A job
is kept until all its READs have ended (invariant I7 in docs/design.md).
"""

import faulthandler
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from socket import socket
from typing import Any

import torch

from kvcache.transfer.job import (
    MappedJob,
    ReadJob,
    TransferJob,
    log_speed,
    transport_of,
)
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.peer import Peer
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import (
    AddPeer,
    Command,
    DigestOrder,
    DropPeer,
    PeerKey,
    PeerPrepared,
    Pull,
    RankEnded,
    RankFailing,
    StopPull,
)
from kvcache.transfer.pulls.rank_links import WorkerLink
from kvcache.verify.digest import Digester
from kvcache.verify.scope import DigestPart, Scope
from protocol.errors import BatonError, InternalError, PullCircuitOpen, TransferFailed
from protocol.ipc.wire import allow_short_naps
from protocol.messages import ErrorInfo
from protocol.metrics import stat_key
from protocol.process.logging import get_logger
from protocol.process.vital_threads import VitalThread

logger = get_logger(__name__)

# The transfer thread pauses after a round without progress while jobs are active: for
# _NAP_S if the pool is in host memory, for _GPU_NAP_S if the pool is on a GPU.
_NAP_S = 0.0005
_GPU_NAP_S = 0.00002
# The pause on a GPU while the engine computes a batch. It is longer than _GPU_NAP_S,
# because the engine's thread needs Python's global interpreter lock.
_GPU_BUSY_NAP_S = 0.00005
# The pause after a failure, and while each job is being stopped or waits for its link.
_STUCK_NAP_S = 0.02
# A link is closed if all READs over the link have hung for this long, and a stopped job
# waits for one of these READs to end.
_TEAR_DOWN_S = 10.0
_MIN_LOGGED_BYTES = 1 << 20  # the speed of a smaller pull is not logged
# This many failures in a row end the process: a round without a failure resets the
# count. A pause of _STUCK_NAP_S follows each failure, so 100 failures take about 2 s.
_MAX_FAILURES = 100
# The watchdog checks at this interval whether the transfer thread makes progress. An
# idle transfer thread also wakes at this interval. After _NUM_CHECKS checks without
# progress, the process ends. The slowest driver call, which compiles a kernel, takes
# less time than that even on a busy machine.
_CHECK_S = 10.0
_NUM_CHECKS = 30


class TransferWorker:
    """Carries out one rank's part of every pull, in a thread.

    Args:
        link: the source of commands and the target of reports: on rank 0 the
            coordinator itself, on other ranks a socket to the coordinator. `close`
            also closes the link.

    Attributes:
        digester: computes this rank's parts of digests.
        counters: the numbers of "posts" (of READs) and of "internal_errors".
    """

    def __init__(self, rank: LocalRank, link: PullCoordinator | socket) -> None:
        self._rank = rank
        self._number = rank.number
        self._link = WorkerLink(link) if isinstance(link, socket) else link
        rank.wake = self._link.wake
        self.digester = Digester(rank.endpoint, rank.total_kv_heads, rank.pool)
        self._commands: list[Command] = []  # received, but not carried out yet
        self._peers: dict[PeerKey, Peer] = {}
        # The first job posts next; a job that has posted moves to the end.
        self._jobs: OrderedDict[str, TransferJob] = OrderedDict()
        # The pulls that have no job until the peer's memory is mapped, by pull id.
        self._unmapped_pulls: dict[str, Pull] = {}
        self.counters: Counter[str] = Counter(posts=0, internal_errors=0)
        self._transport_counts: dict[str, float] = {}  # by metric series
        self._num_rounds = 0
        self._failures: list[Exception] = []  # since the last round without a failure
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, f"pull-{rank.number}")
        self._watchdog = VitalThread(self._watch_rounds, f"pull-{rank.number}-watch")

    def start(self) -> None:
        self._thread.start()

    def stats(self) -> dict[str, float]:
        """The counters of this worker, by metric series. Any thread may call this."""
        return self._transport_counts.copy()

    def close(self) -> None:
        """Ends the threads and every READ."""
        self._stopping.set()
        self._link.wake()
        for thread in (self._thread, self._watchdog):
            if thread.is_alive():
                thread.join()
        self._link.close()
        self._rank.close()

    def _run(self) -> None:
        allow_short_naps()
        use_one_torch_thread()
        self._rank.bind_thread()
        self._watchdog.start()
        wait_s = 0.0
        while not self._stopping.is_set():
            self._num_rounds += 1
            num_failures = len(self._failures)
            try:
                self._commands += self._link.receive(wait_s)
                wait_s = 0.0 if self._round() else self._max_wait_s()
            except Exception as error:
                self._fail_jobs(error, *self._jobs.values())
            if len(self._failures) == num_failures:
                self._failures.clear()
            # After _MAX_FAILURES, no job is expected to end any more.
            elif len(self._failures) >= _MAX_FAILURES:
                raise self._failures[-1]
        if not self._jobs:
            for peer in self._peers.values():
                peer.unmap()

    def _watch_rounds(self) -> None:
        """Ends the process if the transfer thread is stuck in a driver or transport.

        Otherwise the engine would look healthy, but no pull would end. Checks without
        progress are counted, because the clock also advances while a process is
        suspended.
        """
        last_num_rounds = -1
        num_same = 0
        while not self._stopping.wait(_CHECK_S):
            num_same = num_same + 1 if self._num_rounds == last_num_rounds else 0
            last_num_rounds = self._num_rounds
            if num_same == _NUM_CHECKS:
                _print_stacks()
                seconds = _CHECK_S * _NUM_CHECKS
                raise RuntimeError(
                    f"{self._thread.name} has made no progress for {seconds:g} s"
                )

    def _round(self) -> bool:
        """Carries out commands, posts at most one piece, polls and ends jobs.

        Returns:
            True if anything was done, or if a job, digest or link has changed.
        """
        while self._commands:
            self._carry_out(self._commands.pop(0))
        has_changed = self._check_preparations()
        has_changed |= self._post_one()
        has_changed |= self.digester.drive()
        for job in list(self._jobs.values()):
            has_changed |= self._drive(job, job.poll)
            self._report_failing(job)
            if job.has_ended:
                self._end(job)
                has_changed = True
        for peer in self._peers.values():
            link = peer.link
            error = peer.clean_up_link()
            # After a link was closed, jobs that wait for a link may connect again.
            has_changed |= peer.link is not link
            if error is not None:
                self._stop_waiting_jobs(peer, error)
                has_changed = True
        self._close_hanging_links()
        self._bypass_hanging_staging()
        return has_changed

    def _post_one(self) -> bool:
        """Calls `post` of each job until one job posts. Returns False if none posts."""
        for pull_id, job in list(self._jobs.items()):
            if not job.is_stopping and self._drive(job, job.post):
                self.counters["posts"] += isinstance(job, ReadJob)
                self._jobs.move_to_end(pull_id)
                return True
        return False

    def _drive(self, job: TransferJob, call: Callable[[], bool | None]) -> bool:
        """Calls a method of a job, and stops the job if the method raises.

        Returns:
            The method's result; True if the method has raised.
        """
        try:
            return bool(call())
        except BatonError as error:
            job.stop(error)
        except Exception as error:
            self._fail_jobs(error, job)
        return True

    def _fail_jobs(self, error: Exception, *jobs: TransferJob) -> None:
        """Fails jobs after an unexpected exception, so that no pull hangs.

        Then pauses, so that repeated failures do not fill the log quickly.
        """
        logger.exception("the transfer thread failed")
        self.counters["internal_errors"] += 1
        self._failures.append(error)
        for job in jobs:
            job.stop(job.take_exception(error))
        time.sleep(_STUCK_NAP_S)

    def _report_failing(self, job: TransferJob) -> None:
        """Reports, once per job, a failure while READs of the job are still active."""
        if job.error is None or not job.num_active or job.is_failure_reported:
            return
        job.is_failure_reported = True
        info = ErrorInfo.from_error(job.error)
        self._link.report(RankFailing(job.pull_id, self._number, info))

    def _max_wait_s(self) -> float:
        """Seconds that the thread may wait for commands before the next round."""
        jobs = self._jobs.values()
        is_digesting = self.digester.is_busy
        if not is_digesting and all(job.waits_for_link for job in jobs):
            links = [peer.link for peer in self._peers.values() if peer.link]
            deadlines = [
                link.deadline
                for link in links
                if not (link.is_ready or link.is_closing)
            ]
            now_s = time.monotonic()
            wait_s = min([_CHECK_S, *(deadline - now_s for deadline in deadlines)])
            return max(0.0, wait_s)
        if not is_digesting and all(
            job.is_stopping or job.waits_for_link for job in jobs
        ):
            return _STUCK_NAP_S
        is_busy = self._rank.is_busy
        if is_busy is None:
            return _NAP_S
        return _GPU_BUSY_NAP_S if is_busy() else _GPU_NAP_S

    def _carry_out(self, command: Command) -> None:
        match command:
            case Pull(pull_id, key):
                peer = self._peers.get(key)
                if peer is None:
                    self._report_end(pull_id, _not_connected(key[0]))
                    return
                peer.begin_mapping()
                if peer.is_mapping:
                    self._unmapped_pulls[pull_id] = command
                else:
                    self._begin_job(command, peer)
            case StopPull(pull_id):
                if pull_id in self._jobs:
                    self._jobs[pull_id].stop()
                else:  # there is no job, so no READ of the pull is active
                    self._unmapped_pulls.pop(pull_id, None)
                    self.digester.stop(pull_id)
                    self._report_end(pull_id)
            case DigestOrder(pull_id, scope, blocks):
                self._report_end_with_digest(pull_id, scope, blocks)
            case AddPeer(metadata):
                key = (metadata.engine_id, metadata.incarnation)
                if key in self._peers:
                    self._peers[key].is_dropped = False
                    self._peers[key].is_reported = False
                    return
                peer = Peer(self._rank, metadata)
                self._peers[key] = peer
                peer.prepare()
            case DropPeer(key):
                peer = self._peers.get(key)
                if peer is not None:
                    peer.is_dropped = True
                    self._stop_waiting_jobs(peer, _not_connected(key[0]))
                    self._clean_up(peer)

    def _begin_job(self, pull: Pull, peer: Peer) -> None:
        kind = MappedJob if peer.uses_mapping else ReadJob
        self._jobs[pull.pull_id] = kind(pull, peer)

    def _check_preparations(self) -> bool:
        """Reports newly prepared peers, and begins the pulls that have waited until
        their peer's memory was mapped. Returns True if it did any of that."""
        has_changed = False
        for peer in self._peers.values():
            if peer.is_reported:
                continue
            peer.connect_if_unmapped()
            if peer.is_prepared:
                peer.is_reported = True
                has_changed = True
                self._link.report(PeerPrepared(peer.key, self._number))
        for pull_id, pull in list(self._unmapped_pulls.items()):
            peer = self._peers[pull.peer]
            if not peer.is_mapping:
                del self._unmapped_pulls[pull_id]
                self._begin_job(pull, peer)
                has_changed = True
        return has_changed

    def _end(self, job: TransferJob) -> None:
        del self._jobs[job.pull_id]
        is_complete = not job.is_stopping
        error = job.error
        if is_complete and job.bytes_read:
            key = stat_key("baton_kv_transports", transport=transport_of(job))
            self._transport_counts[key] = self._transport_counts.get(key, 0.0) + 1
        if is_complete:  # before the clean-up, because the pull waits for the report
            self._report_complete(job)
        try:
            self._drive(job, job.release_staging)
            self._clean_up(job.peer)
        finally:
            if not is_complete:
                self._report_end(job.pull_id, error)
        seconds = time.perf_counter() - job.began_s
        is_logged = job.peer.is_speed_logged or job.bytes_read < _MIN_LOGGED_BYTES
        if is_complete and not is_logged:
            job.peer.is_speed_logged = True
            log_speed(job, seconds)

    def _stop_waiting_jobs(self, peer: Peer, error: BatonError) -> None:
        """Fails the pulls that wait for the peer's memory to be mapped, or for its
        link. They have posted nothing."""
        for pull_id, pull in list(self._unmapped_pulls.items()):
            if pull.peer == peer.key:
                del self._unmapped_pulls[pull_id]
                self._report_end(pull_id, error)
        for job in self._jobs.values():
            if job.peer is peer and job.waits_for_link:
                job.stop(error)

    def _clean_up(self, peer: Peer) -> None:
        """Unmaps the memory of a stale or dropped peer, and removes a dropped peer.

        Does nothing while a job uses the peer.
        """
        if any(job.peer is peer for job in self._jobs.values()):
            return
        if peer.is_stale or peer.is_dropped:
            peer.unmap()
        if peer.is_dropped:
            self._peers.pop(peer.key, None)
            if peer.link is not None:
                peer.link.close()

    def _close_hanging_links(self) -> None:
        """Closes links on which all READs hang, so that stopped jobs can end.

        Closing a link ends its READs. A link is closed only if a stopped job waits for
        the end of a READ.
        """
        jobs = self._jobs.values()
        hanging_peers = {
            job.peer for job in jobs if job.is_stopping and job.idle_s >= _TEAR_DOWN_S
        }
        for peer in hanging_peers:
            if peer.link is None:
                continue
            idle_s = min(
                job.idle_s for job in jobs if job.peer is peer and job.num_active
            )
            if idle_s >= _TEAR_DOWN_S:
                error = TransferFailed(
                    f"READs have hung for {_TEAR_DOWN_S:g} s; closing the connection"
                )
                peer.link.close(error)

    def _bypass_hanging_staging(self) -> None:
        """Makes jobs read straight into the pool if the owner of staging memory hangs.

        The owner is the job that uses the staging memory, for which other jobs wait.
        The owner also counts as hanging if it has no active READs and READs of other
        jobs from the same peer hang. A job that has to convert KV cannot do without
        staging memory. Such a job fails if the owner is stopping, because the owner
        then does not free the memory.
        """
        staging = self._rank.staging
        owner = self._jobs.get(staging.owner or "") if staging else None
        if owner is None:
            return
        jobs = self._jobs.values()
        is_behind_hanging_job = not owner.num_active and any(
            job.hangs for job in jobs if job.peer is owner.peer
        )
        if not (owner.hangs or is_behind_hanging_job):
            return
        for job in jobs:
            can_continue = not isinstance(job, ReadJob) or job.bypass_staging()
            # An owner that is not stopping may still free the memory.
            if not can_continue and owner.is_stopping:
                job.stop(
                    PullCircuitOpen(
                        "the staging memory is in use by a pull with READs that hang"
                    )
                )

    def _report_complete(self, job: TransferJob) -> None:
        """Reports a complete job, or begins the digest that the report must contain."""
        fields: dict[str, Any] = {
            "nbytes": job.nbytes,
            "num_descriptors": job.num_descriptors,
            "path": job.path if job.nbytes else "none",
        }
        scope = job.pull.scope
        if scope is None:
            self._report_end(job.pull_id, **fields)
        else:
            blocks = job.pull.local_block_ids
            self._report_end_with_digest(job.pull_id, scope, blocks, **fields)

    def _report_end_with_digest(
        self, pull_id: str, scope: Scope, blocks: Sequence[int], **fields: Any
    ) -> None:
        """Begins the digest of a Pull or of a DigestOrder.

        When the digest is computed, the end of the Pull or DigestOrder is reported.
        """

        def report(part: DigestPart | None) -> None:
            if part is None:
                error = InternalError("a digest of KV could not be computed")
                self._report_end(pull_id, error)
            else:
                self._report_end(pull_id, part=part, **fields)

        self.digester.begin(pull_id, scope, blocks, report)

    def _report_end(
        self, pull_id: str, error: BatonError | None = None, **fields: Any
    ) -> None:
        """Reports that no READ of a pull is active any more.

        Args:
            error: why the pull has failed on this rank.
            fields: the fields of RankEnded that only a complete pull has. If there are
                none, the report is about an incomplete pull.
        """
        report = RankEnded(
            pull_id=pull_id,
            rank=self._number,
            complete=bool(fields),
            error=ErrorInfo.from_error(error) if error else None,
            **fields,
        )
        self._link.report(report)


def use_one_torch_thread() -> None:
    """Keeps torch from starting OpenMP threads for the calling thread.

    If there are more OpenMP threads than cores, libgomp's threads sleep while they wait
    for work. The engine's operations would then wait for threads to wake up.
    """
    torch.set_num_threads(1)
    # This call fixes the number for the calling thread, so that later calls in other
    # threads do not change the number.
    torch.get_num_threads()


def _print_stacks() -> None:
    """Prints the stack of every thread to stderr.

    faulthandler writes straight to a file descriptor, which may block if stderr is a
    pipe that nothing reads. So faulthandler writes to a temporary file, which is then
    printed.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        print(file.read(), file=sys.stderr, end="", flush=True)


def _not_connected(engine_id: str) -> TransferFailed:
    return TransferFailed(f"prefill server {engine_id} is not connected any more")

"""A rank's transfer thread: drives every job piece by piece and reports its end.

The thread blocks while it is idle. It reads commands between any two posts, so that a pull stops
within one post. A READ that does not end keeps its job here until it does (I7).
"""

import faulthandler
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from socket import socket
from typing import Any

import torch

from kvcache.transfer.job import MappedJob, ReadJob, TransferJob
from kvcache.transfer.peer import LocalRank, Peer
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import (
    AddPeer,
    Command,
    DigestOrder,
    DropPeer,
    PeerKey,
    Pull,
    RankEnded,
    RankFailing,
    StopPull,
)
from kvcache.transfer.pulls.rank_links import WorkerLink
from kvcache.verify.digest import Digester
from kvcache.verify.scope import DigestPart, Scope
from protocol.errors import BatonError, InternalError, PullWithheld, TransferFailed
from protocol.ipc.wire import allow_short_naps
from protocol.messages import ErrorInfo
from protocol.process.lifecycle import VitalThread
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_NAP_S = 0.0005
# On a GPU. Longer beside a batch: meanwhile the engine has the interpreter's lock.
_GPU_NAP_S, _GPU_BUSY_NAP_S = 0.00002, 0.00005
_STUCK_NAP_S = (
    0.02  # while only READs of stopped pulls are left, and after a failed round
)
_TEAR_DOWN_S = (
    10.0  # a link is closed once its READs of stopped pulls have hung for this long
)
_SAMPLE_BYTES = 1 << 20  # the speed of a smaller pull is not logged
_MAX_FAILURES = 100  # failed rounds in a row, about two seconds of them
# Together longer than a driver's slowest call (compiling a kernel) on a busy machine.
_LOOK_S, _NUM_LOOKS = 10.0, 30


class TransferWorker:
    """One rank's end of every pull.

    Args:
        link: brings commands and takes reports. On rank 0 the coordinator itself, which is closed
            with the worker; on other ranks a socket to it.
    """

    def __init__(self, rank: LocalRank, link: PullCoordinator | socket) -> None:
        self._rank, self._number = rank, rank.number
        self._link = WorkerLink(link) if isinstance(link, socket) else link
        rank.wake = self._link.wake
        self.digester = Digester(rank.endpoint, rank.total_kv_heads, rank.pool)
        self._commands: list[Command] = []  # still to be carried out
        self._peers: dict[PeerKey, Peer] = {}
        self._jobs: OrderedDict[str, TransferJob] = (
            OrderedDict()
        )  # in the order of their turns
        self.counters: Counter[str] = Counter(posts=0, internal_errors=0)
        self._num_rounds = 0
        self._failures: list[Exception] = []  # since the last round without one
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, f"pull-{rank.number}")
        self._watch = VitalThread(self._watch_rounds, f"pull-{rank.number}-watch")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the threads, and every READ."""
        self._stopping.set()
        self._link.wake()
        for thread in (self._thread, self._watch):
            if thread.is_alive():
                thread.join()
        self._link.close()
        self._rank.close()

    def _run(self) -> None:
        allow_short_naps()
        use_one_core()
        self._rank.bind_thread()
        self._watch.start()
        patience_s = 0.0
        while not self._stopping.is_set():
            self._num_rounds += 1
            num_failures = len(self._failures)
            try:
                self._commands += self._link.receive(patience_s)
                patience_s = 0.0 if self._round() else self._patience_s()
            except Exception as error:
                self._survive(error, *self._jobs.values())
            if len(self._failures) == num_failures:
                self._failures.clear()
            elif len(self._failures) >= _MAX_FAILURES:  # nothing ends any more
                raise self._failures[-1]
        if not self._jobs:
            for peer in self._peers.values():
                peer.unmap()

    def _watch_rounds(self) -> None:
        """Ends the process when the thread is stuck in a driver or a transport: the engine would
        look healthy, and no pull would end. Counts looks, not seconds, because a process that was
        suspended for a while is not stuck."""
        seen, num_same = -1, 0
        while not self._stopping.wait(_LOOK_S):
            num_same = num_same + 1 if self._num_rounds == seen else 0
            seen = self._num_rounds
            if num_same == _NUM_LOOKS:
                _print_stacks()
                seconds = _LOOK_S * _NUM_LOOKS
                raise RuntimeError(
                    f"{self._thread.name} has made no progress for {seconds:g} s"
                )

    def _round(self) -> bool:
        """Carries out commands, posts at most one piece, polls, ends jobs; whether it did any."""
        while self._commands:
            self._obey(self._commands.pop(0))
        happened = self._post_one() | self.digester.drive()
        for job in list(self._jobs.values()):
            happened |= self._drive(job, job.poll)
            if job.error is not None and job.active and not job.is_failure_told:
                job.is_failure_told = True
                failing = RankFailing(
                    job.pull_id, self._number, ErrorInfo.of(job.error)
                )
                self._link.report(failing)
            if job.ended:
                self._end(job)
                happened = True
        for peer in self._peers.values():
            link, error = peer.link, peer.settle()
            happened |= peer.link is not link  # closed: jobs that wait may connect anew
            if error is not None:
                self._refuse(peer, error)
                happened = True
        self._relieve_hung()
        return happened

    def _post_one(self) -> bool:
        for pull_id, job in list(self._jobs.items()):
            if not job.is_stopping and self._drive(job, job.post):
                self.counters["posts"] += isinstance(job, ReadJob)
                self._jobs.move_to_end(pull_id)  # pulls take turns
                return True
        return False

    def _drive(self, job: TransferJob, call: Callable[[], bool | None]) -> bool:
        try:
            return bool(call())
        except BatonError as error:
            job.stop(error)
        except Exception as error:
            self._survive(error, job)
        return True

    def _survive(self, error: Exception, *jobs: TransferJob) -> None:
        """Fails the jobs after a bug of ours or a device's error, so that no pull hangs."""
        logger.exception("pull worker")
        self.counters["internal_errors"] += 1
        self._failures.append(error)
        for job in jobs:
            job.stop(job.fault(error))
        time.sleep(_STUCK_NAP_S)

    def _patience_s(self) -> float:
        """How long the thread may wait for commands before the next round."""
        jobs = self._jobs.values()
        is_idle = not self.digester.is_busy
        if is_idle and all(job.waits for job in jobs):
            links = [peer.link for peer in self._peers.values() if peer.link]
            soon = [
                link.deadline
                for link in links
                if not (link.is_ready or link.is_closing)
            ]
            return max(0.0, min([_LOOK_S, *(each - time.monotonic() for each in soon)]))
        if is_idle and all(job.is_stopping or job.waits for job in jobs):
            return _STUCK_NAP_S
        busy = self._rank.busy
        if busy is None:
            return _NAP_S
        return _GPU_BUSY_NAP_S if busy() else _GPU_NAP_S

    def _obey(self, command: Command) -> None:
        match command:
            case Pull(pull_id, key):
                if peer := self._peers.get(key):
                    kind = MappedJob if peer.map() else ReadJob
                    self._jobs[pull_id] = kind(command, peer)
                else:
                    self._tell_end(pull_id, _not_connected(key[0]))
            case StopPull(pull_id):
                if pull_id in self._jobs:
                    self._jobs[pull_id].stop()
                else:  # ended: no READ of it is active
                    self.digester.stop(pull_id)
                    self._tell_end(pull_id)
            case DigestOrder(pull_id, scope, blocks):
                self._tell_digest(scope, blocks, pull_id)
            case AddPeer(metadata):
                key = (metadata.engine_id, metadata.incarnation)
                if key in self._peers:
                    self._peers[key].is_dropped = False
                    return
                peer = self._peers[key] = Peer(self._rank, metadata)
                peer.prepare()
            case DropPeer(key):
                if dropped := self._peers.get(key):
                    dropped.is_dropped = True
                    self._refuse(dropped, _not_connected(key[0]))
                    self._clean(dropped)

    def _end(self, job: TransferJob) -> None:
        del self._jobs[job.pull_id]
        is_complete, error = not job.is_stopping, job.error
        if is_complete:  # reported first: the fence waits for it
            path, tell = job.path if job.nbytes else "none", self._tell_end
            if job.pull.scope is not None:
                tell = partial(
                    self._tell_digest, job.pull.scope, job.pull.local_block_ids
                )
            tell(job.pull_id, nbytes=job.nbytes, descriptors=job.descriptors, path=path)
        try:
            self._drive(job, job.leave)
            self._clean(job.peer)
        finally:
            if not is_complete:
                self._tell_end(job.pull_id, error)
        peer, seconds = job.peer, time.perf_counter() - job.began
        if is_complete and not peer.is_speed_told and job.bytes_read >= _SAMPLE_BYTES:
            peer.is_speed_told = True
            way = "mapped memory"
            if isinstance(job, ReadJob):
                transport = peer.link and peer.link.way_of_reading
                way = f"NIXL, {job.path}, by {transport or 'an untold way'}"
            rate = job.bytes_read / seconds / 1e9
            logger.info("prefill server %s: %s, %.2f GB/s", peer.engine_id, way, rate)

    def _refuse(self, peer: Peer, error: BatonError) -> None:
        """Fails the jobs that wait for the peer's link; they have posted nothing."""
        for job in self._jobs.values():
            if job.peer is peer and job.waits:
                job.stop(error)

    def _clean(self, peer: Peer) -> None:
        """Unmaps a stale peer, and forgets a dropped one, once no job uses it."""
        if any(job.peer is peer for job in self._jobs.values()):
            return
        if peer.is_stale or peer.is_dropped:
            peer.unmap()
        if peer.is_dropped:
            self._peers.pop(peer.key, None)
            if peer.link is not None:
                peer.link.close()

    def _relieve_hung(self) -> None:
        """Closes links on which only READs of stopped pulls are left and hang, and lets no pull
        wait for staging memory whose owner hangs."""
        jobs = self._jobs.values()
        for peer in {
            job.peer for job in jobs if job.is_stopping and job.still_s >= _TEAR_DOWN_S
        }:
            still_s = min(
                job.still_s for job in jobs if job.peer is peer and job.active
            )
            if still_s >= _TEAR_DOWN_S and peer.link is not None:
                peer.link.close(TransferFailed("READs hang"))
        staging = self._rank.staging
        holder = self._jobs.get(staging.owner or "") if staging else None
        if holder is None:
            return
        behind = (
            any(job.hangs for job in jobs if job.peer is holder.peer)
            and not holder.active
        )
        if not (holder.hangs or behind):
            return
        for job in jobs:
            passes_by = not isinstance(job, ReadJob) or job.pass_staging_by()
            if (
                not passes_by and holder.is_stopping
            ):  # a holder that goes on may free the memory
                job.stop(PullWithheld("READs that hang have the staging memory"))

    def _tell_digest(
        self, scope: Scope, blocks: Sequence[int], name: str, **done: Any
    ) -> None:
        """Reports the end of a pull or of a DigestOrder once the blocks' digest is computed."""

        def tell(part: DigestPart | None) -> None:
            error = (
                None if part else InternalError("a digest of KV could not be computed")
            )
            self._tell_end(name, error, **({"part": part, **done} if part else {}))

        self.digester.begin(name, scope, blocks, tell)

    def _tell_end(
        self, pull_id: str, error: BatonError | None = None, **done: Any
    ) -> None:
        """
        Args:
            done: further fields of RankEnded, only for a complete pull.
        """
        info = ErrorInfo.of(error) if error else None
        members = {"complete": bool(done), "error": info, **done}
        self._link.report(RankEnded(pull_id=pull_id, rank=self._number, **members))


def use_one_core() -> None:
    """Keeps torch from starting OpenMP threads for the calling thread: with more of them than cores
    libgomp stops spinning for work, and the engine's operations would wait to be woken."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # fixes the number for this thread


def _print_stacks() -> None:
    """Prints the stack of every thread to stderr. Not directly: faulthandler writes to the
    descriptor itself, which blocks while nothing reads it."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        print(file.read(), file=sys.stderr, end="", flush=True)


def _not_connected(engine_id: str) -> TransferFailed:
    return TransferFailed(f"prefill server {engine_id} is not connected any more")

"""Pulls that would wait for ever for staging memory whose owner's READs hang."""

from collections.abc import Iterable, Mapping

from kvcache.transfer.move.staging import StagingBuffer
from kvcache.transfer.worker.job_maker import Job
from kvcache.transfer.worker.job_peer import JobPeer
from kvcache.transfer.worker.read_job import ReadJob


def starved(staging: StagingBuffer | None, jobs: Mapping[str, tuple[Job, JobPeer]]) -> list[Job]:
    """Those of `jobs` (by pull id) that have to fail. Others that wait are told to do without
    staging, where they can."""
    if staging is None or staging.owner is None:
        return []
    owner = jobs.get(staging.owner)
    if owner is None:  # it could not be made, or failed to leave
        staging.leave(staging.owner)
        return []
    if len(jobs) == 1:
        return []
    holder, peer = owner
    if not holder.hangs and (holder.active or not _hangs(peer, jobs.values())):
        return []
    found: list[Job] = []
    for job, _ in jobs.values():
        if not (isinstance(job, ReadJob) and job.awaits_staging) or job.pass_staging_by():
            continue
        if holder.stopping:  # nobody else waits for it
            found.append(job)
    return found


def _hangs(peer: JobPeer, jobs: Iterable[tuple[Job, JobPeer]]) -> bool:
    """Whether READs from it do, which may keep others from being posted."""
    return any(job.hangs for job, whose in jobs if whose is peer)

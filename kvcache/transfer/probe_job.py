"""Measuring a peer at first contact, as a job beside the pulls.

It reads the peer's null block into staging memory: many short runs and few long ones, twice, since
the first round connects and makes memory resident. Pulls that arrive meanwhile wait for its end, so
that already the first one is planned with what was measured. If anything goes wrong the transport's
usual constants stay; a pull that waited fails when its own time is over, and pulls that arrive
later than `_WAIT_S` do not wait.
"""

import time
from dataclasses import replace

from kvcache.transfer.move.staging import StagingBuffer
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import CostModel, Sample, fit_costs, probe_reads
from kvcache.transfer.plan.endpoint import Endpoint
from kvcache.transfer.plan.plan import TransferPlan
from kvcache.transfer.plan.staged import ALIGN_BYTES, Chunk, aligned
from kvcache.transfer.posts import PostLimits
from kvcache.transfer.pull import Pull
from kvcache.transfer.pull_job import PullJob, Step
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_WAIT_S = 0.25  # a probe takes 5 to 10 ms
_CPU_BYTES = 4 << 20  # of long runs: 1 ms, where a GPU needs more to be seen at its speed


class ProbeJob(PullJob):
    """Driven by the worker as any pull; nobody is told of its end."""

    def __init__(
        self,
        name: str,
        local: Endpoint,
        remote: Endpoint,
        staging: StagingBuffer,
        limits: PostLimits,
    ) -> None:
        room = staging.nbytes // 2 // ALIGN_BYTES * ALIGN_BYTES
        long, short = probe_reads(remote, min(room, _CPU_BYTES) if staging.on_cpu else room)
        self._reads = (short, long, short, long)
        self._on_cpu = staging.on_cpu
        self._steps: list[Step] = []
        self.waiting: dict[str, Pull] = {}  # begun when the probe has ended
        self._late_at = time.monotonic() + _WAIT_S
        chunks = tuple(_chunk(read) for read in self._reads)
        nbytes = sum(int(read.lengths.sum()) for read in self._reads)
        plan = TransferPlan("staged", (), chunks, nbytes, 0, 0.0, "measures the peer")
        super().__init__(name, plan, 0, staging, limits)
        self._num_slots = 1  # one read after the other

    def delays(self, pull: Pull) -> bool:
        """Keeps a pull until the probe has ended; False where it has run for too long."""
        if time.monotonic() < self._late_at:
            self.waiting[pull.pull_id] = pull
        return pull.pull_id in self.waiting

    def costs(self, reformat_bytes_per_s: float) -> CostModel | None:
        """What was measured, once the job has ended; None when that came to nothing."""
        if not self.complete:
            return None
        short, long = (
            Sample(len(read.lengths), int(read.lengths.sum()), step.seconds)
            for read, step in list(zip(self._reads, self._steps, strict=True))[2:]
        )
        try:
            costs = fit_costs(long, short, reformat_bytes_per_s=reformat_bytes_per_s)
        except ValueError as error:  # a null block too small to tell runs apart
            logger.debug("%s: %s", self.pull_id, error)
            return None
        copying = self._on_cpu and all(step.at_once for step in self._steps[2:])
        if not copying:
            return costs
        # Placing is such a copy as well; what was measured of it was in the cache.
        place = min(costs.reformat_bytes_per_s, costs.bytes_per_s)
        return replace(costs, reformat_bytes_per_s=place, overlaps=False)

    def _begin(self, step: Step) -> Step:
        self._steps.append(step)
        return super()._begin(step)


def _chunk(read: ReadDescriptors) -> Chunk:
    """Read, and placed nowhere."""
    end = int((read.local_offsets + read.lengths).max())
    return Chunk((read,), aligned(end), ())

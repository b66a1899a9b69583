"""READs that begin before their plans: where they have to wait for these."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.pool import KVPool
from kvcache.transfer.job_peer import JobPeer
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.opening import Opening
from kvcache.transfer.pace import Throttle
from kvcache.transfer.posts import PostLimits
from kvcache.transfer.pull_job import PullJob
from kvcache.transfer.reads import Reads
from kvcache.transfer.runs import RankRead
from kvcache.transfer.transfer_plan import TransferPlan

sys.path.insert(0, str(Path(__file__).parent))
from pull_rig import Prefill, layout

BLOCKS = [5, 2, 9]


class Rank:
    """Of D, as far as it reads; `is_busy` is what the throttle is told of its engine."""

    def __init__(self, prefill: Any) -> None:
        self.prefill, self.pool, self.agent = prefill, KVPool(layout()), MemoryAgent()
        self.agent.register(self.pool.base_address, self.pool.nbytes)
        self.peer = JobPeer.of(prefill.metadata)
        self.peer.names[0] = self.agent.add_peer(prefill.metadata.ranks[0].agent_metadata)
        self.is_busy = False
        self.throttle = Throttle(lambda: self.is_busy, 1 << 30)
        self.counters: Counter[str] = Counter(posts=0)

    def open(self, limits: PostLimits) -> Any:
        """An opening of three whole blocks."""
        self.reads = Reads(
            self.agent, self.pool, limits, self._failed, self.counters, self.throttle
        )
        return self.again()

    def again(self) -> Any:
        size = self.pool.layout.block_bytes
        places = np.array(BLOCKS, np.int64) * size
        read = RankRead(0, places, places, np.full(len(BLOCKS), size, np.int64))
        return self.reads.open(
            self.peer, Opening(read, num_blocks=len(BLOCKS)), self.pool.base_address
        )

    def adopt(self, opened: Any) -> PullJob:
        plan = TransferPlan("direct", (opened.opening.read,), (), 0, 0, 0.0, "")
        job = PullJob("a", plan, 0, None, PostLimits(), None, opened)
        self.reads.adopt(opened, job, self.peer)
        return job

    def holds(self) -> bool:
        theirs = self.prefill.pools[0].canonical[BLOCKS]
        return bool((self.pool.canonical[BLOCKS] == theirs).all())

    @staticmethod
    def _failed(job: PullJob, error: Exception) -> None:
        raise error


@pytest.fixture
def rank(rig: Any) -> Iterator[Rank]:
    rank = Rank(rig(Prefill))
    yield rank
    rank.agent.close()


def test_an_opening_is_read_at_once_and_is_its_jobs_then(rank: Rank) -> None:
    opened = rank.open(PostLimits())
    assert opened is not None and (rank.agent.active, rank.counters["posts"]) == (1, 1)
    job = rank.adopt(opened)
    assert not job.ended and rank.reads.post_one([(job, rank.peer)]) is None  # nothing is left
    assert rank.reads.poll() and job.complete and rank.holds()


def test_an_opening_beside_a_batch_waits_for_its_plan(rank: Rank) -> None:
    """READs are then to leave the batch its memory bandwidth."""
    rank.is_busy = True
    assert rank.open(PostLimits()) is None
    rank.throttle.posted(1 << 50, time.perf_counter())
    rank.is_busy = False
    assert rank.again() is None  # what went out beside the batch still counts
    assert (rank.agent.active, rank.counters["posts"]) == (0, 0)


def test_an_opening_is_no_larger_than_a_post(rank: Rank) -> None:
    nbytes = 3 * rank.pool.layout.block_bytes
    assert rank.open(PostLimits(max_bytes=nbytes - 1)) is None
    assert rank.open(PostLimits(max_runs=2)) is None
    assert rank.open(PostLimits(max_bytes=nbytes, max_runs=3)) is not None


def test_an_opening_waits_for_first_contact_and_for_other_reads(rank: Rank) -> None:
    rank.adopt(rank.open(PostLimits()))
    assert rank.again() is None
    rank.reads.poll()
    assert rank.again() is not None
    rank.peer.names.clear()
    assert rank.again() is None


def test_an_opening_that_cannot_be_posted_is_left_to_the_plan(rank: Rank) -> None:
    rank.agent.remove_peer(rank.peer.names[0])
    assert rank.open(PostLimits()) is None and rank.counters["posts"] == 0

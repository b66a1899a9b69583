"""A rank's worker with an agent, copies and plans that fail at random.

Every pull must end, complete pulls must have no wrong byte, and pulls after the faults
must succeed.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache.pool import KVPool
from kvcache.transfer.agent import PostLimits, ReadHandle, ReadState
from kvcache.transfer.job import ReadJob
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.move import place as placing
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.pulls.messages import AddPeer, DropPeer, RankEnded, StopPull
from kvcache.transfer.worker import TransferWorker
from protocol.errors import TransferFailed
from tests.rigs.cluster import wait_until
from tests.rigs.coordinator_stub import CoordinatorStub
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import HEADS, Prefill, expected, layout, pull_command

NUM_TOKENS = 24  # of a pull
NUM_BLOCKS = 3  # of a pull


class Faults:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.odds = 0.0

    def strike(self) -> bool:
        return self._rng.random() < self.odds

    def may_raise(self) -> None:
        if self.strike():
            raise self._rng.choice(
                [TransferFailed("as agents fail"), RuntimeError("a random fault")]
            )

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **options: Any) -> Any:
            self.may_raise()
            return call(*args, **options)

        return faulty

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            self.may_raise()
            return result

        return faulty


class FaultyAgent(MemoryAgent):
    """An agent on which any call may raise TransferFailed or some other exception.

    A posted READ must end even if `poll` raises an exception.
    """

    def __init__(self, faults: Faults, network: Any = None) -> None:
        super().__init__(network=network)
        self._faults = faults
        self.add_peer = faults.before(self.add_peer)  # type: ignore[method-assign]
        self.read = faults.before(self.read)  # type: ignore[method-assign]
        self.release = faults.after(self.release)  # type: ignore[method-assign]

    def new_sibling(self) -> "FaultyAgent":
        self._faults.may_raise()
        return FaultyAgent(self._faults, self._network)

    def poll(self, handle: ReadHandle) -> ReadState:
        self._faults.may_raise()
        if self._faults.strike():
            return handle.state  # as if the READ had not ended
        if self._faults.strike():
            self.fail()
        return super().poll(handle)


class Rank:
    """A worker, and ten block tables in its pool. No two concurrent pulls use the same
    table.
    """

    def __init__(self, rng: random.Random, faults: Faults, seed: int) -> None:
        self._rng = rng
        self.link = CoordinatorStub()
        self.pool = KVPool(layout())
        self.agent = FaultyAgent(faults)
        max_bytes = 1 << 16 if seed % 4 == 1 else 2048
        local = LocalRank(
            0,
            1,
            HEADS,
            self.agent,
            self.pool,
            limits=PostLimits(max_bytes, max_runs=64, max_active=3),
            staging_bytes=1 << 18 if seed % 2 else None,
            costs=DEFAULT_COSTS["cuda"] if seed % 3 else None,
        )
        self.worker = TransferWorker(local, self.link.worker_end)
        self._free = [
            [1 + NUM_BLOCKS * i + j for j in range(NUM_BLOCKS)] for i in range(10)
        ]
        self._reading: dict[str, tuple[Any, list[int]]] = {}
        self.num_complete = 0

    def pull(self, pull_id: str, prefill: Prefill) -> None:
        while not self._free:
            self.agent.resume()
            self._take_report()
        blocks = self._free.pop(self._rng.randrange(len(self._free)))
        self._rng.shuffle(blocks)
        self.pool.canonical[blocks] = -1
        lease = prefill.lease(self._rng.sample(range(1, 32), NUM_BLOCKS), NUM_TOKENS)
        self._reading[pull_id] = lease, blocks
        self.link.send(AddPeer(prefill.metadata))
        self.link.send(pull_command(pull_id, lease, 0, NUM_TOKENS, blocks))

    def wait(self) -> None:
        """Waits until every pull has ended."""
        while self._reading:
            self._take_report()

    def _take_report(self) -> None:
        report = self.link.report()
        if isinstance(report, RankEnded) and report.pull_id in self._reading:
            lease, blocks = self._reading.pop(report.pull_id)
            self._free.append(blocks)
            if report.complete:
                self.num_complete += 1
                rows = self.pool.canonical[blocks].permute(0, 4, 1, 2, 3, 5)
                result = rows.flatten(0, 1)[:NUM_TOKENS].numpy()
                assert np.array_equal(result, expected(lease, 0, NUM_TOKENS)), report


@pytest.mark.parametrize("seed", range(8))
def test_every_pull_ends_and_complete_pulls_have_correct_bytes(rig, seed, monkeypatch):
    monkeypatch.setattr("kvcache.transfer.worker._STUCK_NAP_S", 0.0005)
    monkeypatch.setattr("kvcache.transfer.job.HANGS_S", 0.003)
    rng = random.Random(seed)
    faults = Faults(random.Random(seed + 1))
    monkeypatch.setattr(placing, "place", faults.before(placing.place))
    monkeypatch.setattr(
        ReadJob, "release_staging", faults.after(ReadJob.release_staging)
    )
    monkeypatch.setattr(ReadJob, "_begin", faults.after(ReadJob._begin))
    prefills = [rig(Prefill, engine_id=name, order="LBCNHD") for name in "PQ"]
    rank = Rank(rng, faults, seed)
    rank.worker.start()
    try:
        faults.odds = 0.01 * (1 + seed % 4)
        for number in range(60):
            prefill = rng.choice(prefills)
            rank.pull(str(number), prefill)
            if rng.random() < 0.3:
                rank.link.send(StopPull(str(rng.randint(0, number))))
            if rng.random() < 0.1:
                key = prefill.metadata.engine_id, prefill.metadata.incarnation
                rank.link.send(DropPeer(key))
            if rng.random() < 0.1:
                rank.agent.stall(prefill.agents[0].name)
            if rng.random() < 0.2:
                rank.agent.resume()
            if rng.random() < 0.4:
                # Wait a little, because otherwise most pulls would be stopped before
                # they begin.
                time.sleep(0.001)
        faults.odds = 0.0
        rank.agent.resume()
        rank.wait()
        # There are two rounds, because the first pulls may still use a link that has
        # failed.
        for prefill in prefills * 2:
            rank.num_complete = 0
            rank.pull("after", prefill)
            rank.wait()
        assert rank.num_complete == 1
        # READs that appeared to hang are ended by the link's thread, when it closes the
        # link.
        wait_until(lambda: rank.agent.active == 0)
    finally:
        faults.odds = 0.0
        rank.worker.close()
        rank.link.close()

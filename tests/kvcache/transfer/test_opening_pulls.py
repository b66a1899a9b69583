"""Pulls of any kind in a row by a worker that opens, over READs that behave as badly as they may:
a pull brings its own bytes to its own places, whatever the ones before it read and left."""

import ctypes
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.transfer import plan, whole_blocks
from kvcache.transfer.agent import Addresses, MemoryKind, ReadHandle, ReadState
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.plan import CostModel
from kvcache.transfer.pull import AddPeer, Pull, RankEnded, StopPull
from kvcache.transfer.pull_job import Opened, PullJob
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.rank_links import InsideLink
from protocol.handshake import PROTOCOL_VERSION, EngineMetadata, RankMetadata
from tests.kvcache.transfer.geometry import GARBAGE, Case, Side, garbage, memory_of, with_dtypes
from tests.kvcache.transfer.pull_rig import DEADLINE_S, compat
from tests.kvcache.transfer.test_planner import pulls

STAGE_ALL = CostModel(1e-3, 1e12, 1e15)  # every descriptor hurts


class BadAgent(MemoryAgent):
    """What it reads is garbage until the READ has ended, which takes a few polls, or it fails."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._busy: dict[int, list[tuple[int, int]]] = {}  # what active READs write

    def read(
        self,
        peer: str,
        local_addresses: Addresses,
        remote_addresses: Addresses,
        lengths: Addresses,
        *,
        local_device: int = 0,
        remote_device: int = 0,
        kinds: Sequence[MemoryKind] = ("DRAM", "DRAM"),
    ) -> ReadHandle:
        handle = super().read(peer, local_addresses, remote_addresses, lengths)
        spans = list(zip(local_addresses.tolist(), lengths.tolist(), strict=True))
        for others in self._busy.values():
            for (at, size), (to, room) in ((a, b) for a in spans for b in others):
                assert at + size <= to or to + room <= at, "two READs write to one place"
        self._busy[id(handle)] = spans
        self._scribble(spans)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        if handle.ended or self._random.random() < 0.5:
            return handle.state
        if self._random.random() < 0.02:
            self.fail()
        state = super().poll(handle)
        spans = self._busy.pop(id(handle))
        if state is ReadState.ERROR:
            self._scribble(spans)
        return state

    @staticmethod
    def _scribble(spans: list[tuple[int, int]]) -> None:
        for at, size in spans:
            ctypes.memset(at, 0x3B, size)


class Engines:
    """All of P, and a rank of D, of one geometry."""

    def __init__(self, case: Case, d_rank: int, staging_blocks: int, seed: int) -> None:
        self.case, self.d_rank = case, d_rank
        self.p_pools = [KVPool(case.layout(case.p, rank)) for rank in range(case.p.tp)]
        self.pool = KVPool(case.layout(case.d, d_rank))
        self.p_agents = [MemoryAgent("P") for _ in self.p_pools]
        self.agent, self.link, self._told = BadAgent(seed), InsideLink(), threading.Event()
        self.link.on_report = self._told.set
        block_bytes = max(pool.layout.block_bytes for pool in self.p_pools)
        self.worker = PullWorker(
            d_rank,
            case.d.tp,
            case.heads,
            self.agent,
            self.pool,
            "",
            dcp=case.d.dcp,
            inside=self.link,
            opens=True,
            staging_bytes=staging_blocks * (block_bytes + 64) * 2 * case.p.tp,
            convert=True,
            costs=STAGE_ALL,
        )
        self.worker.start()
        self.link.send(AddPeer(self._metadata()))

    def _metadata(self) -> EngineMetadata:
        ranks = []
        for rank, (pool, agent) in enumerate(zip(self.p_pools, self.p_agents, strict=True)):
            agent.register(pool.base_address, pool.nbytes)
            where: Any = {"base_address": pool.base_address, "nbytes": pool.nbytes}
            where |= {"device_id": 0, "device_kind": "cpu", "layout": pool.layout.to_record()}
            ranks.append(RankMetadata(rank=rank, agent_metadata=agent.metadata(), **where))
        return EngineMetadata(
            protocol_version=PROTOCOL_VERSION,
            engine_id="P",
            incarnation="i",
            compat=compat(),
            tp_size=len(ranks),
            ranks=ranks,
        )

    def pull(self, case: Case, number: int, *, stops: bool) -> None:
        """Checks every element of D."""
        for rank, pool in enumerate(self.p_pools):
            _flat(pool)[:] = _of_pull(memory_of(case, case.p, rank), number)
        _flat(self.pool)[:] = garbage(case, case.d, self.d_rank)
        order = Pull(
            pull_id=str(number),
            engine_id="P",
            incarnation="i",
            lease_hash=case.lease_hash,
            token_start=case.start,
            token_stop=case.stop,
            local_block_ids=list(case.d.blocks),
            remote_block_ids=list(case.p.blocks),
        )
        self.link.send(order)
        if stops:
            self.link.send(StopPull(order.pull_id))
        ended = self._ended(order.pull_id)
        for pool in self.p_pools:  # now it may be another's
            _flat(pool)[:] = GARBAGE
        found = _flat(self.pool)
        wanted = _of_pull(memory_of(case, case.d, self.d_rank, case.start), number)
        if ended.complete:
            np.testing.assert_array_equal(found, wanted)
        else:
            assert stops or (ended.error is not None and "a READ from" in ended.error.message)
            assert (found[wanted == GARBAGE] == GARBAGE).all()

    def _ended(self, pull_id: str) -> RankEnded:
        while True:
            for report in self.link.reports():
                if isinstance(report, RankEnded) and report.pull_id == pull_id:
                    return report
            assert self._told.wait(DEADLINE_S)
            self._told.clear()

    def close(self) -> None:
        self.worker.close()
        assert self.agent.active == 0 and self.worker.counters["internal_errors"] == 0
        for agent in self.p_agents:
            agent.close()


def _flat(pool: KVPool) -> Any:
    return pool.tensor.view(-1).numpy()


def _of_pull(memory: Any, number: int) -> Any:
    return np.where(memory == GARBAGE, memory, (memory.astype(int) + 101 * number) % 2039)


def _pull_each(cases: list[Case], d_rank: int, staging_blocks: int, seed: int) -> None:
    engines = Engines(cases[0], d_rank % cases[0].d.tp, staging_blocks, seed)
    choice = random.Random(seed)
    try:
        for number, case in enumerate(cases):
            engines.pull(case, number, stops=choice.random() < 0.1)
    finally:
        engines.close()


def test_pulls_in_a_row_bring_their_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted, adopt = [], PullJob._adopt

    def noted(self: PullJob, opened: Opened) -> None:
        adopt(self, opened)
        adopted.append(opened.step.chunk is not None)

    monkeypatch.setattr(PullJob, "_adopt", noted)

    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)
    @given(
        pulls(),
        st.integers(0, 7),
        st.integers(1, 6),
        st.sampled_from(["float32", "float16"]),
        st.integers(0, 2**32 - 1),
    )
    def check(
        all_pulls: list[Case], d_rank: int, staging_blocks: int, dtype: str, seed: int
    ) -> None:
        cases = [with_dtypes(case, "float32", dtype) for case in all_pulls for _ in range(2)]
        _pull_each(cases, d_rank, staging_blocks, seed)

    check()
    assert sum(adopted) >= 20  # of some hundred


@st.composite
def whole_pulls(draw: Any) -> list[Case]:
    """Pulls of nothing but whole blocks, each of them one run from each rank."""
    p_tp, d_tp, heads = draw(
        st.sampled_from([(1, 1, 2), (1, 2, 2), (2, 1, 2), (4, 2, 4), (4, 1, 1)])
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for _ in range(draw(st.integers(3, 6))):
        count = draw(st.integers(1, 9))
        start = draw(st.integers(0, count - 1))
        sides = []
        for tp in (p_tp, d_tp):
            ids = np.arange(20) if draw(st.booleans()) else rng.permutation(20)
            sides.append(Side(tp, "BHLCND", 4, tuple(ids[:count].tolist()), 20))
        of = {"layers": 2, "components": 1, "head_dim": 2, "lease_hash": draw(st.integers(0, 9))}
        found.append(Case(*sides, heads, start=start * 4, stop=count * 4, **of))
    return found


def test_whole_blocks_in_a_row_bring_their_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted, adopt = [], PullJob._adopt

    def noted(self: PullJob, opened: Opened) -> None:
        adopt(self, opened)
        adopted.append(opened.opening.num_blocks)

    monkeypatch.setattr(PullJob, "_adopt", noted)
    monkeypatch.setattr(plan, "_LONG_RUN_BYTES", 1)

    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)
    @given(whole_pulls(), st.integers(0, 7), st.integers(1, 4), st.integers(0, 2**32 - 1))
    def check(cases: list[Case], d_rank: int, most: int, seed: int) -> None:
        monkeypatch.setattr(whole_blocks, "_FIRST_BLOCKS", most)
        _pull_each(cases, d_rank, 1, seed)

    check()
    assert sum(map(bool, adopted)) >= 50  # of some hundred

"""Staged chunks placed by the gather's arithmetic end where torch's strided copies put them."""

import ctypes
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.transfer.boxes import Transfer
from kvcache.transfer.mapper import MemoryMapper, Work
from kvcache.transfer.plan import CostModel, PlanError, Planner
from kvcache.transfer.slot_gather import SlotGather
from kvcache.transfer.staging import Staging
from tests.kvcache.transfer.geometry import (
    DTYPES,
    GARBAGE,
    Case,
    cases,
    execute_reads,
    memory_of,
    with_dtypes,
)
from tests.kvcache.transfer.test_plan import PROPERTY, side, simple

STAGE_ALL = CostModel(1e-3, 1e12, 1e15)  # every descriptor hurts


def place_all(case: Case, d_rank: int, staging_blocks: int) -> None:
    block_bytes = max(case.layout(case.p, rank).block_bytes for rank in range(case.p.tp))
    plan = case.plan(
        d_rank,
        costs=STAGE_ALL,
        staging_bytes=staging_blocks * (block_bytes + 64) * 2 * case.p.tp,
        convert=True,
        allow_mixed=True,
    )
    pool = KVPool(case.layout(case.d, d_rank))
    pool.tensor.copy_(torch.full(pool.layout.shape, GARBAGE))
    into = pool.tensor.view(-1).numpy()
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    execute_reads(plan.reads, sources, into)
    gather = SlotGather(MemoryMapper(pool))
    for chunk in plan.chunks:
        slot = np.full(chunk.nbytes + 64, 0xEE, np.uint8)[: chunk.nbytes]
        execute_reads(chunk.reads, sources, slot)
        assert chunk.span is not None
        tokens: list[Any] = []
        gather.place(chunk.span, slot.ctypes.data, tokens)
        assert gather.finished(tokens)
    gather.end()
    np.testing.assert_array_equal(into, memory_of(case, case.d, d_rank, case.start))


@settings(PROPERTY, max_examples=300)
@given(cases(), st.integers(0, 7), st.integers(1, 6), DTYPES)
def test_chunks_end_in_their_places_and_nowhere_else(case, d_rank, staging_blocks, dtypes) -> None:
    place_all(with_dtypes(case, *dtypes), d_rank % case.d.tp, staging_blocks)


class WithoutCompiler(MemoryMapper):
    def prepare(self, transfer: Transfer) -> None:
        raise ImportError("no compiler")

    def launch(self, *_: Any) -> Any:
        raise AssertionError("it cannot")


@pytest.mark.parametrize("kind", [MemoryMapper, WithoutCompiler])
def test_staging_memory_places_with_its_mapper_or_without(kind: type[MemoryMapper]) -> None:
    case = simple(side(1, 16), side(1, 64))
    plan = case.plan(0, costs=STAGE_ALL, staging_bytes=1 << 20)
    pool = KVPool(case.layout(case.d, 0))
    pool.tensor.copy_(torch.full(pool.layout.shape, GARBAGE))
    staging = Staging(1 << 20, pool, kind(pool))
    staging.bind_thread()
    (chunk,) = plan.chunks
    assert chunk.span is not None
    staging.prepare(chunk.span.staging.transfer)
    staging.enter("a")
    size = plan.slot_bytes
    slot = np.frombuffer((ctypes.c_ubyte * size).from_address(staging.base_address + size), "u1")
    execute_reads(chunk.reads, [memory_of(case, case.p, 0)], slot)
    staging.place(chunk, 1, size)
    while not staging.is_free(1):
        pass
    staging.leave("a")
    found = pool.tensor.view(-1).numpy()
    np.testing.assert_array_equal(found, memory_of(case, case.d, 0, case.start))
    staging.close()


class LateWithoutCompiler(MemoryMapper):
    """Prepares one peer and no other."""

    peers = 0

    def prepare(self, transfer: Transfer) -> None:
        self.peers += 1
        if self.peers > 1:
            raise ImportError("no compiler any more")


def test_what_a_mapper_places_has_to_end_though_it_is_given_up() -> None:
    case = simple(side(1, 16), side(1, 64))
    plan = case.plan(0, costs=STAGE_ALL, staging_bytes=1 << 20)
    pool = KVPool(case.layout(case.d, 0))
    mapper = LateWithoutCompiler(pool)
    staging = Staging(1 << 20, pool, mapper)
    (chunk,) = plan.chunks
    assert chunk.span is not None
    transfer = chunk.span.staging.transfer
    staging.prepare(transfer)
    staging.enter("a")
    mapper.stalled = True
    staging.place(chunk, 0, plan.slot_bytes)
    staging.prepare(transfer)  # of another peer
    assert not staging.is_free(0)
    mapper.stalled = False
    assert staging.is_free(0)
    staging.leave("a")
    staging.close()


class Uploads(MemoryMapper):
    """Hands the tables of a pull on as bytes, as to a GPU."""

    def begin(self, work: Work) -> Work:
        transfer = work.transfer
        tables = transfer.remote_table.bytes, transfer.local_table.bytes
        remote, local = (np.frombuffer(table, np.int64).tolist() for table in tables)
        assert (remote, local) == (transfer.remote_blocks.tolist(), [2, 1])
        return super().begin(work)


@pytest.mark.parametrize("table", [(2, 1), (2, 9), (2, -1), (2, 2), (2,)])
def test_a_table_is_checked_before_it_goes_to_a_gpu(table: tuple[int, ...]) -> None:
    """The chunk may have come before anybody else asked."""
    case = simple(side(1, 16), side(1, 64))
    planner = Planner(
        case.endpoints(case.d)[0], case.endpoints(case.p), case.heads, staging_bytes=1 << 20
    )
    for blocks in ((2, 1), table):  # of those like it only the first pull is looked at
        transfer = planner.take((0, 128), list(blocks), list(case.p.blocks))
        plan = planner.plan(transfer, STAGE_ALL)
    pool = KVPool(case.layout(case.d, 0))
    gather, (chunk,) = SlotGather(Uploads(pool)), plan.chunks
    slot = np.zeros(chunk.nbytes, np.uint8)
    raises = pytest.raises(PlanError, match="local_block_ids")
    with nullcontext() if table == (2, 1) else raises:
        gather.place(chunk.span, slot.ctypes.data, [])

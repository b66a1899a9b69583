"""Staged transfers: the sizes of chunks, and placing KV out of slots of the staging
memory.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move.peer_memory import bytes_at
from kvcache.transfer.move.place import Placer, StagingBuffer
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.steps import Step
from tests.kvcache.test_pool import resident_bytes
from tests.kvcache.transfer.test_plan import make_case, scattered, side
from tests.rigs.geometry import GARBAGE, STAGE_ALL, Case, Side, execute_reads, memory_of
from tests.rigs.memory_placer import MemoryPlacer

NUM_TOKENS = 4096
BLOCK_BYTES = 16 * 8 * 2 * 2 * 4 * 4  # of P
BETWEEN_GPUS = CostModel(1e-7, 1e9, 4e9)
ON_A_CPU = CostModel(1e-7, 1e9, 4e9, overlaps=False)


def sizes(costs: CostModel, staging_blocks: int) -> list[int]:
    """Returns the number of P's blocks in each chunk of a pull of 256 blocks."""
    case = make_case(
        scattered(side(1, 16, tokens=NUM_TOKENS)),
        scattered(side(1, 64, tokens=NUM_TOKENS)),
        stop=NUM_TOKENS,
    )
    plan = case.plan(0, costs=costs, staging_bytes=staging_blocks * BLOCK_BYTES)
    assert plan.path == "staged"
    assert plan.slot_bytes * 2 <= staging_blocks * BLOCK_BYTES
    chunk_blocks = [step.bytes_read // BLOCK_BYTES for step in plan.steps]
    assert sum(chunk_blocks) == NUM_TOKENS // 16
    return chunk_blocks


@pytest.mark.parametrize(
    ("staging_blocks", "expected"), [(512, [32] * 8), (128, [32] * 8), (64, [16] * 16)]
)
def test_overlapping_reads_take_eight_equal_chunks_or_a_quarter_of_the_memory_each(
    staging_blocks, expected
):
    assert sizes(BETWEEN_GPUS, staging_blocks) == expected


def test_chunks_of_cpu_reads_are_equal_except_the_last():
    *equal, last = sizes(ON_A_CPU, 128)
    assert len(set(equal)) == 1 and 0 < last <= equal[0]


def test_chunks_between_gpus_are_fewer_if_each_chunk_cuts_the_runs_of_every_layer():
    fresh = Side(1, "LBCHND", 64, tuple(range(1, 129)), 129, "bfloat16")
    case = make_case(
        fresh, replace(fresh, order="BHLCND"), layers=32, head_dim=128, stop=8192
    )
    plan = case.plan(0, costs=DEFAULT_COSTS["cuda"], staging_bytes=512 << 20)
    assert len(plan.steps) == 4
    assert plan.num_descriptors == 4 * 32


def test_steps_are_computed_on_first_use():
    case = make_case(
        side(1, 16, tokens=NUM_TOKENS), side(1, 64, tokens=NUM_TOKENS), stop=NUM_TOKENS
    )
    plan = case.plan(0, costs=BETWEEN_GPUS, staging_bytes=128 * BLOCK_BYTES)
    first, second, *_ = plan.steps
    assert first.reads is first.reads and first.copies is first.copies
    assert {"reads", "copies"} <= vars(first).keys()
    assert not {"reads", "copies"} & vars(second).keys()


def garbage_pool(case: Case, d_rank: int) -> KVPool:
    pool = KVPool(case.layout(case.d, d_rank))
    pool.tensor.copy_(torch.full(pool.layout.shape, GARBAGE))
    return pool


CASE = make_case(side(1, 16), side(1, 64))


def filled(staging: StagingBuffer, slot: int) -> tuple[Step, int]:
    """Reads the only step of a pull into a slot. Returns the step and the size of the
    slot.
    """
    plan = CASE.plan(0, costs=STAGE_ALL, staging_bytes=1 << 20)
    (step,) = plan.steps
    size = plan.slot_bytes
    into = bytes_at(staging.base_address + slot * size, size).numpy()
    execute_reads(step.reads, [memory_of(CASE, CASE.p, 0)], into)
    return step, size


@pytest.mark.parametrize("kind", [MemoryPlacer, Placer])
def test_staging_memory_places_with_the_given_placer(kind):
    pool = garbage_pool(CASE, 0)
    staging = StagingBuffer(1 << 20, pool, kind(pool))
    staging.bind_thread()
    staging.join_queue("a")
    step, size = filled(staging, 1)
    staging.place(step, 1, size)
    assert staging.is_free(1)
    staging.leave_queue("a")
    content = pool.tensor.view(-1).numpy()
    np.testing.assert_array_equal(content, memory_of(CASE, CASE.d, 0, CASE.start))


def test_slot_is_free_when_the_copies_out_of_it_have_ended():
    pool = garbage_pool(CASE, 0)
    placer = MemoryPlacer(pool)
    staging = StagingBuffer(1 << 20, pool, placer)
    placer.stalled = True
    step, size = filled(staging, 0)
    staging.place(step, 0, size)
    assert not staging.is_free(0) and staging.is_free(1)
    placer.stalled = False
    assert staging.is_free(0)


NBYTES = 256 << 20
POOL = KVPool(KVLayout("BHLCND", 2, 1, 1, 1, 16, 8, "float32"))


def test_staging_memory_is_not_resident_before_use_and_has_two_to_four_slots():
    before = resident_bytes()
    staging = StagingBuffer(NBYTES, POOL, Placer(POOL))
    assert resident_bytes() - before < NBYTES // 4
    assert [staging.num_slots(NBYTES // parts) for parts in (2, 3, 100)] == [2, 3, 4]


def test_error_names_a_staging_size_above_the_available_memory():
    with pytest.raises(
        ValueError, match=r"staging_bytes is 1152921504606846976, .* use a lower"
    ):
        StagingBuffer(1 << 60, POOL, Placer(POOL))

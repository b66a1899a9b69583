"""Chunks of staged transfers: their sizes, and that each is made when it is wanted."""

from itertools import pairwise

import pytest

from kvcache.transfer import chunks
from kvcache.transfer.plan import CostModel
from tests.kvcache.transfer.test_plan import scattered, side, simple

TOKENS = 4096
BLOCK_BYTES = 16 * 8 * 2 * 2 * 4 * 4  # of P
BETWEEN_GPUS = CostModel(1e-7, 1e9, 4e9)
ON_A_CPU = CostModel(1e-7, 1e9, 4e9, overlaps=False)


def sizes(costs: CostModel, staging_blocks: int, order: str = "BHLCND") -> list[int]:
    """Blocks of P in each chunk of a pull of 256 of them."""
    case = simple(
        scattered(side(1, 16, order, TOKENS)), scattered(side(1, 64, tokens=TOKENS)), stop=TOKENS
    )
    plan = case.plan(0, costs=costs, staging_bytes=staging_blocks * BLOCK_BYTES)
    assert plan.path == "staged"
    spans = [chunk.span for chunk in plan.chunks]
    assert [span.first for span in spans[1:]] == [span.last for span in spans[:-1]]
    assert (spans[0].first, spans[-1].last) == (0, TOKENS // 16)
    assert plan.slot_bytes * 2 <= staging_blocks * BLOCK_BYTES
    return [span.last - span.first for span in spans]


def test_between_gpus_chunks_take_a_quarter_of_the_memory_and_become_smaller() -> None:
    found = sizes(BETWEEN_GPUS, 128)
    assert found[0] == 32 and found[-1] == 4
    assert all(before >= after for before, after in pairwise(found))


def test_on_a_cpu_chunks_are_alike() -> None:
    *found, last = sizes(ON_A_CPU, 128)
    assert len(set(found)) == 1 and 0 < last <= found[0]


def test_a_chunk_is_made_when_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = chunks._make
    monkeypatch.setattr(chunks, "_make", lambda *which: made.append(which[1]) or make(*which))
    case = simple(side(1, 16, tokens=TOKENS), side(1, 64, tokens=TOKENS), stop=TOKENS)
    plan = case.plan(0, costs=BETWEEN_GPUS, staging_bytes=128 * BLOCK_BYTES)
    assert not made
    reads = plan.chunks[0].reads
    assert made == [0] and plan.chunks[0].reads is reads
    assert plan.descriptors >= len(plan.chunks) == len(made)
    with pytest.raises(IndexError):
        plan.chunks[len(plan.chunks)]

"""Runs of blocks are found by loops or, where there are many blocks, by numpy: the same ones."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.transfer import chunks, whole_blocks
from kvcache.transfer.plan import CostModel, TransferPlan
from tests.kvcache.transfer.geometry import Case, Side, with_dtypes


def _reads(plan: TransferPlan) -> list[tuple[Any, ...]]:
    staged = [read for chunk in plan.chunks for read in chunk.reads]
    return [
        (read.remote_rank, *(array.tolist() for array in read[1:]))
        for read in (*plan.reads, *staged)
    ]


def _table(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    """Rows of neighbours, cut anywhere and put in any order."""
    cuts = np.sort(rng.integers(0, count + 2, rng.integers(0, 12)))
    rows = np.split(np.arange(count + 2), cuts)
    rng.shuffle(rows)
    return tuple(np.concatenate(rows)[:count].tolist())


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    tps=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    staged=st.booleans(),
    heads=st.integers(1, 6),
    per_run_s=st.sampled_from([1e-9, 1e-3]),
)
def test_loops_and_numpy_find_the_same_runs(seed, tps, staged, heads, per_run_s) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 400))
    orders = ("LBCHND", "BHLCND") if staged else ("BHLCND",) * 2
    p, d = (
        Side(tp, order, 4, _table(rng, count), count + 2)
        for tp, order in zip(tps, orders, strict=True)
    )
    case = Case(p, d, heads, 2, 2, 2, 4 * int(rng.integers(0, count)), 4 * count, seed % 7)
    case = with_dtypes(case, "float32", "float16" if staged else "float32")
    found, room = [], 1 << 22 if staged else None
    costs = CostModel(per_run_s, 1e9, 1e9, 1.5)
    for few in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            for module in (whole_blocks, chunks):
                patch.setattr(module, "_FEW_BLOCKS", few)
            plan = case.plan(seed % d.tp, costs=costs, staging_bytes=room, convert=True)
            assert plan.path == ("staged" if staged else "direct")
            found.append(_reads(plan))
    assert found[0] == found[1] != []

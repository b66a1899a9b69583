"""What copy engines are given to do, proved on the CPU for any pair of geometries."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.transfer.move.cuda_placer import Rows, rows_of
from kvcache.transfer.move.place import launches
from kvcache.transfer.plan.block_copy import BlockCopy
from tests.rigs.geometry import (
    DTYPES,
    Case,
    Side,
    cases,
    garbage,
    memory_of,
    with_dtypes,
)

PROPERTY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=300)


def every_rows(case: Case, d_rank: int) -> list[Rows | None]:
    transfer = case.transfer(d_rank)
    return [rows_of(copy, transfer.factors) for copy in transfer.copies()]


def carry_out(copy: BlockCopy, rows: Rows, source: np.ndarray, into: np.ndarray) -> None:
    """As copy engines do, between the bytes of two pools."""
    for read, write in zip(copy.sources, copy.targets, strict=True):
        for row in range(rows.number):
            start, stop = read + row * rows.pitches[0], write + row * rows.pitches[1]
            into[stop : stop + rows.width] = source[start : start + rows.width]


def copy_all(case: Case, d_rank: int, chunk_bytes: int) -> np.ndarray | None:
    """What D holds after all copies; None where its share is no rows."""
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    into = garbage(case, case.d, d_rank)
    transfer = case.transfer(d_rank)
    for part in launches(transfer.copies(), chunk_bytes):
        how = rows_of(part, transfer.factors)
        if how is None:
            return None
        assert how.width * how.number == part.piece_bytes
        carry_out(part, how, sources[part.owner].view(np.uint8), into.view(np.uint8))
    return into


@PROPERTY
@given(cases(), st.integers(0, 7), st.integers(1, 10_000), st.booleans(), DTYPES)
def test_every_byte_arrives_and_nothing_else_is_touched(
    case: Case, d_rank: int, chunk_bytes: int, alike: bool, dtypes: tuple[str, str]
) -> None:
    if alike:
        d = dataclasses.replace(case.d, order=case.p.order)
        case = dataclasses.replace(case, d=d)
    else:
        case = with_dtypes(case, *dtypes)
    d_rank %= case.d.tp
    found = copy_all(case, d_rank, chunk_bytes)
    if found is not None:
        np.testing.assert_array_equal(found, memory_of(case, case.d, d_rank, case.start))


def case_of(p: Side, d: Side, **changes: int) -> Case:
    sizes = {"heads": 4, "layers": 3, "components": 2, "head_dim": 8, "start": 0, "stop": 32}
    return Case(p, d, **{**sizes, **changes})


BLOCKS = {8: (3, 1, 5, 2), 16: (2, 4), 32: (1,)}


def side(order: str = "BHLCND", tp: int = 1, size: int = 8) -> Side:
    return Side(tp, order, size, BLOCKS[size], 6)


@pytest.mark.parametrize(
    ("p", "d", "count", "width"),
    [
        (side(), side(), 1, 24 * 8 * 8 * 4),  # rows x tokens x elements x bytes
        (side(), side(tp=2), 1, 12 * 8 * 8 * 4),
        (side(tp=4), side(tp=2), 1, 6 * 8 * 8 * 4),
        (side("BLCNHD"), side("BLCNHD"), 1, 6 * 8 * 4 * 8 * 4),
        (side(size=16), side(), 24, 8 * 8 * 4),
        (side(), side(size=32), 24, 8 * 8 * 4),
        (side("BLCNHD"), side("BLCNHD", tp=2), 48, 2 * 8 * 4),
    ],
)
def test_what_is_rows(p: Side, d: Side, count: int, width: int) -> None:
    for rows in every_rows(case_of(p, d), 0):
        assert rows is not None
        assert (rows.number, rows.width) == (count, width)


@pytest.mark.parametrize(
    ("p", "d"),
    [
        (side("LBCNHD"), side()),
        (side("BLCHND", size=16), side("BLCHND", tp=2)),  # some heads and tokens of each layer
    ],
)
def test_what_is_more_than_rows(p: Side, d: Side) -> None:
    assert set(every_rows(case_of(p, d), 0)) == {None}


def test_whole_blocks_are_runs_and_the_ends_are_rows() -> None:
    found = every_rows(case_of(side(), side(), start=3, stop=30), 0)
    assert [(rows.number, rows.width) for rows in found if rows] == [
        (24, 5 * 8 * 4),
        (24, 6 * 8 * 4),
        (1, 24 * 8 * 8 * 4),
    ]

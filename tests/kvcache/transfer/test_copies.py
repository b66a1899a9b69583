"""What copy engines are given to do, proved on the CPU for any pair of geometries."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.transfer.copies import Copies, Rows, plan_copies, rows_of, whole_blocks
from kvcache.transfer.gather import launches, make_gathers
from tests.kvcache.transfer.geometry import (
    DTYPES,
    Case,
    Side,
    cases,
    garbage,
    memory_of,
    with_dtypes,
)
from tests.kvcache.transfer.test_gather import gathers_of

PROPERTY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=300)


def every_rows(case: Case, d_rank: int) -> list[Rows | None]:
    local, remote = case.endpoints(case.d)[d_rank], case.endpoints(case.p)
    return [
        rows_of(gather.share, local, remote[gather.share.remote_rank])
        for gather in gathers_of(case, d_rank)
    ]


def carry_out(copies: Copies, rows: Rows, count: int, source: np.ndarray, into: np.ndarray) -> None:
    """`count` rows for each copy, between the bytes of two pools."""
    for read, write, width in zip(*copies, strict=True):
        for row in range(count):
            start, stop = read + row * rows.source.pitch, write + row * rows.target.pitch
            into[stop : stop + width] = source[start : start + width]


def copy_all(case: Case, d_rank: int, chunk_bytes: int) -> np.ndarray | None:
    """What D holds after all copies; None where its share is no rows."""
    transfer = case.transfer(d_rank)
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    into = garbage(case, case.d, d_rank)
    for gather, rows in zip(make_gathers(transfer), every_rows(case, d_rank), strict=True):
        if rows is None:
            return None
        source = sources[gather.share.remote_rank].view(np.uint8)
        for first, count in launches(gather, chunk_bytes):
            runs, strided = plan_copies(rows, gather, transfer, first, count)
            blocks = whole_blocks(rows, gather, transfer, first, count)
            assert (blocks is None) == (runs is None or strided is not None)
            if runs is not None and blocks is not None:
                assert blocks == list(
                    zip(runs.sources.tolist(), runs.targets.tolist(), strict=True)
                )
            if runs is not None:
                assert set(runs.widths.tolist()) == {rows.run_bytes}
                carry_out(runs, rows, 1, source, into.view(np.uint8))
            if strided is not None:
                carry_out(strided, rows, rows.count, source, into.view(np.uint8))
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
    ("p", "d", "count", "run_bytes"),
    [
        (side(), side(), 24, 24 * 8 * 8 * 4),  # rows x tokens x elements x bytes
        (side(), side(tp=2), 12, 12 * 8 * 8 * 4),
        (side(tp=4), side(tp=2), 6, 6 * 8 * 8 * 4),
        (side("BLCNHD"), side("BLCNHD"), 6, 6 * 8 * 4 * 8 * 4),
        (side(size=16), side(), 24, 0),
        (side(), side(size=32), 24, 0),
    ],
)
def test_what_is_rows(p: Side, d: Side, count: int, run_bytes: int) -> None:
    for rows in every_rows(case_of(p, d), 0):
        assert rows is not None
        assert (rows.count, rows.run_bytes) == (count, run_bytes)


@pytest.mark.parametrize(
    ("p", "d"),
    [
        (side("LBCNHD"), side()),
        (side("BLCHND"), side("BLCHND", tp=2)),  # a slice of heads for each layer and component
        (side("LBCHND"), side("LBCHND")),  # a place for each layer
        (side("BLCNHD"), side("BLCNHD", tp=2)),
    ],
)
def test_what_is_more_than_rows(p: Side, d: Side) -> None:
    assert every_rows(case_of(p, d), 0) == [None] * len(every_rows(case_of(p, d), 0))


def test_whole_blocks_are_runs_and_the_ends_are_rows() -> None:
    case = case_of(side(), side(), start=3, stop=30)
    transfer = case.transfer(0)
    (gather,) = make_gathers(transfer)
    (rows,) = every_rows(case, 0)
    assert rows is not None
    runs, strided = plan_copies(rows, gather, transfer, 0, 4)
    assert runs is not None and len(runs.sources) == 2
    assert strided is not None
    assert strided.widths.tolist() == [5 * 8 * 4, 6 * 8 * 4]
    assert [
        whole_blocks(rows, gather, transfer, *part) is None for part in ((0, 4), (1, 2), (3, 1))
    ] == [
        True,
        False,
        True,
    ]

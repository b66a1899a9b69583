"""What the kernel and copy engines are told to do, carried out on the CPU for any geometries."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.transfer.move.cuda_placer import Rows, divisor, kind_of, rows_of
from kvcache.transfer.move.place import launches
from kvcache.transfer.plan.block_copy import BlockCopy
from tests.rigs.geometry import (
    DTYPES,
    GARBAGE,
    Case,
    Side,
    cases,
    garbage,
    memory_of,
    with_dtypes,
)
from tests.rigs.memory_placer import locate

PROPERTY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=250)


def parts(case: Case, d_rank: int, chunk_bytes: int) -> Iterator[tuple[BlockCopy, np.ndarray]]:
    """Each launch of a pull, and the memory that it reads."""
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    for copy in launches(case.transfer(d_rank).copies(), chunk_bytes):
        yield copy, sources[copy.owner]


def by_kernel(case: Case, d_rank: int, chunk_bytes: int) -> np.ndarray:
    """What D holds after all launches."""
    into, factors = garbage(case, case.d, d_rank), case.transfer(d_rank).factors
    for copy, source in parts(case, d_rank, chunk_bytes):
        elements = kind_of(copy.source, copy.target, factors).unit_elements
        reads, writes, scales = locate(copy, factors)
        assert len(np.unique(writes)) == len(writes)
        picked = source.reshape(-1, elements)[reads] * scales[:, None]
        into.reshape(-1, elements)[writes] = picked.astype(into.dtype)
    return into


def by_engines(case: Case, d_rank: int, chunk_bytes: int) -> np.ndarray | None:
    """The same, row by row; None where D's share is no rows."""
    into, factors = garbage(case, case.d, d_rank), case.transfer(d_rank).factors
    for copy, source in parts(case, d_rank, chunk_bytes):
        rows = rows_of(copy, factors)
        if rows is None:
            return None
        assert rows.width * rows.number == copy.piece_bytes
        for read, write in zip(copy.sources, copy.targets, strict=True):
            for row in range(rows.number):
                start, stop = read + row * rows.pitches[0], write + row * rows.pitches[1]
                moved = source.view(np.uint8)[start : start + rows.width]
                into.view(np.uint8)[stop : stop + rows.width] = moved
    return into


@PROPERTY
@given(cases(), st.integers(0, 7), DTYPES, st.integers(1, 10_000), st.sampled_from([1, 2, 3, 8]))
def test_every_element_arrives_and_nothing_else_is_touched(
    case: Case, d_rank: int, dtypes: tuple[str, str], chunk_bytes: int, widen: int
) -> None:
    case = with_dtypes(dataclasses.replace(case, head_dim=case.head_dim * widen), *dtypes)
    d_rank %= case.d.tp
    wanted = memory_of(case, case.d, d_rank, case.start)
    np.testing.assert_array_equal(by_kernel(case, d_rank, chunk_bytes), wanted)
    found = by_engines(case, d_rank, chunk_bytes)
    assert found is None or np.array_equal(found, wanted)


@PROPERTY
@given(cases(), st.integers(0, 7), st.integers(1, 10_000))
def test_copy_engines_do_what_is_rows(case: Case, d_rank: int, chunk_bytes: int) -> None:
    case = dataclasses.replace(case, d=dataclasses.replace(case.d, order=case.p.order))
    d_rank %= case.d.tp
    found = by_engines(case, d_rank, chunk_bytes)
    assert found is None or np.array_equal(found, memory_of(case, case.d, d_rank, case.start))


@PROPERTY
@given(cases(), st.integers(0, 7), st.integers(1, 10_000), st.booleans())
def test_every_element_is_multiplied_by_its_layers_factor(
    case: Case, d_rank: int, chunk_bytes: int, has_own_scales: bool
) -> None:
    d_rank %= case.d.tp
    shape = (case.layers, case.components)
    theirs = 2.0 ** np.arange(np.prod(shape))  # exact in float32
    ours = 4.0 ** -np.arange(np.prod(shape)) if has_own_scales else np.ones(np.prod(shape))
    p = dataclasses.replace(case.p, scales=tuple(theirs.tolist()))
    d = dataclasses.replace(case.d, scales=tuple(ours.tolist()) if has_own_scales else ())
    found = by_kernel(dataclasses.replace(case, p=p, d=d), d_rank, chunk_bytes)
    plain = memory_of(case, case.d, d_rank, case.start)
    order = case.d.order
    lying = [case.layout(case.d, d_rank).sizes[axis] if axis in "LC" else 1 for axis in order]
    factors = (theirs / ours).reshape(shape)
    factors = factors.T if order.index("C") < order.index("L") else factors
    wanted = plain.reshape(case.layout(case.d, d_rank).shape) * factors.reshape(lying)
    wanted = np.where(plain.reshape(wanted.shape) == GARBAGE, GARBAGE, wanted)
    np.testing.assert_array_equal(found, wanted.reshape(-1).astype(np.float32))


def test_a_latent_cache_is_placed_as_one_head_from_every_copy_in_turn() -> None:
    p = Side(4, "BHLCND", 16, tuple(range(5, -1, -1)), 7)
    d = Side(2, "LBCNHD", 8, tuple(range(12)), 12)
    case = Case(p, d, heads=1, layers=3, components=1, head_dim=72, start=3, stop=95)
    read = dict.fromkeys(range(4), 0)
    for copy in case.transfer(1).copies():
        read[copy.owner] += copy.tokens * len(copy.sources)
    assert read == {0: 16, 1: 29, 2: 31, 3: 16}  # two blocks, but for those of the ends
    np.testing.assert_array_equal(by_kernel(case, 1, 4096), memory_of(case, d, 1, 3))


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_a_division_by_a_constant_is_a_multiplication(size: int, number: int) -> None:
    by, magic, shift = divisor(size)
    assert by == size and 0 < magic <= 2**32
    at_borders = number // size * size, number // size * size - 1
    for each in (number, *at_borders):
        assert each * magic < 2**63
        assert max(each, 0) * magic >> shift == max(each, 0) // size


@pytest.mark.parametrize(
    ("head_dim", "source", "target", "elements"),
    [
        (128, "bfloat16", "bfloat16", 8),
        (576, "bfloat16", "bfloat16", 8),
        (100, "bfloat16", "bfloat16", 4),
        (3, "float32", "float32", 1),
        (128, "float8_e4m3fn", "float8_e4m3fn", 16),
        (128, "float32", "float8_e4m3fn", 4),
    ],
)
def test_units_are_as_wide_as_both_sides_allow(
    head_dim: int, source: str, target: str, elements: int
) -> None:
    p = Side(1, "BHLCND", 4, (1,), 2, source)
    d = Side(1, "LBCNHD", 4, (1,), 2, target)
    case = Case(p, d, heads=2, layers=1, components=2, head_dim=head_dim, start=0, stop=4)
    assert kind_of(case.layout(p, 0), case.layout(d, 0), None).unit_elements == elements


def test_launches_cover_all_pieces_and_are_bounded() -> None:
    p = Side(1, "BHLCND", 4, tuple(range(10)), 10)
    case = Case(p, p, heads=2, layers=1, components=2, head_dim=4, start=0, stop=38)
    half, whole = case.transfer(0).copies()
    assert (half.tokens, whole.piece_bytes) == (2, 4 * 2 * 2 * 4 * 4)
    found = list(launches([half, whole], 3 * whole.piece_bytes + 1))
    assert [(part.tokens, len(part.sources)) for part in found] == [(2, 1), (4, 3), (4, 3), (4, 3)]
    assert np.array_equal(np.concatenate([part.targets for part in found[1:]]), whole.targets)
    assert len(list(launches([whole], 1))) == 9


BLOCKS = {8: (3, 1, 5, 2), 16: (2, 4), 32: (1,)}


def side(order: str = "BHLCND", tp: int = 1, size: int = 8) -> Side:
    return Side(tp, order, size, BLOCKS[size], 6)


def rows_between(p: Side, d: Side, start: int = 0, stop: int = 32) -> list[Rows | None]:
    case = Case(p, d, heads=4, layers=3, components=2, head_dim=8, start=start, stop=stop)
    return [rows_of(copy, None) for copy in case.transfer(0).copies()]


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
        (side("LBCNHD"), side(), None, 0),  # more than rows
        (side("BLCHND", size=16), side("BLCHND", tp=2), None, 0),  # parts of each layer
    ],
)
def test_what_is_rows(p: Side, d: Side, count: int | None, width: int) -> None:
    for rows in rows_between(p, d):
        assert (rows and (rows.number, rows.width)) == (count and (count, width))


def test_whole_blocks_are_runs_and_the_ends_are_rows() -> None:
    found = rows_between(side(), side(), start=3, stop=30)
    ends = [(24, 5 * 8 * 4), (24, 6 * 8 * 4)]
    assert [(rows.number, rows.width) for rows in found if rows] == [*ends, (1, 24 * 8 * 8 * 4)]

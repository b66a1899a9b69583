"""The placing kernel's index arithmetic, proved on the CPU for any pair of geometries."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.transfer.move.cuda_placer import divisor, kind_of
from kvcache.transfer.move.place import launches
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

PROPERTY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=200)


def place_all(case: Case, d_rank: int, chunk_bytes: int) -> np.ndarray:
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    into = garbage(case, case.d, d_rank)
    transfer = case.transfer(d_rank)
    for copy in launches(transfer.copies(), chunk_bytes):
        elements = kind_of(copy.source, copy.target, transfer.factors).unit_elements
        reads, writes, factors = locate(copy, transfer.factors)
        assert len(np.unique(writes)) == len(writes)
        picked = sources[copy.owner].reshape(-1, elements)[reads] * factors[:, None]
        into.reshape(-1, elements)[writes] = picked.astype(into.dtype)
    return into


@PROPERTY
@given(cases(), st.integers(0, 7), DTYPES, st.integers(1, 10_000), st.sampled_from([1, 2, 3, 8]))
def test_every_element_arrives_and_nothing_else_is_touched(
    case: Case, d_rank: int, dtypes: tuple[str, str], chunk_bytes: int, widen: int
) -> None:
    case = with_dtypes(dataclasses.replace(case, head_dim=case.head_dim * widen), *dtypes)
    d_rank %= case.d.tp
    found = place_all(case, d_rank, chunk_bytes)
    np.testing.assert_array_equal(found, memory_of(case, case.d, d_rank, case.start))


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
    found = place_all(dataclasses.replace(case, p=p, d=d), d_rank, chunk_bytes)
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
    np.testing.assert_array_equal(place_all(case, 1, 4096), memory_of(case, d, 1, 3))


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_division_by_a_constant_is_a_multiplication(size: int, number: int) -> None:
    by, magic, shift = divisor(size)
    assert by == size and 0 < magic <= 2**32
    assert number * magic < 2**63
    assert (number * magic) >> shift == number // size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 2**16 - 1, 2**30 + 1, 2**31 - 1])
def test_division_is_exact_at_its_borders(size: int) -> None:
    _, magic, shift = divisor(size)
    for multiple in (1, 2, (2**31 - 1) // size):
        for number in (multiple * size - 1, multiple * size):
            if number < 2**31:
                assert (number * magic) >> shift == number // size


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
    parts = list(launches([half, whole], 3 * whole.piece_bytes + 1))
    assert [(part.tokens, len(part.sources)) for part in parts] == [(2, 1), (4, 3), (4, 3), (4, 3)]
    assert np.array_equal(np.concatenate([part.targets for part in parts[1:]]), whole.targets)
    assert len(list(launches([whole], 1))) == 9

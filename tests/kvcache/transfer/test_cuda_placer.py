"""Copies from mapped memory, by three methods: torch, the kernel's arithmetic, and copy
engines. In these tests, all three methods run on the CPU.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvcache.transfer.move.cuda_placer import divisor, kernel_kind, run_bytes_of
from kvcache.transfer.move.place import place, split_into_launches
from kvcache.transfer.plan.block_copy import BlockCopy, ScaleFactors
from tests.rigs.examples import examples
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
from tests.rigs.memory_placer import place_units

PROPERTY = examples(500, suppress_health_check=list(HealthCheck))


def place_runs(
    copy: BlockCopy,
    source: torch.Tensor,
    target: torch.Tensor,
    scale_factors: ScaleFactors,
) -> None:
    """Copies like a GPU: contiguous runs as copy engines copy them, all other copies
    with the kernel's arithmetic.
    """
    if not run_bytes_of(copy, scale_factors):
        place_units(copy, source, target, scale_factors)
        return
    for read, write in zip(copy.sources, copy.targets, strict=True):
        target[write : write + copy.piece_bytes] = source[
            read : read + copy.piece_bytes
        ]


def place_all(case: Case, d_rank: int, chunk_bytes: int, place_copy: Any) -> np.ndarray:
    """Returns the content of D's pool after all launches, each copied by
    `place_copy`.
    """
    target = garbage(case, case.d, d_rank)
    transfer = case.transfer(d_rank)
    memory = torch.from_numpy(target).view(torch.uint8)
    memories = [
        memory_of(case, case.p, rank).view(np.uint8) for rank in range(case.p.tp)
    ]
    for copy in split_into_launches(transfer.copies(), chunk_bytes):
        source = torch.from_numpy(memories[copy.owner])
        place_copy(copy, source, memory, transfer.scale_factors)
    return target


def with_scales(case: Case, d_has_scales: bool) -> tuple[Case, np.ndarray]:
    """Returns the case with scales on P or on both sides, and the scale factors [L,
    C].
    """
    numbers = np.arange(case.layers * case.components)
    p_scales = 2.0**numbers  # exact in float32
    d_scales = 4.0**-numbers if d_has_scales else np.ones(len(numbers))
    p = dataclasses.replace(case.p, scales=tuple(p_scales.tolist()))
    d = dataclasses.replace(
        case.d, scales=tuple(d_scales.tolist()) if d_has_scales else ()
    )
    factors = (p_scales / d_scales).reshape(case.layers, case.components)
    return dataclasses.replace(case, p=p, d=d), factors


RANKS = st.integers(0, 7)
CHUNKS = st.integers(1, 10_000)
PLACE_FUNCTIONS = st.sampled_from([place, place_units, place_runs])


@PROPERTY
@given(
    cases(),
    RANKS,
    DTYPES,
    CHUNKS,
    st.sampled_from([1, 2, 3, 8]),
    PLACE_FUNCTIONS,
    st.booleans(),
)
def test_placing_writes_exactly_the_requested_elements(
    case, d_rank, dtypes, chunk_bytes, widen, place_copy, alike
):
    case = with_dtypes(
        dataclasses.replace(case, head_dim=case.head_dim * widen), *dtypes
    )
    if alike:
        case = dataclasses.replace(
            case, d=dataclasses.replace(case.d, order=case.p.order)
        )
    d_rank %= case.d.tp
    expected = memory_of(case, case.d, d_rank, case.start)
    np.testing.assert_array_equal(
        place_all(case, d_rank, chunk_bytes, place_copy), expected
    )


@PROPERTY
@given(cases(), RANKS, CHUNKS, PLACE_FUNCTIONS, st.booleans())
def test_elements_are_multiplied_by_layer_factors(
    case, d_rank, chunk_bytes, place_copy, d_has_scales
):
    d_rank %= case.d.tp
    plain = memory_of(case, case.d, d_rank, case.start)
    layout = case.layout(case.d, d_rank)
    case, factors = with_scales(case, d_has_scales)
    factors = (
        factors.T if layout.order.index("C") < layout.order.index("L") else factors
    )
    factor_shape = [layout.sizes[axis] if axis in "LC" else 1 for axis in layout.order]
    expected = (plain.reshape(layout.shape) * factors.reshape(factor_shape)).reshape(-1)
    expected = np.where(plain == GARBAGE, GARBAGE, expected).astype(np.float32)
    np.testing.assert_array_equal(
        place_all(case, d_rank, chunk_bytes, place_copy), expected
    )


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_divisor_replaces_a_division_by_a_multiplication(size, number):
    divided_by, magic, shift = divisor(size)
    assert divided_by == size and 0 < magic <= 2**32
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
def test_units_are_as_wide_as_both_sides_allow(head_dim, source, target, elements):
    p = Side(1, "BHLCND", 4, (1,), 2, source)
    d = Side(1, "LBCNHD", 4, (1,), 2, target)
    case = Case(
        p, d, heads=2, layers=1, components=2, head_dim=head_dim, start=0, stop=4
    )
    assert (
        kernel_kind(case.layout(p, 0), case.layout(d, 0), None).unit_elements
        == elements
    )


BLOCK_TABLES = {8: (3, 1, 5, 2), 16: (2, 4)}


def side(order: str = "BHLCND", tp: int = 1, size: int = 8) -> Side:
    return Side(tp, order, size, BLOCK_TABLES[size], 6)


@pytest.mark.parametrize(
    ("p", "d", "start", "runs"),  # `runs`: sizes of the contiguous runs, in floats
    [
        # 24 (heads, layers and components) x tokens x elements.
        (side(), side(), 0, [24 * 8 * 8]),
        # Only a part of the first block is copied, in several runs: its entry is 0.
        (side(), side(), 3, [0, 24 * 8 * 8]),
        (side(), side(tp=2), 0, [12 * 8 * 8]),
        (side(tp=4), side(tp=2), 0, [6 * 8 * 8] * 2),
        (side("BLCNHD"), side("BLCNHD"), 0, [6 * 8 * 4 * 8]),
        (side(size=16), side(), 0, [0]),
        (side("LBCNHD"), side(), 0, [0]),
    ],
)
def test_whole_blocks_of_one_order_are_single_runs(p, d, start, runs):
    case = Case(p, d, heads=4, layers=3, components=2, head_dim=8, start=start, stop=32)
    copies = list(case.transfer(0).copies())
    assert [run_bytes_of(copy, None) for copy in copies] == [4 * run for run in runs]
    assert not any(run_bytes_of(copy, (1.0,)) for copy in copies)


def test_launches_cover_all_pieces_and_are_bounded():
    p = Side(1, "BHLCND", 4, tuple(range(10)), 10)
    case = Case(p, p, heads=2, layers=1, components=2, head_dim=4, start=0, stop=38)
    half, whole = case.transfer(0).copies()
    assert (half.num_tokens, whole.piece_bytes) == (2, 4 * 2 * 2 * 4 * 4)
    parts = list(split_into_launches([half, whole], 3 * whole.piece_bytes + 1))
    assert [(part.num_tokens, len(part.sources)) for part in parts] == [
        (2, 1),
        (4, 3),
        (4, 3),
        (4, 3),
    ]
    assert np.array_equal(
        np.concatenate([part.targets for part in parts[1:]]), whole.targets
    )
    assert len(list(split_into_launches([whole], 1))) == 9

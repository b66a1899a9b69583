"""Placing staged KV with torch: conversions, bounds, and how many views it takes."""

from itertools import product
from typing import Any

import pytest
import torch

from kvcache.layout import KVLayout
from kvcache.transfer.move import place as placing
from kvcache.transfer.move.place import place
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import Endpoint, PlanError
from kvcache.transfer.plan.plan import Planner, Step

# Descriptors cost much and copies nothing, so that everything is staged.
STAGE = CostModel(1.0, 1e12, 1e15)


def endpoint(
    order: str,
    block_size: int,
    num_blocks: int,
    dtype: str = "float32",
    scales: tuple[float, ...] = (),
) -> Endpoint:
    return Endpoint(KVLayout(order, num_blocks, 2, 2, 2, block_size, 4, dtype), 0, 1, scales)


def one_step(p: Endpoint, d: Endpoint, tokens: int, d_blocks: list[int], **options) -> Step:
    p_blocks = list(range(p.layout.num_blocks))
    planner = Planner(d, [p], 2, staging_bytes=1 << 20, **options)
    plan = planner.plan(planner.take((0, tokens), d_blocks, p_blocks), STAGE)
    assert plan.path == "staged"
    (step,) = plan.steps
    return step


def filled(end: Endpoint) -> torch.Tensor:
    layout = end.layout
    count = layout.nbytes // layout.itemsize
    dtype = getattr(torch, layout.dtype)
    return torch.linspace(-3, 3, count, dtype=torch.float64).to(dtype).view(layout.shape)


def slot_of(step: Step, source: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """A slot that starts `lead` bytes into its storage, with the step's reads carried out."""
    slot = torch.zeros(step.slot.nbytes + lead, dtype=torch.uint8)[lead:]
    lying = source.view(-1).view(torch.uint8)
    for read in step.reads:
        for remote, local, length in zip(
            read.remote_offsets, read.local_offsets, read.lengths, strict=True
        ):
            slot[local : local + length] = lying[remote : remote + length]
    return slot


def canonical(pool: torch.Tensor, end: Endpoint) -> torch.Tensor:
    """[block, N, H, L, C, D]"""
    return pool.permute([end.layout.order.index(axis) for axis in "BNHLCD"])


def placed(step: Step, p: Endpoint, d: Endpoint, lead: int = 0) -> torch.Tensor:
    pool = torch.zeros(d.layout.shape, dtype=getattr(torch, d.layout.dtype))
    for copy in step.copies:
        place(copy, slot_of(step, filled(p), lead), pool, step.transfer.factors)
    return canonical(pool, d)


def assert_placed(p: Endpoint, d: Endpoint, values: torch.Tensor, lead: int = 0, **options) -> None:
    """Four blocks of 4 tokens of P become blocks 2 and 0, of 8 tokens, of D."""
    found = placed(one_step(p, d, 16, [2, 0], **options), p, d, lead)[[2, 0]]
    wanted = values.to(getattr(torch, d.layout.dtype)).reshape(2, 8, 2, 2, 2, 4)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@pytest.mark.parametrize("p_dtype, d_dtype", [p for p in product(DTYPES, DTYPES) if len({*p}) > 1])
def test_conversion_is_that_of_torch(p_dtype: str, d_dtype: str) -> None:
    p, d = endpoint("LBCNHD", 4, 4, p_dtype), endpoint("BHLCND", 8, 3, d_dtype)
    assert_placed(p, d, canonical(filled(p), p), convert=True)


FP8 = "float8_e4m3fn"
THEIRS, OURS = (0.5, 1.0, 300.0, 0.25), (2.0, 1.0, 0.001, 0.1)  # the third is cut off


@pytest.mark.parametrize(
    ("p", "d", "factors"),
    [
        ((FP8, THEIRS), ("float32", ()), THEIRS),
        (("float32", ()), (FP8, OURS), [1 / ours for ours in OURS]),
        (("bfloat16", ()), (FP8, (1.0,) * 4), (1.0,) * 4),
        ((FP8, THEIRS), (FP8, OURS), [a / b for a, b in zip(THEIRS, OURS, strict=True)]),
    ],
    ids=["from fp8", "to fp8", "to fp8, unscaled", "other scales"],
)
def test_elements_change_their_scale_by_layer_and_component(p: Any, d: Any, factors: Any) -> None:
    source, target = endpoint("LBCNHD", 4, 4, *p), endpoint("BHLCND", 8, 3, *d)
    values = canonical(filled(source), source).float()  # [block, N, H, L, C, D]
    scaled = values * torch.tensor(factors).view(2, 2, 1)
    if d[0] == FP8:
        scaled = scaled.clamp(-448, 448)
    assert_placed(source, target, scaled, convert=True)


def test_equal_scales_move_the_bytes_as_they_are() -> None:
    p, d = endpoint("LBCNHD", 4, 4, FP8, OURS), endpoint("BHLCND", 8, 3, FP8, OURS)
    assert one_step(p, d, 16, [2, 0]).transfer.factors is None
    assert_placed(p, d, canonical(filled(p), p))


def test_other_scales_are_refused_unless_told_to_convert() -> None:
    p, d = endpoint("LBCNHD", 4, 4, FP8, THEIRS), endpoint("BHLCND", 8, 3, FP8, OURS)
    with pytest.raises(PlanError, match=r"KV scales is.*0.001.*300.0.*--kv-convert"):
        one_step(p, d, 16, [2, 0])


@pytest.mark.parametrize("lead", [0, 2, 4, 8])
def test_a_slot_may_start_anywhere_that_suits_its_elements(lead: int) -> None:
    p, d = endpoint("LBCNHD", 4, 4, "bfloat16"), endpoint("BHLCND", 8, 3, "bfloat16")
    assert_placed(p, d, canonical(filled(p), p), lead)


@pytest.mark.parametrize(
    ("p", "d", "tokens", "blocks", "views"),
    [
        (endpoint("BHLCND", 1, 64), endpoint("BHLCND", 32, 4), 64, [1, 3], 2),  # one a block of D
        (endpoint("BHLCND", 32, 4), endpoint("BHLCND", 8, 17), 128, [*range(1, 17)], 4),
        (endpoint("BHLCND", 32, 4), endpoint("BHLCND", 8, 17), 120, [*range(1, 17)], 4),
        (endpoint("LBCNHD", 16, 8), endpoint("BHLCND", 16, 9), 128, [*range(8)], 1),
    ],
)
def test_evenly_spaced_pieces_take_one_view(
    p: Endpoint, d: Endpoint, tokens: int, blocks: list[int], views: int
) -> None:
    copies = one_step(p, d, tokens, blocks).copies
    assert sum(len(list(placing._stretches(copy))) for copy in copies) == views

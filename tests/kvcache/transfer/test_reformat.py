"""Placing staged KV: conversions, bounds, and how many copies it takes."""

from itertools import product
from typing import Any

import pytest
import torch

from kvcache.layout import KVLayout
from kvcache.transfer import reformat
from kvcache.transfer.plan import Chunk, CostModel, Endpoint, PlanError, plan_transfer

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


def one_chunk(p: Endpoint, d: Endpoint, tokens: int, d_blocks: list[int], **options) -> Chunk:
    p_blocks = list(range(p.layout.num_blocks))
    options = {"costs": STAGE, "staging_bytes": 1 << 20} | options
    plan = plan_transfer(d, [p], 2, 0, tokens, d_blocks, p_blocks, **options)
    assert plan.path == "staged"
    (chunk,) = plan.chunks
    return chunk


def filled(end: Endpoint) -> torch.Tensor:
    layout = end.layout
    count = layout.nbytes // layout.itemsize
    dtype = getattr(torch, layout.dtype)
    return torch.linspace(-3, 3, count, dtype=torch.float64).to(dtype).view(layout.shape)


def slot_of(chunk: Chunk, source: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """A slot that starts `lead` bytes into its storage, with the chunk's reads carried out."""
    slot = torch.zeros(chunk.nbytes + lead, dtype=torch.uint8)[lead:]
    lying = source.view(-1).view(torch.uint8)
    for read in chunk.reads:
        for remote, local, length in zip(
            read.remote_offsets, read.local_offsets, read.lengths, strict=True
        ):
            slot[local : local + length] = lying[remote : remote + length]
    return slot


def canonical(pool: torch.Tensor, end: Endpoint) -> torch.Tensor:
    """[block, N, H, L, C, D]"""
    return pool.permute([end.layout.order.index(axis) for axis in "BNHLCD"])


def placed(chunk: Chunk, p: Endpoint, d: Endpoint, lead: int = 0) -> torch.Tensor:
    pool = torch.zeros(d.layout.shape, dtype=getattr(torch, d.layout.dtype))
    reformat.apply(chunk, slot_of(chunk, filled(p), lead), pool)
    return canonical(pool, d)


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@pytest.mark.parametrize("p_dtype, d_dtype", [p for p in product(DTYPES, DTYPES) if len({*p}) > 1])
def test_conversion_is_that_of_torch(p_dtype: str, d_dtype: str) -> None:
    p, d = endpoint("LBCNHD", 4, 4, p_dtype), endpoint("BHLCND", 8, 3, d_dtype)
    chunk = one_chunk(p, d, 16, [2, 0], convert=True)
    expected = canonical(filled(p), p).to(getattr(torch, d_dtype)).reshape(2, 8, 2, 2, 2, 4)
    found = placed(chunk, p, d)[[2, 0]]
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


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
    chunk = one_chunk(source, target, 16, [2, 0], convert=True)
    values = canonical(filled(source), source).float()  # [block, N, H, L, C, D]
    scaled = values * torch.tensor(factors).view(2, 2, 1)
    if d[0] == FP8:
        scaled = scaled.clamp(-448, 448)
    wanted = scaled.to(getattr(torch, d[0])).float().reshape(2, 8, 2, 2, 2, 4)
    assert torch.equal(placed(chunk, source, target)[[2, 0]].float(), wanted)


def test_equal_scales_move_the_bytes_as_they_are() -> None:
    p, d = endpoint("LBCNHD", 4, 4, FP8, OURS), endpoint("BHLCND", 8, 3, FP8, OURS)
    chunk = one_chunk(p, d, 16, [2, 0])
    assert chunk.factors is None
    wanted = canonical(filled(p), p).reshape(2, 8, 2, 2, 2, 4)
    found = placed(chunk, p, d)[[2, 0]]
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_other_scales_are_refused_unless_told_to_convert() -> None:
    p, d = endpoint("LBCNHD", 4, 4, FP8, THEIRS), endpoint("BHLCND", 8, 3, FP8, OURS)
    with pytest.raises(PlanError, match=r"KV scales is.*0.001.*300.0.*--kv-convert"):
        one_chunk(p, d, 16, [2, 0])


@pytest.mark.parametrize("lead", [0, 2, 4, 8])
def test_a_slot_may_start_anywhere_that_suits_its_elements(lead: int) -> None:
    p, d = endpoint("LBCNHD", 4, 4, "bfloat16"), endpoint("BHLCND", 8, 3, "bfloat16")
    chunk = one_chunk(p, d, 16, [2, 0])
    expected = canonical(filled(p), p).reshape(2, 8, 2, 2, 2, 4)
    assert torch.equal(placed(chunk, p, d, lead)[[2, 0]], expected)


def test_small_blocks_of_the_peer_fill_a_block_in_one_move() -> None:
    p, d = endpoint("BHLCND", 1, 64), endpoint("BHLCND", 32, 3)
    (move,) = one_chunk(p, d, 64, [2, 1]).moves
    assert move.repeat == 32
    assert move.source_blocks.tolist() == [0, 32]
    assert move.target_blocks.tolist() == [2, 1]


def test_large_blocks_of_the_peer_take_one_move_where_they_are_whole() -> None:
    p, d = endpoint("BHLCND", 32, 4), endpoint("BHLCND", 8, 17)
    (move,) = one_chunk(p, d, 128, list(range(16, 0, -1))).moves
    assert (move.pieces, move.num_tokens) == (4, 8)
    assert move.target_blocks.tolist() == list(range(16, 0, -1))


def test_large_blocks_of_the_peer_take_a_move_per_part_and_not_per_token() -> None:
    p, d = endpoint("BHLCND", 32, 4), endpoint("BHLCND", 8, 17)
    chunk = one_chunk(p, d, 120, list(range(16, 0, -1)))
    assert len(chunk.moves) == 4
    assert sorted(move.source_token for move in chunk.moves) == [0, 8, 16, 24]


def test_a_slot_too_small_is_refused_before_anything_moves() -> None:
    p, d = endpoint("LBCNHD", 4, 4), endpoint("BHLCND", 8, 3)
    chunk = one_chunk(p, d, 16, [2, 0])
    pool = torch.zeros(d.layout.shape)
    with pytest.raises(PlanError, match=f"slot has {chunk.nbytes - 1} bytes"):
        reformat.apply(chunk, torch.ones(chunk.nbytes - 1, dtype=torch.uint8), pool)
    assert not pool.any()


def test_a_pool_of_another_size_is_refused() -> None:
    p, d = endpoint("LBCNHD", 4, 4), endpoint("BHLCND", 8, 3)
    chunk = one_chunk(p, d, 16, [2, 0])
    slot = torch.ones(chunk.nbytes, dtype=torch.uint8)
    with pytest.raises(PlanError, match="planned for"):
        reformat.apply(chunk, slot, torch.zeros(7))

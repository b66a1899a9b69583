"""`place`, which copies KV with torch: its conversions, and the number of its views."""

from itertools import product

import pytest
import torch

from kvcache.layout import KVLayout
from kvcache.transfer.move.place import _equally_spaced, place
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.plan.endpoint import Endpoint, PlanError
from kvcache.transfer.plan.plan import Planner


def endpoint(
    order: str,
    block_size: int,
    num_blocks: int,
    dtype: str = "float32",
    scales: tuple[float, ...] = (),
) -> Endpoint:
    return Endpoint(
        KVLayout(order, num_blocks, 2, 2, 2, block_size, 4, dtype), 0, 1, scales
    )


def transfer_of(
    p: Endpoint, d: Endpoint, tokens: int, d_blocks: list[int], convert: bool = False
) -> Transfer:
    """Returns the transfer of the first `tokens` tokens, from all blocks of P in
    order.
    """
    planner = Planner(d, [p], 2, convert=convert)
    return planner.make_transfer((0, tokens), d_blocks, range(p.layout.num_blocks))


def filled(end: Endpoint) -> torch.Tensor:
    layout = end.layout
    count = layout.nbytes // layout.itemsize
    dtype = getattr(torch, layout.dtype)
    return (
        torch.linspace(-3, 3, count, dtype=torch.float64).to(dtype).view(layout.shape)
    )


def canonical(pool: torch.Tensor, end: Endpoint) -> torch.Tensor:
    """Returns a view [block, N, H, L, C, D] of the pool."""
    return pool.permute([end.layout.order.index(axis) for axis in "BNHLCD"])


def assert_placed(
    p: Endpoint, d: Endpoint, values: torch.Tensor, lead: int = 0, convert: bool = False
) -> None:
    """Places four blocks of P (4 tokens each) into blocks 2 and 0 of D (8 tokens each).

    Args:
        lead: number of bytes in P's storage before its blocks.
    """
    source = torch.zeros(p.layout.nbytes + lead, dtype=torch.uint8)[lead:]
    source.copy_(filled(p).view(-1).view(torch.uint8))
    pool = torch.zeros(d.layout.shape, dtype=getattr(torch, d.layout.dtype))
    transfer = transfer_of(p, d, 16, [2, 0], convert)
    for copy in transfer.copies():
        memory = pool.view(-1).view(torch.uint8)
        place(copy, source, memory, transfer.scale_factors)
    expected = values.to(pool.dtype).reshape(2, 8, 2, 2, 2, 4)
    assert torch.equal(
        canonical(pool, d)[[2, 0]].view(torch.uint8), expected.view(torch.uint8)
    )


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@pytest.mark.parametrize(
    "p_dtype, d_dtype", [p for p in product(DTYPES, DTYPES) if len({*p}) > 1]
)
def test_conversion_equals_that_of_torch(p_dtype, d_dtype):
    p = endpoint("LBCNHD", 4, 4, p_dtype)
    d = endpoint("BHLCND", 8, 3, d_dtype)
    assert_placed(p, d, canonical(filled(p), p), convert=True)


FP8 = "float8_e4m3fn"
# The third factor (P's scale / D's scale) exceeds the range of FP8.
P_SCALES = (0.5, 1.0, 300.0, 0.25)
D_SCALES = (2.0, 1.0, 0.001, 0.1)


@pytest.mark.parametrize(
    ("p", "d", "factors"),
    [
        ((FP8, P_SCALES), ("float32", ()), P_SCALES),
        (("float32", ()), (FP8, D_SCALES), [1 / ours for ours in D_SCALES]),
        (("bfloat16", ()), (FP8, (1.0,) * 4), (1.0,) * 4),
        (
            (FP8, P_SCALES),
            (FP8, D_SCALES),
            [a / b for a, b in zip(P_SCALES, D_SCALES, strict=True)],
        ),
    ],
    ids=["from fp8", "to fp8", "to fp8, unscaled", "other scales"],
)
def test_elements_change_their_scale_by_layer_and_component(p, d, factors):
    source = endpoint("LBCNHD", 4, 4, *p)
    target = endpoint("BHLCND", 8, 3, *d)
    values = canonical(filled(source), source).float()  # [block, N, H, L, C, D]
    scaled = values * torch.tensor(factors).view(2, 2, 1)
    if d[0] == FP8:
        scaled = scaled.clamp(-448, 448)
    assert_placed(source, target, scaled, convert=True)


def test_equal_scales_keep_the_bytes_and_other_scales_need_convert():
    p = endpoint("LBCNHD", 4, 4, FP8, D_SCALES)
    d = endpoint("BHLCND", 8, 3, FP8, D_SCALES)
    assert transfer_of(p, d, 16, [2, 0]).scale_factors is None
    assert_placed(p, d, canonical(filled(p), p))
    with pytest.raises(PlanError, match=r"KV scales is.*0.001.*300.0.*--kv-convert"):
        transfer_of(endpoint("LBCNHD", 4, 4, FP8, P_SCALES), d, 16, [2, 0])


@pytest.mark.parametrize("lead", [0, 2, 4, 8])
def test_source_may_start_at_any_multiple_of_its_elements(lead):
    p = endpoint("LBCNHD", 4, 4, "bfloat16")
    d = endpoint("BHLCND", 8, 3, "bfloat16")
    assert_placed(p, d, canonical(filled(p), p), lead)


@pytest.mark.parametrize(
    ("p", "d", "tokens", "blocks", "views"),
    [
        # Pieces are evenly spaced only within a block of the side with larger blocks.
        (endpoint("BHLCND", 1, 64), endpoint("BHLCND", 32, 4), 64, [1, 3], 2),
        (endpoint("BHLCND", 32, 4), endpoint("BHLCND", 8, 17), 128, [*range(1, 17)], 4),
        (endpoint("BHLCND", 32, 4), endpoint("BHLCND", 8, 17), 120, [*range(1, 17)], 4),
        # With blocks of equal size, all pieces are evenly spaced.
        (endpoint("LBCNHD", 16, 8), endpoint("BHLCND", 16, 9), 128, [*range(8)], 1),
    ],
)
def test_evenly_spaced_pieces_share_a_view(p, d, tokens, blocks, views):
    copies = transfer_of(p, d, tokens, blocks).copies()
    assert sum(len(list(_equally_spaced(copy))) for copy in copies) == views

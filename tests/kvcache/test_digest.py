"""The digest of KV is the same wherever the KV lies, and any wrong bit changes it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcache.pool import KVPool
from kvcache.verify.digest import Digester
from kvcache.verify.scope import DigestPart, Scope
from tests.rigs.geometry import Case, Side, cases, with_dtypes

DTYPES = "float32", "bfloat16", "float8_e4m3fn"


@st.composite
def scopes(draw: Any, case: Case) -> Scope:
    lease_id = f"{draw(st.integers(0, 2**64)):032x}"
    return Scope(
        lease_id, case.start, case.stop, draw(st.booleans()), draw(st.integers(1, 64))
    )


@st.composite
def scoped(draw: Any) -> tuple[Case, Scope]:
    case = draw(cases().filter(lambda case: case.start < case.stop))
    case = with_dtypes(case, *[draw(st.sampled_from(DTYPES))] * 2)
    return case, draw(scopes(case))


def element_bytes(pool: KVPool) -> torch.Tensor:
    """[B, H, L, C, N, bytes of D], into the pool."""
    layout = pool.layout
    shape = (*layout.shape[:-1], layout.head_dim * layout.itemsize)
    return pool.flat_bytes.view(shape).permute(
        [layout.order.index(axis) for axis in "BHLCND"]
    )


def pools_of(case: Case, side: Side, seed: int) -> list[KVPool]:
    """An engine with the case's KV, by head and token of the model, and garbage around it."""
    nbytes = case.head_dim * case.layout(side, 0).itemsize
    shape = case.stop, case.heads, case.layers, case.components, nbytes
    kv = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    pools, around = [], np.random.default_rng(seed)
    for rank in range(side.tp):
        pool = KVPool(case.layout(side, rank))
        pool.flat_bytes.copy_(
            torch.from_numpy(around.integers(0, 256, pool.nbytes, np.uint8))
        )
        tokens, heads = (
            torch.from_numpy(kept(case, side, rank)),
            side.heads(rank, case.heads),
        )
        blocks = torch.tensor(side.blocks)[tokens // side.tokens_per_block]
        within = tokens % side.block_size
        wanted = kv[tokens, heads.start : heads.stop]
        element_bytes(pool)[blocks, :, :, :, within] = wanted
        pools.append(pool)
    return pools


def kept(case: Case, side: Side, rank: int) -> np.ndarray:
    return side.kept(rank, np.arange(case.start, case.stop))


def parts_of(
    case: Case, side: Side, pools: list[KVPool], scope: Scope, piece_bytes: int = 1000
) -> list[DigestPart]:
    return [
        part_of(Digester(end, case.heads, pool), scope, side.blocks, piece_bytes)
        for end, pool in zip(case.endpoints(side), pools, strict=True)
    ]


def part_of(
    digester: Digester, scope: Scope, blocks: Sequence[int], piece_bytes: int
) -> DigestPart:
    parts: list[DigestPart | None] = []
    digester.piece_bytes = piece_bytes
    digester.begin("", scope, blocks, parts.append)
    while digester.is_busy:
        digester.drive()
    (part,) = parts
    assert part is not None
    return part


@given(scoped(), st.integers(1, 5000))
def test_engines_that_hold_the_same_agree_whatever_their_geometries(
    scoped, piece_bytes
):
    """Orders, TP, DCP, copies of heads, blocks, and what lies in the rest of them."""
    case, scope = scoped
    told = scope.merged(
        parts_of(case, case.p, pools_of(case, case.p, 1), scope), case.heads
    )
    ours = parts_of(case, case.d, pools_of(case, case.d, 2), scope, piece_bytes)
    assert scope.faults(ours, told) == ""
    assert len(told) == 8 * case.heads * len(scope.chunks)


def flip(case: Case, side: Side, rank: int, pool: KVPool, draw: Any) -> tuple[int, int]:
    """One bit of what the rank holds; returns the token and the head of the model."""
    token = int(draw(st.sampled_from(kept(case, side, rank).tolist())))
    heads = side.heads(rank, case.heads)
    head = draw(st.sampled_from(heads))
    block, within = side.blocks[token // side.tokens_per_block], token % side.block_size
    row = element_bytes(pool)[block, head - heads.start, :, :, within]  # [L, C, bytes]
    at = tuple(draw(st.integers(0, size - 1)) for size in row.shape)
    row[at] ^= 1 << draw(st.integers(0, 7))
    return token, head


@given(scoped(), st.data())
def test_any_wrong_bit_is_found_and_its_tokens_are_named(scoped, data):
    """On whichever rank, a copy's among them. Two that would cancel out in a plain sum as well."""
    case, scope = scoped
    scope = replace(scope, samples=False)
    holders = [rank for rank in range(case.d.tp) if len(kept(case, case.d, rank))]
    assume(holders)
    told = scope.merged(
        parts_of(case, case.p, pools_of(case, case.p, 1), scope), case.heads
    )
    pools = pools_of(case, case.d, 2)
    rank = data.draw(st.sampled_from(holders))
    before = pools[rank].flat_bytes.clone()
    wrong = [flip(case, case.d, rank, pools[rank], data.draw) for _ in range(2)]
    assume(not torch.equal(pools[rank].flat_bytes, before))  # the same one twice
    found = scope.faults(parts_of(case, case.d, pools, scope), told)
    chunks = {token // scope.chunk_tokens * scope.chunk_tokens for token, _ in wrong}
    start, stop = (
        max(min(chunks), case.start),
        min(max(chunks) + scope.chunk_tokens, case.stop),
    )
    heads = ", ".join(map(str, sorted({head for _, head in wrong})))
    if wrong[0] != wrong[1]:
        assert found == f"tokens {start} to {stop - 1} in KV heads {heads}"
    assert found


@given(scoped(), st.data())
def test_a_sample_finds_every_token_that_is_another(scoped, data):
    """As where a block is wrong, stale or was never written."""
    case, scope = scoped
    scope = replace(scope, samples=True)
    holders = [rank for rank in range(case.d.tp) if len(kept(case, case.d, rank))]
    assume(holders)
    told = scope.merged(
        parts_of(case, case.p, pools_of(case, case.p, 1), scope), case.heads
    )
    pools = pools_of(case, case.d, 2)
    rank = data.draw(st.sampled_from(holders))
    token = data.draw(st.sampled_from(kept(case, case.d, rank).tolist()))
    block = case.d.blocks[token // case.d.tokens_per_block]
    element_bytes(pools[rank])[block, :, :, :, token % case.d.block_size] ^= 0x55
    assert scope.faults(parts_of(case, case.d, pools, scope), told)


def test_samples_of_many_leases_leave_no_layer_out():
    samples = [
        Scope(f"{lease}", 300, 1000, samples=True).layers(40) for lease in range(200)
    ]
    for seen in np.stack(samples, axis=1):  # of one chunk: [leases, layers]
        assert seen.shape[1] == 3 and set(seen.flat) == set(range(40))
    assert len({sample.tobytes() for sample in samples}) == 200

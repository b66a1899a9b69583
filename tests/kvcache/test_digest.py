"""The digest of KV does not depend on the layout, and any wrong bit changes it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcache.groups import KVGroups
from kvcache.pool import KVPool
from kvcache.verify import digest
from kvcache.verify.digest import Digester
from kvcache.verify.scope import DigestPart, Scope
from tests.rigs.geometry import Case, Side, cases, with_dtypes

DTYPES = "float32", "bfloat16", "float8_e4m3fn"


@st.composite
def scopes(draw: Any, case: Case) -> Scope:
    return Scope(
        lease_id=f"{draw(st.integers(0, 2**64)):032x}",
        start=case.start,
        stop=case.stop,
        is_sample=draw(st.booleans()),
        chunk_tokens=draw(st.integers(1, 64)),
    )


@st.composite
def scoped_cases(draw: Any) -> tuple[Case, Scope]:
    case = draw(cases().filter(lambda case: case.start < case.stop))
    case = with_dtypes(case, *[draw(st.sampled_from(DTYPES))] * 2)
    return case, draw(scopes(case))


def element_bytes(pool: KVPool) -> torch.Tensor:
    """Returns a view [B, H, L, C, N, bytes of D] of the pool."""
    layout = pool.layout
    shape = (*layout.shape[:-1], layout.head_dim * layout.itemsize)
    axes = [layout.order.index(axis) for axis in "BHLCND"]
    return pool.flat_bytes.view(shape).permute(axes)


def pools_of(case: Case, side: Side, seed: int) -> list[KVPool]:
    """Returns an engine's pools with the KV of the case. All other bytes are random.

    The KV is the same for every side, rank and seed. `seed` determines only the random
    bytes.
    """
    row_bytes = case.head_dim * case.layout(side, 0).itemsize
    shape = (case.stop, case.heads, case.layers, case.components, row_bytes)
    kv = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    rng = np.random.default_rng(seed)
    pools = []
    for rank in range(side.tp):
        pool = KVPool(case.layout(side, rank))
        noise = rng.integers(0, 256, pool.nbytes, np.uint8)
        pool.flat_bytes.copy_(torch.from_numpy(noise))
        tokens = torch.from_numpy(local_tokens(case, side, rank))
        heads = side.heads(rank, case.heads)
        blocks = torch.tensor(side.blocks)[tokens // side.tokens_per_block]
        offsets = tokens % side.block_size
        rows = kv[tokens, heads.start : heads.stop]
        element_bytes(pool)[blocks, :, :, :, offsets] = rows
        pools.append(pool)
    return pools


def local_tokens(case: Case, side: Side, rank: int) -> np.ndarray:
    """Returns the tokens of the case that a rank stores."""
    return side.stored_tokens(rank, np.arange(case.start, case.stop))


def ranks_with_tokens(case: Case, side: Side) -> list[int]:
    return [rank for rank in range(side.tp) if len(local_tokens(case, side, rank))]


def parts_of(
    case: Case, side: Side, pools: list[KVPool], scope: Scope, piece_bytes: int = 1000
) -> list[DigestPart]:
    return [
        part_of(Digester(endpoint, case.heads, pool), scope, side.blocks, piece_bytes)
        for endpoint, pool in zip(case.endpoints(side), pools, strict=True)
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


def prefill_digest(case: Case, scope: Scope) -> bytes:
    parts = parts_of(case, case.p, pools_of(case, case.p, 1), scope)
    return scope.merge(parts, case.heads)


@given(scoped_cases(), st.integers(1, 5000))
def test_engines_with_equal_kv_and_different_geometries_compute_equal_digests(
    scoped_case, piece_bytes
):
    """The engines may differ in axis order, TP, DCP, replicated heads, block size, and
    the content of blocks without the case's KV.
    """
    case, scope = scoped_case
    expected = prefill_digest(case, scope)
    pools = pools_of(case, case.d, 2)
    parts = parts_of(case, case.d, pools, scope, piece_bytes)
    assert scope.differences(parts, expected) == ""
    assert len(expected) == 8 * case.heads * len(scope.chunks)


def flip_bit(
    case: Case, side: Side, rank: int, pool: KVPool, draw: Any
) -> tuple[int, int]:
    """Flips one bit of the rank's KV. Returns the bit's token, and its head (an index
    into all heads of the model).
    """
    token = int(draw(st.sampled_from(local_tokens(case, side, rank).tolist())))
    heads = side.heads(rank, case.heads)
    head = draw(st.sampled_from(heads))
    block = side.blocks[token // side.tokens_per_block]
    offset = token % side.block_size
    # [L, C, bytes]
    row = element_bytes(pool)[block, head - heads.start, :, :, offset]
    position = tuple(draw(st.integers(0, size - 1)) for size in row.shape)
    row[position] ^= 1 << draw(st.integers(0, 7))
    return token, head


@given(scoped_cases(), st.data())
def test_differences_name_the_tokens_and_heads_of_wrong_bits(scoped_case, data):
    """Two bits are flipped on one rank. Other ranks may have copies of its heads.

    The digest is a keyed sum, because in a plain sum the two bits might cancel out.
    """
    case, scope = scoped_case
    scope = replace(scope, is_sample=False)
    ranks = ranks_with_tokens(case, case.d)
    assume(ranks)
    expected = prefill_digest(case, scope)
    pools = pools_of(case, case.d, 2)
    rank = data.draw(st.sampled_from(ranks))
    before = pools[rank].flat_bytes.clone()
    flipped = [flip_bit(case, case.d, rank, pools[rank], data.draw) for _ in range(2)]
    # Skip the example if the same bit was flipped twice.
    assume(not torch.equal(pools[rank].flat_bytes, before))
    parts = parts_of(case, case.d, pools, scope)
    differences = scope.differences(parts, expected)
    size = scope.chunk_tokens
    chunk_starts = [token // size * size for token, _ in flipped]
    start = max(min(chunk_starts), case.start)
    stop = min(max(chunk_starts) + size, case.stop)
    heads = ", ".join(map(str, sorted({head for _, head in flipped})))
    if flipped[0] != flipped[1]:
        assert differences == f"tokens {start} to {stop - 1} in KV heads {heads}"
    assert differences


@given(scoped_cases(), st.data())
def test_digest_of_sampled_layers_detects_every_wrong_token(scoped_case, data):
    """A sample of layers is enough, because a wrong, stale or missing block has wrong
    bytes in all heads and layers.
    """
    case, scope = scoped_case
    scope = replace(scope, is_sample=True)
    ranks = ranks_with_tokens(case, case.d)
    assume(ranks)
    expected = prefill_digest(case, scope)
    pools = pools_of(case, case.d, 2)
    rank = data.draw(st.sampled_from(ranks))
    tokens = local_tokens(case, case.d, rank).tolist()
    token = data.draw(st.sampled_from(tokens))
    block = case.d.blocks[token // case.d.tokens_per_block]
    offset = token % case.d.block_size
    element_bytes(pools[rank])[block, :, :, :, offset] ^= 0x55
    assert scope.differences(parts_of(case, case.d, pools, scope), expected)


def test_samples_of_many_leases_cover_all_layers():
    samples = [
        Scope(f"{lease}", 300, 1000, is_sample=True).layers(40) for lease in range(200)
    ]
    # `layers` is [leases, sampled layers] of one chunk of tokens.
    for layers in np.stack(samples, axis=1):
        assert layers.shape[1] == 3
        assert set(layers.flat) == set(range(40))
    assert len({sample.tobytes() for sample in samples}) == 200


def test_warm_up_of_the_kernel_covers_models_with_windows(monkeypatch, caplog):
    """If a warm-up launch failed, torch would compute all digests without an error."""
    side = Side(1, "BLCNHD", 4, (0, 1), 2)
    case = Case(
        side, side, heads=2, layers=1, components=2, head_dim=8, start=0, stop=8
    )
    (endpoint,) = case.endpoints(side)
    endpoint = dataclasses.replace(endpoint, groups=KVGroups((None, 4)))
    launched = []

    def kernel(*args: Any) -> torch.Tensor:
        launched.append(args)
        return digest._values(*args)

    monkeypatch.setattr(digest, "_values_by_kernel", kernel)
    digester = Digester(endpoint, case.heads, KVPool(endpoint.layout))
    digester._compile()
    assert len(launched) == endpoint.groups.count
    assert digester.values is kernel
    assert not caplog.records

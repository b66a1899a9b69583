"""Plans, executed by plain copies over memory in which every element names itself."""

import dataclasses
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.layout import KVLayout
from kvcache.transfer import reformat
from kvcache.transfer.plan import (
    DEFAULT_COSTS,
    CostModel,
    Endpoint,
    PlanError,
    TransferPlan,
    heads_of,
    plan_transfer,
)

ORDERS = ["".join(axes) + "D" for axes in permutations("BHLCN")]
COSTS = DEFAULT_COSTS["cpu"]
GARBAGE = -7.0
NUMPY = {"float32": np.float32, "float16": np.float16}


@dataclass(frozen=True)
class Side:
    """One engine: a geometry, a block table, and (tp, elements) maps of where things lie."""

    tp: int
    order: str
    block_size: int
    blocks: tuple[int, ...]
    num_blocks: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Case:
    p: Side
    d: Side
    heads: int
    layers: int
    components: int
    head_dim: int
    start: int
    stop: int
    lease_hash: int = 0

    def endpoints(self, side: Side) -> list[Endpoint]:
        return [Endpoint(self.layout(side, rank), rank, side.tp) for rank in range(side.tp)]

    def layout(self, side: Side, rank: int) -> KVLayout:
        return KVLayout(
            order=side.order,
            num_blocks=side.num_blocks,
            num_heads=len(heads_of(rank, side.tp, self.heads)),
            num_layers=self.layers,
            num_components=self.components,
            block_size=side.block_size,
            head_dim=self.head_dim,
            dtype=side.dtype,
        )

    def plan(self, d_rank: int, **options) -> TransferPlan:
        options = {"costs": COSTS, "lease_hash": self.lease_hash} | options
        return plan_transfer(
            self.endpoints(self.d)[d_rank],
            self.endpoints(self.p),
            self.heads,
            self.start,
            self.stop,
            self.d.blocks,
            self.p.blocks,
            **options,
        )


def element_map(case: Case, side: Side, rank: int, tokens: np.ndarray) -> np.ndarray:
    """Element offset of [head on the rank, layer, component, token, dim], by indexing an arange."""
    layout = case.layout(side, rank)
    where = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    where = where.transpose([layout.order.index(axis) for axis in "BHLCND"])
    blocks = np.array(side.blocks, int)[tokens // side.block_size]
    # Two index arrays with slices between: their axis comes first.
    picked = where[blocks, :, :, :, tokens % side.block_size, :]
    return picked.transpose(1, 2, 3, 0, 4)


def codes(case: Case, heads: range, tokens: np.ndarray) -> np.ndarray:
    """A different number for each (head of the model, layer, component, token, dim).

    Where 16 bits must hold it the numbers repeat, but with a period that no stride has.
    """
    shape = (case.heads, case.layers, case.components, case.stop, case.head_dim)
    assert np.prod(shape) < 2**24
    numbers = np.arange(np.prod(shape)).reshape(shape)[heads.start : heads.stop, :, :, tokens, :]
    return numbers if case.p.dtype == case.d.dtype == "float32" else numbers % 2039


def garbage(case: Case, side: Side, rank: int) -> np.ndarray:
    layout = case.layout(side, rank)
    return np.full(layout.nbytes // layout.itemsize, GARBAGE, NUMPY[layout.dtype])


def memory_of(case: Case, side: Side, rank: int, start: int = 0) -> np.ndarray:
    """The rank's pool with tokens [start, stop) in it; garbage everywhere else."""
    memory = garbage(case, side, rank)
    tokens = np.arange(start, case.stop)
    heads = heads_of(rank, side.tp, case.heads)
    memory[element_map(case, side, rank, tokens)] = codes(case, heads, tokens)
    return memory


def execute_reads(reads, sources: list[np.ndarray], into: np.ndarray) -> None:
    target = into.view(np.uint8)
    for read in reads:
        source = sources[read.remote_rank].view(np.uint8)
        for remote, local, length in zip(
            read.remote_offsets, read.local_offsets, read.lengths, strict=True
        ):
            assert remote >= 0 and local >= 0 and length > 0
            assert remote + length <= len(source) and local + length <= len(target)
            target[local : local + length] = source[remote : remote + length]


def owner_of(case: Case, d_rank: int, head: int, tokens: np.ndarray) -> np.ndarray:
    owners = [r for r in range(case.p.tp) if head in heads_of(r, case.p.tp, case.heads)]
    turns = (d_rank + case.lease_hash + tokens // case.p.block_size) % len(owners)
    return np.array(owners)[turns]


def fewest_descriptors(case: Case, d_rank: int) -> int:
    """Brute force: pairs every element with its source, counts where both sides stop being next."""
    tokens = np.arange(case.start, case.stop)
    d_heads = heads_of(d_rank, case.d.tp, case.heads)
    local = element_map(case, case.d, d_rank, tokens)
    owner = np.stack([owner_of(case, d_rank, head, tokens) for head in d_heads])
    count = 0
    for rank in range(case.p.tp):
        p_heads = heads_of(rank, case.p.tp, case.heads)
        shared = [h for h in d_heads if h in p_heads]
        if not shared:
            continue
        theirs = element_map(case, case.p, rank, tokens)[[h - p_heads.start for h in shared]]
        ours = local[[h - d_heads.start for h in shared]]
        mine = owner[[h - d_heads.start for h in shared]] == rank
        mine = np.broadcast_to(mine[:, None, None, :, None], ours.shape)
        ours, theirs = ours[mine], theirs[mine]
        if len(ours):
            order = np.argsort(ours)
            joined = (np.diff(ours[order]) == 1) & (np.diff(theirs[order]) == 1)
            count += len(ours) - int(joined.sum())
    return count


@st.composite
def block_tables(draw, block_size: int, tokens: int) -> tuple[tuple[int, ...], int]:
    """A scattered, contiguous or mixed table, in a pool that may have room to spare."""
    needed = -(-tokens // block_size)
    num_blocks = needed + draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.permutation(num_blocks)[:needed]
    kind = draw(st.sampled_from(["scattered", "ascending", "mixed"]))
    if kind == "ascending":
        ids = np.sort(ids)
    elif kind == "mixed":
        ids = np.concatenate((np.sort(ids[: needed // 2]), ids[needed // 2 :]))
    return tuple(int(block) for block in ids), num_blocks


@st.composite
def sides(draw, tokens: int) -> Side:
    size = draw(st.one_of(st.sampled_from([1, 8, 16, 24, 64]), st.integers(1, 64)))
    blocks, num_blocks = draw(block_tables(size, tokens))
    return Side(draw(st.integers(1, 8)), draw(st.sampled_from(ORDERS)), size, blocks, num_blocks)


@st.composite
def cases(draw) -> Case:
    tokens = draw(st.integers(1, 130))
    p, d = draw(sides(tokens)), draw(sides(tokens))
    if draw(st.integers(0, 2)) == 0:  # geometries often agree in something
        d = dataclasses.replace(d, order=p.order)
    if draw(st.integers(0, 2)) == 0:
        blocks, num_blocks = draw(block_tables(p.block_size, tokens))
        d = dataclasses.replace(d, block_size=p.block_size, blocks=blocks, num_blocks=num_blocks)
    return Case(
        p,
        d,
        heads=draw(st.integers(1, 16)),
        layers=draw(st.integers(1, 3)),
        components=draw(st.integers(1, 2)),
        head_dim=draw(st.integers(1, 3)),
        start=draw(st.integers(0, tokens)),
        stop=tokens,
        lease_hash=draw(st.integers(0, 9)),
    )


def check_direct(case: Case, d_rank: int) -> None:
    plan = case.plan(d_rank)
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    into = garbage(case, case.d, d_rank)
    execute_reads(plan.reads, sources, into)
    np.testing.assert_array_equal(into, memory_of(case, case.d, d_rank, case.start))
    assert plan.descriptors == sum(len(read.lengths) for read in plan.reads)
    assert plan.descriptors == fewest_descriptors(case, d_rank)
    moved = sum(int(read.lengths.sum()) for read in plan.reads)
    assert moved == plan.bytes_read == plan.useful_bytes


PROPERTY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=600)


@PROPERTY
@given(cases(), st.integers(0, 7))
def test_direct_plans_are_exact_and_minimal(case: Case, d_rank: int) -> None:
    check_direct(case, d_rank % case.d.tp)


def leased_bytes(case: Case, rank: int) -> np.ndarray:
    layout = case.layout(case.p, rank)
    where = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    leased = np.zeros(where.size, bool)
    leased[np.moveaxis(where, layout.order.index("B"), 0)[list(case.p.blocks)]] = True
    return np.repeat(leased, layout.itemsize)


def check_staged(case: Case, d_rank: int, staging_blocks: int) -> str:
    block_bytes = max(case.layout(case.p, rank).block_bytes for rank in range(case.p.tp))
    staging = staging_blocks * (block_bytes + 64) * 2 * case.p.tp
    costs = CostModel(1e-3, 1e12, 1e15)  # every descriptor hurts
    plan = case.plan(d_rank, costs=costs, staging_bytes=staging, convert=True, allow_mixed=True)
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    into = garbage(case, case.d, d_rank)
    execute_reads(plan.reads, sources, into)
    layout = case.layout(case.d, d_rank)
    pool = torch.from_numpy(into).view(layout.shape)
    for chunk in plan.chunks:
        assert chunk.nbytes <= staging // 2
        slot = np.full(chunk.nbytes, 0xEE, np.uint8)
        execute_reads(chunk.reads, sources, slot)
        reformat.apply(chunk, torch.from_numpy(slot), pool)
    np.testing.assert_array_equal(into, memory_of(case, case.d, d_rank, case.start))
    reads = [*plan.reads, *(read for chunk in plan.chunks for read in chunk.reads)]
    assert plan.descriptors == sum(len(read.lengths) for read in reads)
    assert plan.bytes_read == sum(int(read.lengths.sum()) for read in reads)
    for read in reads:
        leased = leased_bytes(case, read.remote_rank)
        for first, length in zip(read.remote_offsets, read.lengths, strict=True):
            assert leased[first : first + length].all()
    return plan.path


DTYPES = st.sampled_from([("float32",) * 2, ("float32", "float16"), ("float16", "float32")])


def with_dtypes(case: Case, p_dtype: str, d_dtype: str) -> Case:
    p, d = (dataclasses.replace(s, dtype=t) for s, t in ((case.p, p_dtype), (case.d, d_dtype)))
    return dataclasses.replace(case, p=p, d=d)


@PROPERTY
@given(cases(), st.integers(0, 7), st.integers(1, 6), DTYPES)
def test_staged_plans_are_exact_and_stay_in_the_lease(case, d_rank, staging_blocks, dtypes) -> None:
    case = with_dtypes(case, *dtypes)
    path = check_staged(case, d_rank % case.d.tp, staging_blocks)
    if case.start < case.stop and dtypes[0] != dtypes[1]:
        assert path == "staged"


@pytest.mark.slow
@settings(PROPERTY, max_examples=10_000)
@given(cases(), st.integers(0, 7), st.integers(1, 6), DTYPES)
def test_staged_plans_are_exact_in_many_draws(case, d_rank, staging_blocks, dtypes) -> None:
    check_staged(with_dtypes(case, *dtypes), d_rank % case.d.tp, staging_blocks)


@pytest.mark.slow
@settings(PROPERTY, max_examples=10_000)
@given(cases(), st.integers(0, 7))
def test_direct_plans_are_exact_and_minimal_in_many_draws(case: Case, d_rank: int) -> None:
    check_direct(case, d_rank % case.d.tp)


def simple(p: Side, d: Side, **changes) -> Case:
    fields = {"heads": 8, "layers": 2, "components": 2, "head_dim": 4, "start": 0, "stop": 128}
    return Case(p, d, **(fields | changes))


def side(tp: int, block_size: int = 16, order: str = "BHLCND", tokens: int = 128) -> Side:
    """Blocks in descending order."""
    count = -(-tokens // block_size)
    return Side(tp, order, block_size, tuple(range(count, 0, -1)), count + 1)


def scattered(of: Side) -> Side:
    """Blocks in steps of two: against descending ones no two neighbours stay together."""
    count = len(of.blocks)
    return dataclasses.replace(of, blocks=(*range(2, count + 1, 2), *range(1, count + 1, 2)))


@pytest.mark.parametrize("p_tp, d_tp", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("stop", [128, 121, 3])
def test_the_default_layout_takes_one_descriptor_per_block_and_pair(p_tp, d_tp, stop) -> None:
    case = simple(side(p_tp, tokens=stop), scattered(side(d_tp, tokens=stop)), stop=stop)
    for d_rank in range(d_tp):
        # With memory to stage a last block that is only partly wanted, it is one as well.
        plan = case.plan(d_rank, staging_bytes=1 << 20, allow_mixed=True)
        pairs = max(p_tp // d_tp, 1)
        assert plan.descriptors == -(-stop // 16) * pairs
        assert plan.path == ("direct" if stop == 128 else "mixed" if stop == 121 else "staged")


def test_consecutive_blocks_of_one_geometry_are_one_read() -> None:
    same = Side(1, "BHLCND", 16, tuple(range(1, 9)), 9)
    plan = simple(same, same).plan(0, staging_bytes=1 << 20)
    assert (plan.path, plan.descriptors) == ("direct", 1)


def test_a_latent_is_read_once_by_each_rank_and_striped_over_its_copies() -> None:
    case = simple(side(4), side(2), heads=1, components=1)
    for d_rank in range(2):
        plan = case.plan(d_rank)
        assert plan.bytes_read == 128 * 2 * 4 * 4
        assert [read.remote_rank for read in plan.reads] == [0, 1, 2, 3]
        assert [len(read.lengths) for read in plan.reads] == [2, 2, 2, 2]


def test_copies_of_heads_on_both_sides_are_read_once() -> None:
    case = simple(side(8), side(4), heads=2)
    for d_rank in range(4):
        plan = case.plan(d_rank)
        assert plan.bytes_read == plan.useful_bytes == 128 * 2 * 2 * 4 * 4
        own = range(4) if d_rank < 2 else range(4, 8)
        assert {read.remote_rank for read in plan.reads} == set(own)


def test_nothing_to_read_is_an_empty_plan() -> None:
    plan = simple(side(1), side(2), start=128).plan(1, staging_bytes=1 << 20)
    assert (plan.reads, plan.chunks, plan.descriptors, plan.bytes_read) == ((), (), 0, 0)


def test_chunks_fit_half_the_staging_memory_and_end_on_blocks_of_both_sides() -> None:
    case = simple(side(1, 16), side(1, 24, tokens=144), stop=128)
    plan = case.plan(0, staging_bytes=2 * 3 * 16 * 8 * 2 * 2 * 4 * 4)
    assert plan.path == "staged" and len(plan.chunks) == 3
    written = [
        {int(block) for move in chunk.moves for block in move.target_blocks}
        for chunk in plan.chunks
    ]
    assert not any(a & b for i, a in enumerate(written) for b in written[:i])


def test_the_cheaper_path_wins_and_why_names_the_other() -> None:
    case = simple(side(1, 16), side(1, 64))
    descriptors_cost = case.plan(0, costs=CostModel(1.0, 1e9, 1e9), staging_bytes=1 << 20)
    bytes_cost = case.plan(0, costs=CostModel(1e-12, 1e9, 1e3), staging_bytes=1 << 20)
    assert (descriptors_cost.path, bytes_cost.path) == ("staged", "direct")
    assert "direct would read 256 runs" in descriptors_cost.why
    assert "staged would read" in bytes_cost.why


def test_staging_memory_below_two_blocks_is_refused_with_both_sizes() -> None:
    case = simple(side(1, 16), side(1, 64))
    block = 16 * 8 * 2 * 2 * 4 * 4
    with pytest.raises(PlanError, match=rf"staging_bytes is {2 * block - 1}; .* {block} bytes"):
        case.plan(0, staging_bytes=2 * block - 1)
    assert case.plan(0, staging_bytes=2 * block).path == "staged"


def test_unequal_dtypes_need_leave_and_staging_memory() -> None:
    case = with_dtypes(simple(side(1), side(1)), "float32", "float16")
    with pytest.raises(PlanError, match="float16 here and float32 on the peer"):
        case.plan(0, staging_bytes=1 << 20)
    with pytest.raises(PlanError, match="staging_bytes is None"):
        case.plan(0, convert=True)
    assert case.plan(0, convert=True, staging_bytes=1 << 20).path == "staged"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"blocks": (1, 2, 3, 4, 5, 6, 7)}, "has 7 blocks of 16 tokens; 128 tokens need 8"),
        ({"blocks": (1, 2, 3, 4, 5, 6, 7, 9)}, "names block 9; the pool has blocks 0 to 8"),
        ({"blocks": (1, 2, 3, 4, 5, 6, 7, -1)}, "names block -1"),
    ],
)
@pytest.mark.parametrize("which", ["p", "d"])
def test_block_tables_that_do_not_fit_are_refused(which, changes, message) -> None:
    case = simple(side(1), side(1))
    changed = dataclasses.replace(getattr(case, which), **changes)
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(case, **{which: changed}).plan(0)


def test_writing_one_block_twice_is_refused() -> None:
    case = simple(side(1), dataclasses.replace(side(1), blocks=(1, 2, 3, 4, 5, 6, 7, 3)))
    with pytest.raises(PlanError, match="local_block_ids names block 3 twice"):
        case.plan(0)


@pytest.mark.parametrize("start, stop", [(-1, 4), (5, 4)])
def test_a_token_range_that_is_none_is_refused(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match=rf"token range is \[{start}, {stop}\)"):
        simple(side(1), side(1), start=start, stop=stop).plan(0)

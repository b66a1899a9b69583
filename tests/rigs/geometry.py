"""Random pairs of KV geometries, and the expected transfers, computed by brute force.

Every element of P's KV has a unique value, so that a test detects misplaced elements.
"""

import dataclasses
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kvcache.layout import MAX_BLOCK_SIZE_TOKENS, KVLayout
from kvcache.transfer.agent import ReadState
from kvcache.transfer.move.place import place
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, heads_of
from kvcache.transfer.plan.plan import Planner, TransferPlan
from tests.rigs.memory_agent import MemoryAgent

ORDERS = ["".join(axes) + "D" for axes in permutations("BHLCN")]
COSTS = DEFAULT_COSTS["cpu"]
STAGE_ALL = CostModel(1e-3, 1e12, 1e15)  # makes direct READs too expensive
GARBAGE = -7.0
NUMPY = {"float32": np.float32, "float16": np.float16}


@dataclass(frozen=True)
class Side:
    """The geometry and the block table of one engine.

    Attributes:
        scales: scales of the engine's KV, if the dtype has scales.
        dcp: number of ranks that share tokens. A block of the table is then one block
            on each of these ranks.
    """

    tp: int
    order: str
    block_size: int
    blocks: tuple[int, ...]
    num_blocks: int
    dtype: str = "float32"
    scales: tuple[float, ...] = ()
    dcp: int = 1

    @property
    def tokens_per_block(self) -> int:
        return self.block_size * self.dcp

    def heads(self, rank: int, total: int) -> range:
        return heads_of(rank // self.dcp, self.tp // self.dcp, total)

    def stored_tokens(self, rank: int, tokens: np.ndarray) -> np.ndarray:
        """Return those of the tokens that the rank stores."""
        return tokens[tokens // self.block_size % self.dcp == rank % self.dcp]


@dataclass(frozen=True)
class Case:
    """A transfer of tokens [start, stop) from P to D."""

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
        return [
            Endpoint(self.layout(side, rank), rank, side.tp, side.scales, side.dcp)
            for rank in range(side.tp)
        ]

    def layout(self, side: Side, rank: int) -> KVLayout:
        return KVLayout(
            order=side.order,
            num_blocks=side.num_blocks,
            num_heads=len(side.heads(rank, self.heads)),
            num_layers=self.layers,
            num_components=self.components,
            block_size=side.block_size,
            head_dim=self.head_dim,
            dtype=side.dtype,
        )

    def planner(self, d_rank: int, **options) -> Planner:
        local = self.endpoints(self.d)[d_rank]
        return Planner(local, self.endpoints(self.p), self.heads, **options)

    def pull(self, planner: Planner) -> Transfer:
        return planner.make_transfer(
            (self.start, self.stop),
            self.d.blocks,
            np.repeat(self.p.blocks, self.p.dcp),
            lease_hash=self.lease_hash,
        )

    def plan(self, d_rank: int, costs: CostModel = COSTS, **options) -> TransferPlan:
        planner = self.planner(d_rank, **options)
        return planner.plan(self.pull(planner), costs)

    def transfer(self, d_rank: int) -> Transfer:
        return self.pull(self.planner(d_rank, convert=True))


def element_map(case: Case, side: Side, rank: int, tokens: np.ndarray) -> np.ndarray:
    """Return offsets in a rank's pool, in elements: [head, layer, component, token,
    dim].

    The offsets are found by indexing an arange with the layout's shape. `head` counts
    only the rank's heads.

    Args:
        tokens: tokens of the sequence that the rank stores.
    """
    layout = case.layout(side, rank)
    where = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    where = where.transpose([layout.order.index(axis) for axis in "BHLCND"])
    blocks = np.array(side.blocks, int)[tokens // side.tokens_per_block]
    # As slices separate the two index arrays, numpy puts the indexed axis first.
    picked = where[blocks, :, :, :, tokens % side.block_size, :]
    return picked.transpose(1, 2, 3, 0, 4)


def codes(case: Case, heads: range, tokens: np.ndarray) -> np.ndarray:
    """Return the values of P's KV: a different number for each [head, layer, component,
    token, dim].

    A 16-bit dtype cannot represent so many different numbers. With such a dtype, the
    numbers repeat, with a period that differs from every stride of the array.

    Args:
        heads: range of heads, numbered as in the model.
    """
    shape = (case.heads, case.layers, case.components, case.stop, case.head_dim)
    assert np.prod(shape) < 2**24
    numbers = np.arange(np.prod(shape)).reshape(shape)[
        heads.start : heads.stop, :, :, tokens, :
    ]
    return numbers if case.p.dtype == case.d.dtype == "float32" else numbers % 2039


def garbage(case: Case, side: Side, rank: int) -> np.ndarray:
    layout = case.layout(side, rank)
    return np.full(layout.nbytes // layout.itemsize, GARBAGE, NUMPY[layout.dtype])


def memory_of(case: Case, side: Side, rank: int, start: int = 0) -> np.ndarray:
    """Return the rank's pool with its part of tokens [start, stop).

    All elements outside of these tokens are GARBAGE.
    """
    memory = garbage(case, side, rank)
    tokens = side.stored_tokens(rank, np.arange(start, case.stop))
    heads = side.heads(rank, case.heads)
    memory[element_map(case, side, rank, tokens)] = codes(case, heads, tokens)
    return memory


def execute_reads(reads, sources: list[np.ndarray], into: np.ndarray) -> None:
    """Execute READs with the in-memory agent.

    The agent refuses addresses outside its registered memory, so this also checks
    bounds.
    """
    agent = MemoryAgent("D")
    agent.register(into.ctypes.data, into.nbytes)
    for read in reads:
        assert (read.lengths > 0).all()
        source = sources[read.remote_rank]
        peer = MemoryAgent("P")
        peer.register(source.ctypes.data, source.nbytes)
        handle = agent.read(
            agent.add_peer(peer.metadata()),
            read.local_offsets + into.ctypes.data,
            read.remote_offsets + source.ctypes.data,
            read.lengths,
        )
        assert agent.poll(handle) is ReadState.DONE
        peer.close()
    agent.close()


def owner_of(case: Case, d_rank: int, head: int, tokens: np.ndarray) -> np.ndarray:
    """Return, for each token, the rank of P from which D's rank reads this head."""
    owners = [r for r in range(case.p.tp) if head in case.p.heads(r, case.heads)]
    dcp = case.p.dcp
    # Block indices on a rank of D count only the tokens that the rank stores.
    stored = case.d.stored_tokens(d_rank, np.arange(case.stop))
    blocks = np.searchsorted(stored, tokens) // case.p.block_size
    copy_indices = (d_rank + case.lease_hash + blocks) % (len(owners) // dcp)
    return np.array(owners)[copy_indices * dcp + tokens // case.p.block_size % dcp]


def rest_of_block(case: Case, d_rank: int) -> np.ndarray:
    """Return the tokens after the rank's last token, up to the end of the last token's
    block on P or on D, whichever comes first.
    """
    stored = case.d.stored_tokens(d_rank, np.arange(case.stop))
    block_sizes = (case.p.block_size, case.d.block_size)
    count = min(-len(stored) % size for size in block_sizes)
    return stored[-1:].repeat(count) + np.arange(1, count + 1)


def fewest_descriptors(case: Case, d_rank: int, tokens: np.ndarray) -> int:
    """Return the minimum number of READ descriptors, found by brute force.

    Every element is paired with its source. A descriptor ends where the next element is
    not adjacent on both sides.
    """
    d_heads = case.d.heads(d_rank, case.heads)
    local = element_map(case, case.d, d_rank, tokens)
    owner = np.stack([owner_of(case, d_rank, head, tokens) for head in d_heads])
    count = 0
    for rank in range(case.p.tp):
        p_heads = case.p.heads(rank, case.heads)
        shared = [head for head in d_heads if head in p_heads]
        if not shared:
            continue
        p_rows = [head - p_heads.start for head in shared]
        d_rows = [head - d_heads.start for head in shared]
        sources = element_map(case, case.p, rank, tokens)[p_rows]
        targets = local[d_rows]
        is_owner = owner[d_rows] == rank
        is_owner = np.broadcast_to(is_owner[:, None, None, :, None], targets.shape)
        targets = targets[is_owner]
        sources = sources[is_owner]
        if len(targets):
            order = np.argsort(targets)
            is_adjacent = np.diff(targets[order]) == 1
            is_adjacent &= np.diff(sources[order]) == 1
            count += len(targets) - int(is_adjacent.sum())
    return count


@st.composite
def block_tables(draw, block_size: int, tokens: int) -> tuple[tuple[int, ...], int]:
    """Draw a block table and the number of blocks of its pool.

    The block ids of the table are scattered, ascending or mixed. The pool may have
    spare blocks.
    """
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
    return Side(
        draw(st.integers(1, 8)), draw(st.sampled_from(ORDERS)), size, blocks, num_blocks
    )


@st.composite
def shared_sides(draw, p: Side, tokens: int) -> Side:
    """Draw a side with ranks that share tokens.

    As DCP requires, each block of such a rank begins at a token where a block of P
    begins.
    """
    max_factor = min(3, MAX_BLOCK_SIZE_TOKENS // p.block_size)
    dcp = draw(st.integers(2, 4))
    size = p.block_size * draw(st.integers(1, max_factor))
    blocks, num_blocks = draw(block_tables(size * dcp, tokens))
    tp = dcp * draw(st.integers(1, 8 // dcp))
    order = draw(st.sampled_from([p.order, *ORDERS]))
    return Side(tp, order, size, blocks, num_blocks, dcp=dcp)


@st.composite
def cases(draw) -> Case:
    tokens = draw(st.integers(1, 130))
    p = draw(sides(tokens))
    d = draw(sides(tokens))
    if draw(st.integers(0, 3)) == 0:
        p = draw(shared_sides(p, tokens))
    if draw(st.integers(0, 2)) == 0:  # sometimes both sides have the same order
        d = dataclasses.replace(d, order=p.order)
    if draw(st.integers(0, 2)) == 0:
        blocks, num_blocks = draw(block_tables(p.block_size, tokens))
        d = dataclasses.replace(
            d, block_size=p.block_size, blocks=blocks, num_blocks=num_blocks
        )
    if draw(st.integers(0, 2)) == 0:
        d = draw(shared_sides(p, tokens))
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


def leased_bytes(case: Case, rank: int) -> np.ndarray:
    """Return bool[bytes of the pool], which is true for the leased bytes of P's
    rank.
    """
    layout = case.layout(case.p, rank)
    where = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    leased = np.zeros(where.size, bool)
    leased[np.moveaxis(where, layout.order.index("B"), 0)[list(case.p.blocks)]] = True
    return np.repeat(leased, layout.itemsize)


DTYPES = st.sampled_from(
    [("float32",) * 2, ("float32", "float16"), ("float16", "float32")]
)


def check_plan(case: Case, d_rank: int, plan: TransferPlan, place: Any = place) -> None:
    """Execute a plan and check its result.

    The plan must write the expected tokens and nothing else, except that direct READs
    may fill the rest of the last block. It must read only leased memory, use no larger
    slots than it reports, and report its READs correctly.
    """
    sources = [memory_of(case, case.p, rank) for rank in range(case.p.tp)]
    into = garbage(case, case.d, d_rank)
    memory = torch.from_numpy(into).view(torch.uint8)
    for step in plan.steps:
        slot = None if step.slot is None else np.full(step.slot.nbytes, 0xEE, np.uint8)
        execute_reads(step.reads, sources, into if slot is None else slot)
        for copy in step.copies:
            place(copy, torch.from_numpy(slot), memory, step.transfer.scale_factors)
        assert slot is None or slot.nbytes <= plan.slot_bytes
    if plan.path == "direct":
        beyond = rest_of_block(case, d_rank)[: plan.bytes_read - plan.useful_bytes]
        into[element_map(case, case.d, d_rank, beyond)] = GARBAGE
    np.testing.assert_array_equal(into, memory_of(case, case.d, d_rank, case.start))
    reads = list(plan.reads)
    assert plan.num_descriptors == sum(len(read.lengths) for read in reads)
    assert plan.bytes_read == sum(read.nbytes for read in reads)
    for read in reads:
        leased = leased_bytes(case, read.remote_rank)
        for first, length in zip(read.remote_offsets, read.lengths, strict=True):
            assert leased[first : first + length].all()


def staging_for(case: Case, blocks: int) -> int:
    """Return enough staging bytes for `blocks` blocks of any slot."""
    sizes = (case.layout(case.p, rank).block_bytes for rank in range(case.p.tp))
    return blocks * (max(sizes) + 64) * 2 * case.p.tp


def with_dtypes(case: Case, p_dtype: str, d_dtype: str) -> Case:
    p = dataclasses.replace(case.p, dtype=p_dtype)
    d = dataclasses.replace(case.d, dtype=d_dtype)
    return dataclasses.replace(case, p=p, d=d)

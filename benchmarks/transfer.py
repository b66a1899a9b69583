"""What a KV transfer costs for every pair of layouts and geometries.

    python -m benchmarks.transfer --device cpu|cuda

One process holds the KV of all ranks of P, another is rank 0 of D and pulls. Every case is planned
and moved by Baton (out of P's mapped memory, as servers of one host do, or over NIXL with
`--transfer nixl`, by the pull job and the staging memory of a server, with costs measured as at a
server's first contact), then over NIXL by the field's scheme: one descriptor per layer, component
and block, of the smaller block size, and one per token where token-major blocks are cut by heads.
That scheme is given equal scattered runs and no copy afterwards: its figure is an upper bound.

Blocks are scattered on both sides; what arrives is compared with what was sent, byte for byte.
Seconds are the best of the repetitions and cover planning, posting, reading and placing. GB/s
counts useful bytes. Without `--only` the slowest plan of 32,768 tokens is looked for as well.
The last line is one JSON document.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from kvcache.layout import NAMED_ORDERS, KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.agent import ReadHandle, ReadState, TransferAgent
from kvcache.transfer.move.peer_memory import Memory as PeerMemory
from kvcache.transfer.move.peer_memory import offer, open_host
from kvcache.transfer.move.place import TorchPlacer, launches, place
from kvcache.transfer.move.place import measure as measure_copies
from kvcache.transfer.move.staging import StagingBuffer
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, heads_of
from kvcache.transfer.plan.plan import Planner, plan_transfer
from kvcache.transfer.posts import Post, PostLimits
from kvcache.transfer.probe_job import ProbeJob
from kvcache.transfer.pull_job import PullJob, Step
from kvcache.transfer.threads import use_one_core
from protocol.handshake import RankMetadata

GEOMETRIES = ("same", "1->2", "2->1", "16->64", "64->16")
MIXED = (("LBCNHD", "BHLCND"), ("LCBHND", "BHLCND"), ("BHLCND", "LCBNHD"))
PAGE_BYTES = 4096
NAP_S = 0.0002
PLANNED_TOKENS = 32_768


@dataclass(frozen=True)
class Size:
    """The model and the prompt."""

    layers: int
    heads: int
    head_dim: int
    tokens: int
    dtype: str = "bfloat16"

    @property
    def kv_bytes(self) -> int:
        return self.layers * self.heads * self.head_dim * self.tokens * 2 * 2


@dataclass(frozen=True)
class Side:
    """One engine in one case."""

    order: str
    tp: int
    block_size: int
    seed: int
    scattered: bool = True

    def endpoints(self, size: Size) -> list[Endpoint]:
        return [Endpoint(self.layout(size, rank), rank, self.tp) for rank in range(self.tp)]

    def layout(self, size: Size, rank: int) -> KVLayout:
        heads = len(heads_of(rank, self.tp, size.heads))
        blocks = size.tokens // self.block_size + 1
        return KVLayout(
            self.order, blocks, heads, size.layers, 2, self.block_size, size.head_dim, size.dtype
        )

    def blocks(self, size: Size) -> IntArray:
        """A block table; block 0 stays the null block."""
        blocks = np.arange(1, size.tokens // self.block_size + 1, dtype=np.int64)
        return np.random.default_rng(self.seed).permutation(blocks) if self.scattered else blocks


@dataclass(frozen=True)
class Case:
    name: str
    p: Side
    d: Side


@dataclass(frozen=True)
class Row:
    case: str
    path: str
    descriptors: int
    bytes: int
    seconds: float
    gb_per_s: float
    copy_gb_per_s: float


def cases() -> Iterator[Case]:
    for order in NAMED_ORDERS:
        for geometry in GEOMETRIES:
            p_size, d_size = {"16->64": (16, 64), "64->16": (64, 16)}.get(geometry, (64, 64))
            p_tp, d_tp = {"1->2": (1, 2), "2->1": (2, 1)}.get(geometry, (1, 1))
            name = f"{order} {geometry}"
            yield Case(name, Side(order, p_tp, p_size, 1), Side(order, d_tp, d_size, 2))
    for p_order, d_order in MIXED:
        yield Case(f"{p_order}->{d_order} same", Side(p_order, 1, 64, 1), Side(d_order, 1, 64, 2))


def reference_kv(size: Size) -> torch.Tensor:
    """i16[tokens, heads, layers, 2, head_dim], the same bits in both processes."""
    generator = torch.Generator().manual_seed(7)
    shape = (size.tokens, size.heads, size.layers, 2, size.head_dim)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)


def pool_view(buffer: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """The pool at the buffer's start as i16[B, N, H, L, C, D]."""
    pool = buffer[: layout.nbytes].view(torch.int16).view(layout.shape)
    return pool.permute([layout.order.index(axis) for axis in "BNHLCD"])


def by_block(kv: torch.Tensor, block_size: int, heads: range) -> torch.Tensor:
    """i16[blocks, N, heads, L, C, D]"""
    shape = (-1, block_size, *kv.shape[1:])
    return kv.view(shape)[:, :, heads.start : heads.stop]


def rank_offsets(side: Side, size: Size) -> list[int]:
    """Where each rank's pool starts in the one buffer of its process."""
    sizes = [-(-end.layout.nbytes // PAGE_BYTES) * PAGE_BYTES for end in side.endpoints(size)]
    return [sum(sizes[:rank]) for rank in range(side.tp)]


def buffer_bytes(size: Size) -> int:
    # One null block per rank more than the KV, at 64 tokens a block.
    return size.kv_bytes + 2 * size.kv_bytes // size.tokens * 64 + 2 * PAGE_BYTES


def allocate(nbytes: int) -> KVPool:
    """`nbytes` or a little more, as a server's KV pool allocates it."""
    rows = -(-nbytes // PAGE_BYTES)
    return KVPool(KVLayout("BHLCND", rows, 1, 1, 1, 1, PAGE_BYTES, "float8_e4m3fn"))


class Memory:
    """A buffer as a server's pool, registered with an agent."""

    def __init__(self, nbytes: int, agent: TransferAgent) -> None:
        self.agent = agent
        self.pool = allocate(nbytes)
        self.buffer = self.pool.flat_bytes
        self.agent.register(self.buffer.data_ptr(), self.buffer.nbytes)


def announce(memory: Memory) -> RankMetadata:
    pool = memory.pool
    return RankMetadata(
        rank=0,
        agent_metadata=memory.agent.metadata(),
        base_address=pool.base_address,
        nbytes=pool.nbytes,
        device_id=0,
        device_kind=pool.device.type,
        layout=pool.layout.to_record(),
        extra=offer(pool),
    )


def serve(connection: Connection, size: Size) -> None:
    """Process P: fills its pools for each case it is told, and lets itself be read."""
    memory = Memory(buffer_bytes(size), NixlAgent("bench"))
    kv = reference_kv(size)
    connection.send(announce(memory))
    while (side := connection.recv()) is not None:
        blocks = torch.from_numpy(side.blocks(size))
        for end, offset in zip(side.endpoints(size), rank_offsets(side, size), strict=True):
            heads = end.heads(size.heads)
            pool = pool_view(memory.buffer[offset:], end.layout)
            pool[blocks] = by_block(kv, side.block_size, heads)
        connection.send("filled")
    memory.agent.close()


class Pulled(NamedTuple):
    path: str
    descriptors: int
    nbytes: int  # wanted


@dataclass
class View:
    """The part of the buffer that is the pool of a case."""

    tensor: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.tensor.device


class Result(NamedTuple):
    rows: list[Row]
    costs: CostModel


class Puller:
    """Process D's side: plans, reads, places, checks."""

    def __init__(self, size: Size, staging_bytes: int, peer: RankMetadata, transfer: str) -> None:
        self.size = size
        self.agent = NixlAgent("bench")
        self.memory = Memory(buffer_bytes(size), self.agent)
        self.pool = self.memory.buffer
        self.view = View(self.pool)
        self.staging = StagingBuffer(staging_bytes, cast(KVPool, self.view))
        self.agent.register(self.staging.base_address, self.staging.nbytes)
        self.kv = reference_kv(size)
        self.peer_base = peer.base_address
        self.mapped = open_host(peer) if transfer == "auto" else None  # P's memory
        use_one_core()  # as in a server's worker
        self.peer = self.agent.add_peer(peer.agent_metadata)
        self.costs = DEFAULT_COSTS["cpu"]

    def calibrate(self, remote: Endpoint, local: Endpoint) -> None:
        """As a server's worker does at first contact."""
        self.view.tensor = self.pool_of(local.layout)
        job = ProbeJob("probe", local, remote, self.staging, PostLimits())
        self.drive(job, [0] * remote.tp)
        self.costs = job.costs(measure_copies()) or self.costs

    def drive(self, job: PullJob, offsets: list[int]) -> None:
        """Carries out a job, as a server's worker does."""
        active: list[tuple[ReadHandle, Step, float]] = []
        while not job.ended:
            found = job.next_post() if len(active) < PostLimits().max_active else None
            if found is not None:
                step, post = found
                started = time.perf_counter()
                handle = self.post(step, post, offsets)
                job.read_posted(step, handle)
                active.append((handle, step, started))
            ended = [each for each in active if self.agent.poll(each[0]) is not ReadState.ACTIVE]
            for handle, step, started in ended:
                active.remove((handle, step, started))
                self.release(handle)
                step.seconds += time.perf_counter() - started
                job.read_ended(step)
            if found is None and not ended:
                time.sleep(NAP_S)
        job.leave()

    def post(self, step: Step, post: Post, offsets: list[int]) -> ReadHandle:
        local = post.local_offsets + step.base_address
        remote = post.remote_offsets + (self.peer_base + offsets[post.remote_rank])
        return self.agent.read(self.peer, local, remote, post.lengths)

    def release(self, handle: ReadHandle) -> None:
        if handle.state is not ReadState.DONE:
            raise RuntimeError("a READ failed")
        self.agent.release(handle)

    def pull(self, case: Case) -> Pulled:
        return self.pull_reads(case) if self.mapped is None else self.pull_mapped(case, self.mapped)

    def pool_of(self, layout: KVLayout) -> torch.Tensor:
        return self.pool[: layout.nbytes].view(getattr(torch, self.size.dtype))

    def pull_mapped(self, case: Case, memory: PeerMemory) -> Pulled:
        size, offsets = self.size, rank_offsets(case.p, self.size)
        remote, (local, *_) = case.p.endpoints(size), case.d.endpoints(size)
        blocks = case.d.blocks(size), case.p.blocks(size)
        planner = Planner(local, remote, size.heads)
        transfer = planner.take((0, size.tokens), *blocks)
        assert memory.bytes is not None
        pool, copies = self.pool_of(local.layout), list(transfer.copies())
        for index, first, count in launches(copies, TorchPlacer.launch_bytes):
            copy = copies[index].part(first, count)
            place(copy, memory.bytes[offsets[copy.owner] :], pool)
        return Pulled("mapped", 0, transfer.useful_bytes)

    def pull_reads(self, case: Case) -> Pulled:
        local = case.d.endpoints(self.size)[0]
        plan = plan_transfer(
            local,
            case.p.endpoints(self.size),
            self.size.heads,
            0,
            self.size.tokens,
            case.d.blocks(self.size),
            case.p.blocks(self.size),
            costs=self.costs,
            staging_bytes=self.staging.nbytes,
        )
        self.view.tensor = self.pool_of(local.layout)
        job = PullJob(case.name, plan, self.pool.data_ptr(), self.staging, PostLimits())
        self.drive(job, rank_offsets(case.p, self.size))
        return Pulled(plan.path, plan.descriptors, plan.useful_bytes)

    def pull_per_layer(self, case: Case, useful_bytes: int) -> int:
        """The field's scheme: that many equal runs, scattered on both sides."""
        count = per_layer_descriptors(case, self.size)
        length = useful_bytes // count
        rng = np.random.default_rng(3)
        local = rng.permutation(count) * length + self.pool.data_ptr()
        remote = rng.permutation(count) * length + self.peer_base
        lengths = np.full(count, length, np.int64)
        handle = self.agent.read(self.peer, local, remote, lengths)
        while self.agent.poll(handle) is ReadState.ACTIVE:
            time.sleep(0)
        self.release(handle)
        return count

    def check(self, case: Case) -> None:
        layout = case.d.layout(self.size, 0)
        blocks = torch.from_numpy(case.d.blocks(self.size))
        found = pool_view(self.pool, layout)[blocks]
        heads = heads_of(0, case.d.tp, self.size.heads)
        if not torch.equal(found, by_block(self.kv, case.d.block_size, heads)):
            raise RuntimeError(f"{case.name}: what arrived is not what was sent")

    def copy_gb_per_s(self, nbytes: int, repeat: int) -> float:
        target = torch.zeros(nbytes, dtype=torch.uint8)

        def copy() -> None:
            target.copy_(self.pool[:nbytes])

        return nbytes / best_s(copy, repeat) / 1e9

    def close(self) -> None:
        self.agent.close()


def per_layer_descriptors(case: Case, size: Size) -> int:
    """Layers x components x blocks of the smaller size, or x tokens where heads cut NHD."""
    by_token = case.p.order.endswith("NHD") and case.p.tp != case.d.tp
    block = 1 if by_token else min(case.p.block_size, case.d.block_size)
    return size.layers * 2 * max(case.p.tp // case.d.tp, 1) * (size.tokens // block)


def best_s(action: Any, repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def measure(puller: Puller, case: Case, repeat: int) -> list[Row]:
    puller.pool.zero_()
    path, descriptors, nbytes = puller.pull(case)
    puller.check(case)
    copy = puller.copy_gb_per_s(nbytes, repeat)
    seconds = best_s(lambda: puller.pull(case), repeat)
    row = Row(case.name, path, descriptors, nbytes, seconds, nbytes / seconds / 1e9, copy)
    count = puller.pull_per_layer(case, nbytes)
    seconds = best_s(lambda: puller.pull_per_layer(case, nbytes), repeat)
    field = replace(
        row,
        path="per-layer",
        descriptors=count,
        seconds=seconds,
        gb_per_s=nbytes / seconds / 1e9,
    )
    return [row, field]


def print_table(rows: list[Row]) -> None:
    print(f"{'case':24} {'path':10} {'descriptors':>11} {'MB':>7} {'GB/s':>7} {'of copy':>7}")
    for row in rows:
        share = row.gb_per_s / row.copy_gb_per_s
        print(
            f"{row.case:24} {row.path:10} {row.descriptors:11} {row.bytes / 1e6:7.1f} "
            f"{row.gb_per_s:7.2f} {share:7.0%}"
        )


def slowest_plan(size: Size, costs: CostModel, staging_bytes: int) -> tuple[str, float]:
    """Which of all named pairs of orders, block sizes and tp takes the longest to plan, and ms."""
    found = ("", 0.0)
    sizes = (("same", 64, 64), ("16->64", 16, 64), ("64->16", 64, 16))
    for p_order, d_order in product(NAMED_ORDERS, repeat=2):
        for (name, p_size, d_size), (p_tp, d_tp) in product(sizes, ((1, 1), (1, 2), (2, 1))):
            p, d = Side(p_order, p_tp, p_size, 1), Side(d_order, d_tp, d_size, 2)
            remote, local = p.endpoints(size), d.endpoints(size)[0]
            tables = d.blocks(size), p.blocks(size)
            plan = partial(
                plan_transfer, local, remote, size.heads, 0, size.tokens, *tables,
                costs=costs, staging_bytes=staging_bytes,
            )  # fmt: skip
            milliseconds = best_s(plan, 3) * 1e3
            if milliseconds > found[1]:
                found = (f"{p_order}->{d_order} {name} TP {p_tp}->{d_tp}", milliseconds)
    return found


def run(size: Size, staging_bytes: int, repeat: int, only: str, transfer: str = "auto") -> Result:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, size), daemon=True)
    process.start()
    puller = Puller(size, staging_bytes, here.recv(), transfer)
    first = next(cases())
    puller.calibrate(first.p.endpoints(size)[0], first.d.endpoints(size)[0])
    rows: list[Row] = []
    try:
        for case in cases():
            if only in case.name:
                here.send(case.p)
                here.recv()
                rows += measure(puller, case, repeat)
    finally:
        here.send(None)
        puller.close()
        process.join(30)
    return Result(rows, puller.costs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, help="a multiple of 64")
    parser.add_argument("--staging-bytes", type=int, default=512 << 20)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--transfer", choices=("auto", "nixl"), default="auto")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    cuda_only = parser.add_argument_group("with --device cuda")
    cuda_only.add_argument("--devices", default="0,1", help="GPU of P and GPUs of D's ranks")
    cuda_only.add_argument("--paths", default="mapped,nixl")
    cuda_only.add_argument("--decode", action="store_true", help="also beside a decode batch")
    cuda_only.add_argument("--timeline", action="store_true", help="where the time of pulls goes")
    cuda_only.add_argument("--post-bytes", type=int, help="most bytes of one post")
    cuda_only.add_argument("--post-runs", type=int, default=1024)
    cuda_only.add_argument("--num-threads", type=int, help="of NIXL, ours and bare READs alike")
    cuda_only.add_argument("--tries", type=int, default=1, help="of a row, for quiet processors")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    size = Size(
        args.layers or (32 if cuda else 16),
        args.heads,
        args.head_dim,
        args.tokens or (8192 if cuda else 2048),
    )
    if cuda:
        from benchmarks import transfer_cuda  # the other half of one program

        print(json.dumps(transfer_cuda.run(args, size)))
        return 0
    rows, costs = run(size, args.staging_bytes, args.repeat, args.only, args.transfer)
    print_table(rows)
    print(f"costs measured: {costs}")
    if not args.only:
        size = replace(size, tokens=PLANNED_TOKENS)
        name, plan_ms = slowest_plan(size, costs, args.staging_bytes)
        print(f"slowest plan of {PLANNED_TOKENS} tokens: {name}, {plan_ms:.1f} ms")
    print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

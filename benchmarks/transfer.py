"""What a KV transfer costs for every pair of layouts and geometries.

    python -m benchmarks.transfer --device cpu|cuda

One process holds the KV of all ranks of P, another is rank 0 of D and pulls. Every case is planned
and moved by Baton (out of P's mapped memory, as servers of one host do, or over NIXL with
`--transfer nixl`), then over NIXL by the field's scheme: one descriptor per layer, component and
block, of the smaller block size, and one per token where token-major blocks are cut by heads. That
scheme is given equal scattered runs and no copy afterwards: its figure is an upper bound.

Blocks are scattered on both sides; what arrives is compared with what was sent, byte for byte.
Seconds are the best of the repetitions and cover planning, posting, reading and placing. GB/s
counts useful bytes.
The last line is one JSON document.
"""

import argparse
import ctypes
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache.layout import NAMED_ORDERS, KVLayout
from kvcache.pool import KVPool
from kvcache.transfer import reformat
from kvcache.transfer.agent import MemoryKind, ReadState
from kvcache.transfer.copy_thread import copy_thread
from kvcache.transfer.gather import launches, make_gathers
from kvcache.transfer.host_mapper import CHUNK_BYTES, HostMapper, make_chunk
from kvcache.transfer.mapper import offer
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.plan import (
    DEFAULT_COSTS,
    Endpoint,
    RankRead,
    check_transfer,
    heads_of,
    plan_transfer,
)
from kvcache.transfer.staged import Chunk
from kvcache.transfer.topology import IntArray
from protocol.handshake import RankMetadata

GEOMETRIES = ("same", "1->2", "2->1", "16->64", "64->16")
MIXED = (("LBCNHD", "BHLCND"), ("LCBHND", "BHLCND"), ("BHLCND", "LCBNHD"))
PAGE_BYTES = 4096


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


def allocate(nbytes: int, device: str) -> KVPool:
    """`nbytes` or a little more, as a server's KV pool allocates it."""
    rows = -(-nbytes // PAGE_BYTES)
    return KVPool(KVLayout("BHLCND", rows, 1, 1, 1, 1, PAGE_BYTES, "float8_e4m3fn"), device)


class Memory:
    """A buffer, registered with an agent of its own."""

    def __init__(self, device: str, *nbytes: int) -> None:
        self.kind: MemoryKind = "VRAM" if device == "cuda" else "DRAM"
        self.agent = NixlAgent(
            "bench", device_id=0 if device == "cuda" else None, set_device=torch.cuda.set_device
        )
        self.pools = [allocate(count, device) for count in nbytes]
        self.buffers = [pool.flat_bytes for pool in self.pools]
        for buffer in self.buffers:
            self.agent.register(buffer.data_ptr(), buffer.nbytes, kind=self.kind)

    def close(self) -> None:
        self.agent.close()


def announce(memory: Memory) -> RankMetadata:
    pool = memory.pools[0]
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


def serve(connection: Connection, device: str, size: Size) -> None:
    """Process P: fills its pools for each case it is told, and lets itself be read."""
    memory = Memory(device, buffer_bytes(size))
    buffer, kv = memory.buffers[0], reference_kv(size).to(device)
    connection.send(announce(memory))
    while (side := connection.recv()) is not None:
        blocks = torch.from_numpy(side.blocks(size)).to(device)
        for end, offset in zip(side.endpoints(size), rank_offsets(side, size), strict=True):
            heads = end.heads(size.heads)
            pool = pool_view(buffer[offset:], end.layout)
            pool[blocks] = by_block(kv, side.block_size, heads)
        if device == "cuda":
            torch.cuda.synchronize()
        connection.send("filled")
    memory.close()


class Pulled(NamedTuple):
    path: str
    descriptors: int
    nbytes: int  # wanted


class Puller:
    """Process D's side: plans, reads, places, checks."""

    def __init__(
        self, device: str, size: Size, staging_bytes: int, peer: RankMetadata, transfer: str
    ) -> None:
        self.device, self.size, self.staging_bytes = device, size, staging_bytes
        self.costs = DEFAULT_COSTS[device]
        self.memory = Memory(device, buffer_bytes(size), staging_bytes)
        self.pool, self.staging = self.memory.buffers
        self.kv = reference_kv(size)
        self.peer_base = peer.base_address
        self.mapper = HostMapper(self.memory.pools[0])
        self.mapped: torch.Tensor | None = None  # P's memory
        if transfer == "auto" and device == "cpu":
            memory = (ctypes.c_ubyte * peer.nbytes).from_address(self.mapper.map(peer).address)
            self.mapped = torch.frombuffer(memory, dtype=torch.uint8)
        self.copier = copy_thread("copy")
        # The agent belongs to one thread; planning happens in this one.
        self.thread = ThreadPoolExecutor(1, initializer=self.memory.agent.bind_thread)
        add_peer = self.memory.agent.add_peer
        self.peer = self.thread.submit(add_peer, peer.agent_metadata).result()

    def read(self, offsets: list[int], base: int, reads: tuple[RankRead, ...]) -> None:
        """Posts reads and waits for their end; runs in the reading thread."""
        for read in reads:
            remote = read.remote_offsets + (self.peer_base + offsets[read.remote_rank])
            self.wait(read.local_offsets + base, remote, read.lengths)

    def wait(self, local: IntArray, remote: IntArray, lengths: IntArray) -> None:
        agent, kind = self.memory.agent, self.memory.kind
        handle = agent.read(self.peer, local, remote, lengths, kinds=(kind, kind))
        while agent.poll(handle) is ReadState.ACTIVE:
            time.sleep(0)
        if handle.state is not ReadState.DONE:
            raise RuntimeError("a READ failed")
        agent.release(handle)

    def pull(self, case: Case) -> Pulled:
        return self.pull_reads(case) if self.mapped is None else self.pull_mapped(case, self.mapped)

    def pool_of(self, layout: KVLayout) -> torch.Tensor:
        return self.pool[: layout.nbytes].view(getattr(torch, self.size.dtype))

    def pull_mapped(self, case: Case, source: torch.Tensor) -> Pulled:
        size, offsets = self.size, rank_offsets(case.p, self.size)
        remote, (local, *_) = case.p.endpoints(size), case.d.endpoints(size)
        blocks = case.d.blocks(size), case.p.blocks(size)
        transfer = check_transfer(local, remote, size.heads, (0, size.tokens), *blocks)
        pool = self.pool_of(local.layout)
        for gather in make_gathers(transfer):
            theirs = source[offsets[gather.remote_rank] :]
            for first, count in launches(gather, CHUNK_BYTES):
                self.place(make_chunk(gather, transfer, first, count), theirs, pool)
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
            staging_bytes=self.staging_bytes,
            allow_mixed=True,
        )
        offsets = rank_offsets(case.p, self.size)
        self.thread.submit(self.read, offsets, self.pool.data_ptr(), plan.reads).result()
        pool = self.pool_of(local.layout)
        half = self.staging_bytes // 2
        slots = [self.staging[:half], self.staging[half:]]
        reading: list[Future[None]] = []
        for number, chunk in enumerate(plan.chunks[:1]):
            reading.append(
                self.thread.submit(self.read, offsets, slots[number].data_ptr(), chunk.reads)
            )
        for number, chunk in enumerate(plan.chunks):
            reading.pop().result()
            for following in plan.chunks[number + 1 : number + 2]:
                base = slots[(number + 1) % 2].data_ptr()
                reading.append(self.thread.submit(self.read, offsets, base, following.reads))
            self.place(chunk, slots[number % 2], pool)
        return Pulled(plan.path, plan.descriptors, plan.useful_bytes)

    def place(self, chunk: Chunk, source: torch.Tensor, pool: torch.Tensor) -> None:
        if self.device == "cpu":
            self.copier.submit(reformat.apply, chunk, source, pool).result()
        else:
            reformat.apply(chunk, source, pool)
        self.synchronize()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def pull_per_layer(self, case: Case, useful_bytes: int) -> int:
        """The field's scheme: that many equal runs, scattered on both sides."""
        count = per_layer_descriptors(case, self.size)
        length = useful_bytes // count
        rng = np.random.default_rng(3)
        local = rng.permutation(count) * length + self.pool.data_ptr()
        remote = rng.permutation(count) * length + self.peer_base
        lengths = np.full(count, length, np.int64)
        self.thread.submit(self.wait, local, remote, lengths).result()
        return count

    def check(self, case: Case) -> None:
        layout = case.d.layout(self.size, 0)
        blocks = torch.from_numpy(case.d.blocks(self.size)).to(self.device)
        found = pool_view(self.pool, layout)[blocks].cpu()
        heads = heads_of(0, case.d.tp, self.size.heads)
        if not torch.equal(found, by_block(self.kv, case.d.block_size, heads)):
            raise RuntimeError(f"{case.name}: what arrived is not what was sent")

    def copy_gb_per_s(self, nbytes: int, repeat: int) -> float:
        target = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

        def copy() -> None:
            self.copier.submit(target.copy_, self.pool[:nbytes]).result()
            self.synchronize()

        return nbytes / best_s(copy, repeat) / 1e9

    def close(self) -> None:
        self.thread.shutdown()
        self.memory.close()


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


def run(
    device: str, size: Size, staging_bytes: int, repeat: int, only: str, transfer: str = "auto"
) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, device, size), daemon=True)
    process.start()
    puller = Puller(device, size, staging_bytes, here.recv(), transfer)
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
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, help="a multiple of 64")
    parser.add_argument("--staging-bytes", type=int, default=256 << 20)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--transfer", choices=("auto", "nixl"), default="auto")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    cuda_only = parser.add_argument_group("with --device cuda")
    cuda_only.add_argument("--devices", default="0,1", help="GPU of P and GPU of D")
    cuda_only.add_argument("--paths", default="mapped,nixl")
    cuda_only.add_argument("--decode", action="store_true", help="also beside a decode batch")
    cuda_only.add_argument("--post-bytes", type=int, help="most bytes of one post")
    cuda_only.add_argument("--post-runs", type=int, default=1024)
    cuda_only.add_argument("--num-threads", type=int, default=0, help="posting threads of NIXL")
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
    rows = run(args.device, size, args.staging_bytes, args.repeat, args.only, args.transfer)
    print_table(rows)
    print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a pull of KV costs between two processes of one host, for pairs of layouts and geometries.

    python -m benchmarks.transfer --device cpu|cuda

P is one process, D another one for each rank. Pulls go through the servers' own coordinator,
workers and side channel, from the order until the fence was passed, out of P's mapped memory or
over NIXL (`--paths mapped,nixl`). Blocks are scattered unless a row says fresh; what arrives is
compared with what was sent. Beside them in the same run: the plain copy between the two devices,
and what bare NIXL does with the same runs in the same order. GPUs are P's and those of D
(`--devices 0,1`). The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from benchmarks.transfer_decode import Decode, Setup, loop_ms_beside, loop_ms_on
from benchmarks.transfer_prefill import (
    Case,
    Prefill,
    Remote,
    Side,
    Size,
    kind_of,
    new_agent,
    synchronize,
    use_device,
)
from kvcache.layout import NAMED_ORDERS
from kvcache.transfer.link.agent import ReadState
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.plan.plan import Planner
from protocol.handshake import EngineMetadata
from protocol.messages import RemotePrefill

DEFAULT = "BHLCND"
Wanted = tuple[list[list[ReadDescriptors]], int]  # READs of each rank of D, bytes of its memory
MIXED = (("LBCNHD", "BHLCND"), ("LCBHND", "BHLCND"), ("BHLCND", "LCBNHD"))
GEOMETRIES = {  # tp and block size of P and of D
    "same": ((1, 64), (1, 64)),
    "TP 1->2": ((1, 64), (2, 64)),
    "TP 2->1": ((2, 64), (1, 64)),
    "16->64": ((1, 16), (1, 64)),
    "64->16": ((1, 64), (1, 16)),
}
SHORT_TOKENS = 128
_QUIET = 1.3  # a processor is, whose loop takes no longer than this many of the fastest one's


@dataclass(frozen=True)
class Row:
    case: str
    path: str
    descriptors: int
    bytes: int
    milliseconds: float  # median
    best_ms: float
    gb_per_s: float
    of_copy: float
    of_bare: float | None = None  # what bare NIXL reaches with the same runs
    told_ms: float | None = None  # until the thread that ordered it has been woken
    loop_ms: float | None = None  # DecodeRank.loop_ms, the slower of before and after
    tries: int = 1  # until the processors were quiet, or there were no more

    def __str__(self) -> str:
        of_bare = f"{self.of_bare:.0%}" if self.of_bare is not None else ""
        told = f"{self.told_ms:.3f}" if self.told_ms is not None else ""
        loop = f"{self.loop_ms:.1f}" if self.loop_ms is not None else ""
        times = f"{self.milliseconds:8.3f} {self.best_ms:8.3f} {self.gb_per_s:7.1f}"
        name = f"{self.case:20} {self.path:12} {self.descriptors:11}"
        return f"{name} {times} {self.of_copy:6.0%} {of_bare:>5} {told:>5} {loop:>5} {self.tries:5}"


def _case(
    name: str, geometry: str, p: str = DEFAULT, d: str = DEFAULT, fresh: bool = False
) -> Case:
    p_size, d_size = GEOMETRIES[geometry]
    name += ", fresh" * fresh
    return Case(name, Side(p, *p_size, 1, not fresh), Side(d, *d_size, 2, not fresh))


def cases(device: str, path: str) -> Iterator[Case]:
    if device == "cpu":
        for order, geometry in product(NAMED_ORDERS, GEOMETRIES):
            yield _case(f"{order} {geometry}", geometry, order, order)
        for p, d in MIXED:
            yield _case(f"{p}->{d} same", "same", p, d)
    elif path == "mapped":
        for geometry in GEOMETRIES:
            yield _case(geometry, geometry)
        yield _case("NHD per layer", "same", "LBCNHD")
    else:
        yield _case("same", "same", fresh=True)
        for geometry in ("same", "TP 1->2", "TP 2->1", "16->64"):
            yield _case(geometry, geometry)
        yield _case("64->16", "64->16", fresh=True)
        yield _case("per layer", "same", "LBCHND", fresh=True)
        yield _case("per layer", "same", "LBCHND")


# -- bare NIXL


class BareReader:
    """Reads into memory on a rank's device."""

    def __init__(self, setup: Setup, rank: int, nbytes: int, metadata: EngineMetadata) -> None:
        device = setup.device(rank)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._device, self._kind = torch.device(device).index or 0, kind_of(device)
        self._agent, self._metadata = new_agent("bare", device), metadata
        address = self._memory.data_ptr()
        self._agent.register(address, nbytes, device_id=self._device, kind=self._kind)
        self._name = cache(lambda rank: self._agent.add_peer(metadata.ranks[rank].agent_metadata))
        self.thread = ThreadPoolExecutor(1, initializer=self._agent.bind_thread)

    def read(self, reads: list[ReadDescriptors]) -> None:
        handles = [
            self._agent.read(
                self._name(read.remote_rank),
                read.local_offsets + self._memory.data_ptr(),
                read.remote_offsets + self._metadata.ranks[read.remote_rank].base_address,
                read.lengths,
                local_device=self._device,
                remote_device=self._metadata.ranks[read.remote_rank].device_id,
                kinds=(self._kind, self._kind),
            )
            for read in reads
        ]
        while any(self._agent.poll(handle) is ReadState.ACTIVE for handle in handles):
            pass
        for handle in handles:
            if handle.state is not ReadState.DONE:
                raise RuntimeError("a READ failed")
            self._agent.release(handle)

    def close(self) -> float:
        """Ends it; what a loop of Python took on its thread's processor, in ms."""
        loop_ms = loop_ms_beside(self.thread.submit(threading.get_native_id).result())
        self.thread.shutdown()
        self._agent.close()
        return loop_ms


def planned_reads(setup: Setup, case: Case) -> Wanted:
    """The plan's own runs in its own order, for each rank of D; bytes of memory they want."""
    size = setup.size
    each, nbytes = [], setup.staging_bytes
    for local in case.d.endpoints(size):
        nbytes = max(nbytes, local.layout.nbytes)
        ends = local, case.p.endpoints(size)
        planner = Planner(*ends, size.heads, staging_bytes=setup.staging_bytes)
        blocks = case.d.blocks(size), case.p.blocks(size)
        costs = DEFAULT_COSTS[torch.device(setup.device(0)).type]
        plan = planner.plan(planner.take((0, size.tokens), *blocks), costs)
        each.append(list(plan.reads))
    return each, nbytes


# -- pulls


@dataclass
class Bench:
    prefill: Remote
    size: Size
    devices: tuple[str, ...]  # of D
    staging_bytes: int
    repeat: int
    tries: int  # of a row, until its processors are quiet
    copy_gb_per_s: float
    fastest_loop_ms: float
    rows: list[Row] = field(default_factory=list)
    num_failed: int = 0

    def open(self, case: Case, path: str) -> tuple[EngineMetadata, Decode]:
        metadata: EngineMetadata = self.prefill.call("open", case.p)
        decode = Decode(case.d, self.setup(path))
        decode.connect(self.lease())
        return metadata, decode

    def setup(self, path: str) -> Setup:
        return Setup(self.size, self.devices, path == "mapped", self.staging_bytes)

    def lease(self, tokens: int | None = None) -> RemotePrefill:
        remote: RemotePrefill = self.prefill.call("lease", tokens or self.size.tokens)
        return remote

    def row(
        self, case: str, path: str, descriptors: int, nbytes: int, seconds: list[float], **told: Any
    ) -> Row:
        median_s = statistics.median(seconds)
        rate = nbytes / median_s / 1e9
        times = (median_s * 1e3, min(seconds) * 1e3, rate, rate / self.copy_gb_per_s)
        return Row(case, path, descriptors, nbytes, *times, **told)

    def pulls(self, decode: Decode, name: str, tokens: int, count: int) -> Row:
        """A row of pulls, with the seconds that their caller saw."""
        loops_ms = decode.of_ranks("loop_ms")
        results = [decode.pull(self.lease(tokens)) for _ in range(count)]
        loops_ms += decode.of_ranks("loop_ms")
        done, seconds = results[-1][1], [each.seconds for _, each in results]
        told_ms = statistics.median(seen for seen, _ in results) * 1e3
        told = {"told_ms": told_ms, "loop_ms": max(loops_ms)}
        return self.row(name, done.path, done.descriptors, done.nbytes, seconds, **told)

    def bare(
        self, case: Case, path: str, metadata: EngineMetadata, wanted: Wanted, repeat: int
    ) -> Row:
        """A row of READs of all ranks, posted at once, until all have ended."""
        each, nbytes = wanted
        readers = [BareReader(self.setup("nixl"), r, nbytes, metadata) for r in range(len(each))]
        seconds = []
        for _ in range(repeat + 1):
            started = time.perf_counter()
            pairs = zip(readers, each, strict=True)
            for future in [reader.thread.submit(reader.read, reads) for reader, reads in pairs]:
                future.result()
            seconds.append(time.perf_counter() - started)
        loop_ms = max([reader.close() for reader in readers])
        count = sum(len(read.lengths) for reads in each for read in reads)
        return self.row(case.name, path, count, self.size.kv_bytes, seconds[1:], loop_ms=loop_ms)

    def measure(self, name: str, measured: Callable[[], list[Row]]) -> None:
        """Measures with other threads until their processors are quiet: what a neighbour takes is
        no property of what is measured. Else the quietest of `tries` counts."""
        found: list[list[Row]] = []
        with self.attempt(name):
            while len(found) < self.tries:
                found.append(measured())
                if _loop_of(found[-1]) <= _QUIET * self.fastest_loop_ms:
                    break
            rows = [replace(row, tries=len(found)) for row in min(found, key=_loop_of)]
            print_table(rows)
            self.rows += rows

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A case that fails does not take the others' figures with it."""
        try:
            yield
        except Exception as error:
            self.num_failed += 1
            print(f"{name}: failed, {error!r}", flush=True)


def _loop_of(rows: list[Row]) -> float:
    return max(row.loop_ms or 0.0 for row in rows)


def measure_case(bench: Bench, case: Case, path: str) -> list[Row]:
    metadata, decode = bench.open(case, path)
    try:
        decode.pull(bench.lease())  # warms up
        decode.check()
        row = bench.pulls(decode, case.name, bench.size.tokens, bench.repeat)
        if path == "mapped":
            return [row]
        wanted = planned_reads(bench.setup(path), case)
        beside = bench.bare(case, "bare NIXL", metadata, wanted, bench.repeat)
        return [replace(row, of_bare=row.gb_per_s / beside.gb_per_s), beside]
    finally:
        decode.close()


def measure_short(bench: Bench, path: str) -> list[Row]:
    _, decode = bench.open(_case("same", "same"), path)
    name = f"{SHORT_TOKENS} tokens"
    try:
        bench.pulls(decode, name, SHORT_TOKENS, 5)  # warms up
        held = bench.pulls(decode, name, SHORT_TOKENS, 25)
        decode.holds = False
        return [held, bench.pulls(decode, f"{name} unheld", SHORT_TOKENS, 25)]
    finally:
        decode.close()


def copy_gb_per_s(source: str, target: str, nbytes: int) -> float:
    """The plain copy from one device to the other, eight in a row."""
    a = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=source)
    b = torch.empty(nbytes, dtype=torch.uint8, device=target)
    seconds = []
    for _ in range(4):
        synchronize(target)
        started = time.perf_counter()
        for _ in range(8):
            b.copy_(a, non_blocking=True)
        synchronize(source)  # whose stream copies
        synchronize(target)
        seconds.append((time.perf_counter() - started) / 8)
    return nbytes / statistics.median(seconds[1:]) / 1e9


# -- the run


def print_table(rows: list[Row]) -> None:
    print(f"{'case':20} {'path':12} descriptors       ms     best    GB/s   copy  bare  told  loop "
          "tries", *rows, sep="\n", flush=True)  # fmt: skip


def run(bench: Bench, args: argparse.Namespace) -> None:
    """Fills `bench.rows`."""
    for path in args.paths.split(","):
        for case in cases(args.device, path):
            if args.only in case.name:
                bench.measure(case.name, partial(measure_case, bench, case, path))
        bench.measure(f"{SHORT_TOKENS} tokens", partial(measure_short, bench, path))


def main(argv: list[str] | None = None) -> int:
    args = _parse_args(argv)
    devices = ["cpu", "cpu"]
    if args.device == "cuda":
        devices = [f"cuda:{index}" for index in args.devices.split(",")]
    source, *targets = devices
    size = Size(args.layers, args.heads, args.head_dim, args.tokens)
    use_device(targets[0])
    ceiling = copy_gb_per_s(source, targets[0], size.kv_bytes)
    fastest_ms = min(map(loop_ms_on, os.sched_getaffinity(0)))
    print(f"plain copy {source} -> {targets[0]}: {ceiling:.1f} GB/s")
    print(f"the fastest processor's loop: {fastest_ms:.1f} ms", flush=True)
    prefill = Remote(Prefill, source, size)
    told = (args.staging_bytes, args.repeat, args.tries, ceiling, fastest_ms)
    bench = Bench(prefill, size, tuple(targets), *told)
    try:
        run(bench, args)
    finally:
        prefill.close()
    print_table(bench.rows)
    name = torch.cuda.get_device_name(targets[0]) if args.device == "cuda" else "cpu"
    rows = [asdict(row) for row in bench.rows]
    figures = {"device": name, "copy_gb_per_s": ceiling, "rows": rows}
    print(json.dumps(figures))
    return 1 if bench.num_failed else 0


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--layers", type=int, help="32; 16 on the CPU")
    add("--heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--tokens", type=int, help="a multiple of 64: 8192; 2048 on the CPU")
    add("--staging-bytes", type=int, default=512 << 20)
    add("--repeat", type=int, default=5)
    add("--paths", "--transfer", help="mapped,nixl; mapped on the CPU")
    add("--only", default="", help="cases whose name contains this")
    add("--tries", type=int, default=1, help="of a row, for quiet processors")
    add("--devices", default="0,1", help="GPU of P and GPUs of D's ranks")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    args.layers = args.layers or (32 if cuda else 16)
    args.tokens = args.tokens or (8192 if cuda else 2048)
    if args.paths in (None, "auto"):
        args.paths = "mapped,nixl" if cuda else "mapped"
    if unknown := set(args.paths.split(",")) - {"mapped", "nixl"}:
        parser.error(f"--paths names {', '.join(sorted(unknown))}; use mapped, nixl or both")
    if args.tokens % 64:
        parser.error(f"--tokens {args.tokens} is no multiple of 64")
    if cuda and "," not in args.devices:
        parser.error(f"--devices {args.devices} names one GPU; give P's and those of D, as in 0,1")
    return args


if __name__ == "__main__":
    sys.exit(main())

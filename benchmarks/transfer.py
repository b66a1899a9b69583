"""What a pull of KV costs between two processes of one host, for pairs of layouts and geometries.

    python -m benchmarks.transfer --device cpu|cuda

P is one process, D another one for each rank. Pulls go through the servers' own coordinator,
workers and side channel, from the order until the fence was passed, out of P's mapped memory or
over NIXL (`--paths mapped,nixl`). Blocks are scattered unless a row says fresh; what arrives is
compared with what was sent. Beside them in the same run: the plain copy between the two devices,
what bare NIXL does with the same runs in the same order, and the field's scheme (one descriptor
for each layer, component and block of the smaller size, or token where heads cut token-major
blocks; given equal runs and no copy afterwards).

Between GPUs (`--devices 0,1`) `--decode` runs a synthetic decode step (the matrices and the KV of
64 sequences of an 8B model, as a CUDA graph) beside the pulls, so that each one's cost to the
other is seen. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.transfer_bare import BareReader, Wanted, field_reads, planned_reads
from benchmarks.transfer_decode import Decode, Setup, loop_ms_on
from benchmarks.transfer_prefill import (
    Case,
    Prefill,
    Remote,
    Side,
    Size,
    synchronize,
    use_device,
)
from kvcache.layout import NAMED_ORDERS
from kvcache.step_watch import StepWatch
from protocol.handshake import EngineMetadata
from protocol.messages import RemotePrefill

DEFAULT = "BHLCND"
MIXED = (("LBCNHD", "BHLCND"), ("LCBHND", "BHLCND"), ("BHLCND", "LCBNHD"))
GEOMETRIES = {  # tp and block size of P and of D
    "same": ((1, 64), (1, 64)),
    "TP 1->2": ((1, 64), (2, 64)),
    "TP 2->1": ((2, 64), (1, 64)),
    "16->64": ((1, 16), (1, 64)),
    "64->16": ((1, 64), (1, 16)),
}
SHORT_TOKENS = 128
FIELD_CASE = Case("TP 1->2", Side(DEFAULT, 1, 16, 1), Side(DEFAULT, 2, 16, 2))
FIELD = "the field's"
_QUIET = 1.3  # a processor is, whose loop takes no longer than this many of the fastest one's
Span = tuple[float, float]  # of time.perf_counter


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


def measure_field(bench: Bench, case: Case) -> list[Row]:
    metadata: EngineMetadata = bench.prefill.call("open", case.p)
    return [bench.bare(case, FIELD, metadata, field_reads(bench.setup("nixl"), case), 2)]


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


# -- beside a decode batch


class DecodeStep:
    """What a decode step of an 8B model costs a GPU: 64 sequences of 1,088 tokens, bf16."""

    BATCH, CONTEXT, LAYERS = 64, 1088, 32

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        options: Any = {"dtype": torch.bfloat16, "device": device}
        shapes = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
        self.weights = [
            [torch.randn(shape, **options) for shape in shapes] for _ in range(self.LAYERS)
        ]
        self.keys = [torch.randn(self.BATCH, 8, self.CONTEXT, 128, **options) for _ in range(4)]
        self.queries = torch.randn(self.BATCH, 8, 4, 128, **options)
        self.wide = torch.randn(self.BATCH, 14336, **options)
        self.hidden = torch.randn(self.BATCH, 4096, **options)
        with torch.cuda.stream(self.stream):
            self._step()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._step()
        torch.cuda.synchronize(device)

    def _step(self) -> None:
        for layer, (qkv, out, up, down) in enumerate(self.weights):
            self.hidden @ qkv
            keys, values = self.keys[layer % 4], self.keys[(layer + 1) % 4]
            scores = torch.softmax(self.queries @ keys.transpose(-1, -2), -1)
            scores @ values
            self.hidden @ out
            self.hidden @ up
            self.wide @ down

    def run(self, stepping: StepWatch, until: Callable[[], bool]) -> list[Span]:
        """Steps, one after the other, as a server's engine: when each began and ended."""
        spans = []
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            while not until():
                started = time.perf_counter()
                stepping.launching()
                self.graph.replay()
                ended.record()
                stepping.launched(ended.query)
                ended.synchronize()
                spans.append((started, time.perf_counter()))
        return spans


def measure_decode(bench: Bench, case: Case, path: str) -> dict[str, Any]:
    """Steps alone, steps while pulls follow one another, and those pulls."""
    _, decode = bench.open(case, path)
    step = DecodeStep(bench.devices[0])
    leases = [bench.lease() for _ in range(40)]
    pulls: list[Span] = []
    decode.pull(leases.pop())  # warms up

    def pull_each() -> None:
        for lease in leases:
            seconds, _ = decode.pull(lease)
            pulls.append((time.perf_counter() - seconds, time.perf_counter()))

    try:
        deadline = time.perf_counter() + 0.6
        alone = step.run(decode.first.stepping, lambda: time.perf_counter() > deadline)[5:]
        thread = threading.Thread(target=pull_each)
        for other in decode.others:  # the first one has its own steps
            other.call("count_as_busy")
        thread.start()
        beside = step.run(decode.first.stepping, lambda: not thread.is_alive())
        thread.join()
    finally:
        decode.close()
    base_s = statistics.mean(stop - start for start, stop in alone)
    seen = [stop - start for start, stop in beside]
    during = [s for s, span in zip(seen, beside, strict=True) if _overlap_s(span, pulls) > s / 2]
    found = {
        "path": path,
        "case": case.name,
        "step_ms": base_s * 1e3,
        "slower": statistics.mean(seen) / base_s - 1,
        "slower_during_pulls": statistics.mean(during or seen) / base_s - 1,
        "steps_during_pulls": len(during) / len(seen),
        "pull_ms": statistics.median(stop - start for start, stop in pulls[2:]) * 1e3,
    }
    slower = f"{found['slower_slowerpulls']:+.1%} during pulls"
    shares = f"{found['steps_slowerpulls']:.0%} of the steps; all steps {found['slower']:+.1%}"
    print(f"decode beside {path}, {case.name}: step of {found['step_ms']:.2f} ms {slower} "
          f"({shares}), pulls of {found['pull_ms']:.2f} ms", flush=True)  # fmt: skip
    return found


def _overlap_s(span: Span, others: list[Span]) -> float:
    """How long any of `others`, which follow one another, lay in `span`."""
    start, stop = span
    return sum(max(0.0, min(stop, b) - max(start, a)) for a, b in others)


# -- the run


def print_table(rows: list[Row]) -> None:
    print(f"{'case':20} {'path':12} descriptors       ms     best    GB/s   copy  bare  told  loop "
          "tries", *rows, sep="\n", flush=True)  # fmt: skip


def print_bounds(rows: list[Row], ceiling: float) -> None:
    """The field's scheme beside ours, and what no copy between these devices can beat."""
    for theirs in (row for row in rows if row.path == FIELD):
        ours = [
            f"{row.path} {theirs.milliseconds / row.milliseconds:.1f} x as fast"
            for row in rows
            if row.case == theirs.case and row is not theirs
        ]
        ours.append(f"the plain copy {ceiling / theirs.gb_per_s:.1f} x")
        took = f"{theirs.milliseconds:.1f} ms by the field's scheme"
        print(f"{theirs.case}: {took}; {', '.join(ours)}", flush=True)


def run(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fills `bench.rows`; what a decode step beside the pulls costs."""
    decode: list[dict[str, Any]] = []
    paths = args.paths.split(",")
    for path in paths:
        chosen = [case for case in cases(args.device, path) if args.only in case.name]
        for case in chosen:
            bench.measure(case.name, partial(measure_case, bench, case, path))
        bench.measure(f"{SHORT_TOKENS} tokens", partial(measure_short, bench, path))
        for case in chosen if args.decode else ():
            with bench.attempt(f"decode beside {path}, {case.name}"):
                decode.append(measure_decode(bench, case, path))
    against = [FIELD_CASE] if "nixl" in paths else []
    if args.device == "cpu":
        against = [case for case in cases("cpu", "nixl") if args.only in case.name]
    for case in against:
        bench.measure(f"{case.name}, {FIELD}", partial(measure_field, bench, case))
    return decode


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
        decode = run(bench, args)
    finally:
        prefill.close()
    print_table(bench.rows)
    print_bounds(bench.rows, ceiling)
    name = torch.cuda.get_device_name(targets[0]) if args.device == "cuda" else "cpu"
    rows = [asdict(row) for row in bench.rows]
    figures = {"device": name, "copy_gb_per_s": ceiling, "rows": rows, "decode": decode}
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
    add("--decode", action="store_true", help="also beside a decode batch")
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
    if args.decode and not cuda:
        parser.error("--decode needs --device cuda")
    return args


if __name__ == "__main__":
    sys.exit(main())

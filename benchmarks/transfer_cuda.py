"""The transfer rows of the speed table: `python -m benchmarks.transfer --device cuda`.

P on one GPU, D on another (`--devices 0,1`), pulls through the servers' own coordinator, workers
and side channel, fence included, over the mapped path and over NIXL. Beside them in the same run:
the plain copy between the two GPUs, what bare NIXL does with the same runs in the same order, and
the field's scheme (one descriptor for each layer, component and 16-token block). With `--decode`
a synthetic decode step (the matrices and the KV of 64 sequences of an 8B model, as a CUDA graph)
runs beside the pulls, so that each one's cost to the other is seen.
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.processor import QUIET, fastest_loop_ms
from benchmarks.transfer import Case, Side, Size
from benchmarks.transfer_bare import field, planned
from benchmarks.transfer_cuda_rig import Answers, DecodeEnd, Setup, Timeline, random_kv, serve
from kvcache.stepping import Stepping
from kvcache.transfer.posts import PostLimits
from kvcache.transfer.pull import PullDone
from protocol.handshake import EngineMetadata
from protocol.messages import RemotePrefill

DEFAULT = "BHLCND"
Span = tuple[float, float]  # of time.perf_counter


@dataclass(frozen=True)
class Row:
    case: str
    path: str
    descriptors: int
    bytes: int
    milliseconds: float  # median, from the order until the fence was passed
    best_ms: float
    gb_per_s: float
    of_copy: float
    of_bare: float | None = None  # what bare NIXL reaches with the same runs
    told_ms: float | None = None  # until the thread that ordered it has been woken
    loop_ms: float | None = None  # DecodeRank.loop_ms, the slower of before and after
    tries: int = 1  # until the processors were quiet, or there were no more


def loop_of(rows: list[Row]) -> float:
    return max(row.loop_ms or 0.0 for row in rows)


def _case(name: str, p: tuple[str, int, int], d: tuple[str, int, int], scattered: bool) -> Case:
    return Case(name, Side(*p, 1, scattered), Side(*d, 2, scattered))


def mapped_cases() -> Iterator[Case]:
    one = (DEFAULT, 1, 64)
    yield _case("same", one, one, True)
    yield _case("TP 1->2", one, (DEFAULT, 2, 64), True)
    yield _case("TP 2->1", (DEFAULT, 2, 64), one, True)
    yield _case("16->64", (DEFAULT, 1, 16), one, True)
    yield _case("64->16", one, (DEFAULT, 1, 16), True)
    yield _case("NHD per layer", ("LBCNHD", 1, 64), one, True)


def nixl_cases() -> Iterator[Case]:
    one = (DEFAULT, 1, 64)
    yield _case("same, fresh", one, one, False)
    yield _case("same", one, one, True)
    yield _case("TP 1->2", one, (DEFAULT, 2, 64), True)
    yield _case("TP 2->1", (DEFAULT, 2, 64), one, True)
    yield _case("64->16, fresh", one, (DEFAULT, 1, 16), False)
    yield _case("16->64", (DEFAULT, 1, 16), one, True)
    yield _case("per layer, fresh", ("LBCHND", 1, 64), one, False)
    yield _case("per layer", ("LBCHND", 1, 64), one, True)


@dataclass(frozen=True)
class Bench:
    answers: Answers
    size: Size
    kv: torch.Tensor
    devices: tuple[str, ...]  # of D
    staging_bytes: int
    repeat: int
    copy_gb_per_s: float
    num_threads: int | None
    limits: PostLimits | None
    timeline: bool
    tries: int  # of a row, until its processors are quiet
    fastest_loop_ms: float

    @property
    def device(self) -> str:
        return self.devices[0]

    def open(self, case: Case, *, mapped: bool) -> tuple[EngineMetadata, DecodeEnd]:
        metadata: EngineMetadata = self.answers.ask(case.p)
        decode = DecodeEnd(case.d, self.setup(mapped=mapped))
        decode.connect(self.lease())
        return metadata, decode

    def setup(self, *, mapped: bool = False) -> Setup:
        return Setup(
            self.size, self.devices, mapped, self.staging_bytes, self.limits, self.num_threads
        )

    def in_quiet(self, measure: Callable[[], list[Row]]) -> list[Row]:
        """Measures with other threads until their processors are quiet: what a neighbour takes is
        no property of what is measured. Else the quietest of `tries` counts, whatever it says."""
        found: list[list[Row]] = []
        while len(found) < self.tries:
            found.append(measure())
            if loop_of(found[-1]) <= QUIET * self.fastest_loop_ms:
                break
        quietest = min(found, key=loop_of)
        return [replace(row, tries=len(found)) for row in quietest]

    def lease(self, tokens: int | None = None) -> RemotePrefill:
        remote: RemotePrefill = self.answers.ask(tokens or self.size.tokens)
        return remote

    def row(self, case: str, path: str, descriptors: int, nbytes: int, seconds: list[float]) -> Row:
        median_s = statistics.median(seconds)
        rate = nbytes / median_s / 1e9
        times_ms = (median_s * 1e3, min(seconds) * 1e3)
        return Row(case, path, descriptors, nbytes, *times_ms, rate, rate / self.copy_gb_per_s)

    def pulls(self, case: str, results: list[tuple[float, PullDone]]) -> Row:
        """A row of pulls, with the seconds that their caller saw."""
        done = results[-1][1]
        seconds = [each.seconds for _, each in results]
        row = self.row(case, done.path, done.descriptors, done.nbytes, seconds)
        return replace(row, told_ms=statistics.median(seen for seen, _ in results) * 1e3)


def measure_case(bench: Bench, case: Case, *, mapped: bool) -> list[Row]:
    metadata, decode = bench.open(case, mapped=mapped)
    try:
        decode.pull(bench.lease(), bench.size.tokens)  # warms up
        decode.check(bench.kv)
        row = timed_pulls(bench, decode, case.name, bench.size.tokens, bench.repeat)
        if mapped:
            return [row]
        timed = planned(bench.setup(), case, metadata, bench.repeat)
        bare = bench.row(case.name, "bare NIXL", row.descriptors, row.bytes, timed.seconds)
        bare = replace(bare, loop_ms=timed.loop_ms)
        return [replace(row, of_bare=row.gb_per_s / bare.gb_per_s), bare]
    finally:
        decode.close()


def timed_pulls(bench: Bench, decode: DecodeEnd, name: str, tokens: int, count: int) -> Row:
    before_ms = decode.loop_ms()
    row = bench.pulls(name, pull_all(bench, decode, name, tokens, count))
    return replace(row, loop_ms=max(before_ms, decode.loop_ms()))


def pull_all(
    bench: Bench, decode: DecodeEnd, name: str, tokens: int, count: int
) -> list[tuple[float, PullDone]]:
    """Pulls one after the other; prints where the median one's time went, if wanted."""
    results, timelines = [], []
    for _ in range(count):
        results.append(decode.pull(bench.lease(tokens), tokens))
        timelines.append(decode.timelines())
    if bench.timeline and name:
        for rank, marks in enumerate(zip(*timelines, strict=True)):
            points = [point for point in Timeline.POINTS if all(point in each for each in marks)]
            medians = (statistics.median(each[point] for each in marks) for point in points)
            line = " | ".join(f"{t:,.0f} {p}" for t, p in zip(medians, points, strict=True))
            print(f"  {name}, rank {rank}, us: {line}", flush=True)
    return results


def measure_short(bench: Bench, *, mapped: bool) -> list[Row]:
    """A pull of 128 tokens."""
    _, decode = bench.open(next(mapped_cases()), mapped=mapped)
    try:
        pull_all(bench, decode, "", 128, 5)
        held = timed_pulls(bench, decode, "128 tokens", 128, 25)
        decode.holds = False
        unheld = timed_pulls(bench, decode, "128 tokens unheld", 128, 25)
        return [held, unheld]
    finally:
        decode.close()


def measure_field(bench: Bench) -> list[Row]:
    case = _case("TP 1->2", (DEFAULT, 1, 16), (DEFAULT, 2, 16), True)
    metadata: EngineMetadata = bench.answers.ask(case.p)
    count, timed = field(bench.setup(), case, metadata)
    row = bench.row(case.name, "the field's", count, bench.size.kv_bytes, timed.seconds)
    return [replace(row, loop_ms=timed.loop_ms)]


# -- ceilings


def copy_gb_per_s(source: str, target: str, nbytes: int) -> float:
    """The plain copy from one GPU to the other, by its events."""
    a = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=source)
    b = torch.empty(nbytes, dtype=torch.uint8, device=target)
    milliseconds = []
    with torch.cuda.device(target):
        for _ in range(8):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            b.copy_(a, non_blocking=True)
            stop.record()
            stop.synchronize()
            milliseconds.append(start.elapsed_time(stop))
    return float(nbytes / statistics.median(milliseconds[2:]) / 1e6)


# -- beside a decode batch


class DecodeStep:
    """What a decode step of an 8B model costs a GPU: 64 sequences of 1,088 tokens, bf16."""

    BATCH, CONTEXT, LAYERS = 64, 1088, 32

    def __init__(self, device: str) -> None:
        self.device = device
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

    def run(self, stepping: Stepping, until: Callable[[], bool]) -> list[Span]:
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


def measure_decode(bench: Bench, case: Case, *, mapped: bool) -> dict[str, Any]:
    """Steps alone, steps while pulls follow one another, and those pulls."""
    _, decode = bench.open(case, mapped=mapped)
    step = DecodeStep(bench.device)
    leases = [bench.lease() for _ in range(40)]
    pulls: list[Span] = []
    decode.pull(leases.pop(), bench.size.tokens)  # warms up

    def pull_each() -> None:
        for lease in leases:
            seconds, _ = decode.pull(lease, bench.size.tokens)
            pulls.append((time.perf_counter() - seconds, time.perf_counter()))

    try:
        deadline = time.perf_counter() + 0.6
        alone = step.run(decode.first.stepping, lambda: time.perf_counter() > deadline)[5:]
        thread = threading.Thread(target=pull_each)
        decode.tell_others("busy")
        thread.start()
        beside = step.run(decode.first.stepping, lambda: not thread.is_alive())
        thread.join()
    finally:
        decode.close()
    base_s = statistics.mean(stop - start for start, stop in alone)
    seen = [stop - start for start, stop in beside]
    during = [s for s, span in zip(seen, beside, strict=True) if overlap_s(span, pulls) > s / 2]
    return {
        "case": case.name,
        "step_ms": base_s * 1e3,
        "slower": statistics.mean(seen) / base_s - 1,
        "slower_during_pulls": statistics.mean(during or seen) / base_s - 1,
        "steps_during_pulls": len(during) / len(seen),
        "pull_ms": statistics.median(stop - start for start, stop in pulls[2:]) * 1e3,
    }


def overlap_s(span: Span, others: list[Span]) -> float:
    """How long any of `others`, which follow one another, lay in `span`."""
    start, stop = span
    return sum(max(0.0, min(stop, b) - max(start, a)) for a, b in others)


# -- the run


def print_table(rows: list[Row]) -> None:
    name = f"{'case':18} {'path':12} descriptors"
    print(f"{name}       ms     best    GB/s   copy  bare  told  loop tries")
    for row in rows:
        bare = f"{row.of_bare:.0%}" if row.of_bare is not None else ""
        told = f"{row.told_ms:.3f}" if row.told_ms is not None else ""
        loop = f"{row.loop_ms:.1f}" if row.loop_ms is not None else ""
        times = f"{row.milliseconds:8.3f} {row.best_ms:8.3f} {row.gb_per_s:7.1f} {row.of_copy:6.0%}"
        name = f"{row.case:18} {row.path:12} {row.descriptors:11}"
        print(f"{name} {times} {bare:>5} {told:>5} {loop:>5} {row.tries:5}", flush=True)


def attempt(rows: list[Row], name: str, action: Callable[[], list[Row]]) -> None:
    """One case; a case that fails does not take the others' figures with it."""
    try:
        found = action()
    except Exception as error:
        print(f"{name}: failed, {error!r}", flush=True)
        return
    print_table(found)
    rows += found


def attempt_decode(bench: Bench, case: Case, *, mapped: bool) -> dict[str, Any] | None:
    path = "mapped" if mapped else "nixl"
    try:
        found = {"path": path, **measure_decode(bench, case, mapped=mapped)}
    except Exception as error:
        print(f"decode beside {path}, {case.name}: failed, {error!r}", flush=True)
        return None
    print(
        f"decode beside {path}, {case.name}: step of {found['step_ms']:.2f} ms "
        f"{found['slower_during_pulls']:+.1%} during pulls ({found['steps_during_pulls']:.0%} of "
        f"the steps; all steps {found['slower']:+.1%}), pulls of {found['pull_ms']:.2f} ms",
        flush=True,
    )
    return found


def print_bound(rows: list[Row], ceiling: float) -> None:
    """The field's scheme beside ours, and what no copy between these GPUs can beat."""
    field = next((row for row in rows if row.path == "the field's"), None)
    if field is None:
        return
    bound = field.gb_per_s and ceiling / field.gb_per_s
    print(f"the field's scheme takes {field.milliseconds:.0f} ms; the plain copy is {bound:.0f} x")
    for row in rows:
        if row.case == field.case and row is not field:
            print(f"  {row.path}: {field.milliseconds / row.milliseconds:.0f} x", flush=True)


def run(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    source, *targets = (f"cuda:{index}" for index in args.devices.split(","))
    target = targets[0]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, source, size), daemon=True)
    process.start()
    torch.cuda.set_device(target)
    ceiling = copy_gb_per_s(source, target, size.kv_bytes)
    print(f"plain copy {source} -> {target}: {ceiling:.1f} GB/s", flush=True)
    fastest_ms = fastest_loop_ms()
    print(f"the fastest processor's loop: {fastest_ms:.1f} ms", flush=True)
    limits = PostLimits(args.post_bytes, args.post_runs) if args.post_bytes else None
    kv = random_kv(size, target)
    bench = Bench(
        Answers(here), size, kv, tuple(targets), args.staging_bytes, args.repeat, ceiling,
        args.num_threads, limits, args.timeline, args.tries, fastest_ms,
    )  # fmt: skip
    rows: list[Row] = []
    decode: list[dict[str, Any]] = []
    for path in args.paths.split(","):
        mapped = path == "mapped"
        cases = [c for c in (mapped_cases if mapped else nixl_cases)() if args.only in c.name]
        for case in cases:
            measure = partial(measure_case, bench, case, mapped=mapped)
            attempt(rows, case.name, partial(bench.in_quiet, measure))
        short = partial(measure_short, bench, mapped=mapped)
        attempt(rows, "128 tokens", partial(bench.in_quiet, short))
        for case in cases if args.decode else ():
            found = attempt_decode(bench, case, mapped=mapped)
            decode += [found] if found else []
    if "nixl" in args.paths:
        field_scheme = partial(measure_field, bench)
        attempt(rows, "the field's scheme", partial(bench.in_quiet, field_scheme))
    here.send(None)
    process.join(30)
    print_table(rows)
    print_bound(rows, ceiling)
    return {
        "device": torch.cuda.get_device_name(target),
        "copy_gb_per_s": ceiling,
        "rows": [asdict(row) for row in rows],
        "decode": decode,
    }

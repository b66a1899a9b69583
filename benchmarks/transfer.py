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
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.transfer_pair import (
    Decode,
    Prefill,
    Remote,
    Setup,
    Side,
    Size,
    kind_of,
    new_agent,
    synchronize,
    use_device,
)
from kvcache.layout import NAMED_ORDERS
from kvcache.transfer.agent import ReadState
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.plan.plan import Planner
from protocol.handshake import EngineMetadata

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

    def __str__(self) -> str:
        of_bare = "" if self.of_bare is None else f"{self.of_bare:.0%}"
        times = f"{self.milliseconds:8.3f} {self.best_ms:8.3f} {self.gb_per_s:7.1f}"
        name = f"{self.case:20} {self.path:12} {self.descriptors:11}"
        return f"{name} {times} {self.of_copy:6.0%} {of_bare:>5}"


class Case(NamedTuple):
    name: str
    p: Side
    d: Side


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


class BareReader:
    """Carries out a rank's READs without a pull, in a thread of its own, into memory of its own."""

    def __init__(
        self, device: str, reads: list[ReadDescriptors], remote: EngineMetadata
    ) -> None:
        self._reads, self._remote = reads, remote
        nbytes = max(int((read.local_offsets + read.lengths).max()) for read in reads)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._address = self._memory.data_ptr()
        self._device, self._kind = torch.device(device).index or 0, kind_of(device)
        self._agent = new_agent("bare", device)
        self._agent.register(
            self._address, nbytes, device_id=self._device, kind=self._kind
        )
        self._name = cache(
            lambda rank: self._agent.add_peer(remote.ranks[rank].agent_metadata)
        )
        self.thread = ThreadPoolExecutor(1, initializer=self._agent.bind_thread)

    def read(self) -> None:
        handles = [
            self._agent.read(
                self._name(read.remote_rank),
                read.local_offsets + self._address,
                read.remote_offsets + self._remote.ranks[read.remote_rank].base_address,
                read.lengths,
                local_device=self._device,
                remote_device=self._remote.ranks[read.remote_rank].device_id,
                kinds=(self._kind, self._kind),
            )
            for read in self._reads
        ]
        while any(self._agent.poll(handle) is ReadState.ACTIVE for handle in handles):
            pass
        for handle in handles:
            if handle.state is not ReadState.DONE:
                raise RuntimeError("a READ failed")
            self._agent.release(handle)

    def close(self) -> None:
        self.thread.shutdown()
        self._agent.close()


def planned_reads(case: Case, setup: Setup) -> list[list[ReadDescriptors]]:
    """The plan's own runs in its own order, for each rank of D."""
    size, found = setup.size, []
    costs = DEFAULT_COSTS[torch.device(setup.device(0)).type]
    for end in case.d.endpoints(size):
        remote = case.p.endpoints(size)
        planner = Planner(end, remote, size.heads, staging_bytes=setup.staging_bytes)
        transfer = planner.take(
            (0, size.tokens), case.d.blocks(size), case.p.blocks(size)
        )
        found.append(list(planner.plan(transfer, costs).reads))
    return found


class Bench:
    """One run: P, what its rows are held against, and the rows.

    Attributes:
        num_failed: cases without a row, since they failed.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        devices = ["cpu", "cpu"]
        if args.device == "cuda":
            devices = [f"cuda:{index}" for index in args.devices.split(",")]
        source, *targets = devices
        use_device(targets[0])
        self.args, self.targets = args, tuple(targets)
        self.size = Size(args.layers, args.heads, args.head_dim, args.tokens)
        self.copy_gb_per_s = copy_gb_per_s(source, targets[0], self.size.kv_bytes)
        print(
            f"plain copy {source} -> {targets[0]}: {self.copy_gb_per_s:.1f} GB/s",
            flush=True,
        )
        self.prefill = Remote(Prefill, source, self.size)
        self.rows: list[Row] = []
        self.num_failed = 0

    def run(self) -> None:
        """Fills `rows`."""
        for path in self.args.paths.split(","):
            for case in cases(self.args.device, path):
                if self.args.only in case.name:
                    self._measure(case.name, partial(self._case, case, path))
            self._measure(f"{SHORT_TOKENS} tokens", partial(self._short, path))

    def _measure(self, name: str, measured: Callable[[], list[Row]]) -> None:
        """A case that fails does not take the others' figures with it."""
        try:
            rows = measured()
        except Exception as error:
            self.num_failed += 1
            print(f"{name}: failed, {error!r}", flush=True)
        else:
            print_table(rows)
            self.rows += rows

    def _case(self, case: Case, path: str) -> list[Row]:
        setup = self._setup(path)
        with self._opened(case, setup) as (decode, metadata):
            decode.pull(self.size.tokens)  # warms up
            decode.check()
            row = self._pulls(decode, case.name, self.size.tokens, self.args.repeat)
            if path == "mapped":
                return [row]
            beside = self._bare(case, setup, metadata)
            return [replace(row, of_bare=row.gb_per_s / beside.gb_per_s), beside]

    def _short(self, path: str) -> list[Row]:
        name = f"{SHORT_TOKENS} tokens"
        with self._opened(_case("same", "same"), self._setup(path)) as (decode, _):
            self._pulls(decode, name, SHORT_TOKENS, 5)  # warms up
            held = self._pulls(decode, name, SHORT_TOKENS, 25)
            decode.holds = False
            return [held, self._pulls(decode, f"{name} unheld", SHORT_TOKENS, 25)]

    def _setup(self, path: str) -> Setup:
        ours = self.args.staging_bytes, self.args.verify
        return Setup(self.size, self.targets, path == "mapped", *ours)

    @contextmanager
    def _opened(
        self, case: Case, setup: Setup
    ) -> Iterator[tuple[Decode, EngineMetadata]]:
        metadata = self.prefill.call("open", case.p)
        with closing(Decode(self.prefill, case.d, setup)) as decode:
            decode.connect()
            yield decode, metadata

    def _pulls(self, decode: Decode, name: str, tokens: int, count: int) -> Row:
        done = [decode.pull(tokens) for _ in range(count)]
        seconds, last = [each.seconds for each in done], done[-1]
        return self._row(name, last.path, last.descriptors, last.nbytes, seconds)

    def _bare(self, case: Case, setup: Setup, metadata: EngineMetadata) -> Row:
        """A row of READs of all ranks, posted at once, until all have ended."""
        each = planned_reads(case, setup)
        readers = [
            BareReader(setup.device(r), reads, metadata) for r, reads in enumerate(each)
        ]
        seconds = []
        for _ in range(self.args.repeat + 1):
            started = time.perf_counter()
            for future in [reader.thread.submit(reader.read) for reader in readers]:
                future.result()
            seconds.append(time.perf_counter() - started)
        for reader in readers:
            reader.close()
        count = sum(len(read.lengths) for reads in each for read in reads)
        nbytes = self.size.kv_bytes
        return self._row(case.name, "bare NIXL", count, nbytes, seconds[1:])

    def _row(
        self, case: str, path: str, descriptors: int, nbytes: int, seconds: list[float]
    ) -> Row:
        median_s = statistics.median(seconds)
        rate = nbytes / median_s / 1e9
        times = (median_s * 1e3, min(seconds) * 1e3, rate, rate / self.copy_gb_per_s)
        return Row(case, path, descriptors, nbytes, *times)


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


def print_table(rows: list[Row]) -> None:
    print(f"{'case':20} {'path':12} descriptors       ms     best    GB/s   copy  bare",
          *rows, sep="\n", flush=True)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    bench = Bench(_parse_args(argv))
    try:
        bench.run()
    finally:
        bench.prefill.close()
    print_table(bench.rows)
    on_gpu, target = bench.args.device == "cuda", bench.targets[0]
    figures = {
        "device": torch.cuda.get_device_name(target) if on_gpu else "cpu",
        "copy_gb_per_s": bench.copy_gb_per_s,
        "rows": [asdict(row) for row in bench.rows],
    }
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
    add(
        "--verify",
        choices=("off", "sample", "all"),
        default="off",
        help="as --kv-verify",
    )
    add("--only", default="", help="cases whose name contains this")
    add("--devices", default="0,1", help="GPU of P and GPUs of D's ranks")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    args.layers = args.layers or (32 if cuda else 16)
    args.tokens = args.tokens or (8192 if cuda else 2048)
    args.paths = args.paths or ("mapped,nixl" if cuda else "mapped")
    if unknown := set(args.paths.split(",")) - {"mapped", "nixl"}:
        parser.error(
            f"--paths names {', '.join(sorted(unknown))}; use mapped, nixl or both"
        )
    if args.tokens % 64:
        parser.error(f"--tokens {args.tokens} is no multiple of 64")
    if cuda and "," not in args.devices:
        parser.error(
            f"--devices {args.devices} names one GPU; give P's and those of D, as in 0,1"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())

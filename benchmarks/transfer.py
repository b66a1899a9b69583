"""Measures pulls of KV between two processes of one host.

    python -m benchmarks.transfer --device cpu|cuda

Each row of the output is one case: the layouts and geometries of a prefill server P and
a decode server D. P is one process; D has one process per rank. Pulls use the servers'
own coordinator, workers and side channel. A pull is timed from the call of `pull` until
P has answered COMPLETE (the fence). A pull either copies from P's mapped memory or uses
NIXL (`--paths mapped,nixl`).

Blocks are scattered over the pool, except in rows with "fresh" in their name. The KV
that arrives is compared with the KV that was sent. The same run also measures a plain
copy between the two devices, and bare NIXL with the same reads in the same order.
`--devices 0,1` selects the GPU of P and the GPUs of D. The last line of output is a
JSON document.
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
    DecodeSetup,
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
from kvcache.transfer.agent import ReadState
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.plan.plan import Planner
from protocol.handshake import EngineMetadata

DEFAULT_ORDER = "BHLCND"
# Pairs of different KV layouts: that of P, and that of D.
MIXED_ORDERS = (("LBCNHD", "BHLCND"), ("LCBHND", "BHLCND"), ("BHLCND", "LCBNHD"))
# The TP size and the block size (tokens) of P, and those of D.
GEOMETRIES = {
    "same": ((1, 64), (1, 64)),
    "TP 1->2": ((1, 64), (2, 64)),
    "TP 2->1": ((2, 64), (1, 64)),
    "16->64": ((1, 16), (1, 64)),
    "64->16": ((1, 64), (1, 16)),
}
SHORT_TOKENS = 128


@dataclass(frozen=True)
class Row:
    """The figures of one case.

    Attributes:
        path: how the KV was moved: "bare NIXL" for READs without a pull, "mapped" for a
            copy from mapped memory. For pulls with NIXL: "direct", "staged", or "mixed"
            (both).
        bytes: bytes that one pull moves.
        milliseconds: median duration of the pulls.
        best_ms: shortest duration of a pull.
        of_copy: the pulls' rate divided by the plain copy's rate.
        of_bare: the pulls' rate divided by the rate of bare NIXL with the same reads;
            None if bare NIXL was not measured.
    """

    case: str
    path: str
    descriptors: int
    bytes: int
    milliseconds: float
    best_ms: float
    gb_per_s: float
    of_copy: float
    of_bare: float | None = None

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
    name: str,
    geometry: str,
    p_order: str = DEFAULT_ORDER,
    d_order: str = DEFAULT_ORDER,
    *,
    fresh: bool = False,
) -> Case:
    """Return a case.

    Args:
        geometry: a key of GEOMETRIES.
        fresh: True if blocks are in order, as in a new pool; False if scattered.
    """
    (p_tp, p_block_size), (d_tp, d_block_size) = GEOMETRIES[geometry]
    if fresh:
        name = f"{name}, fresh"
    return Case(
        name,
        Side(p_order, p_tp, p_block_size, seed=1, scattered=not fresh),
        Side(d_order, d_tp, d_block_size, seed=2, scattered=not fresh),
    )


def cases(device: str, path: str) -> Iterator[Case]:
    """Yield the cases to measure with a path: "mapped" or "nixl"."""
    if device == "cpu":
        for order, geometry in product(NAMED_ORDERS, GEOMETRIES):
            yield _case(f"{order} {geometry}", geometry, order, order)
        for p_order, d_order in MIXED_ORDERS:
            yield _case(f"{p_order}->{d_order} same", "same", p_order, d_order)
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
    """Executes the READs of one rank with bare NIXL, without a pull.

    Each reader has its own thread, agent and destination buffer.
    """

    def __init__(
        self, device: str, reads: list[ReadDescriptors], remote: EngineMetadata
    ) -> None:
        self._reads = reads
        self._remote = remote
        nbytes = max(int((read.local_offsets + read.lengths).max()) for read in reads)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._address = self._memory.data_ptr()
        self._device_id = torch.device(device).index or 0
        self._kind = kind_of(device)
        self._agent = new_agent("bare", device)
        self._agent.register(
            self._address, nbytes, device_id=self._device_id, kind=self._kind
        )
        self._peer_name = cache(self._add_peer)
        self.thread = ThreadPoolExecutor(1, initializer=self._agent.bind_thread)

    def _add_peer(self, rank: int) -> str:
        return self._agent.add_peer(self._remote.ranks[rank].agent_metadata)

    def read(self) -> None:
        """Post all READs, and return when all have completed."""
        handles = [
            self._agent.read(
                self._peer_name(read.remote_rank),
                read.local_offsets + self._address,
                read.remote_offsets + self._remote.ranks[read.remote_rank].base_address,
                read.lengths,
                local_device=self._device_id,
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


def planned_reads(case: Case, setup: DecodeSetup) -> list[list[ReadDescriptors]]:
    """Return the READs of each rank of D, in the planner's order."""
    size = setup.size
    costs = DEFAULT_COSTS[torch.device(setup.device(0)).type]
    remote = case.p.endpoints(size)
    reads = []
    for local in case.d.endpoints(size):
        planner = Planner(local, remote, size.heads, staging_bytes=setup.staging_bytes)
        transfer = planner.make_transfer(
            (0, size.tokens), case.d.blocks(size), case.p.blocks(size)
        )
        reads.append(list(planner.plan(transfer, costs).reads))
    return reads


class Bench:
    """One run of the benchmark. The constructor measures the plain copy and starts P.

    Attributes:
        rows: the measured rows.
        num_failed: number of cases that failed and have no row.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        devices = ["cpu", "cpu"]
        if args.device == "cuda":
            devices = [f"cuda:{index}" for index in args.devices.split(",")]
        source, *targets = devices
        use_device(targets[0])
        self.args = args
        self.targets = tuple(targets)
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
        """Measure all cases and fill `rows`."""
        for path in self.args.paths.split(","):
            for case in cases(self.args.device, path):
                if self.args.only in case.name:
                    self._add_rows(case.name, partial(self._measure, case, path))
            short_name = f"{SHORT_TOKENS} tokens"
            measure = partial(self._measure_short_pulls, short_name, path)
            self._add_rows(short_name, measure)

    def _add_rows(self, name: str, measure: Callable[[], list[Row]]) -> None:
        """Call `measure` and add its rows. If it fails, print and count the failure."""
        try:
            rows = measure()
        except Exception as error:
            self.num_failed += 1
            print(f"{name}: failed, {error!r}", flush=True)
        else:
            print_table(rows)
            self.rows += rows

    def _measure(self, case: Case, path: str) -> list[Row]:
        setup = self._setup(path)
        with self._open_pair(case, setup) as (decode, metadata):
            decode.pull(self.size.tokens)  # warms up
            decode.check()
            row = self._measure_pulls(
                decode, case.name, self.size.tokens, self.args.repeat
            )
            if path == "mapped":
                return [row]
            bare_row = self._measure_bare(case, setup, metadata)
            of_bare = row.gb_per_s / bare_row.gb_per_s
            return [replace(row, of_bare=of_bare), bare_row]

    def _measure_short_pulls(self, name: str, path: str) -> list[Row]:
        """Measure short pulls twice.

        In the first row, D begins to renew the lease ("holds" it) before the pull. In
        the second row ("unheld"), D begins to renew the lease with the pull.
        """
        case = _case("same", "same")
        with self._open_pair(case, self._setup(path)) as (decode, _):
            self._measure_pulls(decode, name, SHORT_TOKENS, 5)  # warms up
            held_row = self._measure_pulls(decode, name, SHORT_TOKENS, 25)
            decode.holds_before_pull = False
            unheld_row = self._measure_pulls(decode, f"{name} unheld", SHORT_TOKENS, 25)
            return [held_row, unheld_row]

    def _setup(self, path: str) -> DecodeSetup:
        return DecodeSetup(
            self.size,
            self.targets,
            mapped=path == "mapped",
            staging_bytes=self.args.staging_bytes,
            verify=self.args.verify,
        )

    @contextmanager
    def _open_pair(
        self, case: Case, setup: DecodeSetup
    ) -> Iterator[tuple[Decode, EngineMetadata]]:
        metadata = self.prefill.call("begin_case", case.p)
        with closing(Decode(self.prefill, case.d, setup)) as decode:
            decode.connect()
            yield decode, metadata

    def _measure_pulls(self, decode: Decode, name: str, tokens: int, count: int) -> Row:
        pulls = [decode.pull(tokens) for _ in range(count)]
        seconds = [pull.seconds for pull in pulls]
        last = pulls[-1]
        return self._row(name, last.path, last.num_descriptors, last.nbytes, seconds)

    def _measure_bare(
        self, case: Case, setup: DecodeSetup, metadata: EngineMetadata
    ) -> Row:
        """Measure the READs of all ranks with bare NIXL.

        All ranks post their READs at the same time. A round is timed until all READs
        have completed.
        """
        rank_reads = planned_reads(case, setup)
        readers = [
            BareReader(setup.device(rank), reads, metadata)
            for rank, reads in enumerate(rank_reads)
        ]
        seconds = []
        for _ in range(self.args.repeat + 1):
            started_at = time.perf_counter()
            for future in [reader.thread.submit(reader.read) for reader in readers]:
                future.result()
            seconds.append(time.perf_counter() - started_at)
        for reader in readers:
            reader.close()
        count = sum(len(read.lengths) for reads in rank_reads for read in reads)
        nbytes = self.size.kv_bytes
        # The first round warms up.
        return self._row(case.name, "bare NIXL", count, nbytes, seconds[1:])

    def _row(
        self, case: str, path: str, descriptors: int, nbytes: int, seconds: list[float]
    ) -> Row:
        median_s = statistics.median(seconds)
        gb_per_s = nbytes / median_s / 1e9
        return Row(
            case,
            path,
            descriptors,
            nbytes,
            milliseconds=median_s * 1e3,
            best_ms=min(seconds) * 1e3,
            gb_per_s=gb_per_s,
            of_copy=gb_per_s / self.copy_gb_per_s,
        )


def copy_gb_per_s(source: str, target: str, nbytes: int) -> float:
    """Return the median rate of a plain copy between two devices.

    Eight copies in a row are timed together.
    """
    a = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=source)
    b = torch.empty(nbytes, dtype=torch.uint8, device=target)
    seconds = []
    for _ in range(4):
        synchronize(target)
        started_at = time.perf_counter()
        for _ in range(8):
            b.copy_(a, non_blocking=True)
        synchronize(source)  # the copies run on a stream of the source
        synchronize(target)
        seconds.append((time.perf_counter() - started_at) / 8)
    return nbytes / statistics.median(seconds[1:]) / 1e9


def print_table(rows: list[Row]) -> None:
    print(f"{'case':20} {'path':12} descriptors       ms     best    GB/s   copy  bare")
    for row in rows:
        print(row)
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    bench = Bench(_parse_args(argv))
    try:
        bench.run()
    finally:
        bench.prefill.close()
    print_table(bench.rows)
    device = "cpu"
    if bench.args.device == "cuda":
        device = torch.cuda.get_device_name(bench.targets[0])
    figures = {
        "device": device,
        "copy_gb_per_s": bench.copy_gb_per_s,
        "rows": [asdict(row) for row in bench.rows],
    }
    print(json.dumps(figures))
    return 1 if bench.num_failed else 0


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--layers", type=int, help="default: 32, on the CPU 16")
    add("--heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--tokens", type=int, help="a multiple of 64; default: 8192, on the CPU 2048")
    add("--staging-bytes", type=int, default=512 << 20)
    add("--repeat", type=int, default=5, help="timed pulls of each case")
    add(
        "--paths",
        "--transfer",
        help="mapped, nixl or both, separated by a comma; default: mapped,nixl, on the "
        "CPU mapped",
    )
    add(
        "--verify",
        choices=("off", "sample", "all"),
        default="off",
        help="value of the servers' option --kv-verify",
    )
    add("--only", default="", help="measure only cases with this text in their names")
    add("--devices", default="0,1", help="GPU of P, then GPUs of D's ranks")
    args = parser.parse_args(argv)
    is_cuda = args.device == "cuda"
    args.layers = args.layers or (32 if is_cuda else 16)
    args.tokens = args.tokens or (8192 if is_cuda else 2048)
    args.paths = args.paths or ("mapped,nixl" if is_cuda else "mapped")
    unknown = set(args.paths.split(",")) - {"mapped", "nixl"}
    if unknown:
        parser.error(
            f"--paths names {', '.join(sorted(unknown))}; use mapped, nixl or both"
        )
    if args.tokens % 64:
        parser.error(f"--tokens {args.tokens} is not a multiple of 64")
    if is_cuda and "," not in args.devices:
        parser.error(
            f"--devices {args.devices} names one GPU; "
            "give the GPU of P and the GPUs of D, as in 0,1"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Both ends of pulls between two GPUs of one host, without the engines: for transfer_cuda.py.

P is a process of its own; all its ranks' pools are on one GPU. D's rank 0 and the coordinator are
in this process, its other ranks in processes of their own, as in a server. Coordinator, workers,
side channel and lease are the servers' own, so a pull is timed from its order to the fence's
answer.
"""

import multiprocessing
import operator
import threading
import time
import uuid
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.processor import loop_ms_beside
from benchmarks.transfer import Side, Size, by_block
from kvcache.pool import KVPool
from kvcache.stepping import Stepping
from kvcache.transfer.agent import MemoryKind
from kvcache.transfer.coordinator import PullCoordinator
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.peer_memory import offer
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.posts import PostLimits
from kvcache.transfer.processes import own_record
from kvcache.transfer.pull import Event, PeerReady, PullDone
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.rank_links import InsideLink
from kvcache.transfer.side_channel import LeaseServer
from kvcache.transfer.threads import allow_short_naps
from protocol.handshake import PROTOCOL_VERSION, CompatRecord, EngineMetadata, RankMetadata
from protocol.messages import FirstToken, RemotePrefill

SECRET = b"a benchmark needs none"
WAIT_S = 120.0


def compat(size: Size) -> CompatRecord:
    return CompatRecord(
        model_fingerprint="benchmark",
        kv_dtype=size.dtype,
        num_layers=size.layers,
        total_kv_heads=size.heads,
        num_components=2,
        head_dim=size.head_dim,
        rope="{}",
    )


def random_kv(size: Size, device: str) -> torch.Tensor:
    """i16[tokens, heads, layers, 2, head_dim] on the GPU, the same bits in both processes."""
    generator = torch.Generator(device).manual_seed(7)
    shape = (size.tokens, size.heads, size.layers, 2, size.head_dim)
    return torch.randint(
        -(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator
    )


def by_token(pool: KVPool) -> torch.Tensor:
    """i16[B, N, H, L, C, D] view of the pool."""
    words = pool.flat_bytes.view(torch.int16).view(pool.layout.shape)
    return words.permute([pool.layout.order.index(axis) for axis in "BNHLCD"])


def new_agent(name: str, device: str, num_threads: int | None = None) -> NixlAgent:
    return NixlAgent(
        name,
        device_id=torch.device(device).index,
        set_device=torch.cuda.set_device,
        num_threads=num_threads,
    )


def kind_of(device: torch.device) -> MemoryKind:
    return "VRAM" if device.type == "cuda" else "DRAM"


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class PrefillEnd:
    """P for one case."""

    def __init__(self, side: Side, size: Size, kv: torch.Tensor, device: str) -> None:
        self.side, self.size = side, size
        self.pools = [KVPool(end.layout, device) for end in side.endpoints(size)]
        self.agents = [new_agent("bench-p", device) for _ in self.pools]
        blocks = torch.from_numpy(side.blocks(size)).to(device)
        for end, pool in zip(side.endpoints(size), self.pools, strict=True):
            by_token(pool)[blocks] = by_block(kv, side.block_size, end.heads(size.heads))
        synchronize(device)
        self.metadata = EngineMetadata(
            protocol_version=PROTOCOL_VERSION,
            engine_id=uuid.uuid4().hex,
            incarnation=uuid.uuid4().hex,
            compat=compat(size),
            tp_size=side.tp,
            ranks=[self._rank(rank) for rank in range(side.tp)],
        )
        self.server = LeaseServer("127.0.0.1", 0, self.metadata, SECRET)
        self.server.start()

    def _rank(self, rank: int) -> RankMetadata:
        pool, agent = self.pools[rank], self.agents[rank]
        kind = kind_of(pool.device)
        agent.register(pool.base_address, pool.nbytes, device_id=pool.device_id, kind=kind)
        return RankMetadata(
            rank=rank,
            agent_metadata=agent.metadata(),
            base_address=pool.base_address,
            nbytes=pool.nbytes,
            device_id=pool.device_id,
            device_kind=pool.device.type,
            layout=pool.layout.to_record(),
            extra=offer(pool),
            process=own_record(),
        )

    def lease(self, tokens: int) -> RemotePrefill:
        host, port = self.server.address
        blocks = self.side.blocks(self.size)[: -(-tokens // self.side.block_size)].tolist()
        return RemotePrefill(
            host=host,
            port=port,
            engine_id=self.metadata.engine_id,
            incarnation=self.metadata.incarnation,
            request_id="r",
            lease_id=self.server.grant("r", blocks, 60.0),
            lease_s=60.0,
            block_ids=blocks,
            block_size=self.side.block_size,
            num_tokens=tokens,
            cached_tokens=0,
            tp_size=self.side.tp,
            first_tokens=[FirstToken(1)],
        )

    def close(self) -> None:
        self.server.close()
        for agent in self.agents:
            agent.close()


def serve(connection: Connection, device: str, size: Size) -> None:
    """Process P: answers a Side with its metadata, a number of tokens with a lease."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    kv = random_kv(size, device)
    end: PrefillEnd | None = None
    while (asked := connection.recv()) is not None:
        if isinstance(asked, Side):
            if end is not None:
                end.close()
                end = None
            end = PrefillEnd(asked, size, kv, device)
            connection.send(end.metadata)
        elif end is not None:
            connection.send(end.lease(asked))
    if end is not None:
        end.close()


@dataclass(frozen=True)
class Setup:
    """How every rank of D pulls.

    Attributes:
        devices: GPUs of D's ranks, taken in turn.
        mapped: by the mapped path; else by NIXL.
    """

    size: Size
    devices: tuple[str, ...]
    mapped: bool
    staging_bytes: int
    limits: PostLimits | None = None
    num_threads: int | None = None


class DecodeRank:
    """One rank of D: its pool and its worker."""

    def __init__(
        self, rank: int, side: Side, setup: Setup, address: str, inside: InsideLink | None = None
    ) -> None:
        self.device = setup.devices[rank % len(setup.devices)]
        self.end = side.endpoints(setup.size)[rank]
        self.pool = KVPool(self.end.layout, self.device)
        self.stepping = Stepping()
        self.mapper = None
        if setup.mapped:
            self.mapper = CudaPlacer(self.pool, busy=lambda: self.stepping.busy)
        self.worker = PullWorker(
            rank,
            side.tp,
            setup.size.heads,
            new_agent("bench-d", self.device, setup.num_threads),
            self.pool,
            address,
            staging_bytes=None if setup.mapped else setup.staging_bytes,
            limits=setup.limits,
            mapped=MappedPath(self.mapper, required=True) if self.mapper else None,
            inside=inside,
            busy=lambda: self.stepping.busy,
        )
        self.timeline = Timeline()
        self.timeline.follow(self.worker, self.mapper)

    def loop_ms(self) -> float:
        """What a fixed loop of Python takes on the processors that the pull thread and the calling
        one are on, in ms, the slower of them."""
        ids = (self.worker.native_id, threading.get_native_id())
        return max(loop_ms_beside(thread_id) for thread_id in ids)

    def has(self, kv: torch.Tensor, side: Side, size: Size) -> bool:
        """Whether what was sent has arrived."""
        blocks = torch.from_numpy(side.blocks(size)).to(self.device)
        wanted = by_block(kv, side.block_size, self.end.heads(size.heads))
        return torch.equal(by_token(self.pool)[blocks], wanted)


def serve_rank(connection: Connection, rank: int, side: Side, setup: Setup, address: str) -> None:
    """A process of a rank of D: answers "check", "timeline" and "loop", and obeys "busy" and
    "idle"."""
    end = DecodeRank(rank, side, setup, address)
    torch.cuda.set_device(end.device)
    end.worker.start()
    connection.send("ready")
    while (asked := connection.recv()) is not None:
        if asked == "timeline":
            connection.send(end.timeline.take())
        elif asked == "loop":
            connection.send(end.loop_ms())
        elif asked in ("busy", "idle"):
            end.stepping.launched(partial(operator.eq, asked, "idle"))
            connection.send(asked)
        else:
            connection.send(end.has(random_kv(setup.size, end.device), side, setup.size))
    end.worker.close()


class Timeline:
    """When a rank's pull passed what points, by `time.perf_counter`, in the pull's own order."""

    POINTS = ("ordered", "begun", "planned", "uploaded", "launched", "all launched", "last byte",
              "told", "fence")  # fmt: skip

    def __init__(self) -> None:
        self._marks: dict[str, float] = {}

    def mark(self, point: str) -> None:
        self._marks[point] = time.perf_counter()

    def take(self) -> dict[str, float]:
        marks, self._marks = self._marks, {}
        return marks

    def follow(self, worker: Any, mapper: Any) -> None:
        """Marks points whenever these pass them."""
        self._around(worker, "_begin", before="begun")
        self._around(worker, "_tell_end", before="told")
        self._around(worker._maker, "make", after="planned")
        if mapper is not None:
            self._around(mapper, "begin", after="uploaded")
            self._around(mapper, "launch", after="all launched")
            self._around(mapper, "finished", after="last byte")

    def _around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        method = getattr(owner, name)

        def marked(*args: Any, **options: Any) -> Any:
            if before:
                self.mark(before)
            result = method(*args, **options)
            if after and result is not False:
                self.mark(after)
                if after == "all launched":
                    self._marks.setdefault("launched", self._marks[after])
            return result

        setattr(owner, name, marked)


class DecodeEnd:
    """D for one case.

    Attributes:
        holds: leases are held before they are pulled, as those of an unknown P, or of a request
            that waits for blocks; else with the pull.
    """

    holds = True

    def __init__(self, side: Side, setup: Setup) -> None:
        self.side, self.size, self.setup = side, setup.size, setup
        self.device = setup.devices[0]
        self._woken = threading.Event()
        self._count = 0
        self._ordered_at = self._told_at = 0.0
        link = InsideLink()
        self.coordinator = PullCoordinator(
            "tcp://127.0.0.1:0",
            side.tp,
            compat(setup.size),
            SECRET,
            on_event=self._tell,
            inside={0: link},
        )
        address = self.coordinator.worker_address
        self.first = DecodeRank(0, side, setup, address, link)
        self.coordinator.start()
        self.first.worker.start()
        allow_short_naps()
        self.others = [self._start(rank, address) for rank in range(1, side.tp)]
        for other in self.others:
            other.answer()

    def _start(self, rank: int, address: str) -> "Answers":
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        args = (there, rank, self.side, self.setup, address)
        context.Process(target=serve_rank, args=args, daemon=True).start()
        return Answers(here)

    def _tell(self) -> None:
        self._told_at = time.perf_counter()
        self._woken.set()

    def connect(self, remote: RemotePrefill) -> None:
        self.coordinator.connect(remote)
        event = self._wait()
        if not isinstance(event, PeerReady):
            raise RuntimeError(f"the handshake failed: {event}")

    def pull(self, remote: RemotePrefill, tokens: int) -> tuple[float, PullDone]:
        """Seconds from the order to the end of the pull, fence included."""
        self._count += 1
        pull_id = str(self._count)
        blocks = self.side.blocks(self.size)[: -(-tokens // self.side.block_size)].tolist()
        if self.holds:
            self.coordinator.hold(pull_id, remote)
        # The lease's first renewal, which no pull waits for. The thread that orders pulls works
        # until then, as an engine's does: one that sleeps for 2 ms takes 0.05 ms longer to order.
        renewed = time.perf_counter() + 0.002
        while time.perf_counter() < renewed:
            time.sleep(0.00002)
        started = self._ordered_at = time.perf_counter()
        self.coordinator.pull(pull_id, remote, 0, tokens, blocks)
        event = self._wait()
        seconds = time.perf_counter() - started
        if not isinstance(event, PullDone):
            raise RuntimeError(f"the pull failed: {event}")
        return seconds, event

    def timelines(self) -> list[dict[str, float]]:
        """Of the last pull, by rank: microseconds from its order to each point."""
        found = [self.first.timeline.take(), *(other.ask("timeline") for other in self.others)]
        shared = {"ordered": self._ordered_at, "fence": self._told_at}
        return [
            {
                point: (marks[point] - self._ordered_at) * 1e6
                for point in Timeline.POINTS
                if point in marks
            }
            for marks in ({**each, **shared} for each in found)
        ]

    def loop_ms(self) -> float:
        """DecodeRank.loop_ms of the slowest rank."""
        found: list[float] = [self.first.loop_ms(), *(each.ask("loop") for each in self.others)]
        return max(found)

    def tell_others(self, state: str) -> None:
        """Lets the other ranks' engines count as "busy" or "idle"; the first one has its own."""
        for other in self.others:
            other.ask(state)

    def check(self, kv: torch.Tensor) -> None:
        found = [self.first.has(kv, self.side, self.size)]
        found += [other.ask("check") for other in self.others]
        if not all(found):
            raise RuntimeError(f"what arrived is not what was sent, by rank: {found}")

    def _wait(self) -> Event:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if self._woken.wait(1.0):
                self._woken.clear()
                for event in self.coordinator.drain():
                    return event
        raise RuntimeError(f"no event within {WAIT_S} s")

    def close(self) -> None:
        self.coordinator.close()
        self.first.worker.close()
        for other in self.others:
            other.end()


class Answers:
    """The pipe to another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, question: Any) -> Any:
        self._connection.send(question)
        return self.answer()

    def end(self) -> None:
        self._connection.send(None)

    def answer(self) -> Any:
        if not self._connection.poll(WAIT_S):
            raise RuntimeError("the other process does not answer")
        return self._connection.recv()

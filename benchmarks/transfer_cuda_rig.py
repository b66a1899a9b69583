"""Both ends of pulls between two GPUs of one host, without the engines: for transfer_cuda.py.

P is a process of its own; all its ranks' pools are on one GPU. D is this process, with a pull
worker for each rank, all on another GPU. Coordinator, workers, side channel and lease are the
servers' own, so a pull is timed from its order to the fence's answer.
"""

import threading
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.transfer import Side, Size, by_block
from kvcache.pool import KVPool
from kvcache.transfer.agent import MemoryKind
from kvcache.transfer.coordinator import PullCoordinator
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.mapper import CudaMapper, offer
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.posts import PostLimits
from kvcache.transfer.processes import own_record
from kvcache.transfer.pull import Event, PeerReady, PullDone
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.rank_links import InsideLink
from kvcache.transfer.side_channel import LeaseServer
from protocol.handshake import PROTOCOL_VERSION, CompatRecord, EngineMetadata, RankMetadata
from protocol.messages import FirstToken, RemotePrefill

SECRET = b"a benchmark needs none"
WAIT_S = 30.0


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


def new_agent(name: str, device: str, num_threads: int = 0) -> NixlAgent:
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


class DecodeEnd:
    """D for one case.

    Args:
        mapped: by the mapped path; else by NIXL.
    """

    def __init__(
        self,
        side: Side,
        size: Size,
        device: str,
        *,
        mapped: bool,
        staging_bytes: int,
        limits: PostLimits | None,
        num_threads: int = 0,
    ) -> None:
        self.side, self.size, self.device = side, size, device
        self._woken = threading.Event()
        self._count = 0
        links = {rank: InsideLink() for rank in range(side.tp)}
        self.pools = [KVPool(end.layout, device) for end in side.endpoints(size)]
        self.coordinator = PullCoordinator(
            "tcp://127.0.0.1:0",
            side.tp,
            compat(size),
            SECRET,
            on_event=self._woken.set,
            inside=links,
        )
        self.workers = [
            PullWorker(
                rank,
                side.tp,
                size.heads,
                new_agent("bench-d", device, num_threads),
                pool,
                self.coordinator.worker_address,
                staging_bytes=None if mapped else staging_bytes,
                limits=limits,
                mapped=MappedPath(CudaMapper(pool), required=True) if mapped else None,
                inside=links[rank],
            )
            for rank, pool in enumerate(self.pools)
        ]
        self.coordinator.start()
        for worker in self.workers:
            worker.start()

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
        self.coordinator.hold(pull_id, remote)
        time.sleep(0.002)  # the lease's first renewal, which no pull waits for
        started = time.perf_counter()
        self.coordinator.pull(pull_id, remote, 0, tokens, blocks)
        event = self._wait()
        seconds = time.perf_counter() - started
        if not isinstance(event, PullDone):
            raise RuntimeError(f"the pull failed: {event}")
        return seconds, event

    def check(self, kv: torch.Tensor) -> None:
        blocks = torch.from_numpy(self.side.blocks(self.size)).to(self.device)
        for end, pool in zip(self.side.endpoints(self.size), self.pools, strict=True):
            wanted = by_block(kv, self.side.block_size, end.heads(self.size.heads))
            if not torch.equal(by_token(pool)[blocks], wanted):
                raise RuntimeError("what arrived is not what was sent")

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
        for worker in self.workers:
            worker.close()


class Answers:
    """The pipe to P."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, question: Any) -> Any:
        self._connection.send(question)
        if not self._connection.poll(WAIT_S):
            raise RuntimeError("P does not answer")
        return self._connection.recv()

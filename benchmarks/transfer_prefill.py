"""P of the transfer benchmark, and what both of its ends are made of."""

import multiprocessing
import uuid
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.link.agent import MemoryKind
from kvcache.transfer.link.nixl_agent import NixlAgent
from kvcache.transfer.move.peer_memory import describe
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, heads_of
from kvcache.transfer.session.lease_server import LeaseServer
from protocol.handshake import PROTOCOL_VERSION, CompatRecord, EngineMetadata, RankMetadata
from protocol.messages import FirstToken, RemotePrefill

SECRET = b"a benchmark needs none"
WAIT_S = 120.0


class Size(NamedTuple):
    """The model and the prompt."""

    layers: int
    heads: int
    head_dim: int
    tokens: int

    @property
    def kv_bytes(self) -> int:
        return self.layers * self.heads * self.head_dim * self.tokens * 2 * 2

    @property
    def compat(self) -> CompatRecord:
        return CompatRecord(
            model_fingerprint="benchmark",
            kv_dtype="bfloat16",
            num_layers=self.layers,
            total_kv_heads=self.heads,
            num_components=2,
            head_dim=self.head_dim,
            rope="{}",
        )


class Side(NamedTuple):
    """One engine in one case."""

    order: str
    tp: int
    block_size: int
    seed: int
    scattered: bool = True

    def endpoints(self, size: Size) -> list[Endpoint]:
        heads, blocks = len(heads_of(0, self.tp, size.heads)), size.tokens // self.block_size + 1
        sizes = (blocks, heads, size.layers, 2, self.block_size, size.head_dim)
        layout = KVLayout(self.order, *sizes, "bfloat16")
        return [Endpoint(layout, rank, self.tp) for rank in range(self.tp)]

    def blocks(self, size: Size, tokens: int | None = None) -> IntArray:
        """The block table of the first `tokens`; block 0 stays the null block."""
        blocks = np.arange(1, size.tokens // self.block_size + 1, dtype=np.int64)
        if self.scattered:
            blocks = np.random.default_rng(self.seed).permutation(blocks)
        return blocks[: -(-(tokens or size.tokens) // self.block_size)]


class Case(NamedTuple):
    name: str
    p: Side
    d: Side


@lru_cache(maxsize=1)
def _random_kv(size: Size, device: str) -> torch.Tensor:
    """i16[tokens, heads, layers, 2, head_dim], the same bits in every process."""
    generator = torch.Generator(device).manual_seed(7)
    shape = (size.tokens, size.heads, size.layers, 2, size.head_dim)
    return torch.randint(
        -(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator
    )


class RankMemory:
    """One rank's pool."""

    def __init__(self, side: Side, size: Size, rank: int, device: str) -> None:
        self._end = side.endpoints(size)[rank]
        self.pool = KVPool(self._end.layout, device)
        words = self.pool.flat_bytes.view(torch.int16).view(self._end.layout.shape)
        # i16[B, N, H, L, C, D]
        self._words = words.permute([self._end.layout.order.index(axis) for axis in "BNHLCD"])
        self._blocks = torch.from_numpy(side.blocks(size)).to(device)
        self._side, self._size, self._device = side, size, device

    def fill(self) -> None:
        self._words[self._blocks] = self._wanted()
        synchronize(self._device)

    def is_filled(self) -> bool:
        """Whether the pool holds what P was filled with."""
        return torch.equal(self._words[self._blocks], self._wanted())

    def _wanted(self) -> torch.Tensor:
        kv, heads = _random_kv(self._size, self._device), self._end.heads(self._size.heads)
        by_block = kv.view(-1, self._side.block_size, *kv.shape[1:])
        return by_block[:, :, heads.start : heads.stop]


def use_device(device: str) -> None:
    if device != "cpu":
        torch.cuda.set_device(device)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def new_agent(name: str, device: str) -> NixlAgent:
    return NixlAgent(name, device_id=torch.device(device).index, set_device=torch.cuda.set_device)


def kind_of(device: str) -> MemoryKind:
    return "DRAM" if device == "cpu" else "VRAM"


class Prefill:
    """P, all of its ranks on one device; serves the side of one case after another."""

    def __init__(self, device: str, size: Size) -> None:
        use_device(device)
        self._device, self._size = device, size
        self._ranks: list[tuple[NixlAgent, RankMemory]] = []
        self._server: LeaseServer | None = None

    def open(self, side: Side) -> EngineMetadata:
        self.close()
        self._side = side
        self._metadata = EngineMetadata(
            protocol_version=PROTOCOL_VERSION,
            engine_id=uuid.uuid4().hex,
            incarnation=uuid.uuid4().hex,
            compat=self._size.compat,
            tp_size=side.tp,
            ranks=[self._rank(rank) for rank in range(side.tp)],
        )
        self._server = LeaseServer("127.0.0.1", 0, self._metadata, SECRET)
        self._server.start()
        return self._metadata

    def _rank(self, rank: int) -> RankMetadata:
        memory = RankMemory(self._side, self._size, rank, self._device)
        memory.fill()
        pool, agent = memory.pool, new_agent("bench-p", self._device)
        self._ranks.append((agent, memory))
        kind = kind_of(self._device)
        agent.register(pool.base_address, pool.nbytes, device_id=pool.device_id, kind=kind)
        return describe(pool, rank, agent.metadata())

    def lease(self, tokens: int) -> RemotePrefill:
        assert self._server is not None
        host, port = self._server.address
        blocks = self._side.blocks(self._size, tokens).tolist()
        return RemotePrefill(
            host=host,
            port=port,
            engine_id=self._metadata.engine_id,
            incarnation=self._metadata.incarnation,
            request_id="r",
            lease_id=self._server.grant("r", blocks, 60.0),
            lease_s=60.0,
            block_ids=blocks,
            block_size=self._side.block_size,
            num_tokens=tokens,
            cached_tokens=0,
            tp_size=self._side.tp,
            first_tokens=[FirstToken(1)],
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for agent, _ in self._ranks:
            agent.close()
        self._ranks.clear()


class Remote:
    """An object in a process of its own, made there by `make(*args)`; it has a `close`."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_obey, args=(there, make, *args), daemon=True)
        self._process.start()

    def call(self, method: str, *args: Any) -> Any:
        """Its method's result. Raises RuntimeError where no answer comes."""
        self._connection.send((method, *args))
        if not self._connection.poll(WAIT_S):
            raise RuntimeError(f"no answer to {method!r} within {WAIT_S} s")
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(30)


def _obey(connection: Connection, make: Callable[..., Any], *args: Any) -> None:
    served = make(*args)
    while (asked := connection.recv()) is not None:
        method, *given = asked
        connection.send(getattr(served, method)(*given))
    served.close()

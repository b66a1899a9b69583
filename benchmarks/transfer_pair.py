"""P and D without engines, to measure pulls: the servers' own lease server, coordinator, workers.

P's ranks are in one process. Rank 0 of D and its coordinator are in this one, its other ranks in
processes of their own, as in a server: a pull is timed from its order to the fence's answer.
"""

import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from socket import socket, socketpair
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.peer_memory import describe
from kvcache.transfer.move.place import Placer
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.peer import LocalRank
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, heads_of
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import Event, PeerDecided, PullDone, PullFailed
from kvcache.transfer.worker import TransferWorker
from protocol.handshake import (
    DIGESTS,
    PROTOCOL_VERSION,
    CompatRecord,
    EngineMetadata,
    RankMetadata,
)
from protocol.ipc.wire import allow_short_naps
from protocol.messages import FirstToken, RemotePrefill

_SECRET = b"nobody else is asked"
_WAIT_S = 60.0


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
            model_fingerprint="none",
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
        heads, blocks = (
            len(heads_of(0, self.tp, size.heads)),
            size.tokens // self.block_size + 1,
        )
        sizes = (blocks, heads, size.layers, 2, self.block_size, size.head_dim)
        layout = KVLayout(self.order, *sizes, "bfloat16")
        return [Endpoint(layout, rank, self.tp) for rank in range(self.tp)]

    def blocks(self, size: Size, tokens: int | None = None) -> IntArray:
        """The block table of the first `tokens`; block 0 stays the null block."""
        blocks = np.arange(1, size.tokens // self.block_size + 1, dtype=np.int64)
        if self.scattered:
            blocks = np.random.default_rng(self.seed).permutation(blocks)
        return blocks[: -(-(tokens or size.tokens) // self.block_size)]


class Setup(NamedTuple):
    """How every rank of D pulls."""

    size: Size
    devices: tuple[str, ...]  # of D's ranks, taken in turn
    mapped: bool  # by the mapped path; else by NIXL
    staging_bytes: int
    verify: str = "off"  # as of --kv-verify

    def device(self, rank: int) -> str:
        return self.devices[rank % len(self.devices)]


@lru_cache(maxsize=1)
def _random_kv(size: Size, device: str) -> torch.Tensor:
    """i16[tokens, heads, layers, 2, head_dim], the same bits in every process."""
    generator = torch.Generator(device).manual_seed(7)
    shape = (size.tokens, size.heads, size.layers, 2, size.head_dim)
    options: Any = {"dtype": torch.int16, "device": device, "generator": generator}
    return torch.randint(-(2**15), 2**15, shape, **options)


class _RankMemory:
    """One rank's pool."""

    def __init__(self, side: Side, size: Size, rank: int, device: str) -> None:
        end = side.endpoints(size)[rank]
        self.pool = KVPool(end.layout, device)
        heads = end.heads(size.heads)
        # i16[B, N, H, L, C, D]
        self._words = self.pool.canonical.view(torch.int16).permute(0, 4, 1, 2, 3, 5)
        self._blocks = torch.from_numpy(side.blocks(size)).to(device)
        kv = _random_kv(size, device)[:, heads.start : heads.stop]
        self._wanted = kv.view(-1, side.block_size, *kv.shape[1:])

    def fill(self) -> None:
        self._words[self._blocks] = self._wanted
        synchronize(str(self.pool.device))

    def is_filled(self) -> bool:
        """Whether the pool holds what P was filled with."""
        return torch.equal(self._words[self._blocks], self._wanted)


def use_device(device: str) -> None:
    if device != "cpu":
        torch.cuda.set_device(device)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def new_agent(name: str, device: str) -> NixlAgent:
    return NixlAgent(name, device_id=torch.device(device).index)


def kind_of(device: str) -> Literal["DRAM", "VRAM"]:
    return "DRAM" if device == "cpu" else "VRAM"


class Prefill:
    """P, all of its ranks on one device; serves the side of one case after another."""

    def __init__(self, device: str, size: Size) -> None:
        use_device(device)
        self._device, self._size = device, size
        self._ranks: list[LocalRank] = []
        self._workers: list[TransferWorker] = []  # compute digests
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
            digests=DIGESTS,
        )
        pairs = [socketpair() for _ in self._ranks[1:]]
        ours, compat = [end for end, _ in pairs], self._size.compat
        coordinator = PullCoordinator(ours, compat, _SECRET, block_size=side.block_size)
        links: list[PullCoordinator | socket] = [
            coordinator,
            *(theirs for _, theirs in pairs),
        ]
        self._workers = list(map(TransferWorker, self._ranks, links))
        for worker in self._workers:
            worker.start()
        digest = coordinator.digest
        self._server = LeaseServer(
            "127.0.0.1", 0, self._metadata, _SECRET, digest=digest
        )
        self._server.start()
        return self._metadata

    def _rank(self, rank: int) -> RankMetadata:
        memory = _RankMemory(self._side, self._size, rank, self._device)
        memory.fill()
        pool, agent = memory.pool, new_agent("pair-p", self._device)
        local = LocalRank(rank, self._side.tp, self._size.heads, agent, pool)
        local.offer()
        self._ranks.append(local)
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
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._ranks.clear()


class DecodeRank:
    """One rank of D: its pool and its worker."""

    def __init__(
        self, rank: int, side: Side, setup: Setup, link: PullCoordinator | socket
    ) -> None:
        device = setup.device(rank)
        use_device(device)
        memory = _RankMemory(side, setup.size, rank, device)
        pool = memory.pool
        placer = Placer(pool) if device == "cpu" else CudaPlacer(pool)
        local = LocalRank(
            rank,
            side.tp,
            setup.size.heads,
            new_agent("pair-d", device),
            pool,
            staging_bytes=None if setup.mapped else setup.staging_bytes,
            placer=placer if setup.mapped else None,
            maps_only=setup.mapped,
        )
        worker = TransferWorker(local, link)
        worker.start()
        self.is_filled, self.close = memory.is_filled, worker.close


class Decode:
    """D for one case, and the P that it pulls from.

    Args:
        prefill: a Prefill with an open side.

    Attributes:
        holds: leases are held before they are pulled, as those of an unknown P, or of a request
            that waits for blocks; else with the pull.
    """

    holds = True

    def __init__(self, prefill: "Remote", side: Side, setup: Setup) -> None:
        use_device(setup.device(0))
        self._prefill, self._side, self._size = prefill, side, setup.size
        self._woken, self._count = threading.Event(), 0
        pairs = [socketpair() for _ in range(1, side.tp)]
        ours, about = [end for end, _ in pairs], (setup.size.compat, _SECRET)
        self._coordinator = PullCoordinator(
            ours, *about, block_size=side.block_size, verify=setup.verify
        )
        self._coordinator.on_event = self._woken.set
        others = enumerate((theirs for _, theirs in pairs), 1)
        self._others = [Remote(DecodeRank, r, side, setup, end) for r, end in others]
        for _, theirs in pairs:
            theirs.close()  # a rank has its own copy
        self._first = DecodeRank(0, side, setup, self._coordinator)
        allow_short_naps()

    def connect(self) -> None:
        """Shakes hands. Raises BatonError where that fails."""
        self._coordinator.connect(self._prefill.call("lease", self._size.tokens))
        assert isinstance(self._wait(), PeerDecided)

    def pull(self, tokens: int) -> PullDone:
        """A whole pull of so many; its seconds are those from the order to the end, fence included.
        Raises BatonError where it fails."""
        self._count += 1
        pull_id, remote = str(self._count), self._prefill.call("lease", tokens)
        blocks = self._side.blocks(self._size, tokens).tolist()
        if self.holds:
            self._coordinator.hold(pull_id, remote)
        # The lease's first renewal, which no pull waits for. The thread that orders pulls works
        # until then, as an engine's does: one that sleeps for 2 ms takes longer to order.
        renewed = time.perf_counter() + 0.002
        while time.perf_counter() < renewed:
            time.sleep(0.00002)
        self._coordinator.pull(pull_id, remote, 0, tokens, blocks)
        event = self._wait()
        assert isinstance(event, PullDone)
        return event

    def check(self) -> None:
        found = [
            self._first.is_filled(),
            *(other.call("is_filled") for other in self._others),
        ]
        if not all(found):
            raise RuntimeError(f"what arrived is not what was sent, by rank: {found}")

    def _wait(self) -> Event:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            if self._woken.wait(1.0):
                self._woken.clear()
                for event in self._coordinator.drain():
                    if isinstance(event, PeerDecided | PullFailed) and event.error:
                        raise event.error
                    return event
        raise RuntimeError(f"no event within {_WAIT_S} s")

    def close(self) -> None:
        self._first.close()
        for other in self._others:
            other.close()


# -- processes


class Remote:
    """An object in a process of its own, made there by `make(*args)`; it has a `close`.

    Raises:
        RuntimeError: what it raised there, or no answer.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch"]
        )  # whose import takes seconds, once for all
        self._process = context.Pool(1, _make, (make, *args))
        try:
            self.call("__str__")  # once it is made
        except BaseException:
            self._process.terminate()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Its method's result."""
        try:
            error, result = self._process.apply_async(_call, (method, *args)).get(
                _WAIT_S
            )
        except multiprocessing.TimeoutError:
            error, result = f"no answer from another process within {_WAIT_S:g} s", None
        if error:
            raise RuntimeError(error)
        return result

    def close(self) -> None:
        with suppress(RuntimeError):
            self.call("close")
        self._process.terminate()


_made: Any = None


def _make(make: Callable[..., Any], *args: Any) -> None:
    global _made
    try:
        _made = make(*args)
    except Exception as error:
        _made = error


def _call(method: str, *args: Any) -> tuple[str, Any]:
    """What it raises, in words, as not all errors can be sent; and its result."""
    try:
        if isinstance(_made, Exception):
            raise _made
        return "", getattr(_made, method)(*args)
    except Exception as error:
        return str(error) or repr(error), None

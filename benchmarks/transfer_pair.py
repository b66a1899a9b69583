"""A prefill server P and a decode server D without engines, to measure pulls.

P and D consist of the same lease server, coordinator and transfer workers as real
servers. All ranks of P are in one process. Rank 0 of D and D's coordinator are in the
process of the benchmark. As in a server, each further rank of D has its own process. A
pull is timed from the call of `pull` until P has answered COMPLETE (the fence).
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
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.peer_memory import describe_pool
from kvcache.transfer.move.place import Placer
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, heads_of
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import Event, PeerDecided, PullDone, PullFailed
from kvcache.transfer.worker import TransferWorker
from protocol.handshake import (
    DIGEST_VERSION,
    PROTOCOL_VERSION,
    CompatRecord,
    EngineMetadata,
    RankMetadata,
)
from protocol.ipc.wire import allow_short_naps
from protocol.messages import FirstToken, RemotePrefill

_SECRET = b"secret of the measured pair"
_EVENT_TIMEOUT_S = 60.0


class Size(NamedTuple):
    """The shape of the model, and the length of the prompt in tokens."""

    layers: int
    heads: int
    head_dim: int
    tokens: int

    @property
    def kv_bytes(self) -> int:
        # There are 2 components, K and V, with 2 bytes per element (bfloat16).
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
    """The KV geometry and the block table of one engine in one case.

    Attributes:
        order: order of the axes of the KV layout, such as "BHLCND".
        seed: seed of the scattered block table.
        scattered: True if blocks are scattered over the pool, False if in order.
    """

    order: str
    tp: int
    block_size: int
    seed: int
    scattered: bool = True

    def endpoints(self, size: Size) -> list[Endpoint]:
        layout = KVLayout(
            self.order,
            size.tokens // self.block_size + 1,
            len(heads_of(0, self.tp, size.heads)),
            size.layers,
            2,
            self.block_size,
            size.head_dim,
            "bfloat16",
        )
        return [Endpoint(layout, rank, self.tp) for rank in range(self.tp)]

    def blocks(self, size: Size, tokens: int | None = None) -> IntArray:
        """Return the block ids of the first `tokens` tokens; None means all tokens."""
        blocks = np.arange(1, size.tokens // self.block_size + 1, dtype=np.int64)
        if self.scattered:
            blocks = np.random.default_rng(self.seed).permutation(blocks)
        num_tokens = tokens or size.tokens
        return blocks[: -(-num_tokens // self.block_size)]


class DecodeSetup(NamedTuple):
    """The settings with which the ranks of the decode server D pull.

    Attributes:
        devices: devices of D's ranks; rank r has devices[r % len(devices)].
        mapped: True if pulls copy from mapped memory, False if they use NIXL.
        staging_bytes: staging memory of each rank for pulls with NIXL.
        verify: a value of the servers' option --kv-verify.
    """

    size: Size
    devices: tuple[str, ...]
    mapped: bool
    staging_bytes: int
    verify: str = "off"

    def device(self, rank: int) -> str:
        return self.devices[rank % len(self.devices)]


@lru_cache(maxsize=1)
def _random_kv(size: Size, device: str) -> torch.Tensor:
    """Return int16 [tokens, heads, layers, 2, head_dim] of random bits.

    Every process gets the same bits.
    """
    return torch.randint(
        -(2**15),
        2**15,
        (size.tokens, size.heads, size.layers, 2, size.head_dim),
        dtype=torch.int16,
        device=device,
        generator=torch.Generator(device).manual_seed(7),
    )


class _RankMemory:
    """The KV pool of one rank, and the KV that P sends and D must receive."""

    def __init__(self, side: Side, size: Size, rank: int, device: str) -> None:
        endpoint = side.endpoints(size)[rank]
        self.pool = KVPool(endpoint.layout, device)
        heads = endpoint.heads(size.heads)
        # int16 [B, N, H, L, C, D]
        self._words = self.pool.canonical.view(torch.int16).permute(0, 4, 1, 2, 3, 5)
        self._blocks = torch.from_numpy(side.blocks(size)).to(device)
        kv = _random_kv(size, device)[:, heads.start : heads.stop]
        self._expected = kv.view(-1, side.block_size, *kv.shape[1:])

    def fill(self) -> None:
        self._words[self._blocks] = self._expected
        synchronize(str(self.pool.device))

    def is_filled(self) -> bool:
        """Return whether the pool contains the expected KV."""
        return torch.equal(self._words[self._blocks], self._expected)


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
    """The prefill server P, with all of its ranks on one device.

    P serves one case at a time; `begin_case` closes the previous case.
    """

    def __init__(self, device: str, size: Size) -> None:
        use_device(device)
        self._device = device
        self._size = size
        self._ranks: list[LocalRank] = []
        self._workers: list[TransferWorker] = []  # they compute digests of the KV
        self._server: LeaseServer | None = None

    def begin_case(self, side: Side) -> EngineMetadata:
        """Close the previous case, and start ranks, workers and lease server.

        Returns:
            The metadata that D needs to pull from P.
        """
        self.close()
        self._side = side
        self._metadata = EngineMetadata(
            protocol_version=PROTOCOL_VERSION,
            engine_id=uuid.uuid4().hex,
            incarnation=uuid.uuid4().hex,
            compat=self._size.compat,
            tp_size=side.tp,
            ranks=[self._add_rank(rank) for rank in range(side.tp)],
            digests=DIGEST_VERSION,
        )
        pairs = [socketpair() for _ in self._ranks[1:]]
        coordinator = PullCoordinator(
            [coordinator_end for coordinator_end, _ in pairs],
            self._size.compat,
            _SECRET,
            block_size=side.block_size,
        )
        coordinator_links: list[PullCoordinator | socket] = [coordinator]
        coordinator_links += [worker_end for _, worker_end in pairs]
        self._workers = list(map(TransferWorker, self._ranks, coordinator_links))
        for worker in self._workers:
            worker.start()
        self._server = LeaseServer(
            "127.0.0.1", 0, self._metadata, _SECRET, start_digest=coordinator.digest
        )
        self._server.start()
        return self._metadata

    def _add_rank(self, rank: int) -> RankMetadata:
        memory = _RankMemory(self._side, self._size, rank, self._device)
        memory.fill()
        agent = new_agent("pair-p", self._device)
        local = LocalRank(rank, self._side.tp, self._size.heads, agent, memory.pool)
        local.register_pool()
        self._ranks.append(local)
        return describe_pool(memory.pool, rank, agent.metadata())

    def lease(self, tokens: int) -> RemotePrefill:
        """Lease the blocks of the first `tokens` tokens to D."""
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
    """One rank of the decode server D: its pool and its transfer worker.

    Args:
        link: the coordinator, or a socket to the coordinator's process.
    """

    def __init__(
        self, rank: int, side: Side, setup: DecodeSetup, link: PullCoordinator | socket
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
        self.is_filled = memory.is_filled
        self.close = worker.close


class Decode:
    """The decode server D for one case.

    Args:
        prefill: the Prefill from which D pulls; its `begin_case` has been called.
        side: the KV geometry and block table of D.

    Attributes:
        holds_before_pull: True if D begins to renew the lease before the pull begins,
            False if it begins with the pull. A real decode server begins before the
            pull if it has no handshake with P yet, or if the request waits for blocks.
    """

    holds_before_pull = True

    def __init__(self, prefill: "Remote", side: Side, setup: DecodeSetup) -> None:
        use_device(setup.device(0))
        self._prefill = prefill
        self._side = side
        self._size = setup.size
        self._has_event = threading.Event()
        self._num_pulls = 0
        pairs = [socketpair() for _ in range(1, side.tp)]
        self._coordinator = PullCoordinator(
            [coordinator_end for coordinator_end, _ in pairs],
            setup.size.compat,
            _SECRET,
            block_size=side.block_size,
            verify=setup.verify,
        )
        self._coordinator.on_event = self._has_event.set
        self._other_ranks = [
            Remote(DecodeRank, rank, side, setup, worker_end)
            for rank, (_, worker_end) in enumerate(pairs, 1)
        ]
        for _, worker_end in pairs:
            worker_end.close()  # the rank's process has its own copy
        self._first_rank = DecodeRank(0, side, setup, self._coordinator)
        allow_short_naps()

    def connect(self) -> None:
        """Complete the handshake with P.

        Raises:
            BatonError: the handshake failed.
        """
        self._coordinator.connect(self._prefill.call("lease", self._size.tokens))
        assert isinstance(self._wait(), PeerDecided)

    def pull(self, tokens: int) -> PullDone:
        """Pull the first `tokens` tokens.

        Returns:
            The event of the finished pull. The event's `seconds` include the fence.

        Raises:
            BatonError: the pull failed.
        """
        self._num_pulls += 1
        pull_id = str(self._num_pulls)
        remote = self._prefill.call("lease", tokens)
        blocks = self._side.blocks(self._size, tokens).tolist()
        if self.holds_before_pull:
            self._coordinator.hold(pull_id, remote)
        # After 2 ms, the first renewal has finished and is not part of the timed pull.
        # Unheld pulls wait, too, so that the times of held and unheld pulls are
        # comparable. A thread that wakes from one sleep of 2 ms starts the pull late.
        # This thread therefore takes many short naps, like an engine's thread.
        renewed_at = time.perf_counter() + 0.002
        while time.perf_counter() < renewed_at:
            time.sleep(0.00002)
        self._coordinator.pull(pull_id, remote, 0, tokens, blocks)
        event = self._wait()
        assert isinstance(event, PullDone)
        return event

    def check(self) -> None:
        """Compare the KV in the pools of all ranks with the KV of P.

        Raises:
            RuntimeError: the KV of a rank differs.
        """
        is_filled = [self._first_rank.is_filled()]
        is_filled += [rank.call("is_filled") for rank in self._other_ranks]
        if not all(is_filled):
            raise RuntimeError(
                "the KV that arrived differs from the KV that was sent; "
                f"equal, by rank: {is_filled}"
            )

    def _wait(self) -> Event:
        deadline = time.monotonic() + _EVENT_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._has_event.wait(1.0):
                self._has_event.clear()
                for event in self._coordinator.drain():
                    if isinstance(event, PeerDecided | PullFailed) and event.error:
                        raise event.error
                    return event
        raise RuntimeError(
            f"the coordinator of D reported no event within {_EVENT_TIMEOUT_S:g} s"
        )

    def close(self) -> None:
        self._first_rank.close()
        for rank in self._other_ranks:
            rank.close()


# -- processes


class Remote:
    """A proxy for an object in another process, which `make(*args)` creates there.

    The object must have a method `close`.

    Raises:
        RuntimeError: the other process did not answer, or `make` or a called method
            raised an error in it.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        # Importing torch takes seconds, so the fork server imports it once for all
        # processes.
        context.set_forkserver_preload(["torch"])
        self._process = context.Pool(1, _create_object, (make, *args))
        try:
            self.call("__str__")  # waits until the object exists
        except BaseException:
            self._process.terminate()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and return its result."""
        pending = self._process.apply_async(_call, (method, *args))
        try:
            error, result = pending.get(_EVENT_TIMEOUT_S)
        except multiprocessing.TimeoutError:
            raise RuntimeError(
                f"no answer from another process within {_EVENT_TIMEOUT_S:g} s"
            ) from None
        if error:
            raise RuntimeError(error)
        return result

    def close(self) -> None:
        with suppress(RuntimeError):
            self.call("close")
        self._process.terminate()


# The object of this process, or the error that its creation raised.
_object: Any = None


def _create_object(make: Callable[..., Any], *args: Any) -> None:
    """Create the object of this process, or keep the error that its creation raised."""
    global _object
    try:
        _object = make(*args)
    except Exception as error:
        _object = error


def _call(method: str, *args: Any) -> tuple[str, Any]:
    """Call a method of this process's object.

    Returns:
        The error as text ("" if there is none), and the result. Text is used because
        some exceptions cannot be pickled.
    """
    try:
        if isinstance(_object, Exception):
            raise _object
        return "", getattr(_object, method)(*args)
    except Exception as error:
        return str(error) or repr(error), None

"""A prefill side and a decode side of pulls, small, with every byte known."""

import selectors
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.move.peer_memory import describe
from kvcache.transfer.move.place import Placer
from kvcache.transfer.plan.endpoint import heads_of
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import (
    Event,
    Pull,
    PullDone,
    PullDrained,
    PullFailed,
    PullSettings,
    Report,
    key_of,
)
from kvcache.transfer.pulls.pull_state import PullState
from kvcache.transfer.pulls.rank_links import RankLinks
from protocol.errors import BatonError
from protocol.handshake import (
    DIGESTS,
    PROTOCOL_VERSION,
    CompatRecord,
    EngineMetadata,
    RankMetadata,
)
from protocol.messages import FirstToken, RemotePrefill
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.workers import Workers

SECRET = b"cluster secret"
DEADLINE_S = 30.0
HEADS, LAYERS, HEAD_DIM = 4, 3, 8
_MOST_HEADS = 8
ENDINGS = (PullDone, PullFailed, PullDrained)
PATIENT = {
    "drain_grace_s": 60.0
}  # of a slow machine's READs that are to end before the verdict
# Of a lease where nobody looks at more than its names.
REMOTE = RemotePrefill(
    host="h", port=1, engine_id="P", incarnation="i", request_id="r", lease_id="00" * 16,
    lease_s=30.0, block_ids=[1], block_size=16, num_tokens=16, cached_tokens=0, tp_size=1,
    first_tokens=[FirstToken(1)],
)  # fmt: skip


def pull_command(
    pull_id: str, remote: RemotePrefill, start: int, stop: int, blocks: list[int]
) -> Pull:
    """The order that ranks get."""
    return Pull(
        pull_id, key_of(remote), remote.lease_id, start, stop, blocks, remote.block_ids
    )


def layout(
    tp: int = 1, rank: int = 0, *, heads: int = HEADS, dcp: int = 1, **changes: Any
) -> KVLayout:
    values = {
        "order": "BHLCND", "num_blocks": 32,
        "num_heads": len(heads_of(rank // dcp, tp // dcp, heads)), "num_layers": LAYERS,
        "num_components": 2, "block_size": 8, "head_dim": HEAD_DIM, "dtype": "float32",
    }  # fmt: skip
    return KVLayout(**{**values, **changes})


def compat(**changes: Any) -> CompatRecord:
    values: dict[str, Any] = {
        "model_fingerprint": "model", "kv_dtype": "float32", "num_layers": LAYERS,
        "total_kv_heads": HEADS, "num_components": 2, "head_dim": HEAD_DIM, "rope": "{}",
    }  # fmt: skip
    return CompatRecord(**{**values, **changes})


def metadata(*ranks: RankMetadata, **changes: Any) -> EngineMetadata:
    """Of an engine with these ranks."""
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION, "engine_id": "P", "incarnation": uuid.uuid4().hex,
        "compat": compat(), "tp_size": len(ranks), "ranks": list(ranks),
    }  # fmt: skip
    return EngineMetadata(**{**values, **changes})


def value(
    head: Any, layer: Any, component: Any, block: Any, token: Any, element: Any
) -> Any:
    """What P keeps there; block is P's."""
    number = (
        (((block * _MOST_HEADS + head) * LAYERS + layer) * 2 + component) * 256 + token
    ) * HEAD_DIM
    return (number + element) % 16_000_057 + 1  # exact in float32, never 0


def fill(pool: KVPool, rank: int, tp: int, heads: int = HEADS) -> None:
    sizes = pool.layout.sizes
    grid = np.meshgrid(*(np.arange(sizes[axis]) for axis in "BHLCND"), indexing="ij")
    block, head, layer, component, token, element = grid
    first = heads_of(rank, tp, heads).start
    numbers = value(head + first, layer, component, block, token, element)
    pool.canonical.copy_(torch.from_numpy(numbers).to(pool.tensor.dtype))


def compat_of(
    layout: KVLayout, heads: int, scales: tuple[float, ...] = ()
) -> CompatRecord:
    return compat(
        kv_dtype=layout.dtype,
        num_components=layout.num_components,
        total_kv_heads=heads,
        kv_scales=scales,
    )


class Clock:
    """Real time and what a test skips of it: what it waits for comes first on any
    machine, and a limit that is to end ends then, not when this machine has been slow
    for a moment.
    """

    def __init__(self) -> None:
        self._skipped_s, self._stands_at_s = 0.0, None

    def __call__(self) -> float:
        return (self._stands_at_s or time.monotonic()) + self._skipped_s

    def stand(self, still: bool) -> None:
        """No limit ends while it stands still."""
        self._stands_at_s = time.monotonic() if still else None

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


class Orders:
    """The coordinator's end of one worker's link, played by a test.

    Attributes:
        theirs: the worker's end.
        reports: of the worker, not yet taken by `report`.
    """

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.reports: deque[Report] = deque()
        self._selector = selectors.DefaultSelector()
        self._links = RankLinks([ours], self._selector, self.reports.append)
        self.send = self._links.broadcast

    def report(self) -> Report:
        while not self.reports:
            ready = self._selector.select(DEADLINE_S)
            assert ready, "the worker says nothing"
            for key, _ in ready:
                key.data()
        return self.reports.popleft()

    def close(self) -> None:
        self._links.close()
        self._selector.close()


def run_round(coordinator: PullCoordinator) -> None:
    """A whole one, after all that was said to it."""
    for _ in range(2):
        begun = threading.Event()
        coordinator._call(begun.set)
        assert begun.wait(DEADLINE_S)


class Prefill:
    """P: pools, agents, the side channel."""

    def __init__(
        self,
        make_agent: Callable[[], TransferAgent],
        *,
        tp: int = 1,
        port: int = 0,
        engine_id: str = "P",
        incarnation: str | None = None,
        edit: Callable[[EngineMetadata], EngineMetadata] = lambda metadata: metadata,
        secret: bytes = SECRET,
        device: str = "cpu",
        heads: int = HEADS,
        digests: bool = False,
        **changes: Any,
    ) -> None:
        self.tp, self.heads, self.clock = tp, heads, Clock()
        self.layouts = [layout(tp, rank, heads=heads, **changes) for rank in range(tp)]
        self.pools = [KVPool(each, device) for each in self.layouts]
        self.agents = [make_agent() for _ in range(tp)]
        self.metadata = metadata(
            *map(self._rank, range(tp)), engine_id=engine_id,
            incarnation=incarnation or uuid.uuid4().hex, compat=compat_of(self.layouts[0], heads),
            digests=DIGESTS if digests else 0,
        )  # fmt: skip
        self.lending = None
        if digests:
            agents = [MemoryAgent() for _ in self.pools]
            self.lending = Workers(self.pools, agents, self.metadata.compat).start()
            self.digest = self.lending.coordinator.digest  # a test may come between
        self.ended = threading.Event()
        self.server = LeaseServer(
            "127.0.0.1", port, edit(self.metadata), secret, self.clock, self.ended.set,
            digest=lambda *asked: self.digest(*asked),
        )  # fmt: skip
        self.server.start()

    def _rank(self, rank: int) -> RankMetadata:
        pool, agent = self.pools[rank], self.agents[rank]
        fill(pool, rank, self.tp, self.heads)
        cuda = pool.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(pool.device)
        kind: Any = "VRAM" if cuda else "DRAM"
        agent.register(
            pool.base_address, pool.nbytes, device_id=pool.device_id, kind=kind
        )
        return describe(pool, rank, agent.metadata())

    def lease(
        self,
        block_ids: list[int],
        num_tokens: int,
        lease_s: float = 60.0,
        request_id: str = "r",
    ) -> RemotePrefill:
        host, port = self.server.address
        return replace(
            REMOTE, host=host, port=port, engine_id=self.metadata.engine_id,
            incarnation=self.metadata.incarnation, request_id=request_id,
            lease_id=self.server.grant(request_id, block_ids, lease_s), lease_s=lease_s,
            block_ids=block_ids, block_size=self.layouts[0].block_size, num_tokens=num_tokens,
            tp_size=self.tp,
        )  # fmt: skip

    def outcomes(self, count: int = 1) -> list[str]:
        """How the next `count` leases ended; waits for them."""
        found: list[str] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(found) < count:
            assert self.ended.wait(max(0.0, deadline - time.monotonic())), (
                "no lease ended"
            )
            self.ended.clear()
            found += [lease.outcome.value for lease in self.server.drain_ended()]
        return found

    def close(self) -> None:
        self.server.close()
        if self.lending:
            self.lending.close()
        for agent in self.agents:
            agent.close()


OF_RANKS = {"limits", "staging_bytes", "costs", "connect_timeout_s", "maps_only"}


class Decode:
    """D: one worker for each rank, and the coordinator, as in an engine.

    Args:
        options: of OF_RANKS, and changes of the layout.
    """

    def __init__(
        self,
        make_agent: Callable[[], TransferAgent],
        *,
        tp: int = 1,
        dcp: int = 1,
        heads: int = HEADS,
        scales: tuple[float, ...] = (),
        secret: bytes = SECRET,
        settings: dict[str, Any] | None = None,
        device: str = "cpu",
        make_placer: Callable[[KVPool], Placer | None] = lambda pool: None,
        convert: bool = False,
        verify: str = "off",
        **options: Any,
    ) -> None:
        of_ranks = {name: options.pop(name) for name in OF_RANKS & options.keys()}
        self.tp, self.dcp, self.heads, self.clock = tp, dcp, heads, Clock()
        self.woken = threading.Event()
        self.events: list[Event] = []
        self.layouts = [
            layout(tp, rank, heads=heads, dcp=dcp, **options) for rank in range(tp)
        ]
        self.pools = [KVPool(each, device, scales) for each in self.layouts]
        self.agents = [make_agent() for _ in range(tp)]
        told = compat_of(self.layouts[0], heads, scales)
        limits, about = (
            PullSettings(**(settings or {})),
            {"dcp": dcp, "convert": convert},
        )
        self._work = Workers(
            self.pools, self.agents, told, secret, limits, clock=self.clock, verify=verify,
            make_placer=make_placer, **about, **of_ranks,
        )  # fmt: skip
        self.coordinator, self.workers = self._work.coordinator, self._work.workers
        self.coordinator.on_event = self.woken.set
        self._work.start()

    def wait(self, *kinds: type, pull_id: str | None = None) -> Any:
        """The next event of one of these kinds, taken out; others stay for later
        waits.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for event in self.events:
                if isinstance(event, kinds) and pull_id in (
                    None,
                    getattr(event, "pull_id", None),
                ):
                    self.events.remove(event)
                    return event
            remaining_s = max(0.0, deadline - time.monotonic())
            assert self.woken.wait(remaining_s), f"no {kinds}, but {self.events}"
            self.woken.clear()
            self.events += self.coordinator.drain()

    def done(self, pull_id: str | None = None) -> PullDone:
        """The ending of a pull, or of this one, that has ended well."""
        ending = self.wait(*ENDINGS, pull_id=pull_id)
        assert isinstance(ending, PullDone), ending
        return ending

    def failed(self, pull_id: str | None = None) -> BatonError:
        """Why a pull, or this one, has failed, of which no READ is left."""
        ending = self.wait(*ENDINGS, pull_id=pull_id)
        assert isinstance(ending, PullFailed) and ending.drained, ending
        return ending.error

    def pull(
        self,
        pull_id: str,
        remote: RemotePrefill,
        start: int,
        stop: int,
        blocks: list[int],
    ) -> PullDone:
        """A pull that ends well, with every byte as it should be."""
        self.coordinator.pull(pull_id, remote, start, stop, blocks)
        done = self.done(pull_id)
        assert_pulled(self, remote, blocks, start, stop)
        return done

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for what a thread brings about."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the state did not come"
            self.woken.wait(0.001)

    def skip(self, seconds: float) -> None:
        """Whatever takes longer by the coordinator's clock is over."""
        self.clock.skip(seconds)
        run_round(self.coordinator)

    def settle(self) -> list[Event]:
        """All events left, once every command given so far has been obeyed and every
        answer that has come was taken.
        """
        take_a_round(self.coordinator)
        self.events += self.coordinator.drain()
        events, self.events = self.events, []
        return events

    def pulls(self) -> list[PullState]:
        """Those that have not ended."""
        return list(self.coordinator._pulls)

    def tokens(self, block_ids: list[int], start: int, stop: int) -> Any:
        """[token, head of the model, layer, component, element] as the pools hold them
        now.
        """
        sizes = self.layouts[0].sizes
        shape = (stop - start, self.heads, LAYERS, sizes["C"], HEAD_DIM)
        merged = np.zeros(shape, dtype=np.float32)
        for rank, pool in enumerate(self.pools):
            tokens, rows = self._places(rank, block_ids, start, stop)
            part = pool.canonical.cpu().float().permute(0, 4, 1, 2, 3, 5)[rows]
            heads = heads_of(rank // self.dcp, self.tp // self.dcp, self.heads)
            merged[tokens - start, heads.start : heads.stop] = part.numpy()
        return merged

    def _places(self, rank: int, block_ids: list[int], start: int, stop: int) -> Any:
        """The tokens of [start, stop) that a rank keeps, and their (blocks, places in
        them).
        """
        size = self.layouts[0].block_size
        tokens = np.arange(start, stop)
        tokens = tokens[tokens // size % self.dcp == rank % self.dcp]
        blocks = np.array(block_ids, int)[tokens // (size * self.dcp)]
        return tokens, (torch.from_numpy(blocks), torch.from_numpy(tokens % size))

    def fill(self, number: float) -> None:
        """Everywhere."""
        for pool in self.pools:
            pool.canonical.fill_(number)

    def is_only_written_at(self, block_ids: list[int], start: int, stop: int) -> bool:
        """After `fill`: whether all but tokens [start, stop) is as it was."""
        before = []
        for rank, pool in enumerate(self.pools):
            _, rows = self._places(rank, block_ids, start, stop)
            rest = pool.canonical.cpu().float().permute(0, 4, 1, 2, 3, 5).clone()
            filled = float(rest[0, 0, 0, 0, 0, 0])  # of the null block
            rest[rows] = filled
            before.append(bool((rest == filled).all()))
        return all(before)

    def close(self) -> None:
        self._work.close()


def expected(
    remote: RemotePrefill,
    start: int,
    stop: int,
    heads: int = HEADS,
    components: int = 2,
) -> Any:
    """[token, head, layer, component, element] that P holds for these tokens."""
    tokens = np.arange(start, stop)
    block = np.array(remote.block_ids)[tokens // remote.block_size]
    shape = np.ix_(
        tokens, *(np.arange(size) for size in (heads, LAYERS, components, HEAD_DIM))
    )
    token, head, layer, component, element = shape
    where = np.array(block)[:, None, None, None, None]
    numbers = value(head, layer, component, where, token % remote.block_size, element)
    return numbers.astype(np.float32)


def assert_pulled(
    decode: Decode, remote: Any, blocks: list[int], start: int, stop: int
) -> None:
    components = decode.layouts[0].num_components
    wanted = expected(remote, start, stop, decode.heads, components)
    assert np.array_equal(decode.tokens(blocks, start, stop), wanted)


def pulled(decode: Decode, prefill: Prefill, pull_id: str, blocks: list[int]) -> None:
    """Pulls three blocks, exactly."""
    decode.pull(pull_id, prefill.lease([5, 2, 9], 24), 0, 24, blocks)


def nixl_agent() -> TransferAgent:
    from kvcache.transfer.nixl_agent import NixlAgent

    return NixlAgent("test")

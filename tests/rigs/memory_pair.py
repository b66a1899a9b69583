"""A small prefill side P and a small decode side D for tests of pulls.

P's KV has the values of `value`, so that tests can check every pulled byte.
"""

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.move.peer_memory import describe_pool
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
    key_of,
)
from kvcache.transfer.pulls.pull_state import PullState
from protocol.errors import BatonError
from protocol.handshake import (
    DIGEST_VERSION,
    PROTOCOL_VERSION,
    CompatRecord,
    EngineMetadata,
    RankMetadata,
)
from protocol.messages import FirstToken, RemotePrefill
from tests.rigs.clock import Clock
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pools import HEAD_DIM as HEAD_DIM
from tests.rigs.memory_pools import HEADS as HEADS
from tests.rigs.memory_pools import LAYERS as LAYERS
from tests.rigs.memory_pools import PoolWithDraft
from tests.rigs.memory_pools import fill as fill
from tests.rigs.memory_pools import layout as layout
from tests.rigs.memory_pools import value as value
from tests.rigs.workers import Workers

SECRET = b"cluster secret"
DEADLINE_S = 30.0
ENDINGS = (PullDone, PullFailed, PullDrained)
# Settings for tests in which all READs must end before a failed pull is reported. The
# grace period is long enough for a slow machine.
PATIENT = {"drain_grace_s": 60.0}
# A reference to KV that does not exist, for tests that do not read it.
REMOTE = RemotePrefill(
    host="h",
    port=1,
    engine_id="P",
    incarnation="i",
    request_id="r",
    lease_id="00" * 16,
    lease_s=30.0,
    block_ids=[1],
    block_size=16,
    num_tokens=16,
    cached_tokens=0,
    tp_size=1,
    first_tokens=[FirstToken(1)],
)


def pull_command(
    pull_id: str, remote: RemotePrefill, start: int, stop: int, blocks: list[int]
) -> Pull:
    """Return the command with which the coordinator starts a pull on the ranks."""
    return Pull(
        pull_id, key_of(remote), remote.lease_id, start, stop, blocks, remote.block_ids
    )


def compat(**changes: Any) -> CompatRecord:
    fields: dict[str, Any] = {
        "model_fingerprint": "model",
        "kv_dtype": "float32",
        "num_layers": LAYERS,
        "total_kv_heads": HEADS,
        "num_components": 2,
        "head_dim": HEAD_DIM,
        "rope": "{}",
    }
    return CompatRecord(**{**fields, **changes})


def metadata(*ranks: RankMetadata, **changes: Any) -> EngineMetadata:
    """Return the metadata of an engine with these ranks."""
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "engine_id": "P",
        "incarnation": uuid.uuid4().hex,
        "compat": compat(),
        "tp_size": len(ranks),
        "ranks": list(ranks),
    }
    return EngineMetadata(**{**fields, **changes})


def compat_of(
    layout: KVLayout, heads: int, scales: tuple[float, ...] = ()
) -> CompatRecord:
    return compat(
        kv_dtype=layout.dtype,
        num_components=layout.num_components,
        total_kv_heads=heads,
        kv_scales=scales,
    )


def run_round(coordinator: PullCoordinator) -> None:
    """Wait until the coordinator has executed all earlier commands and one complete
    round.
    """
    for _ in range(2):
        has_run = threading.Event()
        coordinator._call(has_run.set)
        assert has_run.wait(DEADLINE_S)


class Prefill:
    """The prefill side P: pools, agents and a lease server.

    Args:
        drafter: as in PoolWithDraft.make; None: there is no drafter.
    """

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
        drafter: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.tp = tp
        self.heads = heads
        self.clock = Clock()
        self.layouts = [layout(tp, rank, heads=heads, **changes) for rank in range(tp)]
        self.ranks = [
            PoolWithDraft.make(rank_layout, device, (), rank, tp, drafter)
            for rank, rank_layout in enumerate(self.layouts)
        ]
        self.pools = [rank.pool for rank in self.ranks]
        self.agents = [make_agent() for _ in range(tp)]
        self.metadata = metadata(
            *map(self._register_rank, range(tp)),
            engine_id=engine_id,
            incarnation=incarnation or uuid.uuid4().hex,
            compat=compat_of(self.layouts[0], heads),
            digests=DIGEST_VERSION if digests else 0,
            draft=None if drafter is None else self.ranks[0].draft.kv,
        )
        self.lending = None
        if digests:
            agents = [MemoryAgent() for _ in self.pools]
            self.lending = Workers(self.pools, agents, self.metadata.compat).start()
            self.digest = self.lending.coordinator.digest  # a test may replace it
        self.ended = threading.Event()
        self.server = LeaseServer(
            "127.0.0.1",
            port,
            edit(self.metadata),
            secret,
            self.clock,
            self.ended.set,
            start_digest=lambda *args: self.digest(*args),
        )
        self.server.start()

    def _register_rank(self, rank: int) -> RankMetadata:
        """Fill and register the pool of a rank. Return its metadata."""
        pool = self.pools[rank]
        agent = self.agents[rank]
        fill(pool, rank, self.tp, self.heads)
        draft_pool, draft = self.ranks[rank][1:]
        if draft_pool is not None:
            fill(draft_pool, rank, self.tp, draft.kv.total_kv_heads)
        is_cuda = pool.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(pool.device)
        kind: Any = "VRAM" if is_cuda else "DRAM"
        agent.register(
            pool.base_address, len(pool.memory), device_id=pool.device_id, kind=kind
        )
        return describe_pool(
            pool, rank, agent.metadata(), draft=None if draft is None else draft.pool
        )

    def lease(
        self,
        block_ids: list[int],
        num_tokens: int,
        lease_s: float = 60.0,
        request_id: str = "r",
    ) -> RemotePrefill:
        host, port = self.server.address
        return replace(
            REMOTE,
            host=host,
            port=port,
            engine_id=self.metadata.engine_id,
            incarnation=self.metadata.incarnation,
            request_id=request_id,
            lease_id=self.server.grant(request_id, block_ids, lease_s),
            lease_s=lease_s,
            block_ids=block_ids,
            block_size=self.layouts[0].block_size,
            num_tokens=num_tokens,
            tp_size=self.tp,
        )

    def outcomes(self, count: int = 1) -> list[str]:
        """Wait until `count` more leases have ended. Return their outcomes."""
        outcomes: list[str] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(outcomes) < count:
            assert self.ended.wait(max(0.0, deadline - time.monotonic())), (
                "no lease ended"
            )
            self.ended.clear()
            outcomes += [lease.outcome.value for lease in self.server.drain_ended()]
        return outcomes

    def close(self) -> None:
        self.server.close()
        if self.lending:
            self.lending.close()
        for agent in self.agents:
            agent.close()


RANK_OPTIONS = {"limits", "staging_bytes", "costs", "connect_timeout_s", "maps_only"}


class Decode:
    """The decode side D: a worker for each rank, and the coordinator, as in an engine.

    Args:
        drafter: as in Prefill.
        options: options in RANK_OPTIONS are for LocalRank. All others are fields of the
            layout.
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
        drafter: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        rank_options = {
            name: options.pop(name) for name in RANK_OPTIONS & options.keys()
        }
        self.tp = tp
        self.dcp = dcp
        self.heads = heads
        self.clock = Clock()
        self.has_event = threading.Event()
        self.events: list[Event] = []
        self.layouts = [
            layout(tp, rank, heads=heads, dcp=dcp, **options) for rank in range(tp)
        ]
        ranks = [
            PoolWithDraft.make(rank_layout, device, scales, rank, tp, drafter)
            for rank, rank_layout in enumerate(self.layouts)
        ]
        self.pools = [rank.pool for rank in ranks]
        self.draft_pools = [rank.draft_pool for rank in ranks]
        self.agents = [make_agent() for _ in range(tp)]
        self._work = Workers(
            self.pools,
            self.agents,
            compat_of(self.layouts[0], heads, scales),
            secret,
            PullSettings(**(settings or {})),
            clock=self.clock,
            verify=verify,
            make_placer=make_placer,
            dcp=dcp,
            convert=convert,
            drafts=[rank.draft for rank in ranks if rank.draft is not None],
            **rank_options,
        )
        self.coordinator = self._work.coordinator
        self.workers = self._work.workers
        self.coordinator.on_event = self.has_event.set
        self._work.start()

    def wait(self, *kinds: type, pull_id: str | None = None) -> Any:
        """Wait for an event of one of these kinds. Remove and return it. Events of
        other kinds stay for later calls.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for event in self.events:
                event_pull_id = getattr(event, "pull_id", None)
                if isinstance(event, kinds) and pull_id in (None, event_pull_id):
                    self.events.remove(event)
                    return event
            remaining_s = max(0.0, deadline - time.monotonic())
            assert self.has_event.wait(remaining_s), f"no {kinds}, but {self.events}"
            self.has_event.clear()
            self.events += self.coordinator.drain()

    def done(self, pull_id: str | None = None) -> PullDone:
        """Wait for the end of a pull, which must succeed."""
        ending = self.wait(*ENDINGS, pull_id=pull_id)
        assert isinstance(ending, PullDone), ending
        return ending

    def wait_for_error(self, pull_id: str | None = None) -> BatonError:
        """Wait for the end of a pull. The pull must fail and have no active READs.
        Return its error.
        """
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
        """Pull tokens, and assert that every byte has the expected value."""
        self.coordinator.pull(pull_id, remote, start, stop, blocks)
        done = self.done(pull_id)
        assert_pulled(self, remote, blocks, start, stop)
        return done

    def until(self, condition: Callable[[], object]) -> None:
        """Poll until the condition is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, (
                "the condition did not become true in time"
            )
            self.has_event.wait(0.001)

    def skip(self, seconds: float) -> None:
        """Advance the coordinator's clock, so that time limits of up to `seconds`
        end.
        """
        self.clock.skip(seconds)
        run_round(self.coordinator)

    def settle(self) -> list[Event]:
        """Wait until all earlier commands and their answers have been processed. Return
        all remaining events.
        """
        run_round(self.coordinator)
        self.events += self.coordinator.drain()
        events = self.events
        self.events = []
        return events

    def pulls(self) -> list[PullState]:
        """Return the pulls that have not ended."""
        return list(self.coordinator._pulls)

    def tokens(self, block_ids: list[int], start: int, stop: int) -> Any:
        """Return the KV of the pools: [token, head, layer, component, element].

        The axis `head` has all heads of the model, from all ranks.
        """
        sizes = self.layouts[0].sizes
        shape = (stop - start, self.heads, LAYERS, sizes["C"], HEAD_DIM)
        merged = np.zeros(shape, dtype=np.float32)
        for rank, pool in enumerate(self.pools):
            tokens, rows = self._slots(rank, block_ids, start, stop)
            part = pool.canonical.cpu().float().permute(0, 4, 1, 2, 3, 5)[rows]
            heads = heads_of(rank // self.dcp, self.tp // self.dcp, self.heads)
            merged[tokens - start, heads.start : heads.stop] = part.numpy()
        return merged

    def _slots(self, rank: int, block_ids: list[int], start: int, stop: int) -> Any:
        """Return the tokens of [start, stop) that a rank stores, and the slots of these
        tokens.

        The slots are two arrays: blocks, and offsets in them.
        """
        size = self.layouts[0].block_size
        tokens = np.arange(start, stop)
        tokens = tokens[tokens // size % self.dcp == rank % self.dcp]
        blocks = np.array(block_ids, int)[tokens // (size * self.dcp)]
        return tokens, (torch.from_numpy(blocks), torch.from_numpy(tokens % size))

    def fill(self, number: float) -> None:
        """Fill all pools with one number."""
        for pool in self.pools:
            pool.canonical.fill_(number)

    def is_only_written_at(self, block_ids: list[int], start: int, stop: int) -> bool:
        """Whether the pools are unchanged since `fill`, except tokens [start, stop) of
        these blocks.
        """
        is_unchanged = []
        for rank, pool in enumerate(self.pools):
            _, rows = self._slots(rank, block_ids, start, stop)
            rest = pool.canonical.cpu().float().permute(0, 4, 1, 2, 3, 5).clone()
            fill_value = float(rest[0, 0, 0, 0, 0, 0])  # read from the null block
            rest[rows] = fill_value
            is_unchanged.append(bool((rest == fill_value).all()))
        return all(is_unchanged)

    def close(self) -> None:
        self._work.close()


def expected(
    remote: RemotePrefill,
    start: int,
    stop: int,
    heads: int = HEADS,
    components: int = 2,
) -> Any:
    """Return P's KV of these tokens: [token, head, layer, component, element]."""
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
    expected_kv = expected(remote, start, stop, decode.heads, components)
    assert np.array_equal(decode.tokens(blocks, start, stop), expected_kv)


def pulled(decode: Decode, prefill: Prefill, pull_id: str, blocks: list[int]) -> None:
    """Pull three blocks, and assert that every byte has the expected value."""
    decode.pull(pull_id, prefill.lease([5, 2, 9], 24), 0, 24, blocks)


def nixl_agent() -> TransferAgent:
    from kvcache.transfer.nixl_agent import NixlAgent

    return NixlAgent("test")

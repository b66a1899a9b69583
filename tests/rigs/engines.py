"""Engines that lend and borrow KV, in one process.

Lender, borrower, leases, side channels, coordinators, pull workers and KV pools are
real. The model is a shadow (tests/rigs/shadow.py): a slot of its KV holds a token id,
so that wrong KV shows in the output. The transport is the in-memory agent, which can
stall and fail on command.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from msgspec.structs import replace

from engine.config import EngineConfig
from engine.kv.borrower import Borrower
from engine.kv.connector import Connector
from engine.kv.host_tier import HostTier
from engine.kv.lender import Lender
from engine.kv.rates import BorrowMode, Rates
from engine.worker.memory import max_sequence_tokens_in
from kvcache.blocks import BlockState
from kvcache.groups import KVGroups
from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.draft import DraftRank
from kvcache.transfer.move.peer_memory import describe_pool
from kvcache.transfer.pulls.messages import PullSettings
from protocol import kv_params
from protocol.handshake import DIGEST_VERSION, CompatRecord
from protocol.kv_offers import Offer
from protocol.messages import KVHint, RemotePrefill, TokenDelta
from protocol.metrics import stat_key
from tests.rigs.clock import Clock
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import compat, metadata
from tests.rigs.memory_placer import MemoryPlacer
from tests.rigs.pool_executor import PooledSlots, PoolExecutor
from tests.rigs.shadow import (
    WindowedExecutor,
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
)
from tests.rigs.workers import Workers

SECRET = b"in-process secret"
COMPAT = compat(model_fingerprint="shadow", num_layers=2, total_kv_heads=2, head_dim=4)
OTHER_COMPAT = replace(COMPAT, model_fingerprint="another")
_names = itertools.count()


def make_config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "role": "prefill",
        "engine_id": f"engine-{next(_names)}",
        "incarnation": f"{next(_names):016x}",
        "model_dir": "",
        "cluster_secret": SECRET,
        **changes,
    }
    return EngineConfig(**fields)


def min_num_blocks(groups: KVGroups, step: int, size: int, max_len: int) -> int:
    """Return the minimum number of blocks with which an engine can run sequences of
    `max_len` tokens.

    Args:
        step: maximum number of tokens in a step.
        size: number of tokens in a block.
    """
    config = make_config(max_num_batched_tokens=step, block_size=size)
    num_blocks = 1
    while max_sequence_tokens_in(config, groups, num_blocks, max_len) < max_len:
        num_blocks += 1
    return num_blocks


@dataclass
class Movers:
    """The agents and placers that move bytes to the ranks of an engine.

    Agents and placers stall and fail on command. `stall` chooses one or more agents at
    random, and `fail` chooses one. Both affect all placers.
    """

    agents: list[MemoryAgent]
    placers: list[MemoryPlacer]
    rng: random.Random

    @property
    def active(self) -> int:
        return sum(agent.active for agent in self.agents)

    def stall(self) -> None:
        for agent in self.rng.sample(
            self.agents, self.rng.randint(1, len(self.agents))
        ):
            agent.stall()
        for placer in self.placers:
            placer.stalled = True

    def resume(self) -> None:
        for agent in self.agents:
            agent.resume()
        for placer in self.placers:
            placer.stalled = False

    def fail(self, count: int = 1) -> None:
        self.rng.choice(self.agents).fail(count)
        for placer in self.placers:
            placer.num_failing = count


class Engine:
    """One engine. A test drives it, one round at a time.

    Args:
        compat: compatibility record of the engine's KV, which also determines the
            shapes of its pools.
        dcp: number of ranks, which share the tokens of sequences.
        coordinator_dcp: the value of `dcp` for the pull coordinator, if it differs from
            the engine's `dcp`.
        convert: whether the engine accepts KV with a dtype different from its own.
        launch_bytes: if set, the engine copies from the mapped memory of peers, at most
            this many bytes in a launch. Otherwise it reads with the agents.
        store_link: a link to a store (tests/rigs/stores.py); None: there is no store.
        rng: source of the random choice of agents that stall and fail.
        lease_clock, port: clock and port of the engine's lease server.
        limits: arguments of `make_core`.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        order: str = "BHLCND",
        num_blocks: int = 40,
        compat: CompatRecord = COMPAT,
        dcp: int = 1,
        coordinator_dcp: int | None = None,
        convert: bool = False,
        launch_bytes: int | None = None,
        verify: str = "off",
        depth: int = 0,
        secret: bytes = SECRET,
        mode: BorrowMode = "always",
        policy: str = "recompute",
        settings: PullSettings | None = None,
        quarantine_timeout_s: float = 30.0,
        lease_s: float = 30.0,
        lease_clock: Callable[[], float] = time.monotonic,
        port: int = 0,
        store_link: Any = None,
        rng: random.Random | None = None,
        **limits: Any,
    ) -> None:
        stripes = [Stripe(rank, dcp, block_size) for rank in range(dcp)]
        self.pools = [
            self.make_pool(num_blocks, order, block_size, compat) for _ in stripes
        ]
        drafts = self.make_draft_ranks()
        self.clock = Clock()
        agents = [MemoryAgent() for _ in stripes]
        self.movers = Movers(agents, [], rng or random.Random(0))
        self.config = make_config(
            block_size=block_size,
            tp=dcp,
            dcp=dcp,
            role="decode",
            cluster_secret=secret,
            lease_s=lease_s,
        )

        def make_placer(pool: KVPool) -> MemoryPlacer:
            placer = MemoryPlacer(pool, launch_bytes or 0)
            self.movers.placers.append(placer)
            return placer

        options: dict[str, Any] = {}
        if launch_bytes:
            options["make_placer"] = make_placer
        self._work = Workers(
            self.pools,
            agents,
            compat,
            secret,
            settings,
            dcp=dcp,
            coordinator_dcp=coordinator_dcp,
            convert=convert,
            verify=verify,
            staging_bytes=2**20,
            clock=self.clock,
            drafts=drafts,
            **options,
        )
        self.coordinator = self._work.coordinator
        self.workers = self._work.workers
        for rank in self._work.ranks:
            rank.register_pool()
        rank_metadata = [
            describe_pool(
                pool,
                rank,
                agent.metadata(),
                draft=drafts[rank].pool if drafts else None,
            )
            for rank, (pool, agent) in enumerate(zip(self.pools, agents, strict=True))
        ]
        engine_metadata = metadata(
            *rank_metadata,
            compat=compat,
            dcp_size=dcp,
            engine_id=self.config.engine_id,
            incarnation=self.config.incarnation,
            digests=DIGEST_VERSION,
            draft=drafts[0].kv if drafts else None,
        )
        self.leases = LeaseServer(
            "127.0.0.1",
            port,
            engine_metadata,
            secret,
            lease_clock,
            start_digest=self.coordinator.digest,
            max_lookup_tokens=num_blocks * block_size * dcp,
        )
        self.leases.start()
        self._work.start()
        self.store_link = store_link
        self.rates = Rates(mode, 64, 1e9)
        host_tier = None
        if store_link is not None:
            host_tier = HostTier(store_link, self.coordinator, self.leases, self.rates)
        borrower = Borrower(
            self.coordinator,
            policy,
            quarantine_timeout_s,
            self.rates,
            self.config.engine_id,
            host_tier.get_readable_region if host_tier else lambda: None,
        )
        self.executor = self.make_executor(stripes, depth)
        self.core, _, self.out = make_core(
            num_blocks=num_blocks,
            block_size=block_size * dcp,
            role=Connector(Lender(self.config, self.leases), borrower, host_tier),
            executor=self.executor,
            **limits,
        )

    def make_pool(
        self, num_blocks: int, order: str, size: int, compat: CompatRecord
    ) -> KVPool:
        layout = KVLayout(
            order,
            num_blocks,
            compat.total_kv_heads,
            compat.num_layers,
            compat.num_components,
            size,
            compat.head_dim,
            compat.kv_dtype,
        )
        return KVPool(layout)

    def make_draft_ranks(self) -> list[DraftRank]:
        """Return the drafter's KV of each rank, or [] if there is no drafter."""
        return []

    def make_executor(self, stripes: list[Stripe], depth: int) -> Any:
        return PoolExecutor(self.pools, stripes, depth)

    def hint(self, num_tokens: int, **changes: Any) -> KVHint:
        """Return a hint to a peer: this engine may have KV of a prompt's first
        `num_tokens` tokens.
        """
        host, port = self.leases.address
        fields = {
            "host": host,
            "port": port,
            "num_tokens": num_tokens,
            "engine_id": self.config.engine_id,
            "incarnation": self.config.incarnation,
        }
        return KVHint(**{**fields, **changes})

    def offer(self, transfer_id: str, prompt: Sequence[int]) -> RemotePrefill:
        """Return a reference to a prompt's KV that this engine is still computing."""
        host, port = self.leases.address
        offer = Offer(
            transfer_id=transfer_id,
            host=host,
            port=port,
            engine_id=self.config.engine_id,
            incarnation=self.config.incarnation,
        )
        return offer.to_remote(0, prompt)

    def reference(self, name: str) -> RemotePrefill:
        """Return the reference to a finished request's KV, which is now lent. The
        reference is in the request's terminal delta.
        """
        params = [
            delta.kv_transfer_params
            for delta in self.out.terminals(name)
            if delta.kv_transfer_params
        ]
        (reference,) = params
        return kv_params.to_remote_prefill(kv_params.parse(reference))

    def kv(self, name: str) -> tuple[int, int, int]:
        """Return how many prompt tokens of a finished request were transferred,
        recomputed and skipped.
        """
        usage = self.out.terminals(name)[0].usage
        assert usage is not None
        return usage.transferred, usage.recomputed, usage.skipped

    def stat(self, name: str, **labels: str) -> float:
        return self.core.stats()[stat_key(name, **labels) if labels else name]

    def has_all_blocks_free(self) -> bool:
        """Whether every block is free or cached."""
        counts = self.core.scheduler.allocator.counts()
        num_available = counts[BlockState.FREE] + counts[BlockState.CACHED]
        return num_available == self.core.scheduler.allocator.capacity

    def end(self) -> None:
        """End all threads, as if the engine had been killed."""
        self.movers.resume()
        self._work.close()
        self.leases.close()


class WindowedEngine(Engine):
    """An engine of a model with several KV groups.

    A slot holds a hash of all tokens that the slot's token attends to.
    """

    def __init__(self, groups: KVGroups, **options: Any) -> None:
        self.groups = groups
        record = replace(
            COMPAT, num_layers=2 * groups.count, kv_windows=groups.to_wire()
        )
        options = {"num_blocks": 400, **options}
        super().__init__(compat=record, groups=groups, **options)

    def make_pool(
        self, num_blocks: int, order: str, size: int, compat: CompatRecord
    ) -> KVPool:
        layout = KVLayout(
            order, num_blocks, 2, 2, 2, size, compat.head_dim, compat.kv_dtype
        )
        return KVPool(layout, groups=self.groups)

    def make_executor(self, stripes: list[Stripe], depth: int) -> Any:
        (pool,) = self.pools
        executor = WindowedExecutor(
            pool.layout.num_blocks, pool.layout.block_size, depth, self.groups
        )
        executor.pool = PooledSlots(pool)
        return executor


class Group:
    """Several engines that run their rounds together."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = list(engines)

    def begin(
        self, engine: Engine, prompt: Sequence[int], max_tokens: int = 3, **members: Any
    ) -> str:
        name = f"r{next(_names)}"
        engine.core.round([add(name, prompt, max_tokens, **members)])
        return name

    def end_of(self, engine: Engine, name: str) -> TokenDelta:
        """Run rounds until a request ends. Return its only terminal delta, which may be
        an error.
        """
        self.until(lambda: bool(engine.out.terminals(name)))
        (end,) = engine.out.terminals(name)
        return end

    def tokens_of(self, engine: Engine, name: str) -> list[int]:
        """Run rounds until a request ends without an error. Return its output
        tokens.
        """
        assert self.end_of(engine, name).error is None
        return engine.out.tokens(name)

    def complete(
        self, engine: Engine, prompt: Sequence[int], max_tokens: int = 3, **members: Any
    ) -> tuple[list[int], tuple[int, int, int]]:
        """Run a request. Return its output tokens and the result of `Engine.kv` for it.

        The output is checked: it must be the continuation of the prompt.
        """
        name = self.begin(engine, prompt, max_tokens, **members)
        tokens = self.tokens_of(engine, name)
        assert tokens == expected_output(prompt, max_tokens)
        return tokens, engine.kv(name)

    def round(self, times: int = 1) -> None:
        """Run `times` rounds of each engine, even if they make no progress."""
        for _ in range(times):
            for engine in self.engines:
                engine.core.round([])

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Run rounds of all engines until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                "the condition did not become true in time"
            )
            progressed = False
            for engine in self.engines:
                progressed |= engine.core.round([])
                engine.core.scheduler.check_integrity()
            if not progressed:
                threading.Event().wait(0.002)  # lets the other threads run

    def settle(self) -> None:
        """Run rounds until every block is free or cached."""
        self.until(lambda: all(engine.has_all_blocks_free() for engine in self.engines))
        for engine in self.engines:
            assert_all_blocks_free(engine.core)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self.close()

    def close(self) -> None:
        for engine in self.engines:
            engine.movers.resume()
        for engine in self.engines:
            engine.end()

"""Engines that lend and borrow, in one process: both halves, leases, side channels, coordinators,
pull workers and KV pools are real; the model is a shadow whose KV holds the tokens it claims to
hold, and the transport is the in-memory agent, which can stall and fail on command."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.geometry import kv_groups
from engine.kv.borrower import Borrower
from engine.kv.connector import Connector
from engine.kv.lender import Lender
from engine.kv.rates import Borrow, Rates
from engine.worker.memory import longest_in, make_memory
from engine.worker.runner import ModelRunner
from kvcache.groups import KVGroups
from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.move.peer_memory import describe
from kvcache.transfer.pulls.messages import PullSettings
from model.config import load_config
from model.parallel import Parallel
from protocol import kv_params
from protocol.handshake import DIGESTS, CompatRecord
from protocol.kv_offers import Offer
from protocol.messages import KVHint, RemotePrefill, TokenDelta
from protocol.metrics import stat_key
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import Clock, compat, metadata
from tests.rigs.memory_placer import MemoryPlacer
from tests.rigs.shadow import (
    ShadowExecutor,
    WindowedExecutor,
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
)
from tests.rigs.workers import Workers

SECRET = b"in-process secret"
COMPAT = compat(model_fingerprint="shadow", num_layers=2, total_kv_heads=2, head_dim=4)
ANOTHER = replace(COMPAT, model_fingerprint="another")
_names = itertools.count()


def make_config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "role": "prefill", "engine_id": f"engine-{next(_names)}",
        "incarnation": f"{next(_names):016x}", "model_dir": "", "cluster_secret": SECRET,
        **changes,
    }  # fmt: skip
    return EngineConfig(**fields)


def smallest(groups: KVGroups, step: int, size: int, max_len: int) -> int:
    """The fewest blocks with which an engine takes sequences of so many tokens."""
    config = make_config(max_num_batched_tokens=step, block_size=size)
    return next(
        n
        for n in itertools.count(1)
        if longest_in(config, groups, n, max_len) >= max_len
    )


class PoolExecutor(ShadowExecutor):
    """The shadow's token ids live in every element of their slots, in the KV pool of the rank that
    keeps them."""

    def __init__(self, pools: list[KVPool], stripes: list[Stripe], depth: int) -> None:
        super().__init__(pools[0].layout.num_blocks, stripes[0].tokens_per_block, depth)
        self._ranks = list(zip(pools, stripes, strict=True))

    def run(self, step: StepInput) -> Any:
        slots = step.attention_batch(self.block_size).slot_mapping
        for pool, stripe in self._ranks:
            local = stripe.local_slots(slots).tolist()
            for slot, token in zip(local, step.token_ids.tolist(), strict=True):
                block, offset = divmod(slot, stripe.block_size)
                if block:
                    pool.canonical[block, :, :, :, offset, :] = token + 1.0
        return super().run(step)

    def context(self, step: StepInput, row: int) -> list[int]:
        at = np.arange(int(step.context_lens[row]))
        tokens = np.zeros(len(at), np.int64)
        table = step.block_tables[row].astype(np.int64)
        for pool, stripe in self._ranks:
            own = at[at // stripe.block_size % stripe.size == stripe.rank]
            blocks, offsets = (
                table[own // stripe.tokens_per_block],
                own % stripe.block_size,
            )
            rows = torch.from_numpy(blocks), torch.from_numpy(offsets)
            values = (
                pool.canonical.permute(0, 4, 1, 2, 3, 5)[rows]
                .flatten(1)
                .float()
                .numpy()
            )
            assert (values == values[:, :1]).all(), (
                "parts of a slot belong to different tokens"
            )
            tokens[own] = values[:, 0].astype(np.int64) - 1
        return tokens.tolist()


class PooledSlots:
    """Slots of a KV pool, which hold a number in each of their rows."""

    def __init__(self, pool: KVPool) -> None:
        self._words = pool.canonical.view(torch.int64)

    def __setitem__(self, at: tuple[int, int], value: int) -> None:
        self._words[at[0], :, :, :, at[1]] = value

    def __getitem__(self, at: tuple[int, int]) -> int:
        found = self._words[at[0], :, :, :, at[1]].unique()
        assert len(found) == 1, "parts of a slot belong to different tokens"
        return int(found) or -1


@dataclass
class Movers:
    """What moves bytes to the ranks of an engine, whichever way: it stalls and fails on command, of
    several ranks some at random."""

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
    """One engine, driven by hand round by round.

    Args:
        compat: of its KV, which its pool follows.
        dcp: how many ranks it has, which share the tokens of sequences; `coordinator_dcp` as its
            coordinator believes.
        convert: it takes KV of another dtype.
        launch_bytes: it copies out of peers' mapped memory, so much at a time; None: it reads.
        rng: decides which ranks stall and fail.
        lease_clock, port: of its lease server.
        limits: of `make_core`.
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
        mode: Borrow = "always",
        policy: str = "recompute",
        settings: PullSettings | None = None,
        quarantine_timeout_s: float = 30.0,
        lease_s: float = 30.0,
        lease_clock: Callable[[], float] = time.monotonic,
        port: int = 0,
        rng: random.Random | None = None,
        **limits: Any,
    ) -> None:
        stripes = [Stripe(rank, dcp, block_size) for rank in range(dcp)]
        self.pools = [
            self.make_pool(num_blocks, order, block_size, compat) for _ in stripes
        ]
        self.clock, agents = Clock(), [MemoryAgent() for _ in stripes]
        self.movers = Movers(agents, [], rng or random.Random(0))
        self.config = config = make_config(
            block_size=block_size, tp=dcp, dcp=dcp, role="decode", cluster_secret=secret,
            lease_s=lease_s,
        )  # fmt: skip

        def make_placer(pool: KVPool) -> MemoryPlacer:
            self.movers.placers.append(MemoryPlacer(pool, launch_bytes or 0))
            return self.movers.placers[-1]

        way: dict[str, Any] = {"make_placer": make_placer} if launch_bytes else {}
        how = {
            "dcp": dcp,
            "coordinator_dcp": coordinator_dcp,
            "convert": convert,
            "verify": verify,
        }
        how |= {"staging_bytes": 2**20, "clock": self.clock}
        self._work = Workers(self.pools, agents, compat, secret, settings, **how, **way)
        self.coordinator, self.workers = self._work.coordinator, self._work.workers
        for rank in self._work.ranks:
            rank.offer()
        told = [
            describe(pool, at, agent.metadata())
            for at, (pool, agent) in enumerate(zip(self.pools, agents, strict=True))
        ]
        shown = metadata(
            *told, compat=compat, dcp_size=dcp, engine_id=config.engine_id,
            incarnation=config.incarnation, digests=DIGESTS,
        )  # fmt: skip
        self.leases = LeaseServer(
            "127.0.0.1", port, shown, secret, lease_clock, digest=self.coordinator.digest,
            max_tokens=num_blocks * block_size * dcp,
        )  # fmt: skip
        self.leases.start()
        self._work.start()
        self.rates = Rates(mode, 64, 1e9)
        borrower = Borrower(
            self.coordinator, policy, quarantine_timeout_s, self.rates, config.engine_id
        )
        self.executor = self.make_executor(stripes, depth)
        self.core, _, self.out = make_core(
            num_blocks=num_blocks, block_size=block_size * dcp,
            role=Connector(Lender(config, self.leases), borrower), executor=self.executor, **limits,
        )  # fmt: skip

    def make_pool(
        self, num_blocks: int, order: str, size: int, compat: CompatRecord
    ) -> KVPool:
        sizes = compat.total_kv_heads, compat.num_layers, compat.num_components
        return KVPool(
            KVLayout(order, num_blocks, *sizes, size, compat.head_dim, compat.kv_dtype)
        )

    def make_executor(self, stripes: list[Stripe], depth: int) -> Any:
        return PoolExecutor(self.pools, stripes, depth)

    def hint(self, num_tokens: int, **changes: Any) -> KVHint:
        """That this engine may have so many tokens of a prompt."""
        host, port = self.leases.address
        mine = {
            "engine_id": self.config.engine_id,
            "incarnation": self.config.incarnation,
        }
        return KVHint(
            **{"host": host, "port": port, "num_tokens": num_tokens, **mine, **changes}
        )

    def offer(self, transfer_id: str, prompt: Sequence[int]) -> RemotePrefill:
        """That this engine computes the prompt now."""
        host, port = self.leases.address
        mine = {
            "engine_id": self.config.engine_id,
            "incarnation": self.config.incarnation,
        }
        return Offer(transfer_id=transfer_id, host=host, port=port, **mine).to_remote(
            0, prompt
        )

    def reference(self, name: str) -> RemotePrefill:
        """To what is lent of a request that has ended."""
        (told,) = filter(
            None, (end.kv_transfer_params for end in self.out.terminals(name))
        )
        return kv_params.to_remote_prefill(kv_params.parse(told))

    def kv(self, name: str) -> tuple[int, int, int]:
        """Tokens of the prompt that were transferred, recomputed, skipped."""
        usage = self.out.terminals(name)[0].usage
        assert usage is not None
        return usage.transferred, usage.recomputed, usage.skipped

    def stat(self, name: str, **labels: str) -> float:
        return self.core.stats()[stat_key(name, **labels) if labels else name]

    def has_all_blocks_free(self) -> bool:
        """Whether every block is."""
        counts = self.core.scheduler.allocator.counts()
        return (
            counts[0] + counts[2] == self.core.scheduler.allocator.capacity
        )  # FREE, CACHED

    def end(self) -> None:
        """Its threads end, as if it had been killed."""
        self.movers.resume()
        self._work.close()
        self.leases.close()


class WindowedEngine(Engine):
    """Of a model of several KV groups. A slot stands for all that its token has seen."""

    def __init__(self, groups: KVGroups, **options: Any) -> None:
        self.groups = groups
        about = replace(
            COMPAT, num_layers=2 * groups.count, kv_windows=groups.to_wire()
        )
        super().__init__(compat=about, groups=groups, **{"num_blocks": 400, **options})

    def make_pool(
        self, num_blocks: int, order: str, size: int, compat: CompatRecord
    ) -> KVPool:
        layout = KVLayout(
            order, num_blocks, 2, 2, 2, size, compat.head_dim, compat.kv_dtype
        )
        return KVPool(layout, groups=self.groups)

    def make_executor(self, stripes: list[Stripe], depth: int) -> Any:
        (pool,) = self.pools
        sizes = pool.layout.num_blocks, pool.layout.block_size
        executor = WindowedExecutor(*sizes, depth, self.groups)
        executor.pool = PooledSlots(pool)
        return executor


class RealEngine(Engine):
    """It runs `model` in float32."""

    def __init__(self, model: Path, **options: Any) -> None:
        self._folder, self._model = model, load_config(model)
        self.groups, self._dealt = kv_groups(self._model)
        about = compat(
            num_layers=self._model.num_layers, total_kv_heads=self._model.kv_heads_total,
            num_components=self._model.kv_components, head_dim=self._model.kv_dim,
            rope=self._model.rope_canonical, kv_windows=self.groups.to_wire(),
        )  # fmt: skip
        limits = {
            "groups": self.groups,
            "max_model_len": 400,
            "max_num_batched_tokens": 150,
        }
        super().__init__(
            compat=about, num_blocks=120 * self.groups.count, **limits, **options
        )

    def make_pool(
        self, num_blocks: int, order: str, size: int, compat: CompatRecord
    ) -> KVPool:
        sizes = compat.total_kv_heads, max(map(len, self._dealt)), compat.num_components
        layout = KVLayout(
            order, num_blocks, *sizes, size, compat.head_dim, compat.kv_dtype
        )
        return KVPool(layout, groups=self.groups)

    def make_executor(self, stripes: list[Stripe], depth: int) -> Any:
        (pool,) = self.pools
        config = make_config(
            model_dir=str(self._folder), block_size=pool.layout.block_size
        )
        runner = ModelRunner(config, self._model, Parallel())
        runner.memory = make_memory(config, self._model, runner.model, pool)
        return SimpleNamespace(depth=0, launch=runner.launch)


class Group:
    """Several engines that take rounds together."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = list(engines)

    def begin(
        self, engine: Engine, prompt: Sequence[int], max_tokens: int = 3, **members: Any
    ) -> str:
        name = f"r{next(_names)}"
        engine.core.round([add(name, prompt, max_tokens, **members)])
        return name

    def end_of(self, engine: Engine, name: str) -> TokenDelta:
        """The one end of a request, which may be an error."""
        self.until(lambda: bool(engine.out.terminals(name)))
        (end,) = engine.out.terminals(name)
        return end

    def tokens_of(self, engine: Engine, name: str) -> list[int]:
        """Of a request that ends well."""
        assert self.end_of(engine, name).error is None
        return engine.out.tokens(name)

    def complete(
        self, engine: Engine, prompt: Sequence[int], max_tokens: int = 3, **members: Any
    ) -> tuple[list[int], tuple[int, int, int]]:
        """The output, which is the prompt's own continuation, and where its KV came from."""
        name = self.begin(engine, prompt, max_tokens, **members)
        tokens = self.tokens_of(engine, name)
        assert tokens == expected_output(prompt, max_tokens)
        return tokens, engine.kv(name)

    def round(self, times: int = 1) -> None:
        """Rounds of each engine, whatever comes of them."""
        for _ in range(times):
            for engine in self.engines:
                engine.core.round([])

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Rounds of all engines until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            progressed = False
            for engine in self.engines:
                progressed |= engine.core.round([])
                engine.core.scheduler.check_integrity()
            if not progressed:
                threading.Event().wait(0.002)  # the threads' turn

    def settle(self) -> None:
        """Every block comes home."""
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

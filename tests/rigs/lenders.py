"""Engines that lend and borrow, in one process: both halves, leases, side channels, coordinators,
pull workers and KV pools are real, the model is a shadow, the transport the in-memory agent."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from engine.kv.borrower import Borrower
from engine.kv.connector import Connector
from engine.kv.lender import Lender
from engine.kv.rates import Borrow, Rates
from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.move.peer_memory import describe
from kvcache.transfer.peer import LocalRank
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker import TransferWorker
from protocol.messages import KVHint
from protocol.metrics import stat_key
from tests.rigs.engine_pair import COMPAT, SECRET, Movers, PoolExecutor, make_config
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import Clock, metadata, pulls_address
from tests.rigs.shadow import add, assert_all_blocks_home, expected_output, make_core


class Engine:
    """One engine, driven by hand round by round.

    Args:
        dcp: how many ranks it has, which share the tokens of sequences.
        components: of its KV; 1: latents, of one head.
        convert: it takes KV of another dtype.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        order: str = "BHLCND",
        num_blocks: int = 40,
        dcp: int = 1,
        components: int = 2,
        dtype: str = "float32",
        convert: bool = False,
        model: str = "shadow",
        depth: int = 0,
        secret: bytes = SECRET,
        mode: Borrow = "always",
        policy: str = "recompute",
        settings: PullSettings | None = None,
        **limits: Any,
    ) -> None:
        stripes = [Stripe(rank, dcp, block_size) for rank in range(dcp)]
        heads = components
        layout = KVLayout(order, num_blocks, heads, 2, components, block_size, 4, dtype)
        about = {"num_components": components, "total_kv_heads": heads, "kv_dtype": dtype}
        compat = replace(COMPAT, model_fingerprint=model, **about)
        pools = [KVPool(layout) for _ in stripes]
        agents = [MemoryAgent() for _ in stripes]
        self.movers, self.clock = Movers(agents, [], random.Random(0)), Clock()
        self.config = make_config(
            block_size=block_size, tp=dcp, dcp=dcp, role="decode", cluster_secret=secret
        )
        address = pulls_address()
        self.coordinator = PullCoordinator(
            address,
            dcp,
            compat,
            secret,
            settings or PullSettings(),
            clock=self.clock,
            convert=convert,
            dcp=dcp,
            block_size=block_size,
        )
        how: dict[str, Any] = {"dcp": dcp, "staging_bytes": 2**20, "convert": convert}
        ranks = [
            LocalRank(rank, dcp, heads, agents[rank], pools[rank], **how) for rank in range(dcp)
        ]
        for rank in ranks:
            rank.offer()
        told = [
            describe(pool, at, agent.metadata())
            for at, (pool, agent) in enumerate(zip(pools, agents, strict=True))
        ]
        mine = {"engine_id": self.config.engine_id, "incarnation": self.config.incarnation}
        shown = metadata(*told, compat=compat, dcp_size=dcp, **mine)
        room = num_blocks * block_size * dcp
        self.leases = LeaseServer("127.0.0.1", 0, shown, secret, max_tokens=room)
        self.leases.start()
        self.workers = [
            TransferWorker(rank, address if rank.number else self.coordinator) for rank in ranks
        ]
        for worker in self.workers:
            worker.start()
        self.rates = Rates(mode, 64, 1e9)
        borrower = Borrower(self.coordinator, policy, 30.0, self.rates, self.config.engine_id)
        executor = PoolExecutor(pools, stripes, depth)
        self.core, _, self.out = make_core(
            num_blocks=num_blocks,
            block_size=block_size * dcp,
            role=Connector(Lender(self.config, self.leases), borrower),
            executor=executor,
            **limits,
        )

    def hint(self, num_tokens: int, **changes: Any) -> KVHint:
        """That this engine may have so many tokens of a prompt."""
        told = {
            "host": "127.0.0.1",
            "port": self.leases.address[1],
            "engine_id": self.config.engine_id,
            "incarnation": self.config.incarnation,
            "num_tokens": num_tokens,
        }
        return KVHint(**{**told, **changes})

    def kv(self, name: str) -> tuple[int, int, int]:
        """Tokens of the prompt that were transferred, recomputed, skipped."""
        usage = self.out.terminals(name)[0].usage
        assert usage is not None
        return usage.transferred, usage.recomputed, usage.skipped

    def stat(self, name: str, **labels: str) -> float:
        return self.core.connector.stats()[stat_key(name, **labels) if labels else name]

    def end(self) -> None:
        """Its threads end, as if it had been killed."""
        self.movers.resume()
        for worker in self.workers:
            worker.close()
        self.leases.close()


class Group:
    """Several engines that take rounds together."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = list(engines)
        self._names = 0

    def begin(
        self, engine: Engine, prompt: Sequence[int], max_tokens: int = 3, **members: Any
    ) -> str:
        self._names += 1
        name = f"r{self._names}"
        engine.core.round([add(name, prompt, max_tokens, **members)])
        return name

    def ask(
        self, engine: Engine, prompt: Sequence[int], max_tokens: int = 3, **members: Any
    ) -> tuple[list[int], tuple[int, int, int]]:
        """The output, which is the prompt's own continuation, and where its KV came from."""
        name = self.begin(engine, prompt, max_tokens, **members)
        self.until(lambda: bool(engine.out.terminals(name)))
        assert engine.out.terminals(name)[0].error is None
        tokens = engine.out.tokens(name)
        assert tokens == expected_output(prompt, max_tokens)
        return tokens, engine.kv(name)

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
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
        self.until(lambda: all(self._is_home(engine) for engine in self.engines))
        for engine in self.engines:
            assert_all_blocks_home(engine.core)

    @staticmethod
    def _is_home(engine: Engine) -> bool:
        allocator = engine.core.scheduler.allocator
        counts = allocator.counts()
        return counts[0] + counts[2] == allocator.capacity  # FREE, CACHED

    def close(self) -> None:
        for engine in self.engines:
            engine.movers.resume()
        for engine in self.engines:
            engine.end()

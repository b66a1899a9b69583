"""A KV store in the process of the test, and engines that use it.

The region is real. Its transport is the in-memory agent. Engines get a FixedLink
instead of a connection to the store, so that a test decides when the store is
reachable.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.kv.store_link import StoreRegion
from engine.store.memory import RegionOptions
from engine.store.region import Region
from kvcache.transfer.pulls.messages import PullSettings
from protocol.handshake import CompatRecord
from protocol.ipc.kv_store import RegionSpec
from tests.rigs.clock import Clock
from tests.rigs.engines import COMPAT, SECRET, Engine, Group
from tests.rigs.memory_agent import MemoryAgent


class FixedLink:
    """Replaces an engine's StoreLink. The test sets the region, or None if the store is
    unreachable.
    """

    def __init__(self, region: StoreRegion | None = None) -> None:
        self.region = region
        self.stats: dict[str, float] = {}

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.region = None


class Store:
    """A store with one region of `num_blocks` usable blocks.

    Attributes:
        agents: the agents of the region, which can stall and fail.
        clock: clock of the region's pulls.
        is_suspended: whether the store answers no lookup and begins no pull.
    """

    def __init__(
        self,
        *,
        compat: CompatRecord = COMPAT,
        group_layers: int | None = None,
        block_size: int = 4,
        num_blocks: int = 400,
        max_model_len: int = 64,
        secret: bytes = SECRET,
        settings: PullSettings | None = None,
        lease_s: float = 30.0,
        kv_verify: str = "off",
        transfer: Any = "nixl",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.agents: list[MemoryAgent] = []
        self.clock = Clock()
        self.is_suspended = False
        spec = RegionSpec(
            compat=compat,
            group_layers=group_layers or compat.num_layers,
            block_size=block_size,
            max_model_len=max_model_len,
        )
        token_bytes = (
            compat.total_kv_heads
            * spec.group_layers
            * compat.num_components
            * compat.head_dim
            * 4
        )
        options = RegionOptions(
            host_kv_bytes=(num_blocks + 1) * block_size * token_bytes,
            lease_s=lease_s,
            staging_bytes=2**20,
            kv_verify=kv_verify,
            transfer=transfer,
        )
        more: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.region = Region(
            spec,
            options,
            secret,
            self._make_agent,
            wake=lambda: None,
            settings=settings,
            pull_clock=self.clock,
            **more,
        )

    def _make_agent(self, prefix: str) -> MemoryAgent:
        agent = MemoryAgent(prefix)
        self.agents.append(agent)
        return agent

    def link(self) -> FixedLink:
        """Return a new link to the region, for one engine."""
        opened = self.region.opened("")
        region = StoreRegion(
            address=("127.0.0.1", opened.port),
            engine_id=opened.engine_id,
            incarnation=opened.incarnation,
            block_size=opened.block_size,
            num_tokens=opened.num_tokens,
        )
        return FixedLink(region)

    def num_stored(self, token_ids: list[int], salt: bytes = b"") -> int:
        """Return the number of these tokens, from the first on, that the region has."""
        table = self.region.prefix.match(token_ids, salt=salt)
        count = self.region.prefix.groups.count
        return len(table) // count * self.region.prefix.block_size

    def check_content(self) -> None:
        """Compare all published KV with the tokens that it belongs to. The KV must come
        from engines with a PoolExecutor.
        """
        canonical = self.region.memory.pool.canonical
        pending = [self.region.prefix._root]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            if not node.key:
                continue
            size = self.region.prefix.block_size
            tokens = torch.frombuffer(bytearray(node.key), dtype=torch.int64)[:size]
            (block,) = node.blocks
            slots = canonical[block].permute(3, 0, 1, 2, 4).flatten(1)
            expected = (tokens + 1.0).float()[:, None].expand_as(slots)
            assert torch.equal(slots, expected), "KV of other tokens is published"

    def stall(self) -> None:
        for agent in self.agents:
            agent.stall()

    def resume(self) -> None:
        for agent in self.agents:
            agent.resume()

    def close(self) -> None:
        self.resume()
        self.region.close()


class TieredGroup(Group):
    """Engines that share one store and run their rounds together.

    Attributes:
        store: the store, which a test may replace.
    """

    def __init__(self, store: Store, *engines: Engine) -> None:
        super().__init__(*engines)
        self.store = store
        self._ended: list[Engine] = []
        # The pairs of an engine and a region for which `until_readable` has waited.
        self._connected: set[tuple[Engine, StoreRegion]] = set()

    def begin(
        self, engine: Engine, prompt: Sequence[int], max_tokens: int = 3, **members: Any
    ) -> str:
        """Wait with `until_readable`, and then begin a request."""
        self.until_readable(engine)
        return super().begin(engine, prompt, max_tokens, **members)

    def until_readable(self, engine: Engine) -> None:
        """Run rounds until an engine has connected, or failed to connect, to the region
        of its store link.

        For each engine and region, only the first call waits.
        """
        region = engine.store_link.region if engine.store_link else None
        if region is None or (engine, region) in self._connected:
            return
        self._connected.add((engine, region))

        def is_decided() -> bool:
            counts = engine.coordinator.handshake_counts()
            has_failed = sum(counts.values()) > counts["ok"]
            return has_failed or engine.coordinator.is_prepared(region.hint())

        self.until(is_decided)

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        def polls_store() -> bool:
            if not self.store.is_suspended:
                self.store.region.poll()
            self.store.region.check_integrity()
            return condition()

        super().until(polls_store, timeout_s)

    def settle(self) -> None:
        """Run rounds until every block of both tiers is free or cached."""
        super().settle()
        self.until(lambda: self.store.region.is_idle)
        super().settle()

    def until_stored(self, token_ids: list[int], num_tokens: int, **salt: Any) -> None:
        """Run rounds until the store has the first `num_tokens` of these tokens."""
        self.until(lambda: self.store.num_stored(token_ids, **salt) >= num_tokens)

    def replace(self, engine: Engine, successor: Engine) -> None:
        """End an engine as if it had been killed, and let another take its place."""
        self.engines.remove(engine)
        engine.end()
        self._ended.append(engine)
        self.engines.append(successor)

    def close(self) -> None:
        super().close()
        self.store.close()

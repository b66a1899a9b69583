"""The in-process pair with a decode engine of several ranks that share the tokens of sequences."""

import itertools
import random
from typing import Any

from decode_server.connector import DecodeConnector
from decode_server.failure import FailurePolicy
from engine.core.batch import StepInput
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.link.memory_agent import MemoryAgent
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker.worker import TransferWorker
from tests.rigs.engine_pair import SECRET, Pair, PoolExecutor, Side
from tests.rigs.memory_pair import pulls_address
from tests.rigs.shadow import ShadowExecutor, make_core


class _Executor(PoolExecutor):
    """Each slot of a sequence is in the pool of the rank whose it is."""

    def __init__(self, pools: list[KVPool], stripes: list[Stripe], depth: int) -> None:
        num_blocks = pools[0].layout.num_blocks
        ShadowExecutor.__init__(self, num_blocks, stripes[0].tokens_per_block, depth)
        self._ranks = list(zip(pools, stripes, strict=True))

    def run(self, step: StepInput) -> Any:
        slots = step.attention_batch(self.block_size).slot_mapping
        for pool, stripe in self._ranks:
            if step.copies:
                pool.copy_blocks(step.copies)
            local = stripe.local_slots(slots).tolist()
            for slot, token in zip(local, step.token_ids.tolist(), strict=True):
                block, offset = divmod(slot, stripe.block_size)
                if block:
                    pool.canonical[block, :, :, :, offset, :] = token + 1.0
        return ShadowExecutor.run(self, step)

    def context(self, step: StepInput, row: int) -> list[int]:
        length = int(step.context_lens[row])
        tokens = [0] * length
        for pool, stripe in self._ranks:
            size = stripe.block_size
            own = [at for at in range(length) if at // size % stripe.size == stripe.rank]
            for place, at in enumerate(own):
                block = int(step.block_tables[row, place // size])
                values = pool.canonical[block, :, :, :, place % size, :]
                assert bool((values == values.flatten()[0]).all()), "parts of different tokens"
                tokens[at] = int(values.flatten()[0]) - 1
        return tokens


class _Agents:
    """Those of all ranks; some of them stall, one fails."""

    def __init__(self, agents: list[MemoryAgent], rng: random.Random) -> None:
        self._agents, self._rng = agents, rng

    def stall(self) -> None:
        for agent in self._rng.sample(self._agents, self._rng.randint(1, len(self._agents))):
            agent.stall()

    def resume(self) -> None:
        for agent in self._agents:
            agent.resume()

    def fail(self, count: int) -> None:
        self._rng.choice(self._agents).fail(count)


class SharingPair(Pair):
    """D has `dcp` ranks, each with blocks of `d_block_size` tokens."""

    def __init__(self, rng: random.Random, *, dcp: int, **options: Any) -> None:
        self._rng, self._dcp = rng, dcp
        super().__init__(**options)

    def _start_decode(
        self, block_size: int, order: str, policy: str, settings: PullSettings
    ) -> None:
        dcp = self._dcp
        stripes = [Stripe(rank, dcp, block_size) for rank in range(dcp)]
        pools = [self.make_pool(block_size, order) for _ in stripes]
        agents = [MemoryAgent(f"d{stripe.rank}") for stripe in stripes]
        address = pulls_address()
        self.coordinator = PullCoordinator(
            address,
            dcp,
            self.compat,
            SECRET,
            settings,
            clock=self.clock,
            stripe=stripes[0],
        )
        self.coordinator.start()
        heads = self.compat.total_kv_heads
        self.workers = [
            TransferWorker(rank, dcp, heads, agent, pool, address, dcp=dcp, staging_bytes=2**20)
            for rank, agent, pool in zip(itertools.count(), agents, pools, strict=False)
        ]
        for worker in self.workers:
            worker.start()
        role = DecodeConnector(self.coordinator, FailurePolicy(policy), self._quarantine_timeout_s)
        executor = _Executor(pools, stripes, self.depth)
        core, _, out = make_core(
            num_blocks=pools[0].layout.num_blocks,
            block_size=block_size * dcp,
            role=role,
            executor=executor,
            **self.limits,
        )
        ends: Any = _Agents(agents, self._rng)
        self.d = Side(core, executor, out, ends)

    def close(self) -> None:
        self.coordinator.close()
        for worker in self.workers:
            worker.close()
        self.leases.close()
        self.p.agent.close()
        self._ports.close()

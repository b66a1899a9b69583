"""The in-process pair with a decode engine whose thread begins and drives its pulls, as in a server
of one rank; P's memory is mapped, or its READs begin before they are planned."""

import random
import threading
from typing import Any, Literal

from decode_server.failure import FailurePolicy
from decode_server.role import DecodeRole
from kvcache.pool import KVPool
from kvcache.transfer.coordinator import PullCoordinator
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.mapper import MemoryMapper, offer
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.processes import own_record
from kvcache.transfer.pull import PullSettings
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.rank_links import InsideLink
from protocol.handshake import RankMetadata
from tests.decode_server.pair import SECRET, Pair


class _Mapper(MemoryMapper):
    """Fails on command; knows who made launches."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.num_failing = 0
        self.threads: set[int] = set()

    def launch(self, *args: Any) -> Any:
        self.threads.add(threading.get_ident())
        if self.num_failing:
            self.num_failing -= 1
            raise RuntimeError("a launch failed")
        return super().launch(*args)


class _Both:
    """What moves bytes, whichever way; stalls and fails as a MemoryAgent."""

    def __init__(self, agent: MemoryAgent, mapper: _Mapper) -> None:
        self._agent, self._mapper = agent, mapper

    def stall(self) -> None:
        self._agent.stall()
        self._mapper.stalled = True

    def resume(self) -> None:
        self._agent.resume()
        self._mapper.stalled = False

    def fail(self, count: int = 1) -> None:
        self._agent.fail(count)
        self._mapper.num_failing = count


class InsidePair(Pair):
    """
    Args:
        moves: how: out of mapped memory, or by READs that begin before their plans.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        moves: Literal["mapped", "opened"],
        **options: Any,
    ) -> None:
        self._rng, self._moves = rng, moves
        super().__init__(**options)

    def shown(self, pool: KVPool, **members: Any) -> RankMetadata:
        return RankMetadata(**members, extra=offer(pool), process=own_record())

    def _start_decode(
        self, block_size: int, order: str, policy: str, settings: PullSettings
    ) -> None:
        pool, agent, inside = self.make_pool(block_size, order), MemoryAgent("d"), InsideLink()
        self.mapper, opens = _Mapper(pool), self._moves == "opened"
        self.coordinator = PullCoordinator(
            "tcp://127.0.0.1:0", 1, self.compat, SECRET, settings, inside={0: inside}
        )
        self.worker = PullWorker(
            0,
            1,
            self.compat.total_kv_heads,
            agent,
            pool,
            self.coordinator.worker_address,
            staging_bytes=2**20,
            mapped=None if opens else self._mapped_path(),
            inside=inside,
            opens=opens,
        )
        self.coordinator.start()
        self.worker.start()
        role = DecodeRole(self.coordinator, FailurePolicy(policy), self._quarantine_timeout_s)
        self.d = self._side(pool, role, agent)
        ends: Any = _Both(agent, self.mapper)
        self.d.agent = ends

    def _mapped_path(self) -> MappedPath:
        return MappedPath(self.mapper, chunk_bytes=self._rng.choice([1, 1 << 30]))

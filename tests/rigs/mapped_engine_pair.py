"""The in-process pair where D has P's memory mapped."""

from typing import Any

from kvcache.pool import KVPool
from kvcache.transfer.link.memory_agent import MemoryAgent
from kvcache.transfer.move.peer_memory import offer
from kvcache.transfer.worker.mapped_job import MappedPath
from protocol.handshake import RankMetadata
from protocol.ipc.processes import own_record
from tests.rigs.engine_pair import Pair
from tests.rigs.memory_placer import MemoryPlacer


class _Placer(MemoryPlacer):
    """Fails on command."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.num_failing = 0

    def launch(self, *args: Any) -> Any:
        if self.num_failing:
            self.num_failing -= 1
            raise RuntimeError("a launch failed")
        return super().launch(*args)


class _Both:
    """What moves bytes, whichever way; stalls and fails as a MemoryAgent."""

    def __init__(self, agent: MemoryAgent, placer: _Placer) -> None:
        self._agent, self._placer = agent, placer

    def stall(self) -> None:
        self._agent.stall()
        self._placer.stalled = True

    def resume(self) -> None:
        self._agent.resume()
        self._placer.stalled = False

    def fail(self, count: int = 1) -> None:
        self._agent.fail(count)
        self._placer.num_failing = count


class MappedPair(Pair):
    """
    Args:
        launch_bytes: of what D copies at a time.
    """

    def __init__(self, launch_bytes: int, **options: Any) -> None:
        self._launch_bytes = launch_bytes
        super().__init__(**options)

    def shown(self, pool: KVPool, **members: Any) -> RankMetadata:
        return RankMetadata(**members, extra=offer(pool), process=own_record())

    def make_mapped(self, pool: KVPool) -> MappedPath:
        self.placer = _Placer(pool)
        return MappedPath(self.placer, launch_bytes=self._launch_bytes)

    def _start_decode(self, *args: Any) -> None:
        super()._start_decode(*args)
        ends: Any = _Both(self.d.agent, self.placer)
        self.d.agent = ends

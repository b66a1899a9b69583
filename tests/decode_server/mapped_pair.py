"""The in-process pair where D has P's memory mapped."""

from typing import Any

from kvcache.pool import KVPool
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.mapper import MemoryMapper, offer
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.processes import own_record
from protocol.handshake import RankMetadata
from tests.decode_server.pair import Pair


class _Mapper(MemoryMapper):
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


class MappedPair(Pair):
    """
    Args:
        chunk_bytes: of what D copies at a time.
    """

    def __init__(self, chunk_bytes: int, **options: Any) -> None:
        self._chunk_bytes = chunk_bytes
        super().__init__(**options)

    def shown(self, pool: KVPool, **members: Any) -> RankMetadata:
        return RankMetadata(**members, extra=offer(pool), process=own_record())

    def make_mapped(self, pool: KVPool) -> MappedPath:
        self.mapper = _Mapper(pool)
        return MappedPath(self.mapper, chunk_bytes=self._chunk_bytes)

    def _start_decode(self, *args: Any) -> None:
        super()._start_decode(*args)
        ends: Any = _Both(self.d.agent, self.mapper)
        self.d.agent = ends

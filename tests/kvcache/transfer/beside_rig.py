"""P, and a D whose mapped pulls are begun by the thread that orders them; with what each thread
did. For tests."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import numpy as np

from kvcache.pool import KVPool
from kvcache.transfer.agent import ReadHandle, ReadState
from kvcache.transfer.host_mapper import HostMapper
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.mapper import MappedMemory, MemoryMapper
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.pull import PullDone
from tests.e2e.cluster import wait_until

sys.path.insert(0, str(Path(__file__).parent))
from pull_rig import ENDINGS, PATIENT, Decode, Prefill, expected

BLOCKS = [3, 1, 7, 2, 10, 12]


class Noting(MemoryMapper):
    """Knows which thread made each launch, and may refuse a thread."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.threads: list[int] = []
        self.looks: list[int] = []  # threads that found launches ended
        self.refuses = False
        self.fail_looks = False

    def bind_caller(self) -> None:
        if self.refuses:
            raise RuntimeError("no such device in this thread")

    def launch(self, *args: Any) -> Any:
        self.threads.append(threading.get_ident())
        return super().launch(*args)

    def finished(self, token: Any) -> bool:
        if self.fail_looks:
            raise RuntimeError("the device is lost")
        if has_ended := super().finished(token):
            self.looks.append(threading.get_ident())
        return has_ended


class PollNoting(MemoryAgent):
    """Knows which threads asked for its READs."""

    def __init__(self) -> None:
        super().__init__()
        self.askers: set[int] = set()

    def poll(self, handle: ReadHandle) -> ReadState:
        self.askers.add(threading.get_ident())
        return super().poll(handle)


class Strict(HostMapper):
    """Copies later, in another thread; notes two threads at once, and what is unmapped too soon."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.threads: list[int] = []
        self.wrong: list[str] = []
        self.active: Counter[int] = Counter()  # launches, by address
        self._used = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._used.acquire(blocking=False):
            self.wrong.append("two threads at once")
            self._used.acquire()
        try:
            yield
        finally:
            self._used.release()

    def unmap(self, memory: MappedMemory) -> None:
        with self._alone():
            if self.active[memory.address]:
                self.wrong.append("unmapped under launches")
            super().unmap(memory)

    def launch(self, work: Any, index: int, *blocks: int) -> Any:
        with self._alone():
            self.threads.append(threading.get_ident())
            address = work.sources[index].address
            token = super().launch(work, index, *blocks)
            self.active[address] += 1
            return token, address

    def finished(self, token: Any) -> bool:
        with self._alone():
            has_ended = super().finished(token[0])
            self.active[token[1]] -= has_ended
            return has_ended


class Pair:
    """P, and D of one rank, which know each other: its worker sleeps between pulls."""

    def __init__(self, make_mapper: Callable[[KVPool], Any] = Noting) -> None:
        self._make_mapper = make_mapper
        self.prefill = Prefill(MemoryAgent)
        self.decode = Decode(PollNoting, make_mapped=self._mapped, settings=PATIENT)
        self.worker = self.decode.workers[0]
        self.link: Any = self.worker._link
        self.pull("first")
        assert isinstance(self.decode.wait(*ENDINGS), PullDone)
        self.mapper.threads.clear()

    def _mapped(self, pool: KVPool) -> MappedPath:
        self.mapper = self._make_mapper(pool)
        return MappedPath(self.mapper, chunk_bytes=1)  # a launch for every block

    def pull(self, pull_id: str, *, attended: bool = False) -> Any:
        remote = self.prefill.lease([5, 2, 9, 4, 6, 8], 48)
        self.decode.coordinator.pull(pull_id, remote, 0, 48, BLOCKS, attended=attended)
        return remote

    def rest(self) -> None:
        """Until the worker's thread sleeps, and the coordinator's has nothing to do either."""
        wait_until(lambda: not self.decode.coordinator._pulls)
        wait_until(lambda: self.link._sleeps and not select([self.link.waker], [], [], 0)[0])

    def sleep(self) -> None:
        """As `rest`; lets the worker wake for nothing but what has begun."""
        self.rest()
        self.link._sleeps = False  # so that no order wakes it

    def arrived(self, remote: Any) -> bool:
        return np.array_equal(self.decode.tokens(BLOCKS, 0, 48), expected(remote, 0, 48))

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()

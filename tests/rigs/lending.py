"""What computes the digests of an engine that lends: its coordinator and a worker of each rank."""

from kvcache.pool import KVPool
from kvcache.transfer.peer import LocalRank
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.worker import TransferWorker
from protocol.handshake import CompatRecord
from tests.rigs.memory_agent import MemoryAgent


class Lending:
    def __init__(self, address: str, pools: list[KVPool], compat: CompatRecord) -> None:
        tp, heads, size = len(pools), compat.total_kv_heads, pools[0].layout.block_size
        self.coordinator = PullCoordinator(address, tp, compat, b"", block_size=size)
        links = [self.coordinator, *[address] * (tp - 1)]
        ranks = [LocalRank(rank, tp, heads, MemoryAgent(), pool) for rank, pool in enumerate(pools)]
        self.workers = list(map(TransferWorker, ranks, links))
        for worker in self.workers:
            worker.start()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

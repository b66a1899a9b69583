"""What pulls for an engine, and computes the digests of what it lends: its coordinator,
and a worker of each rank.
"""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcache.pool import KVPool
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.move.place import Placer
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker import TransferWorker
from protocol.handshake import CompatRecord


class Workers:
    """Of an engine with these pools, which `start` begins.

    Args:
        coordinator_dcp: how many ranks share tokens, as the coordinator believes.
        make_placer: makes each rank's, if it has one.
        options: of the ranks.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        agents: Sequence[TransferAgent],
        compat: CompatRecord,
        secret: bytes = b"",
        settings: PullSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        dcp: int = 1,
        coordinator_dcp: int | None = None,
        convert: bool = False,
        verify: str = "off",
        make_placer: Callable[[KVPool], Placer | None] = lambda pool: None,
        **options: Any,
    ) -> None:
        tp, size = len(pools), pools[0].layout.block_size
        pairs = [socket.socketpair() for _ in pools[1:]]
        about = {"dcp": coordinator_dcp or dcp, "block_size": size, "verify": verify}
        settings, common = settings or PullSettings(), {"convert": convert}
        self.coordinator = PullCoordinator(
            [ours for ours, _ in pairs],
            compat,
            secret,
            settings,
            clock=clock,
            **about,
            **common,
        )
        self.ranks = [
            LocalRank(rank, tp, compat.total_kv_heads, agents[rank], pool, dcp=dcp,
                      placer=make_placer(pool), **options, **common)
            for rank, pool in enumerate(pools)
        ]  # fmt: skip
        links = [self.coordinator, *(theirs for _, theirs in pairs)]
        self.workers = list(map(TransferWorker, self.ranks, links))

    def start(self) -> "Workers":
        for worker in self.workers:
            worker.start()
        return self

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

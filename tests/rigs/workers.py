"""The part of an engine that pulls, and that computes the digests of lent KV.

It consists of a coordinator and one worker per rank.
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
    """The coordinator and the workers of an engine with these pools, not started.

    Args:
        coordinator_dcp: number of ranks that share tokens according to the coordinator,
            if it differs from `dcp`.
        make_placer: makes the placer of a rank, or returns None.
        options: further options of LocalRank.
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
        pairs = [socket.socketpair() for _ in pools[1:]]
        self.coordinator = PullCoordinator(
            [coordinator_end for coordinator_end, _ in pairs],
            compat,
            secret,
            settings or PullSettings(),
            clock=clock,
            dcp=coordinator_dcp or dcp,
            block_size=pools[0].layout.block_size,
            verify=verify,
            convert=convert,
        )
        self.ranks = [
            LocalRank(
                rank,
                len(pools),
                compat.total_kv_heads,
                agents[rank],
                pool,
                dcp=dcp,
                placer=make_placer(pool),
                convert=convert,
                **options,
            )
            for rank, pool in enumerate(pools)
        ]
        links = [self.coordinator, *(worker_end for _, worker_end in pairs)]
        self.workers = list(map(TransferWorker, self.ranks, links))

    def start(self) -> "Workers":
        for worker in self.workers:
            worker.start()
        return self

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

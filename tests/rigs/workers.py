"""The part of an engine that pulls KV and computes the digests of lent KV.

This part consists of a coordinator and a worker for each rank.
"""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcache.pool import KVPool
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.draft import DraftRank
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.move.place import Placer
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker import TransferWorker
from protocol.handshake import CompatRecord


class Workers:
    """The coordinator of an engine and a worker for each of its pools. `start` starts
    the workers.

    Args:
        coordinator_dcp: the value of `dcp` for the coordinator, if it differs from the
            workers' `dcp`.
        make_placer: function that creates the placer of a rank, or returns None for a
            rank without a placer.
        drafts: the KV of a drafter, by rank.
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
        drafts: Sequence[DraftRank] = (),
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
            draft=drafts[0].kv if drafts else None,
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
                draft=drafts[rank] if drafts else None,
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

"""One rank of the decode server (D): the resources that its pulls and links share."""

from collections.abc import Callable
from typing import Protocol

import torch

from kvcache.pool import KVPool
from kvcache.transfer.agent import (
    GPU_LIMITS,
    MemoryKind,
    PostLimits,
    Throttle,
    TransferAgent,
)
from kvcache.transfer.draft import DraftRank as DraftRank
from kvcache.transfer.move.cuda_placer import staging_placer
from kvcache.transfer.move.place import Placer, StagingBuffer
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import Endpoint
from protocol.process.logging import get_logger

logger = get_logger(__name__)

SCRATCH_BYTES = 4 << 20  # size of the memory for READs that only measure a link
# Links are measured only if there is at least this much staging memory. With less,
# plans hardly depend on the costs of a link.
_MIN_MEASURED_STAGING_BYTES = 4 << 20


class Link(Protocol):
    """A link that LocalRank.close closes and joins; see PeerLink."""

    def close(self) -> None: ...

    def join(self) -> None: ...


def _do_nothing() -> None:
    pass


def _is_never_busy() -> bool:
    return False


class LocalRank:
    """One rank of D, with the resources that its pulls and links share.

    Args:
        number: the rank.
        tp_size, total_kv_heads, dcp: geometry of this engine; dcp as in Endpoint.
        agent: makes the pool readable by peers. It reads nothing: each link reads with
            its own `agent.new_sibling()`. The agent belongs to the worker from
            `TransferWorker.start` until `close` has returned.
        staging_bytes: size of the staging memory; None: all transfers are direct.
        convert: accept peers with a different KV dtype or KV scales.
        costs: the costs of every link; None: links are measured at first contact, if
            `measures_links`.
        limits: limits on the size and number of posted READs; None: the defaults for
            the device.
        placer: maps the memory of peers and copies out of it. If a peer's memory cannot
            be mapped, an agent reads it. None: agents read from all peers.
        maps_only: fail pulls from a peer if the memory of the peer cannot be mapped.
        is_busy: returns True while the engine computes a batch on this rank. Until the
            batch has ended, the rate of READs into a pool on a GPU is limited.
        connect_timeout_s: longest time that connecting and measuring a link may take.
        draft: the pool of a drafter in the memory behind the pool; None: there is none.

    Attributes:
        wake: called by a link's thread when the link has become ready, has failed or
            is closed.
        links: the links that are not closed.
    """

    def __init__(
        self,
        number: int,
        tp_size: int,
        total_kv_heads: int,
        agent: TransferAgent,
        pool: KVPool,
        *,
        dcp: int = 1,
        staging_bytes: int | None = None,
        convert: bool = False,
        costs: CostModel | None = None,
        limits: PostLimits | None = None,
        placer: Placer | None = None,
        maps_only: bool = False,
        is_busy: Callable[[], bool] = _is_never_busy,
        connect_timeout_s: float = 5.0,
        draft: DraftRank | None = None,
    ) -> None:
        on_gpu = pool.device.type == "cuda"
        self.number = number
        self.total_kv_heads = total_kv_heads
        self.agent = agent
        self.pool = pool
        self.placer = placer
        self.maps_only = maps_only
        self.convert = convert
        self.draft = draft
        self.costs = costs
        self.connect_timeout_s = connect_timeout_s
        self.is_busy = is_busy if on_gpu else None
        self.endpoint = Endpoint(
            layout=pool.layout,
            rank=number,
            tp=tp_size,
            scales=pool.scales,
            dcp=dcp,
            groups=pool.groups,
        )
        self.staging: StagingBuffer | None = None
        if staging_bytes:
            layouts = [draft.endpoint.layout] if draft is not None else []
            placer_out_of_staging = staging_placer(
                pool, convert=convert, extra_layouts=layouts
            )
            self.staging = StagingBuffer(staging_bytes, pool, placer_out_of_staging)
        limits = limits or (GPU_LIMITS if on_gpu else PostLimits())
        self.throttle = Throttle(limits, is_busy) if on_gpu else Throttle(limits)
        self.kind: MemoryKind = "VRAM" if on_gpu else "DRAM"
        self._scratch = torch.empty(
            SCRATCH_BYTES, dtype=torch.uint8, device=pool.device
        )
        self.scratch_address = int(self._scratch.data_ptr())
        self.wake: Callable[[], None] = _do_nothing
        self.links: set[Link] = set()
        if costs is not None:
            logger.info("configured costs of every link: %s", costs)

    @staticmethod
    def reserved_bytes(staging_bytes: int | None) -> int:
        """Bytes of device memory that a LocalRank allocates, not counting the pool."""
        return (staging_bytes or 0) + SCRATCH_BYTES

    @property
    def measures_links(self) -> bool:
        """True if links are measured at first contact.

        That is needed if plans depend on the costs of a link, but no costs are
        configured.
        """
        staging_bytes = self.staging.nbytes if self.staging else 0
        return self.costs is None and staging_bytes >= _MIN_MEASURED_STAGING_BYTES

    def bind_thread(self) -> None:
        """Prepares the calling thread to use the agent and the placers."""
        self.agent.bind_thread()
        if self.staging is not None:
            self.staging.bind_thread()
        if self.placer is not None:
            self.placer.bind_thread()

    def register_pool(self) -> None:
        """Makes the pool, and a drafter's pool behind it, readable by peers."""
        self._register(self.agent, self.pool.base_address, len(self.pool.memory))

    def register_with(self, agent: TransferAgent) -> None:
        """Registers all memory that a link's READs may write to."""
        self._register(agent, self.scratch_address, SCRATCH_BYTES)
        self._register(agent, self.pool.base_address, len(self.pool.memory))
        if self.staging is not None:
            self._register(agent, self.staging.base_address, self.staging.nbytes)

    def _register(self, agent: TransferAgent, address: int, nbytes: int) -> None:
        agent.register(address, nbytes, device_id=self.pool.device_id, kind=self.kind)

    def close(self) -> None:
        """Closes every link and the agent.

        Does not wait for links that are still connecting, because such a link has no
        active READs of pulls.
        """
        links = list(self.links)
        for link in links:
            link.close()
        for link in links:
            link.join()
        self.agent.close()

"""The regions of a store: one for each model, up to a limit.

The regions share the memory equally, so that the engines of one model cannot evict the
KV of another model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.store.memory import RegionOptions, RegionTooSmall, region_layout
from engine.store.region import Region
from kvcache.transfer.agent import TransferAgent
from protocol.errors import PeerIncompatible
from protocol.handshake import CompatRecord, check_compatible
from protocol.ipc.kv_store import OpenRegion, RegionRefused, RegionSpec, StoreReply
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# A region without a request of an engine for this time may be replaced by one for
# another model. Engines request theirs every few seconds.
STALE_REGION_S = 60.0


@dataclass
class _Slot:
    """A share of the memory, and its region.

    Attributes:
        options: the options of the region.
        region: None before the first request of a model.
        requested_s: when an engine last requested the region.
    """

    options: RegionOptions
    region: Region | None = None
    requested_s: float = float("-inf")


class Store:
    """Opens regions for engines. One thread uses this object.

    Args:
        options: the options of all regions together.
        make_agent, wake: as in Region.
    """

    def __init__(
        self,
        options: RegionOptions,
        secret: bytes,
        make_agent: Callable[[str], TransferAgent],
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._make_agent = make_agent
        self._wake = wake
        self._clock = clock
        port = options.side_channel_port
        self._slots = [
            _Slot(replace(options, side_channel_port=port + index if port else 0))
            for index in range(options.max_models)
        ]
        self._last_refusal = ""  # so that an engine that tries again is logged once

    @property
    def regions(self) -> list[Region]:
        """The open regions."""
        return [slot.region for slot in self._slots if slot.region is not None]

    def open_region(self, request: OpenRegion) -> StoreReply:
        """Returns the region for an engine's KV, which is created if necessary."""
        try:
            region = self._region_for(request)
        except (RegionTooSmall, MemoryError, ValueError) as error:
            if str(error) != self._last_refusal:
                self._last_refusal = str(error)
                logger.warning("%s: %s", request.engine_id, error)
            return RegionRefused(nonce=request.nonce, reason=str(error))
        return region.opened(request.nonce)

    def _region_for(self, request: OpenRegion) -> Region:
        """Returns the region for a request.

        Raises:
            RegionTooSmall, MemoryError, ValueError: there can be no such region now.
        """
        spec = request.spec
        layout = region_layout(spec, self._slots[0].options)
        now_s = self._clock()
        for slot in self._slots:
            if slot.region is not None and slot.region.spec.compat == spec.compat:
                slot.requested_s = now_s
                return slot.region
        # A free share comes first, then the region that was unused for longest.
        slot = min(self._slots, key=lambda slot: slot.requested_s)
        if slot.region is not None:
            if now_s - slot.requested_s < STALE_REGION_S:
                raise ValueError(self._refusal(spec.compat))
            logger.info("closing the region of a model that no server uses any more")
            slot.region.close()
            slot.region = None
            slot.requested_s = float("-inf")
        slot.region = self._create(spec, slot.options)
        slot.requested_s = now_s
        logger.info(
            "opened a region of %d tokens in %d blocks of %d (%.2f GiB) for %s",
            slot.region.num_tokens,
            layout.num_blocks - 1,
            spec.block_size,
            layout.nbytes / 2**30,
            request.engine_id,
        )
        return slot.region

    def _create(self, spec: RegionSpec, options: RegionOptions) -> Region:
        return Region(spec, options, self._secret, self._make_agent, self._wake)

    def _refusal(self, compat: CompatRecord) -> str:
        """Returns why the store has no share for a model."""
        max_models = len(self._slots)
        try:
            check_compatible(compat, self.regions[0].spec.compat)
            difference = "the KV differs"
        except PeerIncompatible as error:
            difference = f"{error.param} differs"
        return (
            f"the store is in use by servers of another model or with other KV "
            f"({difference}): start the store with --max-models {max_models + 1}, "
            "start a second store (baton kv) and give its address with --host-kv, or "
            f"stop those servers for {STALE_REGION_S:g} s"
        )

    def poll(self) -> None:
        """Handles what the regions' threads have queued."""
        for region in self.regions:
            region.poll()

    @property
    def is_idle(self) -> bool:
        return all(region.is_idle for region in self.regions)

    def check_integrity(self) -> None:
        for region in self.regions:
            region.check_integrity()

    def close(self) -> None:
        for slot in self._slots:
            if slot.region is not None:
                slot.region.close()
                slot.region = None

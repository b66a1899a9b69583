"""The regions of a store: one for each model, up to a limit.

The regions share the memory equally, so that the engines of one model cannot evict the
KV of another model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.store.memory import RegionOptions, RegionTooSmall, region_layout
from engine.store.opening import RegionOpening
from engine.store.region import Region
from kvcache.layout import KVLayout
from kvcache.transfer.agent import TransferAgent
from protocol.errors import PeerIncompatible
from protocol.handshake import CompatRecord, check_compatible
from protocol.ipc.kv_store import (
    OpenRegion,
    RegionPending,
    RegionRefused,
    RegionSpec,
    StoreReply,
)
from protocol.metadata_rules import check_region
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# A region without a request of an engine for this time may be replaced by one for
# another model. Engines request theirs every few seconds.
STALE_REGION_S = 60.0
# No region is opened for this time after memory could not be allocated for one.
RETRY_OPEN_S = 10.0
_CLOSE_TIMEOUT_S = 2.0  # longest wait of `close` for the regions that are being opened


@dataclass
class _Slot:
    """A share of the memory, and its region.

    Attributes:
        options: the options of the region.
        region: None before the first request of a model.
        opening: the region that is being opened; None if there is none.
        requested_s: when an engine last requested the region.
    """

    options: RegionOptions
    region: Region | None = None
    opening: RegionOpening | None = None
    requested_s: float = float("-inf")

    @property
    def spec(self) -> RegionSpec | None:
        """The KV of this share; None if the share is free."""
        current = self.opening or self.region
        return None if current is None else current.spec


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
        self._open_error = ""  # why a region could not be opened
        self._retry_open_s = float("-inf")
        self._last_refusal = ""  # so that an engine that tries again is logged once

    @property
    def regions(self) -> list[Region]:
        """The open regions."""
        return [slot.region for slot in self._slots if slot.region is not None]

    def open_region(self, request: OpenRegion) -> StoreReply:
        """Returns the region for an engine's KV. Begins to open it if necessary."""
        try:
            return self._answer(request)
        except (RegionTooSmall, PeerIncompatible, ValueError) as error:
            if str(error) != self._last_refusal:
                self._last_refusal = str(error)
                logger.warning("%s: %s", request.engine_id, error)
            return RegionRefused(nonce=request.nonce, reason=str(error))

    def _answer(self, request: OpenRegion) -> StoreReply:
        """Returns the answer to a request.

        Raises:
            RegionTooSmall, PeerIncompatible, ValueError: there can be no such region
                now.
        """
        spec = request.spec
        check_region(spec.compat, spec.group_layers)
        layout = region_layout(spec, self._slots[0].options)
        slot = self._slot_for(spec)
        region = slot.region
        if region is not None and region.spec.compat == spec.compat:
            return region.opened(request.nonce)
        del region  # its memory is freed if the region is replaced now
        # A share with an opening of another model is taken over when that has ended.
        if slot.opening is None:
            self._begin_opening(slot, request, layout)
        return RegionPending(nonce=request.nonce, nbytes=layout.nbytes)

    def _slot_for(self, spec: RegionSpec) -> _Slot:
        """Returns the share with the KV of `spec`, or the share for it to take over.

        Raises:
            ValueError: servers of other models use all shares.
        """
        now_s = self._clock()
        for slot in self._slots:
            if slot.spec is not None and slot.spec.compat == spec.compat:
                slot.requested_s = now_s
                return slot
        # A free share comes first, then the region that was unused for longest.
        slot = min(self._slots, key=lambda slot: slot.requested_s)
        if slot.spec is not None and now_s - slot.requested_s < STALE_REGION_S:
            raise ValueError(self._refusal(spec.compat))
        return slot

    def _begin_opening(
        self, slot: _Slot, request: OpenRegion, layout: KVLayout
    ) -> None:
        """Begins to open a region in a share, and to close the stale one there.

        Raises:
            ValueError: opening a region has failed recently.
        """
        now_s = self._clock()
        if now_s < self._retry_open_s:
            raise ValueError(self._open_error)
        if slot.region is not None:
            logger.info("closing the region of a model that no server uses any more")
        logger.info(
            "allocating %.2f GiB of host memory for %s",
            layout.nbytes / 2**30,
            request.engine_id,
        )
        opening = RegionOpening(
            request.spec,
            slot.region,
            lambda: self._create(request.spec, slot.options),
            self._wake,
        )
        slot.region = None
        slot.opening = opening
        slot.requested_s = now_s
        opening.start()

    def _create(self, spec: RegionSpec, options: RegionOptions) -> Region:
        return Region(spec, options, self._secret, self._make_agent, self._wake)

    def _finish_opening(self, slot: _Slot, opening: RegionOpening) -> None:
        """Takes over the region that was opened, or records the reason of a failure."""
        slot.opening = None
        try:
            region = opening.take()
        except Exception as error:
            # The other regions keep their KV.
            if not (isinstance(error, MemoryError) or self.regions):
                raise
            logger.error("a region could not be opened: %s", error)
            self._open_error = f"the store could not open a region: {error}"
            self._retry_open_s = self._clock() + RETRY_OPEN_S
            slot.requested_s = float("-inf")
            return
        slot.region = region
        layout = region.memory.pool.layout
        logger.info(
            "opened a region of %d tokens in %d blocks of %d (%.2f GiB) in %.1f s",
            region.num_tokens,
            layout.num_blocks - 1,
            layout.block_size,
            layout.nbytes / 2**30,
            opening.seconds,
        )

    def _refusal(self, compat: CompatRecord) -> str:
        """Returns why the store has no share for a model."""
        max_models = len(self._slots)
        try:
            current = next(slot.spec for slot in self._slots if slot.spec is not None)
            check_compatible(compat, current.compat)
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
        """Handles what the regions' threads have queued.

        Raises:
            Exception: the only region could not be opened, for another reason than its
                size.
        """
        for slot in self._slots:
            if slot.opening is not None and slot.opening.has_ended:
                self._finish_opening(slot, slot.opening)
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
            if slot.opening is not None:
                slot.opening.close(_CLOSE_TIMEOUT_S)
                slot.opening = None
            if slot.region is not None:
                slot.region.close()
                slot.region = None

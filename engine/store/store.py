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

# A region that no engine has requested for this time may be replaced by a region for
# another model. Engines request their region every few seconds.
STALE_REGION_S = 60.0
# After a region could not be opened, no region is opened for this time.
RETRY_OPEN_S = 10.0
_CLOSE_TIMEOUT_S = 2.0  # longest wait of `close` for each region that is being opened


@dataclass
class _Slot:
    """A share of the memory, and its region.

    Attributes:
        options: the options of the region.
        region: the open region; None if no region is open.
        opening: the region that is being opened; None if no region is being opened.
        requested_s: when an engine last requested the region.
    """

    options: RegionOptions
    region: Region | None = None
    opening: RegionOpening | None = None
    requested_s: float = float("-inf")

    @property
    def spec(self) -> RegionSpec | None:
        """The spec of the region that is open or opening; None if the share is free."""
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
        self._open_error = ""  # why the last opening failed
        self._retry_open_s = float("-inf")
        self._last_refusal = ""  # so that repeated refusals are logged once

    @property
    def regions(self) -> list[Region]:
        """The open regions."""
        return [slot.region for slot in self._slots if slot.region is not None]

    def open_region(self, request: OpenRegion) -> StoreReply:
        """Answers an engine's request for a region. Begins to open it if necessary."""
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
            RegionTooSmall, PeerIncompatible, ValueError: the region cannot be opened
                now.
        """
        spec = request.spec
        check_region(spec.compat, spec.group_layers)
        layout = region_layout(spec, self._slots[0].options)
        slot = self._slot_for(spec)
        region = slot.region
        if region is not None and region.spec.compat == spec.compat:
            return region.opened(request.nonce)
        del region  # this reference would keep the memory of a replaced region
        # If another model's region is being opened in this share, the engine's next
        # request after that opening takes over the share.
        if slot.opening is None:
            self._begin_opening(slot, request, layout)
        return RegionPending(nonce=request.nonce, nbytes=layout.nbytes)

    def _slot_for(self, spec: RegionSpec) -> _Slot:
        """Returns the share that has the KV of `spec`, or a share to use for that KV.

        Raises:
            ValueError: servers of other models use all shares.
        """
        now_s = self._clock()
        for slot in self._slots:
            if slot.spec is not None and slot.spec.compat == spec.compat:
                slot.requested_s = now_s
                return slot
        # Prefer a free share, then the share that was not requested for the longest
        # time.
        slot = min(self._slots, key=lambda slot: slot.requested_s)
        if slot.spec is not None and now_s - slot.requested_s < STALE_REGION_S:
            raise ValueError(self._refusal(spec.compat))
        return slot

    def _begin_opening(
        self, slot: _Slot, request: OpenRegion, layout: KVLayout
    ) -> None:
        """Begins to open a region in a share, after closing the share's stale region.

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
            # The store continues if memory is lacking, or if other regions hold KV.
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
        """Handles ended openings, and what the regions' threads have queued.

        Raises:
            Exception: a region could not be opened although there was enough memory,
                and no other region is open.
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

"""The regions of a store: at most one at a time, for the KV of one model."""

import time
from collections.abc import Callable

from engine.store.memory import RegionOptions, RegionTooSmall, region_layout
from engine.store.region import Region
from kvcache.transfer.agent import TransferAgent
from protocol.errors import PeerIncompatible
from protocol.handshake import check_compatible
from protocol.ipc.kv_store import OpenRegion, RegionRefused, StoreReply
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# A region without a request of an engine for this time may be replaced by one for
# another model. Engines request theirs every few seconds.
STALE_REGION_S = 60.0


class Store:
    """Opens regions for engines. One thread uses this object.

    Args:
        make_agent, wake: as in Region.

    Attributes:
        region: the open region; None before the first request.
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
        self._options = options
        self._secret = secret
        self._make_agent = make_agent
        self._wake = wake
        self._clock = clock
        self.region: Region | None = None
        self._last_refusal = ""  # so that an engine that tries again is logged once
        self._requested_s = 0.0  # when an engine last requested the region

    def open_region(self, request: OpenRegion) -> StoreReply:
        """Returns the region for an engine's KV, which is created if necessary."""
        try:
            region = self._region_for(request)
        except (RegionTooSmall, MemoryError, ValueError) as error:
            if str(error) != self._last_refusal:
                self._last_refusal = str(error)
                logger.warning("%s: %s", request.engine_id, error)
            return RegionRefused(nonce=request.nonce, reason=str(error))
        self._requested_s = self._clock()
        return region.opened(request.nonce)

    def _region_for(self, request: OpenRegion) -> Region:
        """Returns the region for a request.

        Raises:
            RegionTooSmall, MemoryError, ValueError: there can be no such region now.
        """
        spec = request.spec
        layout = region_layout(spec, self._options.host_kv_bytes)
        region = self.region
        if region is not None and region.spec.compat == spec.compat:
            return region
        if region is not None:
            self._check_is_stale(region, request)
            logger.info("closing the region of a model that no server uses any more")
            self.region = None
            region.close()
        self.region = Region(
            spec, self._options, self._secret, self._make_agent, self._wake
        )
        logger.info(
            "opened a region of %d tokens in %d blocks of %d (%.2f GiB) for %s",
            self.region.num_tokens,
            layout.num_blocks - 1,
            spec.block_size,
            layout.nbytes / 2**30,
            request.engine_id,
        )
        return self.region

    def _check_is_stale(self, region: Region, request: OpenRegion) -> None:
        """Raises ValueError if servers of another model use the region."""
        idle_s = self._clock() - self._requested_s
        if idle_s >= STALE_REGION_S:
            return
        try:
            check_compatible(request.spec.compat, region.spec.compat)
            difference = "the KV differs"
        except PeerIncompatible as error:
            difference = f"{error.param} differs"
        raise ValueError(
            f"the store is in use by servers of another model or with other KV "
            f"({difference}): start a second store (baton kv) and give its address "
            f"with --host-kv, or stop those servers for {STALE_REGION_S:g} s"
        )

    def poll(self) -> None:
        """Handles what the region's threads have queued."""
        if self.region is not None:
            self.region.poll()

    @property
    def is_idle(self) -> bool:
        return self.region is None or self.region.is_idle

    def check_integrity(self) -> None:
        if self.region is not None:
            self.region.check_integrity()

    def close(self) -> None:
        if self.region is not None:
            self.region.close()
            self.region = None

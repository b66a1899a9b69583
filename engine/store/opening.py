"""Opens a region in a thread, because allocating and locking its memory takes seconds.

The store's own thread continues to answer engines while the region is opened.
"""

import gc
import threading
import time
from collections.abc import Callable

from engine.store.region import Region
from protocol.ipc.kv_store import RegionSpec


class RegionOpening:
    """A region that is being opened. One thread uses this object.

    Args:
        spec: the spec of the new region.
        old: a region to close first, because the new region needs its memory. The
            caller must drop its own references to `old` before it calls `start`.
        make_region: opens the region; runs in the thread of this object.
        on_end: called by the thread of this object after `has_ended` has become True.

    Attributes:
        seconds: how long opening took; 0 until opening has ended.
    """

    def __init__(
        self,
        spec: RegionSpec,
        old: Region | None,
        make_region: Callable[[], Region],
        on_end: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.seconds = 0.0
        self._old = old
        self._make_region = make_region
        self._on_end = on_end
        self._region: Region | None = None
        self._error: Exception | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="open-region", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            if self._old is not None:
                self._old.close()
                self._old = None
                gc.collect()  # a region has reference cycles
            self._region = self._make_region()
        except Exception as error:
            self._error = error
        self.seconds = time.monotonic() - began_s
        self._has_ended.set()
        self._on_end()

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def take(self) -> Region:
        """Returns the opened region. Call this only after opening has ended.

        Raises:
            Exception: the error of opening the region.
        """
        if self._error is not None:
            raise self._error
        assert self._region is not None
        return self._region

    def close(self, timeout_s: float) -> None:
        """Closes the region. If opening does not end within `timeout_s`, the region
        stays open until the process ends."""
        self._has_ended.wait(timeout_s)
        if self._region is not None:
            self._region.close()

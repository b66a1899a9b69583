"""The main program of a store.

    start: settings -> listen -> ready -> load torch and NIXL -> regions are opened
    end:   SIGTERM, SIGINT, or the parent has ended -> transfers may finish -> leases
           end -> exit

The main thread serves the connections of engines, and owns the blocks of the regions.
The threads of the regions' lease servers and transfer workers wake the main thread.
"""

import logging
import math
import sys
import time
from collections.abc import Sequence
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING

from engine.store.front import StoreFront
from protocol.ipc.wire import Waker, listen
from protocol.process import lifecycle
from protocol.process.logging import open_standard_streams, setup_logging
from protocol.process.vital_threads import end_with_vital_threads
from protocol.settings.machine import cluster_secret, free_host_bytes, has_gpu
from protocol.settings.settings import StoreSettings, describe, parse

if TYPE_CHECKING:
    from engine.store.store import Store

logger = logging.getLogger("baton.store")

_DEFAULT_SHARE = 0.1  # of the free memory, if --host-kv-bytes is not set
_POLL_INTERVAL_S = 0.5
# After the store has been idle for this time, it checks its block accounting once.
_IDLE_BEFORE_CHECK_S = 5.0
_KILLED_STATUS = 130  # exit status if a signal arrives during the shutdown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a store until a signal ends it. Returns the exit status."""
    settings = parse(StoreSettings, argv, prog="baton kv")
    open_standard_streams()
    lifecycle.watch_parent(grace_s=settings.shutdown_grace_s + 1)
    setup_logging("kv", level=settings.log_level, log_format=settings.log_format)
    end_with_vital_threads()
    logger.info("settings %s", describe(settings))
    status = 0
    try:
        _Program(settings).run()
    except (ValueError, OSError) as error:
        lifecycle.report_failure(str(error) or type(error).__name__)
        status = 1
    except Exception as error:
        logger.exception("the store failed")
        lifecycle.report_failure(f"{type(error).__name__}: {error}")
        status = 1
    # Exit directly: the teardown of NIXL and UCX during the interpreter's shutdown can
    # crash after all work is done.
    logging.shutdown()
    sys.stdout.flush()
    lifecycle.exit_now(status)


def size_of_store(requested_bytes: int | None) -> int:
    """Returns how many bytes of host memory the store uses for KV.

    Raises:
        ValueError: this machine or container does not have that much free memory.
    """
    free_bytes = free_host_bytes()
    if requested_bytes is None:
        return int(free_bytes * _DEFAULT_SHARE)
    if requested_bytes > free_bytes:
        raise ValueError(
            f"--host-kv-bytes is {requested_bytes}, but only {free_bytes} bytes of "
            "memory are free on this machine or in this container: use a smaller "
            "--host-kv-bytes"
        )
    return requested_bytes


class _Program:
    """One store and its main loop."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._secret = cluster_secret(settings.cluster_secret)
        self._num_bytes = size_of_store(settings.host_kv_bytes)
        self._selector = DefaultSelector()
        self._waker = Waker()
        self._selector.register(self._waker, EVENT_READ, self._waker.clear)
        self._num_signals = 0

    def run(self) -> None:
        """Serves until a signal arrives, then shuts down in order."""
        settings = self._settings
        listener = listen(settings.host, settings.port)
        port = listener.getsockname()[1]
        with lifecycle.stop_signals(self._on_signal):
            logger.info(
                "the KV store listens on %s:%d, with %.2f GiB of host memory",
                settings.host,
                port,
                self._num_bytes / 2**30,
            )
            lifecycle.report_ready({"port": port})
            store = self._create_store()
            front = StoreFront(
                listener, self._selector, self._secret, store.open_region
            )
            self._serve(store)
            logger.info("stopping")
            front.close()
            self._drain(store)
            store.close()

    def _create_store(self) -> "Store":
        """Creates the store. First imports torch and NIXL, which takes seconds.

        New connections wait in that time.
        """
        from engine.store.memory import RegionOptions
        from engine.store.store import Store
        from kvcache.transfer.nixl_agent import NixlAgent

        settings = self._settings
        options = RegionOptions(
            host_kv_bytes=self._num_bytes,
            max_models=settings.max_models,
            host=settings.host,
            side_channel_port=settings.side_channel_port,
            transfer=settings.transfer or ("auto" if has_gpu() else "nixl"),
            staging_bytes=settings.staging_bytes,
            kv_verify=settings.kv_verify,
        )
        return Store(options, self._secret, NixlAgent, self._waker.wake)

    def _serve(self, store: "Store") -> None:
        """Serves until a signal arrives."""
        check_due_s = 0.0
        while not self._num_signals:
            self._serve_once(store)
            if not store.is_idle:
                check_due_s = time.monotonic() + _IDLE_BEFORE_CHECK_S
            elif time.monotonic() >= check_due_s:
                check_due_s = math.inf
                store.check_integrity()

    def _drain(self, store: "Store") -> None:
        """Serves for a limited time, so that transfers of KV can finish."""
        deadline_s = time.monotonic() + self._settings.shutdown_grace_s / 2
        while not store.is_idle and time.monotonic() < deadline_s:
            self._serve_once(store)

    def _serve_once(self, store: "Store") -> None:
        for key, _ in self._selector.select(_POLL_INTERVAL_S):
            key.data()
        store.poll()

    def _on_signal(self, _number: int, count: int) -> None:
        self._num_signals = count
        if count > 1:
            lifecycle.exit_now(_KILLED_STATUS)

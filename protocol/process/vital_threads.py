"""Threads without which a process cannot continue."""

import os
import threading
from collections.abc import Callable

from protocol.process import lifecycle
from protocol.process.logging import get_logger

# Maximum time for reporting the end of a VitalThread. If the process that reads the
# report is suspended (SIGSTOP), a write may never return.
_MAX_REPORT_S = 5.0
_log = get_logger(__name__)


class VitalThread(threading.Thread):
    """A daemon thread that the process needs; see `end_with_vital_threads`."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def end_with_vital_threads() -> None:
    """Makes an exception in a VitalThread end this process with status 1.

    The reason is reported to the parent process. In tests, which do not call this
    function, such an exception ends only the thread.
    """
    default_hook = threading.excepthook

    def end_process(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.thread, VitalThread):
            default_hook(args)
            return
        reason = args.exc_type.__name__
        if str(args.exc_value):
            reason += f": {args.exc_value}"
        # If the process that reads the report is suspended, the report may wait
        # forever. The timer then ends this process.
        watchdog = threading.Timer(_MAX_REPORT_S, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
        try:
            lifecycle.report_failure(f"thread {args.thread.name} ended: {reason}")
            _log.critical("thread %s", args.thread.name, exc_info=args.exc_value)
        finally:
            # Other threads may be in any state, so this process does not wait for them.
            lifecycle.exit_now(1)

    threading.excepthook = end_process

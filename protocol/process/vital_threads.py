"""Threads without which a process is of no use.

A thread that raises ends alone: the process continues and looks healthy, while everybody who waits
for the thread runs into a timeout, again and again. A process that has ended is noticed at once.
"""

import contextlib
import os
import threading
from collections.abc import Callable

from protocol.process import lifecycle
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_TELL_S = 5.0  # longest: somebody may have stopped to read our output


class VitalThread(threading.Thread):
    """A daemon thread that others rely on for as long as the process lives."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def end_with_vital_threads() -> None:
    """From now on a VitalThread that raises ends this process, with status 1, the reason reported
    to its parent. Without this it ends as any thread does, which is what tests see."""
    usual = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.thread, VitalThread):
            usual(args)
            return
        try:
            telling = threading.Thread(target=_tell, args=(args.thread.name, args), daemon=True)
            telling.start()
            telling.join(_TELL_S)
        finally:
            os._exit(1)  # other threads may be anywhere; none of them is asked

    threading.excepthook = end


def _tell(thread: str, args: threading.ExceptHookArgs) -> None:
    reason = args.exc_type.__name__
    if str(args.exc_value):
        reason += f": {args.exc_value}"
    with contextlib.suppress(OSError, ValueError):  # there may be no stderr any more
        lifecycle.report_failure(f"thread {thread} ended: {reason}")
    logger.critical("thread %s", thread, exc_info=args.exc_value)

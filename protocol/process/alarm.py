"""Signal handling in a process that its parent ends by ALARM."""

import signal
import sys
from typing import Any, NoReturn

from protocol.process.lifecycle import ALARM

_REPEAT_ALARM_S = 0.01  # delay until this process sends itself a dropped ALARM again


def end_on_alarm() -> None:
    """Makes ALARM raise SystemExit, and disables SIGTERM. Call it in the main thread.

    A service manager sends SIGTERM to all processes of a service at once. At that time,
    the parent may still need this process. The parent ends it later by ALARM.
    """
    # The handler does nothing. It is not SIG_IGN, which child processes would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(ALARM, _raise_exit)
    sys.unraisablehook = _on_unraisable


def ignore_alarm() -> None:
    """Ignores ALARM from now on, so that the signal cannot interrupt the shutdown.

    The parent sends ALARM as soon as it detects that this process is shutting down.
    """
    signal.signal(ALARM, signal.SIG_IGN)


def _raise_exit(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _on_unraisable(unraisable: Any) -> None:
    """Sends ALARM again if it arrived during a finalizer or a weak reference's
    callback.

    Python drops the SystemExit that ALARM raises in such a function.
    """
    if unraisable.exc_type is SystemExit:
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_ALARM_S)
    else:
        sys.__unraisablehook__(unraisable)

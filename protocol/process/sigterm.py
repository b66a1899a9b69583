"""SIGTERM as SystemExit in the main thread of a process, whatever it is doing."""

import signal
import sys
from typing import Any, NoReturn

_AGAIN_S = 0.01
_NUMBERS = (signal.SIGTERM, signal.SIGALRM)


def end_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit. Call it in the main thread."""
    for number in _NUMBERS:
        signal.signal(number, _end)
    sys.unraisablehook = _on_unraisable


def ignore_sigterm() -> None:
    """From now on SIGTERM does not break into what is being closed: once others hear that this
    process ends, they end it, too."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _end(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _on_unraisable(unraisable: Any) -> None:
    """What is raised in callbacks of weak references, finalizers and the like ends there. A SIGTERM
    that came while one ran comes again."""
    if unraisable.exc_type is SystemExit:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(unraisable)

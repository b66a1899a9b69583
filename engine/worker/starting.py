"""What keeps a rank from starting, told from our own bugs."""

import contextlib
from collections.abc import Iterator

from engine.worker.memory import MemoryTooSmall
from protocol.ipc.listening import CannotListen


class CannotStart(Exception):
    """What an option, the model or this machine does not permit, in a sentence for the user."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Tells what explains itself, while starting, from our own bugs."""
    try:
        yield
    except (ValueError, MemoryTooSmall, CannotListen) as error:
        raise CannotStart(str(error)) from error


def reason_of(error: BaseException) -> str:
    if isinstance(error, CannotStart):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

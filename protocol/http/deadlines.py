"""The deadline of a request, and a timer for other timeouts.

A client sets the timeout of its request by HEADER, else the operator's default applies.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.errors import DeadlineExceeded, InvalidRequest
from protocol.short_repr import short_repr

HEADER = "x-request-timeout-s"
MAX_S = 1_000_000  # 11 days, which is also the maximum of options in seconds
_MARGIN_S = 1.0  # see Deadline.header
_NUM_PARTS = 4  # a countdown consists of this many timers, one after the other
_is_number = re.compile(rb"[0-9]{1,7}(\.[0-9]{1,9})?").fullmatch


class Countdown:
    """Calls `callback` after `timeout_s` seconds, unless `cancel` is called first.

    If the process was suspended, or its event loop was busy for a long time, a single
    timer would fire before the loop has read the data that arrived in time. Therefore
    the timeout consists of several timers, one after the other, and the loop reads data
    between two of them. If the last timer fires late, it is repeated once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        callback: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._part_s = timeout_s / _NUM_PARTS
        self._parts_left = _NUM_PARTS
        self._timer = loop.call_later(self._part_s, self._on_part_end)

    def cancel(self) -> None:
        self._timer.cancel()

    def _on_part_end(self) -> None:
        self._parts_left -= 1
        is_late = self._loop.time() > self._timer.when() + self._part_s
        if self._parts_left > 0 or (self._parts_left == 0 and is_late):
            self._timer = self._loop.call_later(self._part_s, self._on_part_end)
        else:
            self._callback()


@dataclass(frozen=True)
class Deadline:
    """The time at which a request times out."""

    timeout_s: float  # the timeout that the client or the operator has set
    expires_at_s: float  # by the clock of the running event loop

    @property
    def error(self) -> DeadlineExceeded:
        """The error of a request that has expired."""
        return DeadlineExceeded(
            f"the request took longer than {self.timeout_s:g} s ({HEADER})"
        )

    def header(self) -> tuple[bytes, bytes]:
        """Returns the header with the remaining time, for a request to another server.

        A margin is added to the remaining time, so that this process times out before
        the other server. If the other server reported the timeout first, this process
        would treat the report as a failure of the other server.
        """
        left_s = max(self.expires_at_s - asyncio.get_running_loop().time(), 0.0)
        return HEADER.encode(), b"%.3f" % min(left_s + _MARGIN_S, MAX_S)


def deadline_of(
    headers: Iterable[tuple[bytes, bytes]], default_s: float | None = None
) -> Deadline | None:
    """Returns the deadline of a request that has just arrived.

    Args:
        headers: The headers of the request.
        default_s: The timeout if the client sets none; None: unlimited.

    Returns:
        The deadline; None if the request has no timeout.

    Raises:
        InvalidRequest: The header is not one number above 0 and at most MAX_S, or
            occurs more than once.
    """
    values = [value.strip() for name, value in headers if name == HEADER.encode()]
    timeout_s = default_s
    if values:
        is_valid = len(values) == 1 and _is_number(values[0])
        timeout_s = float(values[0]) if is_valid else 0.0
        if not 0 < timeout_s <= MAX_S:
            shown = short_repr(b", ".join(values).decode("latin-1"), 100)
            raise InvalidRequest(
                f"the header {HEADER} is {shown}; send one number of seconds above 0 "
                f"and at most {MAX_S}, such as 2.5",
                param=HEADER,
            )
    if timeout_s is None:
        return None
    return Deadline(timeout_s, asyncio.get_running_loop().time() + timeout_s)


@asynccontextmanager
async def enforce_deadline(deadline: Deadline | None) -> AsyncIterator[None]:
    """Cancels the body of the `with` at the deadline, and raises DeadlineExceeded.

    Without a deadline, the `with` has no effect.
    """
    timeout = asyncio.timeout_at(None if deadline is None else deadline.expires_at_s)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if deadline is not None and timeout.expired():
            raise deadline.error from None
        raise

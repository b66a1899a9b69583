"""Request timeouts: set by the client, else by the operator, else unlimited."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.errors import DeadlineExceeded, InvalidRequest
from protocol.short_repr import short_repr

HEADER = "x-request-timeout-s"
MAX_S = 1_000_000  # 11 days, like the options
_MARGIN_S = 1.0
_NUM_PARTS = 4  # of a countdown
_is_number = re.compile(rb"[0-9]{1,7}(\.[0-9]{1,9})?").fullmatch


class Countdown:
    """Calls back after `timeout_s` seconds, unless it is cancelled.

    After the process was suspended, or after a long turn of its event loop, a simple
    timer would fire before the loop has read data that arrived in time. Therefore the
    timeout consists of several timers, one after the other, and the loop reads data
    between them. If the last timer fires late, it is repeated once.
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
        self._timer = loop.call_later(self._part_s, self._part_is_over)

    def cancel(self) -> None:
        self._timer.cancel()

    def _part_is_over(self) -> None:
        self._parts_left -= 1
        is_late = self._loop.time() > self._timer.when() + self._part_s
        if self._parts_left > 0 or (self._parts_left == 0 and is_late):
            self._timer = self._loop.call_later(self._part_s, self._part_is_over)
        else:
            self._callback()


@dataclass(frozen=True)
class Deadline:
    """When a request times out."""

    timeout_s: float  # the requested timeout
    at: float  # by the running loop's clock

    @property
    def error(self) -> DeadlineExceeded:
        """The error of a request that has expired."""
        return DeadlineExceeded(
            f"the request took longer than {self.timeout_s:g} s ({HEADER})"
        )

    def header(self) -> tuple[bytes, bytes]:
        """Returns the header with the remaining time, for a request to another server.

        The time includes a margin, because this process must report the timeout to the
        client. A server that reports it first would look as if it had failed.
        """
        left_s = max(self.at - asyncio.get_running_loop().time(), 0.0)
        return HEADER.encode(), b"%.3f" % min(left_s + _MARGIN_S, MAX_S)


def deadline_of(
    headers: Iterable[tuple[bytes, bytes]], default_s: float | None = None
) -> Deadline | None:
    """Returns the deadline of a request with these headers, which has just arrived.

    Returns:
        None if there is no timeout.

    Raises:
        InvalidRequest: The header is not a number of seconds, or occurs more than once.
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
async def within(deadline: Deadline | None) -> AsyncIterator[None]:
    """Cancels the body of the `with` at the deadline, and raises DeadlineExceeded."""
    timeout = asyncio.timeout_at(None if deadline is None else deadline.at)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if deadline is not None and timeout.expired():
            raise deadline.error from None
        raise

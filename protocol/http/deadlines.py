"""The time that a request may take: said by its client, else by the operator, else unbounded."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.errors import DeadlineExceeded, InvalidRequest
from protocol.short_repr import short_repr

HEADER = "x-request-timeout-s"
MAX_S = 1_000_000  # eleven days, as of options
_MARGIN_S = 1.0
_PARTS = 4  # of a countdown
_is_number = re.compile(rb"[0-9]{1,7}(\.[0-9]{1,9})?").fullmatch


class Countdown:
    """Calls back when `timeout_s` are over, unless cancelled before.

    After the process was stopped, or a long turn of its event loop, a timer is due before anybody
    has looked whether the answer came meanwhile. So the time is over after a number of parts of it,
    between any two of which the loop has looked; a last part that was late is repeated once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        callback: Callable[[], object],
    ) -> None:
        self._loop, self._callback = loop, callback
        self._part_s = timeout_s / _PARTS
        self._left = _PARTS
        self._timer = loop.call_later(self._part_s, self._part_is_over)

    def cancel(self) -> None:
        self._timer.cancel()

    def _part_is_over(self) -> None:
        self._left -= 1
        is_late = self._loop.time() > self._timer.when() + self._part_s
        if self._left > 0 or (self._left == 0 and is_late):
            self._timer = self._loop.call_later(self._part_s, self._part_is_over)
        else:
            self._callback()


@dataclass(frozen=True)
class Deadline:
    timeout_s: float  # that was asked for
    at: float  # its end, by the running loop's clock

    @property
    def error(self) -> DeadlineExceeded:
        """What an expired request ends in."""
        return DeadlineExceeded(
            f"the request took longer than {self.timeout_s:g} s ({HEADER})"
        )

    def header(self) -> tuple[bytes, bytes]:
        """What is left, for another server, and a margin: it is this process that tells the client,
        and a server that was quicker would look as if it had failed."""
        left_s = max(self.at - asyncio.get_running_loop().time(), 0.0)
        return HEADER.encode(), b"%.3f" % min(left_s + _MARGIN_S, MAX_S)


def deadline_of(
    headers: Iterable[tuple[bytes, bytes]], default_s: float | None = None
) -> Deadline | None:
    """When a request of these headers, which has just come, is to be given up; None: never. Raises
    InvalidRequest where the header says no time, or several."""
    given = [value.strip() for name, value in headers if name == HEADER.encode()]
    timeout_s = default_s
    if given:
        timeout_s = float(given[0]) if len(given) == 1 and _is_number(given[0]) else 0.0
        if not 0 < timeout_s <= MAX_S:
            told = short_repr(b", ".join(given).decode("latin-1"), 100)
            must = (
                f"send one number of seconds above 0 and at most {MAX_S}, such as 2.5"
            )
            raise InvalidRequest(f"the header {HEADER} is {told}; {must}", param=HEADER)
    if timeout_s is None:
        return None
    return Deadline(timeout_s, asyncio.get_running_loop().time() + timeout_s)


@asynccontextmanager
async def within(deadline: Deadline | None) -> AsyncIterator[None]:
    """Cancels the body of the `with` at the deadline, and raises DeadlineExceeded then."""
    timeout = asyncio.timeout_at(None if deadline is None else deadline.at)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if deadline is not None and timeout.expired():
            raise deadline.error from None
        raise

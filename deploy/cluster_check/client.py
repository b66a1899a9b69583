"""The HTTP client of the checks: each request has a timeout, each failure a reason."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from protocol.http.tls import client_context

_MAX_BODY_BYTES = 16 << 20
# The Date header has whole seconds, so a clock offset that is measured from it may be
# wrong by half a second, plus half the duration of the request.
DATE_ERROR_S = 0.5


class NoAnswer(Exception):
    """A process cannot be reached or does not answer. The message is the reason."""


@dataclass(frozen=True)
class Reply:
    """A response.

    Attributes:
        headers: the headers, by their names in lower case.
        text: the body, or its first _MAX_BODY_BYTES bytes.
        body: the JSON of the body; None if the body is not JSON.
        clock_offset_s: time of the process's clock minus time of this host's clock;
            None without a valid Date header.
    """

    status: int
    headers: Mapping[str, str]
    text: str
    body: Any
    clock_offset_s: float | None

    @property
    def error(self) -> str:
        """The message of an error response, as one line; else its status."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return " ".join(str(message or f"status {self.status}").split())


class Client:
    """Sends requests to all processes, with the same API key and the same timeout.

    Use the client as a context manager.

    Args:
        key: the API key; None: requests have no key.
        ca_file: certificate authorities of https URLs; None: those of the system.
        timeout_s: timeout of a whole request.
    """

    def __init__(
        self, *, key: str | None, ca_file: str | None, timeout_s: float
    ) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._ca_file = ca_file
        self._timeout_s = timeout_s

    async def __aenter__(self) -> "Client":
        connector = aiohttp.TCPConnector(ssl=client_context(self._ca_file))
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, url: str) -> Reply:
        """Send a GET. Raises NoAnswer."""
        return await self._send("GET", url, None, {})

    async def post(
        self, url: str, body: Mapping[str, Any], *, request_id: str = ""
    ) -> Reply:
        """Send a POST with a JSON body. Raises NoAnswer.

        Args:
            request_id: the X-Request-Id; empty: the receiver chooses one.
        """
        headers = {"x-request-id": request_id} if request_id else {}
        return await self._send("POST", url, body, headers)

    async def _send(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> Reply:
        """Send a request, and read the response.

        Raises:
            NoAnswer: the process cannot be reached, or does not send a complete
                response in time.
        """
        began_at = time.time()
        try:
            async with self._session.request(
                method, url, json=body, headers=headers
            ) as response:
                received_at = time.time()
                raw = await response.content.read(_MAX_BODY_BYTES)
                while chunk := await response.content.read(_MAX_BODY_BYTES - len(raw)):
                    raw += chunk
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            if number is not None and number > 0:
                reason = os.strerror(number)
            else:  # for example, the host name cannot be resolved
                reason = str(error.os_error)
            raise NoAnswer(reason) from None
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(str(error) or repr(error)) from None
        text = raw.decode(errors="replace")
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        return Reply(
            status=response.status,
            headers={name.lower(): value for name, value in response.headers.items()},
            text=text,
            body=parsed,
            clock_offset_s=_offset(
                response.headers.get("date"), (began_at + received_at) / 2
            ),
        )


def _offset(date: str | None, now: float) -> float | None:
    """Return the offset of the clock that wrote a Date header.

    Args:
        date: the value of the header; None: there is no header.
        now: when the header was written, by this host's clock, in Unix seconds.

    Returns:
        The offset in seconds; None without a valid header.
    """
    try:
        stamp = parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return None
    return stamp + DATE_ERROR_S - now

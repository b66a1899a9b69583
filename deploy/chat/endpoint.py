"""The client of an OpenAI-compatible endpoint: models, and streamed chat answers."""

import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from protocol.http.tls import client_context
from protocol.short_repr import short_repr

_CONNECT_TIMEOUT_S = 5.0
_MODELS_TIMEOUT_S = 10.0
_MAX_EVENT_BYTES = 16 << 20  # much longer than any valid event of a chat
_MAX_ERROR_BYTES = 64 << 10
# Control characters, except tab and newline. With ESC, for example, a text could
# change the settings of the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Message = Mapping[str, str]


class ChatError(Exception):
    """A problem that `baton chat` reports to the user. The message is one line."""


@dataclass
class Answer:
    """An answer, complete or still arriving. Times are `time.monotonic` seconds.

    Attributes:
        reasoning: the text that precedes `content`; it is not sent back to the model.
        first_at, last_at: when the first and the last text arrived; None if no text
            has arrived.
        num_pieces: number of events with text. It stands for the number of tokens if
            the endpoint reports no usage.
        kv: prompt tokens by the source of their KV; empty if the endpoint does not
            report it.
    """

    started_at: float = field(default_factory=time.monotonic)
    content: str = ""
    reasoning: str = ""
    first_at: float | None = None
    last_at: float | None = None
    num_pieces: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    kv: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event of the stream. Raises ChatError for an error event."""
        if error := event.get("error"):
            raise ChatError(_error_message(error) or "the endpoint reports an error")
        self.kv = event.get("baton_kv") or self.kv
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = usage.get("completion_tokens", self.completion_tokens)
        for choice in (event.get("choices") or ())[:1]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            self._add_text(
                reasoning=delta.get("reasoning_content") or "",
                content=delta.get("content") or "",
            )

    def _add_text(self, *, reasoning: str, content: str) -> None:
        if not reasoning and not content:
            return
        self.reasoning += _CONTROL.sub("", reasoning)
        self.content += _CONTROL.sub("", content)
        self.num_pieces += 1
        self.last_at = time.monotonic()
        if self.first_at is None:
            self.first_at = self.last_at

    def summary(self) -> str:
        """Return the timings and the sources of the prompt's KV, as one line."""
        if self.first_at is None or self.last_at is None:
            return "no token"
        parts = [f"first token {_duration(self.first_at - self.started_at)}"]
        num_tokens = self.completion_tokens or self.num_pieces
        elapsed_s = self.last_at - self.first_at
        if num_tokens > 1 and elapsed_s > 0:
            parts.append(f"{(num_tokens - 1) / elapsed_s:.1f} tokens/s")
        parts.append(f"{num_tokens} token{'' if num_tokens == 1 else 's'}")
        if self.prompt_tokens is not None:
            sources = [
                f"{count} {name}"
                for name, count in _named_sources(self.kv).items()
                if count
            ]
            details = f" ({', '.join(sources)})" if sources else ""
            parts.append(f"prompt {self.prompt_tokens}{details}")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return " · ".join(parts)


def _named_sources(kv: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of prompt tokens, by the names of sources that users see."""
    return {
        "transferred": kv.get("transferred", 0),
        "computed by the answering server": kv.get("recomputed", 0),
        "cached": kv.get("skipped", 0),
    }


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


class Endpoint:
    """Calls one endpoint. Each call opens a new connection.

    Args:
        url: the endpoint's address without /v1.
        key: the API key, if the endpoint needs one.
        ca_file: certificate authorities of an https endpoint; None: the system's.
        timeout_s: longest time without a byte of an answer.
    """

    def __init__(
        self, url: str, *, key: str | None, ca_file: str | None, timeout_s: float
    ) -> None:
        self.url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._ca_file = ca_file
        self._timeout_s = timeout_s

    async def models(self) -> list[str]:
        """Return the names of the models. Raises ChatError."""
        names: list[str] = []
        async for body in self._exchange("GET", "/v1/models", None, _read_json):
            cards = body.get("data") if isinstance(body, dict) else None
            if not isinstance(cards, list):
                raise ChatError(
                    f"{self.url} is not an OpenAI-compatible endpoint: GET /v1/models "
                    f"returns {short_repr(body, 80)}; give the URL of a proxy or "
                    "server with --url"
                )
            names = [str(card["id"]) for card in cards if "id" in card]
        return names

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed chat. Raises ChatError."""
        request = {
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = "/v1/chat/completions"
        async for event in self._exchange("POST", path, request, _read_events):
            yield event

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[aiohttp.ClientResponse], AsyncIterator[Any]],
    ) -> AsyncIterator[Any]:
        """Send a request, and yield the items that `read` yields for the response.

        Raises:
            ChatError: the endpoint cannot be reached, refuses the request, or does not
                send a complete response in time.
        """
        timeout = aiohttp.ClientTimeout(
            total=_MODELS_TIMEOUT_S if method == "GET" else None,
            sock_connect=_CONNECT_TIMEOUT_S,
            sock_read=self._timeout_s,
        )
        connector = aiohttp.TCPConnector(ssl=client_context(self._ca_file))
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=timeout, connector=connector, headers=self._headers
                ) as session,
                session.request(method, self.url + path, json=body) as response,
            ):
                if response.status != 200:
                    raise ChatError(await self._refusal(response))
                async for item in read(response):
                    yield item
        except aiohttp.ClientConnectorCertificateError as error:
            raise ChatError(
                f"the certificate of {self.url} is not trusted "
                f"({error.certificate_error}); give its authority with --tls-ca"
            ) from None
        except aiohttp.ClientConnectorError as error:
            reason = _reason(error.os_error)
            raise ChatError(
                f"cannot reach {self.url} ({reason}); start a cluster with `baton up`, "
                "or give the address of a running one with --url"
            ) from None
        except TimeoutError:
            raise ChatError(
                f"{self.url} did not respond in time; see GET /ready there. For slow "
                "answers, raise --timeout-s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ChatError(
                f"the connection to {self.url} was lost ({str(error) or 'closed'}); "
                "send the message again"
            ) from None

    async def _refusal(self, response: aiohttp.ClientResponse) -> str:
        """Return the message for a response with a status other than 200."""
        text = (await _read(response, _MAX_ERROR_BYTES)).decode(errors="replace")
        try:
            message = _error_message(json.loads(text).get("error"))
        except (ValueError, AttributeError):
            message = ""
        if response.status in (401, 403):
            key = "is refused" if self._headers else "is missing"
            return (
                f"the API key {key} ({response.status}: {message or 'no details'}); "
                "set BATON_API_KEY to a key of this endpoint"
            )
        if response.status == 404 and not message:
            message = f"{response.url.path} does not exist; give the URL of a proxy"
        return message or f"{self.url} answers with status {response.status}"


def _reason(error: OSError) -> str:
    """Return why a connection failed, without the words that asyncio adds."""
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _error_message(error: object) -> str:
    """Return the message of an error, as one line; empty if it has none.

    Args:
        error: an object with the member `message`, or the message itself.
    """
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str):
        return ""
    return _CONTROL.sub("", " ".join(message.split()))


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response, or its first `max_bytes` bytes."""
    body = bytearray()
    while part := await response.content.read(max_bytes - len(body)):
        body += part
    return bytes(body)


async def _read_json(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield the JSON of a body; None if the body is not JSON."""
    try:
        body = json.loads(await _read(response, _MAX_EVENT_BYTES))
    except ValueError:
        body = None
    yield body


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield the JSON object of each event of a stream, until the event [DONE].

    Raises:
        ChatError: an event is too long or not JSON, or the stream ends without [DONE].
    """
    buffered = bytearray()
    async for chunk in response.content.iter_any():
        buffered += chunk
        if len(buffered) > _MAX_EVENT_BYTES:
            raise ChatError(f"an event has more than {_MAX_EVENT_BYTES} bytes")
        *lines, rest = buffered.split(b"\n")
        buffered = bytearray(rest)
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:
                raise ChatError(
                    f"an event of the answer is not JSON: {short_repr(data, 80)}"
                ) from None
            if isinstance(event, dict):
                yield event
    raise ChatError("the answer ended too early; send the message again")


def choose_model(url: str, requested: str | None, names: Sequence[str]) -> str:
    """Return the model to chat with.

    Args:
        url: the endpoint, for messages.
        requested: the name that the user has given; None: the first model.
        names: the models of the endpoint.

    Raises:
        ChatError: the endpoint does not serve this model, or no model at all.
    """
    if requested is None and names:
        return names[0]
    if requested in names:
        return str(requested)
    if not names:
        raise ChatError(f"{url} serves no model yet; see GET /ready there")
    raise ChatError(
        f"{url} does not serve the model {short_repr(requested, 200)}; choose "
        f"{' or '.join(names[:16])}"
    )

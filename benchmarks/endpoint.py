"""An OpenAI endpoint over HTTP: its model, and the timeline of a streamed request."""

import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

_CONNECT_TIMEOUT_S = 30.0
_KEEPALIVE_S = 1.0  # less than the 5 s after which servers close an idle connection


@dataclass
class Timeline:
    """The events of one request. Times are `time.perf_counter` seconds.

    Attributes:
        due_at: when the request should have been sent. The time to first token and the
            total time count from here.
        token_at: the time of each event that carried tokens.
        kv: the last `baton_kv` object in the stream.
        done: whether the stream ended with [DONE].
    """

    due_at: float
    token_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.due_at

    @property
    def gaps_s(self) -> list[float]:
        """The times between neighbouring token events."""
        return [b - a for a, b in itertools.pairwise(self.token_at)]

    @property
    def mean_itl_s(self) -> float:
        """The mean time per token after the first token; 0 without a second token."""
        num_decoded = self.output_tokens - 1
        if num_decoded <= 0:
            return 0.0
        return (self.token_at[-1] - self.token_at[0]) / num_decoded

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.done and bool(self.token_at)

    def meets_slo(self, ttft_ms: float, itl_ms: float) -> bool:
        """Whether TTFT and mean inter-token latency are within these limits."""
        if not self.succeeded:
            return False
        return self.ttft_s * 1e3 <= ttft_ms and self.mean_itl_s * 1e3 <= itl_ms

    def observe(self, data: bytes, now: float) -> None:
        """Record the data of one event of the stream."""
        if data == b"[DONE]":
            self.done = True
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            error = chunk["error"]
            self.error = str(error.get("code") or error.get("type") or "error event")
            return
        if any(_has_tokens(choice) for choice in chunk.get("choices", ())):
            self.token_at.append(now)
        usage = chunk.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        self.kv = chunk.get("baton_kv") or self.kv


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        choice.get("token_ids")
        or choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
    )


@asynccontextmanager
async def open_session(
    url: str, timeout_s: float, api_key: str | None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session without a limit on the number of connections.

    Args:
        timeout_s: longest time without data from the endpoint.
    """
    timeout = aiohttp.ClientTimeout(
        total=None,
        sock_connect=min(timeout_s, _CONNECT_TIMEOUT_S),
        sock_read=timeout_s,
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        url, connector=connector, timeout=timeout, headers=headers
    ) as session:
        yield session


async def get_model(session: aiohttp.ClientSession) -> dict[str, Any]:
    """Return the first entry of /v1/models.

    Raises:
        RuntimeError: the endpoint lists no model or does not answer.
    """
    try:
        async with session.get("/v1/models") as response:
            return dict((await response.json())["data"][0])
    except (ValueError, LookupError, TypeError, aiohttp.ContentTypeError) as error:
        raise RuntimeError(f"/v1/models of --url lists no model: {error!r}") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = error or "the connection timed out"
        raise RuntimeError(f"--url does not answer: {reason}") from None


async def stream(
    session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], due_at: float
) -> Timeline:
    """Send one request and read its stream to the end.

    A failure is recorded in the timeline's `error` and not raised.
    """
    timeline = Timeline(due_at)
    try:
        async with session.post(path, data=msgspec.json.encode(body)) as response:
            if response.status != 200:
                timeline.error = f"status {response.status}"
            async for line in response.content:
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    timeline.observe(data, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError) as error:
        timeline.error = type(error).__name__
    except (ValueError, msgspec.DecodeError):
        timeline.error = "malformed event"
    timeline.ended_at = time.perf_counter()
    if timeline.error is None and not timeline.done:
        timeline.error = "no [DONE]"
    timeline.output_tokens = timeline.output_tokens or len(timeline.token_at)
    return timeline

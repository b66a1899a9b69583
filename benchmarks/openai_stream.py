"""One streamed request to an OpenAI endpoint, with the time of everything that came."""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.http.sse import SSEParser
from proxy.upstream import HttpUpstream, Response, UpstreamError

KV_FIELDS = ("transferred", "recomputed", "skipped")


@dataclass
class Timeline:
    """What happened to one request. Times are `time.perf_counter` seconds."""

    due_at: float  # when it should have been sent: latencies count from here
    token_at: list[float] = field(default_factory=list)  # one per event that carried tokens
    ended_at: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv: dict[str, int] = field(default_factory=dict)  # baton_kv of the last chunk
    error: str | None = None
    done: bool = False  # [DONE] came

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.due_at

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring token events."""
        return [b - a for a, b in itertools.pairwise(self.token_at)]

    @property
    def mean_itl_s(self) -> float:
        """Mean time per token after the first; 0 when there is none."""
        decoded = self.output_tokens - 1
        return (self.token_at[-1] - self.token_at[0]) / decoded if decoded > 0 else 0.0

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.due_at

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.done and bool(self.token_at)

    def observe(self, event: str, data: str, now: float) -> None:
        """Takes in one event of the stream."""
        if data == "[DONE]":
            self.done = True
            return
        chunk = msgspec.json.decode(data)
        if event == "error" or "error" in chunk:
            error = chunk.get("error", chunk)
            self.error = str(error.get("code") or error.get("type") or "error event")
            return
        if any(_carries_tokens(choice) for choice in chunk.get("choices", ())):
            self.token_at.append(now)
        usage = chunk.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        self.kv = chunk.get("baton_kv") or self.kv


def _carries_tokens(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        choice.get("token_ids")
        or choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
    )


class Endpoint:
    """An OpenAI endpoint, asked over as many connections as requests are in flight.

    Args:
        timeout_s: longest silence of the endpoint.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url
        self._client = HttpUpstream(
            connect_timeout_s=min(timeout_s, 30.0), read_timeout_s=timeout_s
        )
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))

    async def close(self) -> None:
        await self._client.close()

    async def get_model(self) -> dict[str, Any]:
        """The first entry of /v1/models.

        Raises:
            RuntimeError: the endpoint has none, or does not answer.
        """
        try:
            response = await self._client.send(self.url, "GET", "/v1/models", headers=self._headers)
            models = msgspec.json.decode(await response.read())["data"]
            return dict(models[0])
        except UpstreamError as error:
            raise RuntimeError(f"--url {self.url} does not answer: {error}") from None
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise RuntimeError(f"{self.url}/v1/models names no model: {error!r}") from None

    async def stream(self, path: str, body: Mapping[str, Any], due_at: float) -> Timeline:
        """Sends one request and reads its stream to the end; failures are in the result."""
        timeline = Timeline(due_at)
        try:
            response = await self._client.send(
                self.url, "POST", path, headers=self._headers, body=msgspec.json.encode(body)
            )
            if response.status != 200:
                timeline.error = f"status {response.status}"
                await response.read()
            else:
                await _read(response, timeline)
        except UpstreamError as error:
            timeline.error = error.failure.value
        except msgspec.DecodeError:
            timeline.error = "malformed event"
        timeline.ended_at = time.perf_counter()
        if timeline.error is None and not timeline.done:
            timeline.error = "no [DONE]"
        timeline.output_tokens = timeline.output_tokens or len(timeline.token_at)
        return timeline


async def _read(response: Response, timeline: Timeline) -> None:
    parser = SSEParser()
    try:
        while (chunk := await response.next_chunk()) is not None:
            now = time.perf_counter()
            for event, data in parser.feed(chunk):
                timeline.observe(event, data, now)
    finally:
        await response.aclose()

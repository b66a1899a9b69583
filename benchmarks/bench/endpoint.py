"""An OpenAI endpoint over HTTP: its models, and the timeline of a streamed request."""

import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from benchmarks.bench.errors import BenchError
from benchmarks.bench.slo import Slo
from protocol.settings.near_names import suggestion

_CONNECT_TIMEOUT_S = 30.0
_KEEPALIVE_S = 1.0  # less than the 5 s after which servers close an idle connection
_MAX_ERROR_CHARS = 200  # the report truncates an error without a code to this length
_decode_event = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass
class Timeline:
    """The events of one request. Times are `time.perf_counter` seconds.

    Attributes:
        due_at: when the request should have been sent. The time to first token and the
            total time count from this moment.
        sent_at: when this program began to send the request.
        token_at: the time of each event that carried tokens.
        text: parts of the answer, without reasoning; empty without `keeps_answer`.
        token_ids: the answer's token ids, if the endpoint returns them; empty without
            `keeps_answer`.
        kv: the last `baton_kv` object in the stream.
        done: whether the stream ended with [DONE].
    """

    due_at: float
    sent_at: float = 0.0
    keeps_answer: bool = False
    token_at: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
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
        """The times between consecutive token events."""
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

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.due_at

    @property
    def normalised_s(self) -> float:
        """The duration of the whole request, divided by the tokens of its answer."""
        return self.e2e_s / max(self.output_tokens, 1)

    def meets(self, slo: Slo) -> bool:
        """Whether the request succeeded within the limits of `slo`."""
        if not self.succeeded:
            return False
        return slo.is_met(self.ttft_s, self.mean_itl_s, self.e2e_s)

    def observe(self, data: bytes, now: float) -> None:
        """Record the data of one event of the stream.

        Args:
            now: when the event arrived.

        Raises:
            msgspec.DecodeError: the data is not a JSON object.
        """
        if data == b"[DONE]":
            self.done = True
            return
        chunk = _decode_event(data)
        error = chunk.get("error")
        if error is not None:
            self.error = _error_name(error)
            return
        choices = chunk.get("choices") or ()
        if any(_has_tokens(choice) for choice in choices):
            self.token_at.append(now)
        if self.keeps_answer:
            for choice in choices:
                delta = choice.get("delta") or {}
                self.text.append(choice.get("text") or delta.get("content") or "")
                self.token_ids += choice.get("token_ids") or ()
        usage = chunk.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        self.kv = chunk.get("baton_kv") or self.kv


def _error_name(error: object) -> str:
    """Return the name of an error event in the report."""
    if not isinstance(error, dict):
        return str(error)[:_MAX_ERROR_CHARS]
    return str(error.get("code") or error.get("type") or "error event")


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


async def get_models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return the entries of /v1/models; at least one.

    Raises:
        BenchError: the endpoint lists no model or does not answer.
    """
    try:
        async with session.get("/v1/models") as response:
            if response.status in (401, 403):
                raise BenchError(
                    f"{url} refuses the API key (status {response.status}); "
                    "give a valid one with --api-key"
                )
            models = [dict(entry) for entry in (await response.json())["data"]]
            models[0]["id"]
            return models
    except (ValueError, LookupError, TypeError, aiohttp.ContentTypeError) as error:
        raise BenchError(f"/v1/models of {url} lists no model: {error!r}") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = error or "the connection timed out"
        raise BenchError(
            f"{url} does not answer: {reason}. Check the address, and that the server "
            "is ready"
        ) from None


async def find_model(
    session: aiohttp.ClientSession, url: str, name: str | None = None
) -> dict[str, Any]:
    """Return the entry of the model `name` in /v1/models; None: of the first model.

    Raises:
        BenchError: the endpoint does not serve the model.
    """
    models = await get_models(session, url)
    if name is None:
        return models[0]
    names = [str(model.get("id")) for model in models]
    if name not in names:
        raise BenchError(
            f"--model {name}: {url} does not serve it"
            f"{suggestion(name, names)}; it serves {', '.join(names)}"
        )
    return models[names.index(name)]


async def stream(
    session: aiohttp.ClientSession,
    path: str,
    body: Mapping[str, Any],
    timeline: Timeline,
) -> Timeline:
    """Send one request, and record its complete stream in `timeline`.

    A failure is recorded as `timeline.error` and not raised.
    """
    try:
        data = msgspec.json.encode(body)
        timeline.sent_at = time.perf_counter()
        async with session.post(path, data=data) as response:
            if response.status != 200:
                timeline.error = f"status {response.status}"
            async for line in response.content:
                if line.startswith(b"data:"):
                    event = line.removeprefix(b"data:").strip()
                    timeline.observe(event, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError) as error:
        timeline.error = type(error).__name__
    except (ValueError, msgspec.DecodeError):  # ValueError: a line is too long
        timeline.error = "malformed event"
    timeline.ended_at = time.perf_counter()
    if timeline.error is None and not timeline.done:
        timeline.error = "no [DONE]"
    timeline.output_tokens = timeline.output_tokens or len(timeline.token_at)
    return timeline

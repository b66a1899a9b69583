"""Checks with one request per model whether a proxy disaggregates requests."""

import re
import secrets
from dataclasses import dataclass

from deploy.cluster_check.client import Client, NoAnswer
from deploy.cluster_check.pulls import completion_body, kv_of

MAX_MODELS = 8  # limit on the models of a proxy that are tested
_REQUEST_SERIES = re.compile(
    r"^baton_proxy_requests_total\{(.*)\} (\S+)$", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Route:
    """The result of one request through a proxy.

    Attributes:
        problem: why the request failed; empty if it was answered.
        num_transferred: number of prompt tokens with transferred KV.
        num_prompt_tokens: number of all prompt tokens.
        reason: why the decode server computed the prompt itself; empty if it did not,
            or if the metrics of the proxy do not show the reason.
    """

    proxy: str
    model: str
    problem: str = ""
    num_transferred: int = 0
    num_prompt_tokens: int = 0
    reason: str = ""


async def follow(client: Client, proxy: str) -> list[Route]:
    """Send a request for each model of the proxy, up to MAX_MODELS."""
    try:
        listed = await client.get(f"{proxy}/v1/models")
        models = [str(card["id"]) for card in listed.body["data"]]
    except NoAnswer as error:
        return [Route(proxy, "", problem=str(error))]
    except (KeyError, TypeError):
        return [Route(proxy, "", problem=f"GET /v1/models: {listed.error}")]
    return [await _follow_one(client, proxy, model) for model in models[:MAX_MODELS]]


async def _follow_one(client: Client, proxy: str, model: str) -> Route:
    request_id = f"doctor-{secrets.token_hex(8)}"
    try:
        before = await _decode_only_reasons(client, proxy)
        reply = await client.post(
            f"{proxy}/v1/completions",
            completion_body(model, salt=request_id, max_model_len=None),
            request_id=request_id,
        )
        after = await _decode_only_reasons(client, proxy)
    except NoAnswer as error:
        return Route(proxy, model, problem=str(error))
    if reply.status != 200:
        return Route(proxy, model, problem=reply.error)
    kv = kv_of(reply)
    reasons = [name for name, count in after.items() if count > before.get(name, 0)]
    return Route(
        proxy,
        model,
        num_transferred=kv.get("transferred", 0),
        num_prompt_tokens=sum(kv.values()),
        reason=", ".join(reasons),
    )


async def _decode_only_reasons(client: Client, proxy: str) -> dict[str, float]:
    """Return how many requests decode servers served alone, by reason."""
    reply = await client.get(f"{proxy}/metrics")
    counts = {}
    for labels, value in _REQUEST_SERIES.findall(reply.text):
        names = dict(_LABEL.findall(labels))
        if names.get("path") == "decode_only":
            counts[names.get("reason", "")] = float(value)
    return counts

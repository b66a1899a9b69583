"""Timed pulls of KV from a source server to a target server, by real requests.

This module takes the place of the proxy:
1. A prefill leg at the source retains the KV of a fresh prompt.
2. A decode leg at the target gets the reference to this KV, and pulls the KV.
3. The target computes the same prompt without the reference. Another cache salt keeps
   the target from using the pulled KV. Both answers should have the same tokens.
"""

import itertools
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.cluster_check.client import Client, NoAnswer, Reply
from deploy.cluster_check.facts import Server
from protocol.kv_params import RELEASE_PATH, REMOTE_DECODE
from protocol.pairing import may_pair

ANSWER_TOKENS = 8
_PROMPT_WORDS = 600
_MIN_PROMPT_WORDS = 16
_DEFAULT_MODEL_LEN = 1024
_WORDS = (
    "river stone light water paper garden window mountain letter music winter summer "
    "bridge market silver forest engine signal number answer"
).split()
_SERIES = re.compile(r"^(baton_kv_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Pull:
    """One pull from `source` to `target`, or the reason why there was no pull.

    Attributes:
        problem: why the test could not be completed; empty if it was completed.
        kv: prompt tokens by the source of their KV, as the decode leg reports them;
            None if `problem` is not empty.
        seconds: time from the start of the pull until the fence ended or the pull
            failed; None if the target does not report it.
        num_bytes: size of the KV; None unless the metrics show exactly one pull.
        path: direct, staged, mapped or mixed; empty if the metrics do not show it.
        transport: mapped, or the name by which UCX reports the transport; empty if the
            metrics do not show it.
        failure_codes: error codes that the target counted during the test.
        has_same_tokens: whether the answer has the same tokens as the answer that the
            target computes without a pull; None if the answers were not compared.
        total_s: time of the prefill leg and the decode leg.
    """

    source: str
    target: str
    problem: str = ""
    kv: Mapping[str, int] | None = None
    seconds: float | None = None
    num_bytes: float | None = None
    path: str = ""
    transport: str = ""
    failure_codes: tuple[str, ...] = ()
    has_same_tokens: bool | None = None
    total_s: float = 0.0

    @property
    def has_moved(self) -> bool:
        """Whether any KV was transferred."""
        return bool(self.kv and self.kv.get("transferred"))


def choose_pairs(
    servers: Sequence[Server], max_pairs: int
) -> tuple[list[tuple[Server, Server]], int]:
    """Return pairs (source, target) to test, and the number of pairs left out.

    Pairs with a prefill server as source come first, then pairs with another server as
    source, whose cache the target reads. Within each of these two groups, the next pair
    is one with servers that occur in the fewest earlier pairs.
    """
    usable = [server for server in servers if not server.problem]
    left = [
        (source, target)
        for source, target in itertools.product(usable, usable)
        if source is not target
        and source.takes_prefill_legs
        and target.role != "prefill"
        and _may_pair(source, target)
    ]
    counts: Counter[str] = Counter()
    pairs: list[tuple[Server, Server]] = []
    while left and len(pairs) < max_pairs:
        source, target = min(
            left,
            key=lambda pair: (
                pair[0].role != "prefill",
                counts[pair[0].name] + counts[pair[1].name],
            ),
        )
        left.remove((source, target))
        pairs.append((source, target))
        counts.update((source.name, target.name))
    return pairs, len(left)


def _may_pair(source: Server, target: Server) -> bool:
    digests = (server.report.get("kv_digest", "") for server in (source, target))
    return may_pair(*digests)


async def pull(client: Client, source: Server, target: Server) -> Pull:
    """Pull the KV of two prompts; return the second result, or the first failure.

    The first pull takes longer, because it also connects the servers.
    """
    result = Pull(source.name, target.name)
    for _ in range(2):
        try:
            result = await _pull_once(client, source, target)
        except NoAnswer as error:
            return Pull(source.name, target.name, problem=str(error))
        if result.problem or not result.has_moved:
            return result
    return result


async def _pull_once(client: Client, source: Server, target: Server) -> Pull:
    """Pull the KV of a prompt once. Raises NoAnswer."""
    result = Pull(source=source.name, target=target.name)
    request_id = f"doctor-{secrets.token_hex(8)}"
    body = completion_body(
        target.report.get("model"),
        salt=request_id,
        max_model_len=_context_of(source, target),
    )
    began_s = time.monotonic()
    prefill = await client.post(
        f"{source.url}/v1/completions",
        {**body, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE},
        request_id=request_id,
    )
    reference = (prefill.body or {}).get("kv_transfer_params")
    if prefill.status != 200 or reference is None:
        return replace(result, problem=f"the prefill leg fails: {prefill.error}")
    before = await _kv_series(client, target)
    try:
        decode = await client.post(
            f"{target.url}/v1/completions",
            {**body, "kv_transfer_params": reference},
            request_id=request_id,
        )
    except NoAnswer:
        release = {"kv_transfer_params": reference}
        await client.post(f"{source.url}{RELEASE_PATH}", release)
        raise
    total_s = time.monotonic() - began_s
    if decode.status != 200:
        return replace(result, problem=f"the decode leg fails: {decode.error}")
    recomputed = await client.post(
        f"{target.url}/v1/completions",
        {**body, "cache_salt": f"{request_id}-alone"},
        request_id=f"{request_id}-alone",
    )
    after = await _kv_series(client, target)
    changes = {
        key: value - before.get(key, 0.0)
        for key, value in after.items()
        if value > before.get(key, 0.0)
    }
    kv = kv_of(decode)
    return replace(
        result,
        kv=kv,
        seconds=await _pull_seconds(client, target, request_id),
        num_bytes=_num_bytes(changes),
        path=", ".join(_labels(changes, "baton_kv_transfers", "path")),
        transport=", ".join(_labels(changes, "baton_kv_transports", "transport")),
        failure_codes=tuple(_failures(changes)),
        has_same_tokens=(
            _tokens(decode) == _tokens(recomputed) if recomputed.status == 200 else None
        ),
        total_s=total_s,
    )


def _context_of(*servers: Server) -> int | None:
    """Return the shortest context of the servers in tokens; None if it is unknown."""
    lengths = (server.report.get("max_model_len") for server in servers)
    return min((length for length in lengths if length), default=None)


def completion_body(
    model: object, *, salt: str, max_model_len: int | None
) -> dict[str, Any]:
    """Return the body of a greedy completion of a prompt that no server has cached.

    Args:
        salt: the cache salt, which also selects the words of the prompt.
        max_model_len: the server's context in tokens; None if it is unknown.
    """
    generator = random.Random(salt)
    max_words = (max_model_len or _DEFAULT_MODEL_LEN) // 4
    num_words = max(_MIN_PROMPT_WORDS, min(_PROMPT_WORDS, max_words))
    return {
        "model": model,
        "prompt": " ".join(generator.choices(_WORDS, k=num_words)),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def kv_of(reply: Reply) -> dict[str, int]:
    """Return prompt tokens by the source of their KV, as an answer reports them."""
    header = reply.headers.get("x-baton-kv", "")
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", header)}


def _tokens(reply: Reply) -> list[int]:
    return list(reply.body["choices"][0].get("token_ids", ()))


async def _kv_series(
    client: Client, server: Server
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of the metrics about KV, by name and labels.

    The result is empty if the server does not let this client read its metrics.
    """
    reply = await client.get(f"{server.url}/metrics")
    if reply.status != 200:
        return {}
    return {
        (name, tuple(_LABEL.findall(labels))): float(value)
        for name, labels, value in _SERIES.findall(reply.text)
    }


_Changes = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def _labels(changes: _Changes, name: str, label: str) -> Iterator[str]:
    """Yield the values of a label in all changed series of a metric, except "none"."""
    for (metric, labels), _ in sorted(changes.items()):
        value = dict(labels).get(label, "")
        if metric == name and value not in ("", "none"):
            yield value


def _failures(changes: _Changes) -> Iterator[str]:
    """Yield the error codes that the server has counted."""
    yield from _labels(changes, "baton_kv_transfer_failures", "code")
    if any(metric == "baton_kv_params_rejected" for metric, _ in changes):
        yield "kv_params_rejected"


def _num_bytes(changes: _Changes) -> float | None:
    """Return the bytes of the pull; None unless there was exactly one pull."""
    pulls = [
        change
        for (metric, _), change in changes.items()
        if metric == "baton_kv_transfers"
    ]
    if sum(pulls) != 1:
        return None
    sizes = [
        change
        for (metric, _), change in changes.items()
        if metric == "baton_kv_transfer_bytes"
    ]
    return sum(sizes) or None


async def _pull_seconds(
    client: Client, server: Server, request_id: str
) -> float | None:
    """Return how long the request's pull took, according to the server.

    The result is None if the server's statistics do not have the request's pull.
    """
    reply = await client.get(f"{server.url}/stats?since=0")
    for request in (reply.body or {}).get("served", ()):
        times = request.get("times", {})
        if request.get("id") == request_id and "pulled" in times:
            return float(times["pulled"] - times.get("admitted", 0.0))
    return None

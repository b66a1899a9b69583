"""Prefill and decode servers of any geometry, paired request by request, held against one server.

A cell is a pair of geometries. Its prompts are its own, so what a cache holds is what the cell put
there: nothing, a prefix on P, a prefix on D, or both.
"""

import contextlib
import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import pytest

from protocol.process import lifecycle
from tests.make_models import ensure_model, trained_models
from tests.rigs import client
from tests.rigs.client import parse_kv, prefill
from tests.rigs.cluster import Server, assert_idle, start_decode, start_prefill

NUM_TOKENS = 12  # generated for every prompt
# Sums of float32 in another order differ by some 1e-5; a KV element out of place by far more.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Geometry:
    """What P and D may differ in."""

    tp: int = 1
    block_size: int = 64
    layout: str = "BHLCND"
    options: tuple[str, ...] = ()  # further ones of the command line
    dcp: int = 1  # of a decode server

    @property
    def argv(self) -> tuple[str, ...]:
        size = ("--tp", str(self.tp), "--block-size", str(self.block_size))
        dcp = ("--dcp", str(self.dcp)) if self.dcp > 1 else ()
        lay = ("--kv-layout", self.layout, "--kv-cache-tokens", "6144")
        return (*size, *dcp, *lay, *self.options)

    @property
    def tokens_per_block(self) -> int:
        """What a prefix cache keeps or forgets at once."""
        return self.block_size * self.dcp

    def __str__(self) -> str:
        dcp = [f"dcp{self.dcp}"] if self.dcp > 1 else []
        return "-".join(
            [f"tp{self.tp}", *dcp, str(self.block_size), self.layout, *self.options]
        )


def model_dir(name: str) -> Path:
    """A shared trained model where there is one, else our own like it, trained on first use."""
    shared, own = {
        "gqa4": ("llama-gqa-3.7m", "gqa"),
        "gqa2": ("qwen3-gqa-3.7m", None),
        "gqa6": (None, "gqa6"),
        "mla": ("mla-deepseek-1.7m", "mla"),
        "moe": (None, "moe"),
    }[name]
    found = trained_models().get(shared) if shared else None
    if found is None and own is None:
        pytest.skip(f"needs {shared} in BATON_TEST_MODELS")
    return found or ensure_model(own)


class Key(NamedTuple):
    """Which server."""

    role: Literal["prefill", "decode"]
    model: Path
    geometry: Geometry

    def start(self) -> Server:
        if self.role == "prefill":
            return start_prefill(self.model, *self.geometry.argv)
        # Policy `fail`: a transfer that cannot be made is an error, not a detour.
        argv = (*self.geometry.argv, "--kv-load-failure-policy", "fail")
        return start_decode(self.model, *argv)


@dataclass
class Farm:
    """Servers of any geometry, each started at its first use.

    The least recently used ones end when more than `max_ranks` engine processes would run. Those
    `lent` are somebody else's to end.
    """

    max_ranks: int
    lent: Mapping[Key, Server] = field(default_factory=dict)
    _own: OrderedDict[Key, Server] = field(default_factory=OrderedDict)

    def pair(self, model: Path, p: Geometry, d: Geometry) -> tuple[Server, Server]:
        prefiller, decoder = self.get(Key("prefill", model, p), Key("decode", model, d))
        return prefiller, decoder

    def get(self, *keys: Key) -> list[Server]:
        missing = [key for key in keys if key not in self.lent and key not in self._own]
        self._make_room(missing, keep=keys)
        with ThreadPoolExecutor(len(keys)) as pool:
            starts = {key: pool.submit(key.start) for key in missing}
        self._own.update(
            {key: s.result() for key, s in starts.items() if not s.exception()}
        )
        for start in starts.values():
            start.result()
        for key in keys:
            if key in self._own:
                self._own.move_to_end(key)
        return [self.lent.get(key) or self._own[key] for key in keys]

    def _make_room(self, missing: Sequence[Key], keep: Sequence[Key]) -> None:
        wanted = sum(key.geometry.tp for key in missing)
        for key in [key for key in self._own if key not in keep]:
            if sum(own.geometry.tp for own in self._own) + wanted > self.max_ranks:
                self._own.pop(key).stop()

    def close(self) -> None:
        lifecycle.terminate([server.child for server in self._own.values()], 20)
        self._own.clear()


@contextlib.contextmanager
def farm(max_ranks: int, lent: Mapping[Key, Server] | None = None) -> Iterator[Farm]:
    made = Farm(max_ranks, lent or {})
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Case:
    """One prompt, and how much of it each server has seen before."""

    prompt: list[int]
    on_prefill: int = 0  # tokens
    on_decode: int = 0


def make_cases(seed: int) -> list[Case]:
    """Short, long, exactly full blocks, and prefix hits on either side and on both."""
    rng = random.Random(seed)

    def draw(num_tokens: int, **seen: int) -> Case:
        return Case([rng.randrange(3, 256) for _ in range(num_tokens)], **seen)

    return [
        draw(rng.randint(1, 15)),
        draw(128),
        draw(rng.randint(450, 600)),
        draw(330, on_decode=150),
        draw(330, on_prefill=200),
        draw(rng.randint(380, 420), on_prefill=rng.randint(220, 300), on_decode=90),
    ]


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]
    logprobs: list[float]
    kv: dict[str, int]


def post(
    url: str, prompt: Sequence[int], num_tokens: int, params: Any = None
) -> httpx.Response:
    asked = {"logprobs": 1, "kv_transfer_params": params}
    return client.post(url, **client.greedy(prompt, num_tokens, **asked))


def ask(url: str, prompt: Sequence[int], num_tokens: int, params: Any = None) -> Reply:
    response = post(url, prompt, num_tokens, params)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    kv = parse_kv(response.headers["x-baton-kv"])
    return Reply(choice["token_ids"], choice["logprobs"]["token_logprobs"], kv)


def assert_alike(got: Reply, expected: Reply) -> None:
    """The same tokens, and with the same certainty: another KV would show in that first."""
    assert got.token_ids == expected.token_ids
    assert got.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


def check_cell(
    prefiller: Server, decoder: Server, p: Geometry, d: Geometry, oracle: str, seed: str
) -> None:
    """Runs a cell's prompts at once; every answer is the oracle's, and nothing is left behind.

    Args:
        oracle: URL of a server with tensor parallelism 1 that never pulls.
        seed: unlike that of any other cell of these servers.
    """
    cases = make_cases(zlib.crc32(seed.encode()))
    before = _counts(prefiller, decoder)
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(lambda case: _warm(prefiller.url, decoder.url, case), cases))
        replies = list(
            pool.map(lambda c: _pair(prefiller.url, decoder.url, c, p), cases)
        )
        expected = list(
            pool.map(lambda case: ask(oracle, case.prompt, NUM_TOKENS), cases)
        )
    for case, reply, right in zip(cases, replies, expected, strict=True):
        assert_alike(reply, right)
        hit = case.on_decode // d.tokens_per_block * d.tokens_per_block
        assert reply.kv == {
            "transferred": len(case.prompt) - hit,
            "recomputed": 0,
            "skipped": hit,
        }
    assert_idle(prefiller, decoder)
    # However many ranks read from however many: one lease, completed once.
    risen = _counts(prefiller, decoder) - before
    assert risen == dict.fromkeys(("granted", "completed", "done"), len(cases))


def _warm(prefill_url: str, decode_url: str, case: Case) -> None:
    for url, seen in ((prefill_url, case.on_prefill), (decode_url, case.on_decode)):
        if seen:
            ask(url, case.prompt[:seen], 1)


def _pair(prefill_url: str, decode_url: str, case: Case, p: Geometry) -> Reply:
    params = prefill(prefill_url, case.prompt, logprobs=1)
    assert params["tp_size"] == p.tp
    assert (
        params["remote_cached_tokens"] == case.on_prefill // p.block_size * p.block_size
    )
    return ask(decode_url, case.prompt, NUM_TOKENS, params)


def _counts(prefiller: Server, decoder: Server) -> "Counter[str]":
    """Leases by event, and pulls by outcome over all paths. Of a difference only rises are kept."""
    metrics = prefiller.metrics()
    counts = Counter({"gone": int(metrics["baton_lease_gone_total"])})
    for name, value in (*metrics.items(), *decoder.metrics().items()):
        if name.startswith(("baton_leases_total", "baton_kv_transfers_total")):
            label = "event" if "leases" in name else "outcome"
            counts[name.split(f'{label}="')[1].split('"')[0]] += int(value)
    return counts

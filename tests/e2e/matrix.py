"""Compares a prefill and a decode server, each of any geometry, with a single server.

A cell of the matrix is a pair of geometries. No two cells use the same prompts. So of a
cell's prompts, the prefix caches hold only what the cell itself put there: nothing, a
prefix on P, a prefix on D, or both.
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
# Logprobs may differ by about 1e-5, because float32 sums depend on their order. A
# misplaced KV element makes a far larger difference.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Geometry:
    """The options of a server in which P and D may differ.

    Attributes:
        options: further command line options.
        dcp: decode context parallelism. Only a decode server may have more than 1.
    """

    tp: int = 1
    block_size: int = 64
    layout: str = "BHLCND"
    options: tuple[str, ...] = ()
    dcp: int = 1

    @property
    def argv(self) -> tuple[str, ...]:
        argv = ["--tp", str(self.tp), "--block-size", str(self.block_size)]
        if self.dcp > 1:
            argv += ["--dcp", str(self.dcp)]
        argv += ["--kv-layout", self.layout, "--kv-cache-tokens", "6144"]
        return (*argv, *self.options)

    @property
    def tokens_per_block(self) -> int:
        """Number of tokens that a prefix cache keeps or evicts at once."""
        return self.block_size * self.dcp

    def __str__(self) -> str:
        dcp = [f"dcp{self.dcp}"] if self.dcp > 1 else []
        return "-".join(
            [f"tp{self.tp}", *dcp, str(self.block_size), self.layout, *self.options]
        )


def model_dir(name: str) -> Path:
    """Return the directory of a trained model.

    This is a model in the folder of shared models if there is one. Otherwise it is a
    similar test model, which is trained on first use. Without either, the test is
    skipped.
    """
    shared, kind = {
        "gqa4": ("llama-gqa-3.7m", "gqa"),
        "gqa2": ("qwen3-gqa-3.7m", None),
        "gqa6": (None, "gqa6"),
        "mla": ("mla-deepseek-1.7m", "mla"),
        "moe": (None, "moe"),
    }[name]
    shared_model = trained_models().get(shared) if shared else None
    if shared_model is not None:
        return shared_model
    if kind is None:
        pytest.skip(f"needs {shared} in BATON_TEST_MODELS")
    return ensure_model(kind)


class Key(NamedTuple):
    """Identifies a server by its role, model and geometry."""

    role: Literal["prefill", "decode"]
    model: Path
    geometry: Geometry

    def start(self) -> Server:
        if self.role == "prefill":
            return start_prefill(self.model, *self.geometry.argv)
        # With the policy `fail`, a failed transfer is an error and is not recomputed.
        policy = ["--kv-load-failure-policy", "fail"]
        return start_decode(self.model, *self.geometry.argv, *policy)


@dataclass
class Farm:
    """Servers of any geometry. Each is started at its first use.

    The farm runs at most `max_ranks` engine processes. To start further servers, it
    stops the least recently used ones. The `lent` servers belong to the caller. The
    farm neither counts nor stops them.
    """

    max_ranks: int
    lent: Mapping[Key, Server] = field(default_factory=dict)
    _started: OrderedDict[Key, Server] = field(default_factory=OrderedDict)

    def pair(self, model: Path, p: Geometry, d: Geometry) -> tuple[Server, Server]:
        prefiller, decoder = self.get(Key("prefill", model, p), Key("decode", model, d))
        return prefiller, decoder

    def get(self, *keys: Key) -> list[Server]:
        missing = [
            key for key in keys if key not in self.lent and key not in self._started
        ]
        self._stop_unused(missing, keep=keys)
        with ThreadPoolExecutor(len(keys)) as pool:
            starts = {key: pool.submit(key.start) for key in missing}
        for key, start in starts.items():
            if not start.exception():
                self._started[key] = start.result()
        for start in starts.values():
            start.result()  # raises if the start failed
        for key in keys:
            if key in self._started:
                self._started.move_to_end(key)
        return [self.lent.get(key) or self._started[key] for key in keys]

    def _stop_unused(self, missing: Sequence[Key], keep: Sequence[Key]) -> None:
        """Stop servers until the `missing` ones fit. Servers in `keep` stay."""
        missing_ranks = sum(key.geometry.tp for key in missing)
        for key in [key for key in self._started if key not in keep]:
            running_ranks = sum(started.geometry.tp for started in self._started)
            if running_ranks + missing_ranks > self.max_ranks:
                self._started.pop(key).stop()

    def close(self) -> None:
        lifecycle.terminate([server.child for server in self._started.values()], 20)
        self._started.clear()


@contextlib.contextmanager
def farm(max_ranks: int, lent: Mapping[Key, Server] | None = None) -> Iterator[Farm]:
    servers = Farm(max_ranks, lent or {})
    try:
        yield servers
    finally:
        servers.close()


@dataclass(frozen=True)
class Case:
    """One prompt, and how many of its first tokens are in the cache of P and of D
    before the test.
    """

    prompt: list[int]
    on_prefill: int = 0
    on_decode: int = 0


def make_cases(seed: int) -> list[Case]:
    """Return the prompts of a cell.

    The prompts are short, long, or exactly full blocks. Some have a prefix cached on P,
    on D, or on both.
    """
    rng = random.Random(seed)

    def draw(num_tokens: int, **cached: int) -> Case:
        return Case([rng.randrange(3, 256) for _ in range(num_tokens)], **cached)

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
    body = client.greedy(prompt, num_tokens, logprobs=1, kv_transfer_params=params)
    return client.post(url, **body)


def generate(
    url: str, prompt: Sequence[int], num_tokens: int, params: Any = None
) -> Reply:
    """Return a greedy completion with logprobs. `params` are the kv_transfer_params."""
    response = post(url, prompt, num_tokens, params)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    kv = parse_kv(response.headers["x-baton-kv"])
    return Reply(choice["token_ids"], choice["logprobs"]["token_logprobs"], kv)


def assert_same(reply: Reply, expected: Reply) -> None:
    """Assert that tokens and logprobs agree.

    Logprobs are more sensitive: wrong KV may change them without changing a token.
    """
    assert reply.token_ids == expected.token_ids
    assert reply.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


def check_cell(
    prefiller: Server,
    decoder: Server,
    p: Geometry,
    d: Geometry,
    oracle_url: str,
    seed: str,
) -> None:
    """Run the prompts of a cell concurrently.

    Every answer must equal the oracle's, and no block or lease may be left.

    Args:
        oracle_url: URL of a server with tensor parallelism 1, which never pulls.
        seed: determines the prompts. It must be unique to the cell.
    """
    cases = make_cases(zlib.crc32(seed.encode()))
    before = _lease_and_pull_counts(prefiller, decoder)

    def expect(case: Case) -> Reply:
        return generate(oracle_url, case.prompt, NUM_TOKENS)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(
            pool.map(lambda case: _fill_caches(prefiller.url, decoder.url, case), cases)
        )
        replies = list(
            pool.map(lambda case: _run_pair(prefiller.url, decoder.url, case, p), cases)
        )
        expected_replies = list(pool.map(expect, cases))
    for case, reply, expected in zip(cases, replies, expected_replies, strict=True):
        assert_same(reply, expected)
        hit = case.on_decode // d.tokens_per_block * d.tokens_per_block
        assert reply.kv == {
            "transferred": len(case.prompt) - hit,
            "recomputed": 0,
            "skipped": hit,
        }
    assert_idle(prefiller, decoder)
    # Each prompt has one lease. It is completed once, regardless of the number of
    # ranks.
    increases = _lease_and_pull_counts(prefiller, decoder) - before
    expected_counts = dict.fromkeys(("granted", "completed", "done"), len(cases))
    assert increases == expected_counts


def _fill_caches(prefill_url: str, decode_url: str, case: Case) -> None:
    """Put the prefixes of the case into the caches of P and D."""
    if case.on_prefill:
        generate(prefill_url, case.prompt[: case.on_prefill], 1)
    if case.on_decode:
        generate(decode_url, case.prompt[: case.on_decode], 1)


def _run_pair(prefill_url: str, decode_url: str, case: Case, p: Geometry) -> Reply:
    """Run a prompt on P, then on D."""
    params = prefill(prefill_url, case.prompt, logprobs=1)
    assert params["tp_size"] == p.tp
    cached_tokens = case.on_prefill // p.block_size * p.block_size
    assert params["remote_cached_tokens"] == cached_tokens
    return generate(decode_url, case.prompt, NUM_TOKENS, params)


def _lease_and_pull_counts(prefiller: Server, decoder: Server) -> "Counter[str]":
    """Return numbers of leases by event, and of pulls by outcome.

    Subtracting an earlier result leaves only the counters that have increased.
    """
    metrics = prefiller.metrics()
    counts = Counter({"gone": int(metrics["baton_lease_gone_total"])})
    for name, value in (*metrics.items(), *decoder.metrics().items()):
        if name.startswith(("baton_leases_total", "baton_kv_transfers_total")):
            label = "event" if "leases" in name else "outcome"
            counts[name.split(f'{label}="')[1].split('"')[0]] += int(value)
    return counts

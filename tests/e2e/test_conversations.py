"""The turns of a conversation run on different servers, which pull its earlier KV."""

import itertools
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.bench.traces import BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from benchmarks.bench.traces import read_trace
from benchmarks.loads import from_sessions
from tests.make_models import ensure_model
from tests.rigs.client import fresh_prompt, greedy, parse_kv, post
from tests.rigs.cluster import Server, start_decode, start_prefill, start_proxy, started

ANSWER_TOKENS = 60
QUESTION_TOKENS = 40
BLOCK_TOKENS = 32
NUM_TURNS = 3
# As this number is odd, round robin sends consecutive turns of a conversation to
# different servers.
NUM_CONVERSATIONS = 3

pytestmark = pytest.mark.slow

# The model, the options of all servers, and the options of the second decode server.
_KINDS = {
    "gqa": ("gqa", (), ("--tp", "2")),
    "shared tokens": ("mla", (), ("--tp", "2", "--dcp", "2")),
    "fp8": ("gqa", ("--kv-cache-dtype", "float8_e4m3fn"), ("--tp", "2")),
}


@pytest.fixture(scope="module", params=_KINDS)
def fleet(request):
    """Two prefill and two decode servers of different geometry, and a server without a
    proxy.
    """
    kind, options, last_options = _KINDS[request.param]
    model = ensure_model(kind)
    borrows = ["--borrow-prefixes", "always", "--kv-verify", "all", *options]
    p = partial(start_prefill, model, *borrows)
    d = partial(start_decode, model, *borrows)
    small = ["--block-size", str(BLOCK_TOKENS // 2)]
    large = ["--block-size", str(BLOCK_TOKENS)]
    # A decode server with --dcp needs prefill blocks that are no larger than its own
    # blocks on one rank.
    size = small if "--dcp" in last_options else large
    starts = [
        partial(p, *small),
        partial(p, *size, "--kv-layout", "LBCNHD"),
        partial(d, *small),
        partial(d, *small, *last_options),
        partial(start_decode, model, *options, "--no-enable-prefix-caching"),
    ]
    with started(*starts) as servers:
        yield servers


def complete(
    server: Server, prompt: list[int], num_tokens: int = ANSWER_TOKENS
) -> httpx.Response:
    answer = post(server.url, **greedy(prompt, num_tokens))
    assert answer.status_code == 200, answer.text
    return answer


def token_ids(answer: httpx.Response) -> list[int]:
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def recomputed(answer: httpx.Response) -> int:
    """Return the number of prompt tokens that were computed, on both servers
    together.
    """
    legs = [answer.headers.get(name) for name in ("x-baton-kv", "x-baton-kv-prefill")]
    return sum(parse_kv(leg)["recomputed"] for leg in legs if leg)


@pytest.mark.parametrize("mode", ["always", "never", "auto"])
def test_turns_pull_what_another_server_has_computed(fleet, mode):
    """With "auto", a server may also compute a cached prefix again, if that costs less
    than a pull or the prefix was evicted.
    """
    *servers, lone_server = fleet
    routing = "auto" if mode == "auto" else "round_robin"
    argv = ["--routing", routing, "--disaggregate", mode]
    with started(lambda: start_proxy(servers[:2], servers[2:], *argv)) as (proxy,):
        conversations = [fresh_prompt(600) for _ in range(NUM_CONVERSATIONS)]
        num_computed = 0
        ideal = 0  # tokens that a single server would compute if it evicted nothing
        for turn in range(NUM_TURNS):
            for index, prompt in enumerate(conversations):
                answer = complete(proxy, prompt)
                assert token_ids(answer) == token_ids(complete(lone_server, prompt))
                num_computed += recomputed(answer)
                num_cached = len(prompt) - QUESTION_TOKENS - 1 if turn else 0
                ideal += len(prompt) - num_cached // BLOCK_TOKENS * BLOCK_TOKENS
                question = [3 + (turn + i) % 200 for i in range(QUESTION_TOKENS)]
                conversations[index] = [*prompt, *token_ids(answer), *question]
            if mode == "auto":
                _evict(servers[::2])
        if mode == "auto":
            return
        assert num_computed <= 1.1 * ideal
        leg = "decode" if mode == "never" else "prefill"
        hints = proxy.metrics()[f'baton_proxy_hints_total{{leg="{leg}"}}']
        assert hints == (NUM_TURNS - 1) * NUM_CONVERSATIONS


def _evict(servers: list[Server]) -> None:
    """Fill the caches of the servers with other prompts."""
    for server in servers:
        for _ in range(3):
            complete(server, fresh_prompt(2700), 1)


_BLOCK_TOKENS = 8  # represents a block of 512 tokens in the trace
_MAX_REQUESTS = 240


def _trace() -> list[tuple[int, ...]]:
    """Return the prompts of conversations, in order, as tuples of block names.

    If BATON_TEST_TRACE names a trace in Mooncake's format, the conversations are those
    of the trace that have several turns. Otherwise the conversations are synthetic.
    """
    path = os.environ.get("BATON_TEST_TRACE")
    if path:
        requests, _ = from_sessions(read_trace(Path(path), 4000), TRACE_BLOCK_TOKENS)
        rows = [request.hashes for request in requests]
        sizes = Counter(row[1:2] for row in rows)
        rows = [row for row in rows if sizes[row[1:2]] > 1 and len(row) <= 200]
        return rows[:_MAX_REQUESTS]
    rng = random.Random(3)
    names = itertools.count(10)
    open_conversations: list[tuple[int, ...]] = []
    rows = []
    for _ in range(_MAX_REQUESTS):
        before: tuple[int, ...] = (0, 1, 2)
        if open_conversations and rng.random() < 0.7:
            index = rng.randrange(len(open_conversations))
            before = open_conversations.pop(index)
        row = (*before, *(next(names) for _ in range(rng.randint(4, 24))))
        rows.append(row)
        if len(row) < 160:
            open_conversations.append(row)
    return rows


def test_trace_of_conversations_is_computed_little_more_than_once():
    """The number of computed tokens is compared with that of a single server that
    evicts nothing.
    """
    rows = _trace()
    cached_prefixes: set[tuple[int, ...]] = set()
    ideal = len(rows)  # each prompt ends with one new token
    prompts = []
    for row in rows:
        prefixes = [row[:end] for end in range(1, len(row) + 1)]
        num_new = sum(prefix not in cached_prefixes for prefix in prefixes)
        ideal += num_new * _BLOCK_TOKENS
        cached_prefixes.update(prefixes)
        prompt = []
        for name in row:
            prompt += random.Random(name).choices(range(3, 250), k=_BLOCK_TOKENS)
        prompts.append([*prompt, 7])
    model = ensure_model("gqa")
    argv = ["--borrow-prefixes", "always", "--kv-cache-tokens", "65536"]
    argv += ("--block-size", str(_BLOCK_TOKENS))
    p = partial(start_prefill, model, *argv)
    d = partial(start_decode, model, *argv)
    with started(p, p, d, d) as servers, ThreadPoolExecutor(3) as pool:
        with started(lambda: start_proxy(servers[:2], servers[2:])) as (proxy,):
            answers = pool.map(lambda prompt: complete(proxy, prompt, 4), prompts)
            num_computed = sum(map(recomputed, answers))
    num_tokens = sum(map(len, prompts))
    share = num_computed / ideal
    print(f"computed {num_computed} tokens of {num_tokens}, {share:.3f} of ideal")
    assert num_computed <= 1.1 * ideal

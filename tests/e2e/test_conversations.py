"""Conversations whose turns change servers: what was computed once is pulled from there on."""

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.loads import mooncake
from tests.make_models import ensure_model
from tests.rigs.client import fresh_prompt, greedy, parse_kv, post
from tests.rigs.cluster import Server, start_decode, start_prefill, start_proxy, started

ANSWER, NEW, BLOCK = 60, 40, 32  # tokens
TURNS, TALKS = (
    3,
    3,
)  # an odd number of talks: each turn is of other servers than the one before

pytestmark = pytest.mark.slow

# The model, options of all servers, and of the last decode server.
_KINDS = {
    "gqa": ("gqa", (), ("--tp", "2")),
    "shared tokens": ("mla", (), ("--tp", "2", "--dcp", "2")),
    "fp8": ("gqa", ("--kv-cache-dtype", "float8_e4m3fn"), ("--tp", "2")),
}


@pytest.fixture(scope="module", params=_KINDS)
def fleet(request):
    """Two prefill and two decode servers of unlike geometry, and one that is always asked alone."""
    kind, options, last = _KINDS[request.param]
    borrows = ("--borrow-prefixes", "always", "--kv-verify", "all", *options)
    p, d = (
        partial(make, ensure_model(kind), *borrows)
        for make in (start_prefill, start_decode)
    )
    small = ("--block-size", str(BLOCK // 2))
    # Ranks that share tokens hold twice as many of them in a block.
    layout = small if "--dcp" in last else ("--block-size", str(BLOCK))
    layout += ("--kv-layout", "LBCNHD")
    alone = partial(
        start_decode, ensure_model(kind), *options, "--no-enable-prefix-caching"
    )
    unlike = partial(p, *layout), partial(d, *small), partial(d, *small, *last)
    with started(partial(p, *small), *unlike, alone) as found:
        yield found


def ask(server: Server, prompt: list[int], num_tokens: int = ANSWER) -> httpx.Response:
    answer = post(server.url, **greedy(prompt, num_tokens))
    assert answer.status_code == 200, answer.text
    return answer


def said(answer: httpx.Response) -> list[int]:
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def recomputed(answer: httpx.Response) -> int:
    """Prompt tokens that both servers computed for an answer."""
    legs = [answer.headers.get(name) for name in ("x-baton-kv", "x-baton-kv-prefill")]
    return sum(parse_kv(leg)["recomputed"] for leg in legs if leg)


@pytest.mark.parametrize("how", ["always", "never", "auto"])
def test_turns_pull_what_another_server_has_computed(fleet, how):
    """Or, with auto, compute it where that costs less, or where one server of each kind has had to
    evict it."""
    *fleet, alone = fleet
    routing = "auto" if how == "auto" else "round_robin"
    argv = ("--routing", routing, "--disaggregate", how)
    with started(lambda: start_proxy(fleet[:2], fleet[2:], *argv)) as (proxy,):
        talks = [fresh_prompt(600) for _ in range(TALKS)]
        computed = ideal = 0
        for turn in range(TURNS):
            for at, prompt in enumerate(talks):
                answer = ask(proxy, prompt)
                assert said(answer) == said(ask(alone, prompt))
                computed += recomputed(answer)
                known = len(prompt) - NEW - 1 if turn else 0
                ideal += (
                    len(prompt) - known // BLOCK * BLOCK
                )  # as of one server that keeps all
                talks[at] = [
                    *prompt,
                    *said(answer),
                    *(3 + (turn + i) % 200 for i in range(NEW)),
                ]
            for server in fleet[::2] if how == "auto" else ():
                for _ in range(3):
                    ask(server, fresh_prompt(2700), 1)
        if how == "auto":
            return
        assert computed <= 1.1 * ideal
        leg = "decode" if how == "never" else "prefill"
        hints = proxy.metrics()[f'baton_proxy_hints_total{{leg="{leg}"}}']
        assert hints == (TURNS - 1) * TALKS


_SCALED = 8  # tokens of a block of 512
_MOST = 240  # requests


def _trace() -> list[tuple[int, ...]]:
    """Prompts of conversations by the names of their blocks, in order: BATON_TEST_TRACE's (as
    Mooncake's are written) that go on or are gone on with, or some of our own."""
    if path := os.environ.get("BATON_TEST_TRACE"):
        rows = [each.hashes for each in mooncake(Path(path), 1.0, 4000)[0]]
        turns = itertools.groupby(
            sorted(rows, key=lambda row: row[1:2]), lambda row: row[1:2]
        )
        talks = {key for key, group in turns if len(list(group)) > 1}
        return [row for row in rows if row[1:2] in talks and len(row) <= 200][:_MOST]
    rng, names, open_talks = (
        random.Random(3),
        itertools.count(10),
        list[tuple[int, ...]](),
    )
    found = []
    for _ in range(_MOST):
        goes_on = open_talks and rng.random() < 0.7
        before = (
            open_talks.pop(rng.randrange(len(open_talks))) if goes_on else (0, 1, 2)
        )
        row = (*before, *(next(names) for _ in range(rng.randint(4, 24))))
        found.append(row)
        if len(row) < 160:
            open_talks.append(row)
    return found


def test_a_trace_of_conversations_is_computed_hardly_more_than_once():
    """Prompt tokens, against one server whose cache keeps all."""
    model = ensure_model("gqa")
    argv = ("--borrow-prefixes", "always", "--kv-cache-tokens", "65536")
    argv += ("--block-size", str(_SCALED))
    p, d = (partial(make, model, *argv) for make in (start_prefill, start_decode))
    with started(p, p, d, d) as servers, ThreadPoolExecutor(3) as pool:
        with started(lambda: start_proxy(servers[:2], servers[2:])) as (proxy,):
            rows, known, ideal = _trace(), set[tuple[int, ...]](), 0
            prompts = []
            for row in rows:
                heads = [row[:end] for end in range(1, len(row) + 1)]
                ideal += sum(head not in known for head in heads) * _SCALED
                known.update(heads)
                ids = (
                    random.Random(name).choices(range(3, 250), k=_SCALED)
                    for name in row
                )
                prompts.append([*itertools.chain.from_iterable(ids), 7])
            ideal += len(rows)  # the token that is new to each
            computed = sum(
                map(recomputed, pool.map(lambda each: ask(proxy, each, 4), prompts))
            )
    print(
        f"computed {computed} tokens of {sum(map(len, prompts))}, {computed / ideal:.3f} of ideal"
    )
    assert computed <= 1.1 * ideal

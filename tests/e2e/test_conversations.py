"""Conversations whose turns change servers: what was computed once is pulled from there on."""

from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.e2e.reference import Reference
from tests.make_models import ensure_model
from tests.rigs.cluster import Server, start_decode, start_prefill, start_proxy, started

ANSWER, NEW, BLOCK = 60, 40, 32  # tokens
TURNS, TALKS = 3, 3  # an odd number of talks: each turn is of other servers than the one before

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[Server]]:
    """Two prefill and two decode servers of unlike geometry."""
    model, always = ensure_model("gqa"), ("--borrow-prefixes", "always")
    p, d = (partial(make, model, *always) for make in (start_prefill, start_decode))
    layout = ("--block-size", str(BLOCK), "--kv-layout", "LBCNHD")
    with started(p, partial(p, *layout), d, partial(d, "--tp", "2")) as found:
        yield found


def ask(server: Server, prompt: list[int]) -> httpx.Response:
    body = {"model": "test-model", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def recomputed(answer: httpx.Response) -> int:
    """Prompt tokens that both servers computed for an answer."""
    legs = [answer.headers.get(name, "") for name in ("x-baton-kv", "x-baton-kv-prefill")]
    told = [dict(part.split("=") for part in leg.split(", ")) for leg in legs if leg]
    return sum(int(each["recomputed"]) for each in told)


@pytest.mark.parametrize("how", ["always", "never"])
def test_turns_pull_what_another_server_has_computed(fleet: list[Server], how: str) -> None:
    reference = Reference(ensure_model("gqa"))
    argv = ("--routing", "round_robin", "--disaggregate", how)
    with started(lambda: start_proxy(fleet[:2], fleet[2:], *argv)) as (proxy,):
        talks = [[7 * i % 250 + at + 9 * len(how) for i in range(600)] for at in range(TALKS)]
        computed = ideal = 0
        for turn in range(TURNS):
            for at, prompt in enumerate(talks):
                answer = ask(proxy, prompt)
                said = answer.json()["choices"][0]["token_ids"]
                assert said == reference.generate(prompt, ANSWER)
                computed += recomputed(answer)
                known = len(prompt) - NEW - 1 if turn else 0
                ideal += len(prompt) - known // BLOCK * BLOCK  # as of one server that keeps all
                talks[at] = [*prompt, *said, *(3 + (turn + i) % 200 for i in range(NEW))]
        assert computed <= 1.1 * ideal
        leg = "decode" if how == "never" else "prefill"
        hints = proxy.metrics()[f'baton_proxy_hints_total{{leg="{leg}"}}']
        assert hints == (TURNS - 1) * TALKS

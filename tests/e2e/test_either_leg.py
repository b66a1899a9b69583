"""Servers take either leg of a request, whatever they were started as, and lend what they have."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from protocol.kv_params import REMOTE_DECODE, sealed
from protocol.messages import KVHint
from tests.e2e.reference import Reference
from tests.make_models import ensure_model
from tests.rigs.cluster import SECRET, Server, start_decode, start_prefill, started

PROMPT = [(7 * i) % 250 + 1 for i in range(150)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    model = ensure_model("gqa")
    always = ("--borrow-prefixes", "always")
    p = partial(start_prefill, model, "--block-size", "16", "--kv-layout", "LBCNHD", *always)
    d = partial(start_decode, model, "--block-size", "32", "--tp", "2", *always)
    with started(p, d) as found:
        yield found


def ask(server: Server, prompt: list[int], max_tokens: int, params: Any = None) -> httpx.Response:
    body = {"model": "test-model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "kv_transfer_params": params}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def tokens(answer: httpx.Response) -> list[int]:
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_a_server_that_did_both_legs_takes_what_it_has(servers):
    prompt = [9, *PROMPT]
    params = ask(servers[0], prompt, 1, REMOTE_DECODE).json()["kv_transfer_params"]
    answer = ask(servers[0], prompt, 12, params)
    assert answer.headers["x-baton-kv"] == "transferred=0, recomputed=7, skipped=144"
    assert tokens(answer) == tokens(ask(servers[1], prompt, 12))


def hint_to(server: Server) -> dict[str, Any]:
    ready = httpx.get(f"{server.url}/ready", timeout=10).json()
    told = {name.removeprefix("side_channel_"): value for name, value in ready.items()}
    about = {name: told[name] for name in ("host", "port", "engine_id", "incarnation")}
    return sealed(KVHint(num_tokens=999, issued_s=int(time.time()), **about), SECRET.encode())


@pytest.mark.parametrize("reverse", [False, True], ids=["as named", "the other way round"])
def test_turn_two_pulls_from_the_server_that_answered_turn_one_what_only_that_has(servers, reverse):
    prefill, decode = servers[::-1] if reverse else servers
    reference = Reference(ensure_model("gqa"))
    prompt = [int(reverse) + 20, *PROMPT]
    params = ask(prefill, prompt, 1, REMOTE_DECODE).json()["kv_transfer_params"]
    answer = ask(decode, prompt, 60, params)
    assert answer.headers["x-baton-kv"] == "transferred=151, recomputed=0, skipped=0"
    said = tokens(answer)
    assert said == reference.generate(prompt, 60)
    turn_2 = [*prompt, *said, 5, 6, 7, 8]  # 215: D has 210 of them, its last token was not computed

    first = ask(prefill, turn_2, 1, {**REMOTE_DECODE, "hint": hint_to(decode)})
    own, held = (128, 208) if reverse else (144, 192)  # tokens in P's and in D's full blocks
    kv = f"transferred={held - own}, recomputed={215 - held}, skipped={own}"
    assert first.headers["x-baton-kv"] == kv
    second = ask(decode, turn_2, 20, first.json()["kv_transfer_params"])
    assert second.headers["x-baton-kv"] == f"transferred={215 - held}, recomputed=0, skipped={held}"
    assert tokens(second) == reference.generate(turn_2, 20)

"""Servers take either leg of a request, whatever they were started as, and lend what they have."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from protocol.kv_offers import sealed
from protocol.kv_params import REMOTE_DECODE
from protocol.messages import KVHint
from tests.e2e.reference import Reference
from tests.make_models import ensure_model
from tests.rigs.client import complete, greedy, parse_kv, post, prefill
from tests.rigs.cluster import SECRET, Server, start_decode, start_prefill, started

PROMPT = [(7 * i) % 250 + 1 for i in range(150)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    model = ensure_model("gqa")
    always = ("--borrow-prefixes", "always")
    p = partial(
        start_prefill, model, "--block-size", "16", "--kv-layout", "LBCNHD", *always
    )
    d = partial(start_decode, model, "--block-size", "32", "--tp", "2", *always)
    with started(p, d) as found:
        yield found


def test_a_server_that_did_both_legs_takes_what_it_has(servers):
    prompt = [9, *PROMPT]
    params = prefill(servers[0].url, prompt)
    answer = complete(servers[0].url, prompt, 12, kv_transfer_params=params)
    assert answer.kv == {"transferred": 0, "recomputed": 7, "skipped": 144}
    assert answer.token_ids == complete(servers[1].url, prompt, 12).token_ids


def hint_to(server: Server) -> dict[str, Any]:
    ready = httpx.get(f"{server.url}/ready", timeout=10).json()
    told = {name.removeprefix("side_channel_"): value for name, value in ready.items()}
    about = {name: told[name] for name in ("host", "port", "engine_id", "incarnation")}
    return sealed(
        KVHint(num_tokens=999, issued_s=int(time.time()), **about), SECRET.encode()
    )


@pytest.mark.parametrize(
    "reverse", [False, True], ids=["as named", "the other way round"]
)
def test_turn_two_pulls_from_the_server_that_answered_turn_one_what_only_that_has(
    servers, reverse
):
    p, d = servers[::-1] if reverse else servers
    reference = Reference(ensure_model("gqa"))
    prompt = [int(reverse) + 20, *PROMPT]
    answer = complete(d.url, prompt, 60, kv_transfer_params=prefill(p.url, prompt))
    assert answer.kv == {"transferred": 151, "recomputed": 0, "skipped": 0}
    assert answer.token_ids == reference.generate(prompt, 60)
    turn_2 = [
        *prompt,
        *answer.token_ids,
        5,
        6,
        7,
        8,
    ]  # 215: D has 210, the last was not computed

    asked = {"kv_transfer_params": {**REMOTE_DECODE, "hint": hint_to(d)}}
    first = post(p.url, **greedy(turn_2, 1, **asked))
    own, held = (
        (128, 208) if reverse else (144, 192)
    )  # tokens in P's and in D's full blocks
    told = {"transferred": held - own, "recomputed": 215 - held, "skipped": own}
    assert parse_kv(first.headers["x-baton-kv"]) == told
    params = first.json()["kv_transfer_params"]
    second = complete(d.url, turn_2, 20, kv_transfer_params=params)
    assert second.kv == {"transferred": 215 - held, "recomputed": 0, "skipped": held}
    assert second.token_ids == reference.generate(turn_2, 20)

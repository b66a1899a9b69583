"""A server of any role can run the prefill or the decode leg of a request, and lend its
KV.
"""

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
    always = ["--borrow-prefixes", "always"]
    p_layout = ["--block-size", "16", "--kv-layout", "LBCNHD"]
    d_layout = ["--block-size", "32", "--tp", "2"]
    p = partial(start_prefill, model, *p_layout, *always)
    d = partial(start_decode, model, *d_layout, *always)
    with started(p, d) as both:
        yield both


def test_server_with_both_legs_uses_its_cached_kv(servers):
    prompt = [9, *PROMPT]
    params = prefill(servers[0].url, prompt)
    answer = complete(servers[0].url, prompt, 12, kv_transfer_params=params)
    assert answer.kv == {"transferred": 0, "recomputed": 7, "skipped": 144}
    assert answer.token_ids == complete(servers[1].url, prompt, 12).token_ids


def hint_to(server: Server) -> dict[str, Any]:
    """Return a signed hint that `server` may have KV of the beginning of a prompt."""
    ready = httpx.get(f"{server.url}/ready", timeout=10).json()
    hint = KVHint(
        host=ready["side_channel_host"],
        port=ready["side_channel_port"],
        engine_id=ready["engine_id"],
        incarnation=ready["incarnation"],
        num_tokens=999,
        issued_s=int(time.time()),
    )
    return sealed(hint, SECRET.encode())


@pytest.mark.parametrize(
    "reverse", [False, True], ids=["as named", "the other way round"]
)
def test_second_turn_pulls_kv_that_only_the_answering_server_has(servers, reverse):
    p, d = servers[::-1] if reverse else servers
    reference = Reference(ensure_model("gqa"))
    prompt = [int(reverse) + 20, *PROMPT]
    answer = complete(d.url, prompt, 60, kv_transfer_params=prefill(p.url, prompt))
    assert answer.kv == {"transferred": 151, "recomputed": 0, "skipped": 0}
    assert answer.token_ids == reference.generate(prompt, 60)
    # D has KV of the first 210 of these 215 tokens. It has no KV of the last token of
    # its answer, because no step had that token as its input.
    turn_2 = [*prompt, *answer.token_ids, 5, 6, 7, 8]

    params = {**REMOTE_DECODE, "hint": hint_to(d)}
    first = post(p.url, **greedy(turn_2, 1, kv_transfer_params=params))
    # The numbers of tokens in full blocks of P and in full blocks of D.
    p_tokens, d_tokens = (128, 208) if reverse else (144, 192)
    assert parse_kv(first.headers["x-baton-kv"]) == {
        "transferred": d_tokens - p_tokens,
        "recomputed": 215 - d_tokens,
        "skipped": p_tokens,
    }
    params = first.json()["kv_transfer_params"]
    second = complete(d.url, turn_2, 20, kv_transfer_params=params)
    assert second.kv == {
        "transferred": 215 - d_tokens,
        "recomputed": 0,
        "skipped": d_tokens,
    }
    assert second.token_ids == reference.generate(turn_2, 20)

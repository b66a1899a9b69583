"""Servers take either leg of a request, whatever they were started as, and lend what they have."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.kv_params import REMOTE_DECODE
from tests.make_models import ensure_model
from tests.rigs.cluster import Server, start_decode, start_prefill, started

PROMPT = [(7 * i) % 250 + 1 for i in range(150)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """A prefill and a decode server of unlike geometry."""
    model: Path = ensure_model("gqa")
    p = partial(start_prefill, model, "--block-size", "16", "--kv-layout", "LBCNHD")
    d = partial(start_decode, model, "--block-size", "32", "--tp", "2")
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


@pytest.mark.parametrize("reverse", [False, True], ids=["as named", "the other way round"])
def test_either_server_does_either_leg(servers: list[Server], reverse: bool) -> None:
    prefill, decode = servers[::-1] if reverse else servers
    prompt = [int(reverse) + 1, *PROMPT]
    params = ask(prefill, prompt, 1, REMOTE_DECODE).json()["kv_transfer_params"]
    answer = ask(decode, prompt, 12, params)
    assert answer.headers["x-baton-kv"] == "transferred=151, recomputed=0, skipped=0"
    assert tokens(answer) == tokens(ask(prefill, prompt, 12))


def test_a_server_that_did_both_legs_takes_what_it_has(servers: list[Server]) -> None:
    prompt = [9, *PROMPT]
    params = ask(servers[0], prompt, 1, REMOTE_DECODE).json()["kv_transfer_params"]
    answer = ask(servers[0], prompt, 12, params)
    assert answer.headers["x-baton-kv"] == "transferred=0, recomputed=7, skipped=144"
    assert tokens(answer) == tokens(ask(servers[1], prompt, 12))

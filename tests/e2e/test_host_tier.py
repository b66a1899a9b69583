"""Servers of a host keep their KV in a store, from which they and others pull it after
it was evicted or its server was killed. Every answer equals that of a lone server.
"""

from functools import partial
from typing import Any

import pytest

from tests.make_models import ensure_model
from tests.rigs.client import fresh_prompt, greedy, parse_kv, post
from tests.rigs.cluster import (
    Server,
    assert_idle,
    start,
    start_decode,
    started,
    wait_until,
)

pytestmark = pytest.mark.slow

STORE_BYTES = 64 << 20
SMALL = ("--kv-cache-tokens", "2048", "--max-model-len", "1024")


def start_store(*argv: str, **env: str) -> Server:
    return start(
        "engine.store",
        *("--port", "0", "--host-kv-bytes", str(STORE_BYTES), *argv),
        name="kv",
        **env,
    )


def host_kv(store: Server) -> tuple[str, ...]:
    return (*SMALL, "--host-kv", f"127.0.0.1:{store.port}")


def complete(
    server: Server, prompt: list[int], num_tokens: int = 20, **members: Any
) -> tuple[list[int], dict[str, int]]:
    """Return the tokens of an answer, and the sources of its prompt's KV."""
    response = post(server.url, **greedy(prompt, num_tokens, **members))
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["token_ids"]
    return tokens, parse_kv(response.headers["x-baton-kv"])


def has_store(server: Server) -> bool:
    return server.metrics().get("baton_host_kv_up") == 1


def num_demoted(server: Server, outcome: str = "stored") -> float:
    return server.metrics()[f'baton_host_kv_demotions_total{{outcome="{outcome}"}}']


def evict(server: Server) -> None:
    """Fill the prefix cache of a server with other prompts."""
    for _ in range(3):
        complete(server, fresh_prompt(900), 1)


def until_demoted(server: Server) -> None:
    """Wait until the server has no lease of a demotion, and all its KV is stored."""
    wait_until(lambda: num_demoted(server) > 0)
    wait_until(server.all_blocks_free)


def test_evicted_prompt_is_pulled_from_the_store():
    model = ensure_model("gqa")
    with started(start_store) as (store,):
        options = host_kv(store)
        with started(
            partial(start_decode, model, *options), partial(start_decode, model)
        ) as (server, lone_server):
            wait_until(lambda: has_store(server))
            prompt = fresh_prompt(500)
            tokens, kv = complete(server, prompt)
            assert kv["recomputed"] == 500
            until_demoted(server)
            evict(server)
            second = [*prompt, *tokens, 5, 6, 7]
            tokens, kv = complete(server, second)
            assert tokens == complete(lone_server, second)[0]
            assert kv == {"transferred": 512, "recomputed": 11, "skipped": 0}
            assert server.metrics()['baton_kv_pulled_tokens_total{source="host"}'] > 0
            assert_idle(server)

"""Routers that nobody here wrote, between a prefill and a decode server of ours: all KV moves, and
answers are those of the decode server alone."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.process import lifecycle
from tests.ports import reserved_ports
from tests.rigs.client import (
    complete_all,
    fresh_prompt,
    parse_kv,
    post,
    stream,
    streamed_token_ids,
)
from tests.rigs.cluster import Cluster, Server, running, wait_until
from tests.rigs.plain_http import http

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_ROUTER = (
    shutil.which("vllm-router", path=str(Path(sys.executable).parent)) or "vllm-router"
)


@pytest.fixture(scope="module")
def vllm_router(tiny_cluster: Cluster) -> Iterator[str]:
    (p,), (d,) = tiny_cluster.prefill, tiny_cluster.decode
    with reserved_ports(2) as (port, metrics_port):
        argv = [
            _ROUTER,
            "--vllm-pd-disaggregation",
            "--prefill",
            p.url,
            "--decode",
            d.url,
        ]
        argv += ["--port", str(port), "--prometheus-port", str(metrics_port)]
        argv += ["--policy", "round_robin", "--log-level", "warning"]
        router = Server(
            "vllm-router", lifecycle.spawn(argv, name="vllm-router"), port, {}
        )
        with running(router):
            wait_until(lambda: _is_up(router), 60)
            yield router.url


def _is_up(router: Server) -> bool:
    assert not router.child.exited.is_set(), router.child.reason()
    try:
        return http.get(f"{router.url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def _post(
    url: str, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    response = post(url, path, **body)
    assert response.status_code == 200, response.text
    return response.json(), parse_kv(response.headers["x-baton-kv"])


def _choices(answer: dict[str, Any]) -> list[Any]:
    """Without numbers that computing a prompt in other pieces may round in another way."""
    return [
        (choice.get("text"), choice.get("message"), choice["finish_reason"])
        for choice in answer["choices"]
    ]


_DRAWN = {"temperature": 1.2, "seed": 7}


_ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn, choices": {**_DRAWN, "n": 3},
    "ends banned": {"temperature": 0, "min_tokens": 5},
    "logprobs": {**_DRAWN, "logprobs": 5},
    "logprobs of the prompt": {"temperature": 0, "prompt_logprobs": 2},
    "nothing, the prompt is scored": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "penalties": {**_DRAWN, "repetition_penalty": 1.3, "logit_bias": {"65": 2.5}},
    "a grammar": {**_DRAWN, "guided_regex": "[a-z ]{3,9}"},
    "a chat": {**_DRAWN, "logprobs": True, "top_logprobs": 3},
}


@pytest.mark.parametrize("name", _ASKED)
def test_vllm_router_gets_the_answers_of_the_decode_server_alone(
    vllm_router, tiny_cluster, name
):
    """tests/protocol/test_kv_params.py has routers that print numbers in their own ways."""
    body: dict[str, Any] = {"max_tokens": 12, **_ASKED[name]}
    if name == "a chat":
        path = "/v1/chat/completions"
        body["messages"] = [
            {"role": "user", "content": f"Tell me of number {fresh_prompt(3)}."}
        ]
    else:
        path = "/v1/completions"
        body["prompt"] = fresh_prompt(70)
    through, kv = _post(vllm_router, path, body)
    assert (
        kv["transferred"] >= (1 if name == "a chat" else 69) and kv["recomputed"] <= 1
    )
    alone, _ = _post(tiny_cluster.decode[0].url, path, body)
    assert _choices(through) == _choices(alone)
    for counted in ("prompt_tokens", "completion_tokens"):
        assert through["usage"][counted] == alone["usage"][counted]


def test_vllm_router_streams(vllm_router, tiny_cluster):
    prompt = fresh_prompt(70)
    events = stream(vllm_router, prompt, 9, **_DRAWN)
    alone = stream(tiny_cluster.decode[0].url, prompt, 9, **_DRAWN)
    assert streamed_token_ids(events) == streamed_token_ids(alone)
    kv = next(e["baton_kv"] for e in reversed(events[:-1]) if "baton_kv" in e)
    assert kv == {"transferred": 70, "recomputed": 0, "skipped": 0}, (
        "no end is banned on either"
    )


def test_vllm_router_has_every_prompt_transferred(vllm_router, tiny_cluster):
    before = tiny_cluster.decode[0].metrics()
    prompts = [fresh_prompt(20 + 3 * index) for index in range(24)]
    for start in range(0, len(prompts), 8):
        complete_all(vllm_router, prompts[start : start + 8], ignore_eos=False)

    def grown(name: str) -> float:
        after = tiny_cluster.decode[0].metrics()
        return sum(
            after[series] - before.get(series, 0) for series in after if name in series
        )

    wait_until(lambda: grown("baton_kv_first_tokens_redrawn") >= 24)
    assert grown('baton_kv_transfers_total{outcome="done"') == 24
    assert grown("baton_kv_params_rejected") == 0
    assert grown('source="recomputed"') == 24, "the last token of each"

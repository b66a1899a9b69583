"""Routers of other projects in front of a prefill and a decode server of Baton.

All KV must be transferred, and the answers must equal those of the decode server alone.
"""

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
    (p,) = tiny_cluster.prefill
    (d,) = tiny_cluster.decode
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
    """Return the choices without logprobs, which may be rounded differently if a prompt
    is computed in chunks.
    """
    return [
        (choice.get("text"), choice.get("message"), choice["finish_reason"])
        for choice in answer["choices"]
    ]


_SAMPLED = {"temperature": 1.2, "seed": 7}


_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled choices": {**_SAMPLED, "n": 3},
    "minimum length": {"temperature": 0, "min_tokens": 5},
    "logprobs": {**_SAMPLED, "logprobs": 5},
    "logprobs of the prompt": {"temperature": 0, "prompt_logprobs": 2},
    "scored prompt without output": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "penalties": {**_SAMPLED, "repetition_penalty": 1.3, "logit_bias": {"65": 2.5}},
    "a grammar": {**_SAMPLED, "guided_regex": "[a-z ]{3,9}"},
    "a chat": {**_SAMPLED, "logprobs": True, "top_logprobs": 3},
}


@pytest.mark.parametrize("name", _REQUESTS)
def test_vllm_router_gets_the_answers_of_a_single_decode_server(
    vllm_router, tiny_cluster, name
):
    """tests/protocol/test_kv_params.py covers routers that write JSON numbers
    differently.
    """
    body: dict[str, Any] = {"max_tokens": 12, **_REQUESTS[name]}
    if name == "a chat":
        path = "/v1/chat/completions"
        body["messages"] = [
            {"role": "user", "content": f"Tell me of number {fresh_prompt(3)}."}
        ]
    else:
        path = "/v1/completions"
        body["prompt"] = fresh_prompt(70)
    routed, kv = _post(vllm_router, path, body)
    assert kv["transferred"] >= (1 if name == "a chat" else 69)
    assert kv["recomputed"] <= 1
    decode_only, _ = _post(tiny_cluster.decode[0].url, path, body)
    assert _choices(routed) == _choices(decode_only)
    for field in ("prompt_tokens", "completion_tokens"):
        assert routed["usage"][field] == decode_only["usage"][field]


def test_vllm_router_streams_the_answer_of_a_single_decode_server(
    vllm_router, tiny_cluster
):
    prompt = fresh_prompt(70)
    events = stream(vllm_router, prompt, 9, **_SAMPLED)
    decode_only = stream(tiny_cluster.decode[0].url, prompt, 9, **_SAMPLED)
    assert streamed_token_ids(events) == streamed_token_ids(decode_only)
    kv = next(e["baton_kv"] for e in reversed(events[:-1]) if "baton_kv" in e)
    # Both legs have the same sampling parameters, so the decode server uses the first
    # token of the prefill leg and recomputes nothing.
    assert kv == {"transferred": 70, "recomputed": 0, "skipped": 0}


def test_every_prompt_behind_vllm_router_is_transferred(vllm_router, tiny_cluster):
    before = tiny_cluster.decode[0].metrics()
    prompts = [fresh_prompt(20 + 3 * index) for index in range(24)]
    for start in range(0, len(prompts), 8):
        complete_all(vllm_router, prompts[start : start + 8], ignore_eos=False)

    def increase(name: str) -> float:
        after = tiny_cluster.decode[0].metrics()
        series = [key for key in after if name in key]
        return sum(after[key] - before.get(key, 0) for key in series)

    wait_until(lambda: increase("baton_kv_first_tokens_redrawn") >= 24)
    assert increase('baton_kv_transfers_total{outcome="done"') == 24
    assert increase("baton_kv_params_rejected") == 0
    assert increase('source="recomputed"') == 24, (
        "recomputed more than the last token of each prompt"
    )


def test_sidecar_of_llm_d_gets_the_answers_of_a_single_decode_server(tiny_cluster):
    """The test does not run the sidecar, which is a program in Go. It sends the two
    requests into which the sidecar's connector nixlv2 splits a client's request.
    """
    (prefill_server,) = tiny_cluster.prefill
    (decode_server,) = tiny_cluster.decode
    body = {"prompt": fresh_prompt(70), "max_tokens": 12, "min_tokens": 5, **_SAMPLED}
    prefill_leg = {
        **body,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    del prefill_leg["min_tokens"]
    prefilled, _ = _post(prefill_server.url, "/v1/completions", prefill_leg)
    decode_leg = {**body, "kv_transfer_params": prefilled["kv_transfer_params"]}
    decoded, kv = _post(decode_server.url, "/v1/completions", decode_leg)
    assert kv["transferred"] >= 69
    decode_only, _ = _post(decode_server.url, "/v1/completions", body)
    assert _choices(decoded) == _choices(decode_only)

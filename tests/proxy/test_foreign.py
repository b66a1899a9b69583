"""vLLM's servers behind the proxy.

The fakes' answers have the form of recorded answers of vLLM's NixlConnector and OpenAI
server. The proxy must send these servers nothing that vLLM's own proxies do not send.
"""

import pytest

from proxy.poller import _parse_foreign
from tests.proxy.fakes import Behave, Call, Fake, Rig, answers, fails, streams, until

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
KV = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4, 5]],
    "remote_engine_id": "0d6f7f1e-4f5d-4c9c-9d55-5a4c7a4b6a3e",
    "remote_request_id": "chatcmpl-6c2b",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
}
CARD = {
    "object": "model",
    "created": 1,
    "owned_by": "vllm",
    "parent": None,
    "permission": [],
}
CHUNKS = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}]}\n\n',
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,'
    b'"delta":{"content":" Paris"},"logprobs":null,"finish_reason":"stop",'
    b'"stop_reason":null}]}\n\n',
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[],"usage":'
    b'{"prompt_tokens":36,"total_tokens":38,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)
USER = {
    "model": "org/m",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.5,
}


async def prefills_as_vllm(call: Call) -> None:
    body = call.body
    if body.get("min_tokens", 0) > 1:
        error = {
            "message": "min_tokens must be less than or equal to max_tokens=1, got 5.",
            "type": "BadRequestError",
            "code": 400,
        }
        await call.answer(400, {"error": error})
        return
    is_prefill = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
    message = {"role": "assistant", "content": " Par", "tool_calls": []}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "length",
        "stop_reason": None,
    }
    params = KV if is_prefill and not body.get("stream") else None
    answer = {
        "id": "chatcmpl-6c2b",
        "object": "chat.completion",
        "model": body["model"],
        "choices": [choice],
        "kv_transfer_params": params,
    }
    await call.answer(200, answer)


async def decodes_as_vllm(call: Call) -> None:
    if call.body.get("stream"):
        await streams(*CHUNKS)(call)
    else:
        await call.answer(200, {"id": "chatcmpl-1", "kv_transfer_params": None})


async def healthy(call: Call) -> None:
    await call.start(200, {"content-length": "0"})
    await call.write(b"", more=False)


def vllm_server(behave: Behave, *names: str) -> Fake:
    cards = [
        {"id": name, "root": name, "max_model_len": 4096, **CARD} for name in names
    ]
    pages = {
        "/ready": answers(404, {"detail": "Not Found"}),
        "/health": healthy,
        "/v1/models": answers(200, {"object": "list", "data": cards}),
    }
    return Fake(behave, pages=pages)


def vllm_rig(
    prefill: Behave = prefills_as_vllm, decode: Behave = decodes_as_vllm
) -> Rig:
    return Rig([vllm_server(prefill, "org/m")], [vllm_server(decode, "org/m", "lora")])


@pytest.mark.parametrize(
    ("limits", "prefill_limits"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 50, "min_tokens": 5}, {"max_tokens": 1}),
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        (
            {"max_tokens": 50, "max_completion_tokens": 9, "seed": 7},
            {"max_tokens": 1, "max_completion_tokens": 1, "seed": 7},
        ),
    ],
)
async def test_both_legs_equal_those_of_vllm_proxies(limits, prefill_limits):
    sent = {**USER, **limits, "stream": True, "stream_options": {"include_usage": True}}
    async with vllm_rig() as rig:
        headers = {"x-request-timeout-s": "60"}  # the proxy does not forward it
        answer = await rig.client.post(
            "/v1/chat/completions", json=sent, headers=headers
        )
        assert answer.content == b"".join(CHUNKS)
        (p,) = rig.prefill[0].calls
        (d,) = rig.decode[0].calls
        assert p.path == d.path == "/v1/chat/completions"
        assert p.body == {
            **USER,
            **prefill_limits,
            "stream": False,
            "kv_transfer_params": PREFILL_PARAMS,
        }
        assert d.body == {**sent, "kv_transfer_params": KV}
        assert p.headers["x-request-id"] == d.headers["x-request-id"]
        assert not {"x-request-timeout-s"} & {*p.headers, *d.headers}
        assert rig.metric("baton_proxy_requests", path="pd", reason="routed") == 1
        assert rig.prefill[0].releases == []


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "reason"),
    [
        (
            answers(200, {"kv_transfer_params": None}),
            decodes_as_vllm,
            200,
            "no_kv_params",
        ),
        (
            answers(500, {"error": {"message": "boom", "code": 500}}),
            decodes_as_vllm,
            200,
            "error",
        ),
        (
            answers(400, {"error": {"message": "no", "code": 400}}),
            decodes_as_vllm,
            400,
            None,
        ),
        (prefills_as_vllm, fails(500, "boom"), 500, None),
    ],
)
async def test_failures_are_handled_as_with_baton_servers_but_without_releases(
    prefill, decode, status, reason
):
    async with vllm_rig(prefill, decode) as rig:
        response = await rig.client.post("/v1/chat/completions", json=USER)
        assert response.status_code == status
        if reason is not None:
            assert rig.decode_only(reason) == 1
            (call,) = rig.decode[0].calls
            assert call.body == USER
    assert rig.prefill[0].releases == []


async def test_all_model_names_of_a_server_are_served_and_others_are_not():
    async with vllm_rig() as rig:
        listed = (await rig.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in listed] == [
            ("lora", 4096),
            ("org/m", 4096),
        ]
        for name, status in (("lora", 200), ("org/m", 200), ("gpt-4", 404)):
            answer = await rig.client.post(
                "/v1/chat/completions", json={**USER, "model": name}
            )
            assert answer.status_code == status
        assert [call.body["model"] for call in rig.prefill[0].calls] == ["org/m"]


async def test_incompatible_and_unhealthy_foreign_servers_receive_no_request():
    ours = Fake(decodes_as_vllm, details={"model": "org/m", "kv_digest": "a.b.c"})
    async with Rig([vllm_server(prefills_as_vllm, "org/m")], [ours]) as rig:
        response = await rig.client.post("/v1/chat/completions", json=USER)
        assert response.status_code == 200
        assert rig.decode_only("incompatible") == 1 and rig.prefill[0].calls == []
        rig.prefill[0].pages["/health"] = answers(503, {})
        await until(lambda: not rig.is_ready(0))


@pytest.mark.parametrize(
    ("status", "body", "is_foreign"),
    [
        (401, b'{"error": "Unauthorized"}', True),
        (404, b"<html>", False),
        (200, b"[]", False),
    ],
)
def test_foreign_server_is_recognized_by_its_list_of_models(status, body, is_foreign):
    """The server may refuse to send the list of models without a key."""
    report = _parse_foreign(200, status, body)
    assert report.ready == report.is_foreign == is_foreign
    assert report.models == ()
    if not is_foreign:
        expected = "GET /ready answers with status 404, unlike a Baton server"
        assert report.reason == expected

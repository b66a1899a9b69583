"""Requests through fake servers over loopback: both legs, relaying and retries."""

import asyncio
import json

import pytest

from protocol.kv_params import REMOTE_DECODE
from tests.proxy.fakes import (
    D_KV,
    KV_PARAMS,
    LENT,
    Call,
    Fake,
    Rig,
    answers,
    breaks_off,
    decodes,
    drops,
    fails,
    prefills,
    until,
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_request_goes_through_both_servers(path):
    async with Rig() as rig:
        body = {"model": "m", "prompt": "héllo \U0001f600", "max_tokens": 7, "n": 1}
        body |= {"temperature": 0.30000000000000004, "seed": 2**63 - 1}
        response = await rig.client.post(path, content=json.dumps(body))
        assert response.status_code == 200
        assert response.json() == {"text": "onetwo"}
        (prefill_call,) = rig.prefill[0].calls
        (decode_call,) = rig.decode[0].calls
        assert prefill_call.path == decode_call.path == path
        transfer_id = prefill_call.body["kv_transfer_params"]["transfer_id"]
        params = {**REMOTE_DECODE, "transfer_id": transfer_id}
        leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        assert prefill_call.body == leg
        assert decode_call.body == {**body, "kv_transfer_params": LENT}
        assert rig.metric("baton_proxy_requests", path="pd", reason="routed") == 1


async def test_headers_are_forwarded_in_both_directions():
    async with Rig() as rig:
        name = 'any string: "quotes", ünïcode'.encode().decode("latin-1")
        keys = {"authorization": "Bearer k", "x-api-key": "k"}
        headers = {"X-Request-Id": name.encode("latin-1")}
        for key, value in keys.items():
            headers[key] = value.encode()
        response = await rig.client.post(
            "/v1/completions", content="{}", headers=headers
        )
        for call in (rig.prefill[0].calls[0], rig.decode[0].calls[0]):
            assert call.headers["x-request-id"] == name
            assert keys.items() <= call.headers.items()
            assert call.headers["content-type"] == "application/json"
        assert len(response.headers.get_list("x-request-id")) == 1
        assert (b"x-request-id", name.encode("latin-1")) in response.headers.raw
        assert D_KV.items() <= response.headers.items()
        assert response.headers["content-type"] == "application/json"


async def test_white_space_around_header_values_is_not_forwarded():
    """White space around a header's value is not part of the value. Some clients
    without a key send `Bearer `.
    """
    async with Rig() as rig:
        reader, writer = await asyncio.open_connection(*rig.listener.getsockname())
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer \r\n"
            b"x-request-id: a \r\ncontent-length: 2\r\n\r\n{}"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200")
        for call in (rig.prefill[0].calls[0], rig.decode[0].calls[0]):
            assert call.headers["authorization"] == "Bearer"
            assert call.headers["x-request-id"] == "a"


@pytest.mark.parametrize("members", [{}, {"seed": None}])
async def test_both_servers_get_the_same_id_and_seed_from_the_proxy(members):
    async with Rig() as rig:
        ids = []
        for _ in range(2):
            response = await rig.complete(**members)
            ids.append(response.headers["x-request-id"])
        for fake in (rig.prefill[0], rig.decode[0]):
            assert [call.headers["x-request-id"] for call in fake.calls] == ids
        seeds = [call.body["seed"] for call in rig.prefill[0].calls]
        assert [call.body["seed"] for call in rig.decode[0].calls] == seeds
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert len(set(ids)) == len(set(seeds)) == 2


async def test_long_headers_of_a_client_do_not_make_servers_look_lost():
    """The proxy forwards a header that is not UTF-8 with twice as many bytes."""
    traces = {"traceparent": b"\xe9" * 20_000, "tracestate": b"a" * 20_000}
    async with Rig() as rig:
        answer = await rig.complete(headers={"x-request-id": b"\xe9" * 4096})
        assert answer.status_code == 400
        assert "has 8192 bytes, the limit is 4096" in answer.text
        answer = await rig.complete(headers={"x-request-id": b"\xe9" * 1000})
        assert answer.status_code == 200
        answer = await rig.complete(headers={"x-api-key": b"k" * 5000})
        assert answer.status_code == 400 and "x-api-key is too long" in answer.text
        assert (await rig.complete(headers=traces)).status_code == 200
        for fake in (*rig.prefill, *rig.decode):
            assert not traces.keys() & fake.calls[-1].headers.keys()
        assert rig.is_ready(0)


async def test_request_id_that_is_too_long_is_refused_and_reaches_no_server():
    async def echoes(call: Call) -> None:
        headers = {"x-request-id": call.headers["x-request-id"]}
        await call.answer(200, {"kv_transfer_params": KV_PARAMS}, headers)

    async with Rig([Fake(echoes)], [Fake(echoes)]) as rig:
        answer = await rig.complete(headers={"x-request-id": "a" * 4096})
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "a" * 4096)
        answer = await rig.complete(headers={"x-request-id": "a" * 200_000})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message == "the header X-Request-Id has 200000 bytes, the limit is 4096"
        assert len(answer.headers["x-request-id"]) == 32
        assert (await rig.complete()).status_code == 200
        assert len(rig.prefill[0].calls) == len(rig.decode[0].calls) == 2


async def test_kv_transfer_params_of_a_client_reach_no_server():
    async with Rig(prefill=[]) as rig:
        await rig.complete(kv_transfer_params={**KV_PARAMS, "remote_host": "10.0.0.1"})
        assert "kv_transfer_params" not in rig.decode[0].calls[0].body
        assert rig.metric("baton_proxy_stripped_kv_transfer_params") == 1


async def test_stream_is_relayed_byte_for_byte_and_chunk_by_chunk():
    received_first = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.start()
        await call.write(b'data: {"n": 1}\n\n')
        await received_first.wait()
        await call.write(b': comment\r\n\r\ndata: {"n": 2}\n\ndata: [DO')
        await call.write(b"NE]\n\n", more=False)

    async with Rig(decode=[Fake(streams)]) as rig:
        body = {"prompt": "x", "stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as response:
            assert (
                response.headers["content-type"] == "text/event-stream; charset=utf-8"
            )
            received = b""
            async for chunk in response.aiter_raw():
                if not received:
                    assert chunk == b'data: {"n": 1}\n\n'
                    received_first.set()
                received += chunk
        text = (await rig.client.get("/metrics")).text
        assert "baton_proxy_first_byte_seconds_count 1.0" in text
    assert received == (
        b'data: {"n": 1}\n\n: comment\r\n\r\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    )
    assert rig.prefill[0].calls[0].body["stream"] is False


@pytest.mark.parametrize(("kind", "status"), [("prefill", 400), ("decode", 400)])
async def test_refusal_by_either_server_is_the_answer(kind, status):
    error = {
        "error": {"message": "temperature must be a number", "param": "temperature"}
    }
    refuses = [Fake(answers(status, error))]
    async with Rig(**{kind: refuses}) as rig:
        response = await rig.complete(temperature="hot", stream=True)
        assert (response.status_code, response.json()) == (status, error)
        if kind == "prefill":
            assert rig.decode[0].calls == []
            labels = {"path": "prefill", "reason": "status_400"}
            assert rig.metric("baton_proxy_requests", **labels) == 1


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (answers(500, {}), "error"),
        (answers(503, {}), "busy"),
        (drops, "lost"),
        (answers(200, {"choices": []}), "no_kv_params"),
        (answers(200, {"kv_transfer_params": "text"}), "no_kv_params"),
        (answers(200, ["not an object"]), "no_kv_params"),
        (None, "no_prefill_server"),  # not ready
    ],
)
async def test_decode_only_request_without_a_usable_prefill_is_counted(behave, reason):
    async with Rig(prefill=[Fake(behave or prefills, ready=behave is not None)]) as rig:
        response = await rig.complete()
        assert response.status_code == 200
        assert "kv_transfer_params" not in rig.decode[0].calls[0].body
        assert rig.decode_only(reason) == 1


@pytest.mark.parametrize(
    "behave", [answers(500, {}), answers(503, {}), drops, breaks_off]
)
async def test_failed_prefill_is_retried_at_a_second_server(behave):
    async with Rig(prefill=[Fake(behave), Fake(prefills)]) as rig:
        assert (await rig.complete()).status_code == 200
        assert [len(fake.calls) for fake in rig.prefill] == [1, 1]
        assert rig.decode[0].calls[0].body["kv_transfer_params"] == LENT
        assert rig.metric("baton_proxy_retries", leg="prefill") == 1


_died = fails(503, "engine_died")


@pytest.mark.parametrize("fields", [{}, {"n": 2, "stream": True}])
@pytest.mark.parametrize("behave", [answers(503, {}), _died, drops])
async def test_retry_at_another_decode_server_has_the_same_params(behave, fields):
    async with Rig(decode=[Fake(behave), Fake(decodes)]) as rig:
        response = await rig.complete(**fields)
        assert response.status_code == 200 and b"two" in response.content
        (first_call,) = rig.decode[0].calls
        assert first_call.raw == rig.decode[1].calls[0].raw
        assert rig.decode[1].calls[0].body["kv_transfer_params"] == LENT
        assert len(rig.prefill[0].calls) == 1
    assert rig.prefill[0].releases == []


async def test_prefill_is_not_repeated_for_unreachable_and_full_decode_servers():
    decode = [Fake(decodes), Fake(answers(503, {})), Fake(decodes)]
    async with Rig(decode=decode, health_interval_s=60.0) as rig:
        await decode[0].stop()
        assert (await rig.complete(n=2)).json() == {"text": "onetwo"}
        assert [len(fake.calls) for fake in decode] == [0, 1, 1]
        assert decode[2].calls[0].body["kv_transfer_params"] == LENT
        assert rig.metric("baton_proxy_retries", leg="decode") == 2
    assert len(rig.prefill[0].calls) == 1 and rig.prefill[0].releases == []


@pytest.mark.parametrize(
    ("behave", "status", "code", "num_calls"),
    [
        # The request may have crashed these servers, so max_resumes limits them.
        (drops, 502, "decode_server_lost", 3),
        (_died, 503, "engine_died", 3),
        (fails(503, "overloaded"), 503, "overloaded", 4),
        (fails(500, "transfer_failed"), 500, "transfer_failed", 1),
        (fails(502, "transfer_failed"), 502, "transfer_failed", 1),
        (fails(504, "transfer_failed"), 504, "transfer_failed", 1),
        (fails(413, "payload_too_large"), 413, "payload_too_large", 1),
    ],
)
@pytest.mark.parametrize("on_release", [answers(200, {"released": 1}), drops])
async def test_error_of_the_last_decode_server_is_relayed_and_kv_released_once(
    behave, status, code, num_calls, on_release
):
    decode = [Fake(behave) for _ in range(4)]
    options = {"health_interval_s": 60.0, "max_resumes": 2}
    async with Rig([Fake(prefills, on_release=on_release)], decode, **options) as rig:
        response = await rig.complete()
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert sum(len(fake.calls) for fake in decode) == num_calls
        await until(lambda: len(rig.prefill[0].releases) == 1)
    assert len(rig.prefill[0].calls) == 1
    (release,) = rig.prefill[0].releases
    assert release.body == {"kv_transfer_params": KV_PARAMS}


async def test_server_that_only_broke_a_connection_is_used_again_at_once():
    async with Rig(decode=[Fake(drops)], health_interval_s=60.0) as rig:
        assert (await rig.complete()).status_code == 502
        rig.decode[0].behave = decodes
        await until(lambda: rig.decode[0].polls == 2)
        await until(lambda: rig.is_ready(1))
        assert (await rig.complete()).status_code == 200


async def test_unreachable_servers_are_not_tried_again_and_kv_is_released():
    async with Rig(health_interval_s=60.0) as rig:
        await rig.decode[0].stop()
        assert [(await rig.complete()).status_code for _ in range(2)] == [503, 503]
        assert len(rig.prefill[0].calls) == len(rig.prefill[0].releases) == 1
    async with Rig(health_interval_s=60.0) as rig:
        await rig.prefill[0].stop()
        for reason in ("unreachable", "no_prefill_server"):
            assert (await rig.complete()).status_code == 200
            assert rig.decode_only(reason) == 1
        await rig.decode[0].stop()
        for _ in range(2):
            response = await rig.complete()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "no_server_available"


async def test_concurrent_requests_are_spread_over_all_servers():
    prefill = [Fake(prefills) for _ in range(3)]
    decode = [Fake(decodes) for _ in range(2)]
    async with Rig(prefill, decode, routing="round_robin") as rig:
        bodies = [{"prompt": f"p{i}", "stream": i % 2 == 0} for i in range(120)]
        answers = await asyncio.gather(*(rig.complete(**body) for body in bodies))
        assert {answer.status_code for answer in answers} == {200}
        for body, answer in zip(bodies, answers, strict=True):
            assert answer.content.endswith(b"[DONE]\n\n") is body["stream"]
        assert [len(fake.calls) for fake in rig.prefill] == [40, 40, 40]
        assert [len(fake.calls) for fake in rig.decode] == [60, 60]
        prompts = [call.body["prompt"] for fake in rig.decode for call in fake.calls]
        assert sorted(prompts) == sorted(str(body["prompt"]) for body in bodies)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", {}),
        ("GET", "/docs", {}),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": True}),
    ],
)
async def test_requests_other_than_completions_do_not_advance_the_round_robin(
    method, path, body
):
    decode = [Fake(answers(200, {})), Fake(answers(200, {}))]
    async with Rig([Fake(prefills), Fake(prefills)], decode) as rig:
        for _ in range(4):
            await rig.client.request(method, path, json=body)
            assert (await rig.complete()).status_code == 200
        for fakes in (rig.prefill, rig.decode):
            for fake in fakes:
                completions = [call for call in fake.calls if b"hello" in call.raw]
                assert len(completions) == 2

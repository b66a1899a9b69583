"""Servers with different limits: each request goes to servers that allow it.

The limits are the context length and the number of choices (sequences) in one request.
Requests that only score their prompt are answered by the prefill server alone.
"""

import json
from typing import Any

import pytest

from tests.proxy.fakes import KV_PARAMS, Call, Fake, Rig, answers, decodes, drops, fails

TOO_LONG = {"error": {"code": "context_length_exceeded", "message": "too long"}}


async def prefills_100_tokens(call: Call) -> None:
    params: Any = {**KV_PARAMS, "remote_num_tokens": 100}
    if isinstance(call.body["prompt"], list):
        params = [{**KV_PARAMS, "remote_num_tokens": 7}, params]
    await call.answer(200, {"kv_transfer_params": params})


P = prefills_100_tokens
D = decodes
REFUSES_AS_TOO_LONG = answers(400, TOO_LONG)
REFUSES = fails(400, "invalid_request")
CONTEXTS = [(D, 300), (D, 500)]
# These contexts are longer than the 100 tokens of a prefill server in the tests.
LONGER_CONTEXTS = [(D, 200), (D, 300)]
FEW_CHOICES = (P, None, 4)
MANY_CHOICES = (P, None, 64)


@pytest.mark.parametrize(
    ("prefill", "decode", "body", "status", "calls", "reason"),
    [
        # A decode server receives no request that exceeds its context.
        ([(P,)], CONTEXTS, {"max_tokens": 200}, 200, [4, 2, 2], None),
        ([(P,)], CONTEXTS, {"max_tokens": 201}, 200, [4, 0, 4], None),
        ([(P,)], CONTEXTS, {"max_completion_tokens": 201}, 200, [4, 0, 4], None),
        ([(P,)], CONTEXTS, {}, 200, [4, 2, 2], None),
        ([(P,)], CONTEXTS, {"max_tokens": None}, 200, [4, 2, 2], None),
        (
            [(P,)],
            CONTEXTS,
            {"prompt": ["a", "b"], "max_tokens": 201},
            200,
            [4, 0, 4],
            None,
        ),
        # Every server would refuse this request, so any of them may get it.
        ([(P,)], CONTEXTS, {"max_tokens": 10**9}, 200, [4, 2, 2], None),
        # A request that generates needs both servers.
        ([(P,)], [(D,)], {"max_tokens": 1}, 200, [4, 4], None),
        ([(P,)], [(D,)], {"max_tokens": 2, "echo": True}, 200, [4, 4], None),
        ([(P,)], [(D,)], {"echo": True}, 200, [4, 4], None),
        # A prompt that is too long only for prefill servers goes to a decode server.
        (
            [(REFUSES_AS_TOO_LONG, 100)],
            LONGER_CONTEXTS,
            {},
            200,
            [4, 0, 4],
            "prefill_context",
        ),
        (
            [(REFUSES_AS_TOO_LONG, 100)],
            LONGER_CONTEXTS,
            {"max_tokens": 0},
            200,
            [4, 0, 4],
            "prefill_context",
        ),
        (
            [(REFUSES_AS_TOO_LONG, 100)],
            LONGER_CONTEXTS,
            {"max_tokens": 1, "echo": True},
            200,
            [4, 0, 4],
            "prefill_context",
        ),
        ([(REFUSES_AS_TOO_LONG, 300)], LONGER_CONTEXTS, {}, 400, [4, 0, 0], None),
        (
            [(REFUSES_AS_TOO_LONG, 300)],
            LONGER_CONTEXTS,
            {"max_tokens": 0},
            400,
            [4, 0, 0],
            None,
        ),
        ([(REFUSES_AS_TOO_LONG,)], LONGER_CONTEXTS, {}, 400, [4, 0, 0], None),
        # Another prefill server has a longer context.
        (
            [(REFUSES_AS_TOO_LONG, 100), (P, 200)],
            [(D, 300)],
            {},
            200,
            [..., 4, 4],
            None,
        ),
        (
            [(REFUSES_AS_TOO_LONG, 100), (D, 200)],
            [(D, 100)],
            {"max_tokens": 0},
            200,
            [..., 4, 0],
            None,
        ),
        # A request with many choices goes to servers that allow this number of choices.
        (
            [FEW_CHOICES, (P, None, 5)],
            [(D, None, 4), (D, None, 64)],
            {"n": 5},
            200,
            [0, 4, 0, 4],
            None,
        ),
        (
            [FEW_CHOICES, (P, None, 5)],
            [(D, None, 4), (D,)],
            {"best_of": 5},
            200,
            [0, 4, 0, 4],
            None,
        ),
        (
            [FEW_CHOICES, MANY_CHOICES],
            [(D, None, 4), (D,)],
            {"n": 2, "best_of": 5},
            200,
            [0, 4, 0, 4],
            None,
        ),
        (
            [(REFUSES_AS_TOO_LONG, 100)],
            [(D, 500, 4), (D, 300, 8)],
            {"n": 5},
            200,
            [4, 0, 4],
            "prefill_context",
        ),
        # If all prefill servers allow too few choices, a decode server gets the request
        # alone.
        ([FEW_CHOICES], [(D, None, 64)], {"n": 5}, 200, [0, 4], "prefill_choices"),
        ([FEW_CHOICES], [(D, None, 64)], {"n": 4}, 200, [4, 4], None),
        ([MANY_CHOICES], [(REFUSES, None, 4)], {"n": 5}, 400, [0, 4], "decode_choices"),
        ([MANY_CHOICES], [(REFUSES, None, 4)], {"n": 4}, 400, [4, 4], None),
        # The prefill server is not ready.
        ([(P, None, 4, False)], [(D,)], {"n": 5}, 200, [0, 4], "no_prefill_server"),
    ],
)
async def test_requests_go_to_servers_that_can_take_them(
    prefill, decode, body, status, calls, reason
):
    """Four requests are sent.

    `prefill` and `decode` list servers: (behaviour, context length, maximum choices, is
    ready). `calls` has the expected number of requests to each server; `...` allows any
    number. `reason` is the expected reason for decode-only requests.
    """

    def fake(
        behave: Any,
        max_model_len: int | None = None,
        n: int | None = None,
        is_ready: bool = True,
    ) -> Fake:
        return Fake(behave, max_model_len=max_model_len, max_num_seqs=n, ready=is_ready)

    prefill_fakes = [fake(*server) for server in prefill]
    decode_fakes = [fake(*server) for server in decode]
    async with Rig(prefill_fakes, decode_fakes) as rig:
        for number in range(1, 5):
            response = await rig.complete(**body)
            assert response.status_code == status
            assert reason is None or rig.decode_only(reason) == number
        fakes = (*rig.prefill, *rig.decode)
        for server, num_calls in zip(fakes, calls, strict=True):
            assert num_calls is ... or len(server.calls) == num_calls
        if reason is None:
            for server in rig.decode:
                assert all("kv_transfer_params" in call.body for call in server.calls)
        assert rig.in_flight() == 0


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 0}])
async def test_body_too_large_for_prefill_servers_goes_to_a_decode_server_only(limits):
    async def refuses(call: Call) -> None:
        # This may be the answer of a gateway in front of the server.
        await call.start(413, {"content-type": "text/html"})
        await call.write(b"<h1>413</h1>", more=False)

    async with Rig([Fake(refuses)]) as rig:
        assert (await rig.complete(**limits)).json() == {"text": "onetwo"}
        assert "kv_transfer_params" not in rig.decode[0].calls[0].body
        assert rig.decode_only("prefill_body") == 1
        assert rig.in_flight() == 0
        rig.decode[0].behave = refuses
        assert (await rig.complete(**limits)).status_code == 413
    async with Rig([Fake(refuses)], [Fake(decodes, ready=False)]) as rig:
        # A scoring request needs only a prefill server. The only one refuses the
        # request, and the decode server is not ready.
        assert (await rig.complete(max_tokens=0)).status_code == 413


# -- scoring

ECHOED = {"text": "hello", "logprobs": {"tokens": ["hello"]}}


async def scores(call: Call) -> None:
    if call.body.get("stream"):
        await decodes(call)
    else:
        await call.answer(200, ECHOED)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"max_tokens": 1, "echo": True},
        {"max_completion_tokens": 1, "max_tokens": 5, "echo": True},
        {"max_tokens": 1, "echo": True, "stream": True},
        {"max_tokens": -0.0},  # JSON has a negative zero
    ],
)
async def test_scoring_requests_need_no_decode_server(fields):
    async with Rig(prefill=[Fake(scores)], decode=[Fake(decodes, ready=False)]) as rig:
        body = {"model": "m", "prompt": "hello", "seed": 1, **fields}
        content = json.dumps(body).replace("-0.0", "-0")
        response = await rig.client.post("/v1/completions", content=content)
        assert response.status_code == 200
        if fields.get("stream"):
            assert response.content.endswith(b"data: [DONE]\n\n")
        else:
            assert response.json() == ECHOED
        (call,) = rig.prefill[0].calls
        assert call.body == body
        assert rig.metric("baton_proxy_requests", path="prefill", reason="scored") == 1
        assert rig.in_flight() == 0
        # A request that generates needs a decode server.
        assert (await rig.complete(max_tokens=5)).status_code == 503


async def test_decode_server_scores_if_there_is_no_prefill_server():
    async with Rig(prefill=[Fake(drops)]) as rig:
        response = await rig.complete(max_tokens=0)
        assert response.json() == {"text": "onetwo"}
        (call,) = rig.decode[0].calls
        assert "kv_transfer_params" not in call.body
        assert rig.decode_only("lost") == 1

"""Servers of unequal room, in context or sequences: a request goes where it fits. Of requests
that only score their prompt the prefill server's answer is the client's."""

import json
from typing import Any

import pytest

from tests.proxy.fakes import KV_PARAMS, Call, Fake, Rig, answers, decodes, drops, fails

TOO_LONG = {"error": {"code": "context_length_exceeded", "message": "too long"}}


async def prefills_100_tokens(call: Call) -> None:
    params = {**KV_PARAMS, "remote_num_tokens": 100}
    if isinstance(call.body["prompt"], list):
        params = [{**KV_PARAMS, "remote_num_tokens": 7}, params]  # type: ignore[assignment]
    await call.answer(200, {"kv_transfer_params": params})


P, D, LONG, NO = (
    prefills_100_tokens,
    decodes,
    answers(400, TOO_LONG),
    fails(400, "invalid_request"),
)
CONTEXTS = [(D, 300), (D, 500)]
ABOVE = [(D, 200), (D, 300)]  # the context of a prefill server of 100
FEW, MANY = (P, None, 4), (P, None, 64)


@pytest.mark.parametrize(
    ("prefill", "decode", "body", "status", "calls", "reason"),
    [
        # a decode server without room is not asked
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
        (
            [(P,)],
            CONTEXTS,
            {"max_tokens": 10**9},
            200,
            [4, 2, 2],
            None,
        ),  # any of them says so
        # what generates is not scored: it goes through both
        ([(P,)], [(D,)], {"max_tokens": 1}, 200, [4, 4], None),
        ([(P,)], [(D,)], {"max_tokens": 2, "echo": True}, 200, [4, 4], None),
        ([(P,)], [(D,)], {"echo": True}, 200, [4, 4], None),
        # what is too long for the prefill servers alone is computed by a decode server
        ([(LONG, 100)], ABOVE, {}, 200, [4, 0, 4], "prefill_context"),
        ([(LONG, 100)], ABOVE, {"max_tokens": 0}, 200, [4, 0, 4], "prefill_context"),
        (
            [(LONG, 100)],
            ABOVE,
            {"max_tokens": 1, "echo": True},
            200,
            [4, 0, 4],
            "prefill_context",
        ),
        ([(LONG, 300)], ABOVE, {}, 400, [4, 0, 0], None),
        ([(LONG, 300)], ABOVE, {"max_tokens": 0}, 400, [4, 0, 0], None),
        ([(LONG,)], ABOVE, {}, 400, [4, 0, 0], None),
        # another prefill server has room
        ([(LONG, 100), (P, 200)], [(D, 300)], {}, 200, [..., 4, 4], None),
        (
            [(LONG, 100), (D, 200)],
            [(D, 100)],
            {"max_tokens": 0},
            200,
            [..., 4, 0],
            None,
        ),
        # choices go to servers that run so many
        (
            [FEW, (P, None, 5)],
            [(D, None, 4), (D, None, 64)],
            {"n": 5},
            200,
            [0, 4, 0, 4],
            None,
        ),
        (
            [FEW, (P, None, 5)],
            [(D, None, 4), (D,)],
            {"best_of": 5},
            200,
            [0, 4, 0, 4],
            None,
        ),
        (
            [FEW, MANY],
            [(D, None, 4), (D,)],
            {"n": 2, "best_of": 5},
            200,
            [0, 4, 0, 4],
            None,
        ),
        (
            [(LONG, 100)],
            [(D, 500, 4), (D, 300, 8)],
            {"n": 5},
            200,
            [4, 0, 4],
            "prefill_context",
        ),
        # those that one side does not run are the decode server's matter
        ([FEW], [(D, None, 64)], {"n": 5}, 200, [0, 4], "prefill_choices"),
        ([FEW], [(D, None, 64)], {"n": 4}, 200, [4, 4], None),
        ([MANY], [(NO, None, 4)], {"n": 5}, 400, [0, 4], "decode_choices"),
        ([MANY], [(NO, None, 4)], {"n": 4}, 400, [4, 4], None),
        (
            [(P, None, 4, False)],
            [(D,)],
            {"n": 5},
            200,
            [0, 4],
            "no_prefill_server",
        ),  # not ready
    ],
)
async def test_requests_go_where_there_is_room(
    prefill, decode, body, status, calls, reason
):
    """Four of them; servers are (behaviour, longest context, most sequences, whether ready)."""

    def fake(
        behave: Any, length: int | None = None, n: int | None = None, up: bool = True
    ) -> Fake:
        return Fake(behave, max_model_len=length, max_num_seqs=n, ready=up)

    async with Rig(
        [fake(*one) for one in prefill], [fake(*one) for one in decode]
    ) as rig:
        for number in range(1, 5):
            response = await rig.complete(**body)
            assert response.status_code == status
            assert reason is None or rig.decode_only(reason) == number
        fakes = (*rig.prefill, *rig.decode)
        found = [len(one.calls) for one in fakes]
        assert [n for n, told in zip(found, calls, strict=True) if told is not ...] == [
            told for told in calls if told is not ...
        ]
        if reason is None:
            assert all(
                "kv_transfer_params" in c.body for one in rig.decode for c in one.calls
            )
        assert rig.in_flight() == 0


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 0}])
async def test_a_body_too_long_for_a_prefill_server_goes_to_a_decode_server_alone(
    asked,
):
    async def refuses(
        call: Call,
    ) -> None:  # of another size, and some gateways say it so
        await call.start(413, {"content-type": "text/html"})
        await call.write(b"<h1>413</h1>", more=False)

    async with Rig([Fake(refuses)]) as rig:
        assert (await rig.complete(**asked)).json() == {"text": "onetwo"}
        assert "kv_transfer_params" not in rig.decode[0].calls[0].body
        assert rig.decode_only("prefill_body") == 1
        assert rig.in_flight() == 0
        rig.decode[0].behave = refuses
        assert (await rig.complete(**asked)).status_code == 413
    async with Rig([Fake(refuses)], [Fake(decodes, ready=False)]) as rig:
        assert (
            await rig.complete(max_tokens=0)
        ).status_code == 413  # nobody else can be asked


# -- scoring

ECHOED = {"text": "hello", "logprobs": {"tokens": ["hello"]}}


async def scores(call: Call) -> None:
    await (decodes if call.body.get("stream") else answers(200, ECHOED))(call)


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
async def test_the_prefill_server_answers_all_of_it(fields):
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
        assert (
            await rig.complete(max_tokens=5)
        ).status_code == 503  # a decode server's


async def test_without_a_prefill_server_a_decode_server_scores():
    async with Rig(prefill=[Fake(drops)]) as rig:
        response = await rig.complete(max_tokens=0)
        assert response.json() == {"text": "onetwo"}
        (call,) = rig.decode[0].calls
        assert "kv_transfer_params" not in call.body
        assert rig.decode_only("lost") == 1

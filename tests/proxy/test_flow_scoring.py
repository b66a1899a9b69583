"""Requests that only score their prompt: the prefill server's answer is the client's."""

from typing import Any

import pytest

from tests.proxy.fakes import Call, Drop, Fake, Rig, decodes

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
    ],
)
async def test_the_prefill_server_answers_all_of_it(fields: dict[str, Any]) -> None:
    async with Rig(prefill=[Fake(scores)]) as rig:
        response = await rig.complete(seed=1, **fields)
        assert (response.status_code, response.json()) == (200, ECHOED)
        (call,) = rig.prefill[0].calls
        assert call.body == {"model": "m", "prompt": "hello", "seed": 1, **fields}
        assert rig.decode[0].calls == []
        assert rig.metric("baton_proxy_requests", path="prefill", reason="scored") == 1
        labels = {"role": "prefill", "server": "prefill-0"}
        assert rig.metric("baton_proxy_upstream_in_flight", **labels) == 0


async def test_a_negative_zero_is_a_zero() -> None:
    async with Rig(prefill=[Fake(scores)]) as rig:
        body = b'{"model": "m", "prompt": "hello", "max_tokens": -0}'
        response = await rig.client.post("/v1/completions", content=body)
        assert response.json() == ECHOED
        assert rig.decode[0].calls == []


async def test_it_may_be_streamed() -> None:
    async with Rig(prefill=[Fake(scores)]) as rig:
        response = await rig.complete(max_tokens=1, echo=True, stream=True)
        assert response.content.endswith(b"data: [DONE]\n\n")
        assert rig.decode[0].calls == []


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 1}, {"max_tokens": 2, "echo": True}, {"echo": True}]
)
async def test_what_generates_goes_through_both(fields: dict[str, Any]) -> None:
    async with Rig() as rig:
        await rig.complete(**fields)
        assert [len(rig.prefill[0].calls), len(rig.decode[0].calls)] == [1, 1]


async def test_without_a_prefill_server_a_decode_server_scores() -> None:
    async def drops(call: Call) -> None:
        raise Drop

    async with Rig(prefill=[Fake(drops)]) as rig:
        response = await rig.complete(max_tokens=0)
        assert response.json() == {"text": "onetwo"}
        (call,) = rig.decode[0].calls
        assert "kv_transfer_params" not in call.body
        assert rig.decode_only("lost") == 1


async def test_without_a_decode_server_prompts_are_scored() -> None:
    async with Rig(prefill=[Fake(scores)], decode=[Fake(decodes, ready=False)]) as rig:
        assert (await rig.complete(max_tokens=0)).json() == ECHOED
        assert (await rig.complete(max_tokens=5)).status_code == 503

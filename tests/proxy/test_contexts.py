"""Servers of unequal room, in context or sequences: a request goes where it fits, and nothing is
prefilled that no decode server has room for. Requests that only score their prompt: the prefill
server's answer is the client's."""

import json
from typing import Any

import pytest

from proxy.membership import Kind
from tests.proxy.fakes import KV_PARAMS, Call, Fake, Rig, answers, decodes, drops, fails, until

TOO_LONG = {"error": {"code": "context_length_exceeded", "message": "too long"}}


async def prefills_100_tokens(call: Call) -> None:
    params = {**KV_PARAMS, "remote_num_tokens": 100}
    if isinstance(call.body["prompt"], list):
        params = [{**KV_PARAMS, "remote_num_tokens": 7}, params]  # type: ignore[assignment]
    await call.answer(200, {"kv_transfer_params": params})


is_too_long = answers(400, TOO_LONG)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [((300, 500), 500), ((300, None), None), ((None, None), None), ((300, -500), 300)],
)
async def test_a_prefill_server_hears_of_the_longest_context_behind_it(
    lengths: tuple[int | None, int | None], told: int | None
) -> None:
    """A negative one is that of a server that is not ready."""
    fakes = [
        Fake(decodes, ready=length is None or length > 0, max_model_len=length and abs(length))
        for length in lengths
    ]
    async with Rig(decode=fakes) as rig:
        assert (await rig.complete(max_tokens=9)).status_code == 200
        params = rig.prefill[0].calls[-1].body["kv_transfer_params"]
        assert params.get("max_model_len") == told


@pytest.mark.parametrize(
    ("body", "only_large"),
    [
        ({"max_tokens": 200}, False),
        ({"max_tokens": 201}, True),
        ({"max_completion_tokens": 201}, True),
        ({}, False),
        ({"max_tokens": None}, False),
        ({"prompt": ["short", "long"], "max_tokens": 201}, True),
        ({"max_tokens": 10**9}, False),  # none has room: any of them says so
    ],
)
async def test_a_decode_server_without_room_is_not_asked(
    body: dict[str, Any], only_large: bool
) -> None:
    small, large = Fake(decodes, max_model_len=300), Fake(decodes, max_model_len=500)
    async with Rig(prefill=[Fake(prefills_100_tokens)], decode=[small, large]) as rig:
        for _ in range(4):
            assert (await rig.complete(**body)).status_code == 200
        assert (len(small.calls), len(large.calls)) == ((0, 4) if only_large else (2, 2))


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 0}, {"max_tokens": 1, "echo": True}])
@pytest.mark.parametrize(("p_length", "d_length"), [(100, 300), (300, 300), (None, 300)])
async def test_what_is_too_long_for_the_prefill_servers_alone_is_computed_by_a_decode_server(
    p_length: int | None, d_length: int, asked: dict[str, Any]
) -> None:
    prefill = [Fake(is_too_long, max_model_len=p_length)]
    decode = [Fake(decodes, max_model_len=length) for length in (200, d_length)]
    async with Rig(prefill, decode) as rig:
        for number in range(1, 4):
            response = await rig.complete(**asked)
            if p_length == 100:
                assert response.status_code == 200
                assert rig.decode_only("prefill_context") == number
                assert len(decode[1].calls) == number
            else:
                assert (response.status_code, response.json()) == (400, TOO_LONG)
                assert rig.metric("baton_proxy_requests", path="prefill", reason="status_400")
        assert decode[0].calls == []
        assert rig.in_flight() == 0


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 0}])
async def test_a_body_too_long_for_a_prefill_server_goes_to_a_decode_server_alone(
    asked: dict[str, Any],
) -> None:
    async def refuses(call: Call) -> None:  # of another size, and some gateways say it so
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
        assert (await rig.complete(max_tokens=0)).status_code == 413  # nobody else can be asked


async def test_a_prefill_server_with_room_is_asked_when_another_has_none() -> None:
    small = Fake(is_too_long, max_model_len=100)
    large = Fake(prefills_100_tokens, max_model_len=200)
    async with Rig([small, large], [Fake(decodes, max_model_len=300)]) as rig:
        for _ in range(4):
            assert (await rig.complete()).status_code == 200
        assert len(large.calls) == len(rig.decode[0].calls) == 4
        assert all("kv_transfer_params" in call.body for call in rig.decode[0].calls)
        assert rig.decode_only("prefill_context") == 0


@pytest.mark.parametrize("options", [{"ready": False}, {"max_model_len": 100}])
async def test_a_prompt_is_scored_where_there_is_room_whatever_the_decode_servers_have(
    options: dict[str, Any],
) -> None:
    decode = Fake(decodes, **options)
    small, large = Fake(is_too_long, max_model_len=100), Fake(decodes, max_model_len=200)
    async with Rig([small, large], [decode]) as rig:
        for _ in range(4):
            assert (await rig.complete(max_tokens=0)).status_code == 200
        scored = rig.metric("baton_proxy_requests", path="prefill", reason="scored")
        assert len(large.calls) == scored == 4
        assert decode.calls == []


async def test_many_choices_of_a_long_prompt_go_to_a_decode_server_that_may_have_room() -> None:
    few, many = (Fake(decodes, max_model_len=t, max_num_seqs=n) for t, n in ((500, 4), (300, 8)))
    async with Rig([Fake(is_too_long, max_model_len=100)], [few, many]) as rig:
        for number in range(1, 4):
            assert (await rig.complete(n=5)).status_code == 200
            assert (len(few.calls), len(many.calls)) == (0, number)


@pytest.mark.parametrize("asked", [{"n": 5}, {"best_of": 5}, {"n": 2, "best_of": 5}])
async def test_choices_go_to_servers_that_run_so_many(asked: dict[str, Any]) -> None:
    prefill = [Fake(prefills_100_tokens, max_num_seqs=n) for n in (4, 5)]
    decode = [Fake(decodes, max_num_seqs=n) for n in (4, 64)]
    async with Rig(prefill, decode) as rig:
        for _ in range(3):
            assert (await rig.complete(**asked)).status_code == 200
        assert [len(fake.calls) for fake in (*prefill, *decode)] == [0, 3, 0, 3]
        assert "kv_transfer_params" in decode[1].calls[0].body


@pytest.mark.parametrize(("path", "status"), [("prefill", 200), ("decode", 400)])
async def test_choices_that_one_side_does_not_run_are_the_decode_servers_matter(
    path: str, status: int
) -> None:
    """It computes the prompt, or refuses the request before any work."""

    refuses = fails(400, "invalid_request")
    few, many = (4, 64) if path == "prefill" else (64, 4)
    prefill = [Fake(prefills_100_tokens, max_num_seqs=few)]
    decode = [Fake(decodes if path == "prefill" else refuses, max_num_seqs=many)]
    async with Rig(prefill, decode) as rig:
        assert (await rig.complete(n=5)).status_code == status
        assert prefill[0].calls == []
        assert rig.decode_only(f"{path}_choices") == 1
        assert (await rig.complete(n=4)).status_code == status
        assert len(prefill[0].calls) == 1


async def test_no_ready_prefill_server_is_the_reason_whatever_its_room() -> None:
    async with Rig([Fake(prefills_100_tokens, max_num_seqs=4)]) as rig:
        rig.prefill[0].ready = False
        await until(lambda: not rig.app.fleet.ready(Kind.PREFILL))
        assert (await rig.complete(n=5)).status_code == 200
        assert rig.decode_only("no_prefill_server") == 1


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
async def test_the_prefill_server_answers_all_of_it(fields: dict[str, Any]) -> None:
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
        assert (await rig.complete(max_tokens=5)).status_code == 503  # a decode server's


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 1}, {"max_tokens": 2, "echo": True}, {"echo": True}]
)
async def test_what_generates_goes_through_both(fields: dict[str, Any]) -> None:
    async with Rig() as rig:
        await rig.complete(**fields)
        assert [len(rig.prefill[0].calls), len(rig.decode[0].calls)] == [1, 1]


async def test_without_a_prefill_server_a_decode_server_scores() -> None:
    async with Rig(prefill=[Fake(drops)]) as rig:
        response = await rig.complete(max_tokens=0)
        assert response.json() == {"text": "onetwo"}
        (call,) = rig.decode[0].calls
        assert "kv_transfer_params" not in call.body
        assert rig.decode_only("lost") == 1

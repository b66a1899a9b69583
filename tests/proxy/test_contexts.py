"""Servers of unequal context lengths: nothing is prefilled that no decode server has room for."""

from typing import Any

import pytest

from tests.proxy.fakes import KV_PARAMS, Call, Fake, Rig, decodes, run

TOO_LONG = {"error": {"code": "context_length_exceeded", "message": "too long"}}


async def prefills_100_tokens(call: Call) -> None:
    params = {**KV_PARAMS, "remote_num_tokens": 100}
    if isinstance(call.body["prompt"], list):
        params = [{**KV_PARAMS, "remote_num_tokens": 7}, params]  # type: ignore[assignment]
    await call.answer(200, {"kv_transfer_params": params})


async def is_too_long(call: Call) -> None:
    await call.answer(400, TOO_LONG)


def _told(fake: Fake) -> Any:
    return fake.calls[-1].body["kv_transfer_params"].get("max_model_len")


@pytest.mark.parametrize(
    ("lengths", "told"), [((300, 500), 500), ((300, None), None), ((None, None), None)]
)
def test_a_prefill_server_hears_of_the_longest_context_behind_it(
    lengths: tuple[int | None, int | None], told: int | None
) -> None:
    async def test() -> None:
        fakes = [Fake(decodes, max_model_len=length) for length in lengths]
        async with Rig(decode=fakes) as rig:
            assert (await rig.complete(max_tokens=9)).status_code == 200
            assert _told(rig.prefill[0]) == told

    run(test())


def test_a_server_that_is_not_ready_does_not_count() -> None:
    async def test() -> None:
        fakes = [Fake(decodes, max_model_len=300), Fake(decodes, ready=False, max_model_len=500)]
        async with Rig(decode=fakes) as rig:
            await rig.complete()
            assert _told(rig.prefill[0]) == 300

    run(test())


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
def test_a_decode_server_without_room_is_not_asked(body: dict[str, Any], only_large: bool) -> None:
    async def test() -> None:
        small, large = Fake(decodes, max_model_len=300), Fake(decodes, max_model_len=500)
        async with Rig(prefill=[Fake(prefills_100_tokens)], decode=[small, large]) as rig:
            for _ in range(4):
                assert (await rig.complete(**body)).status_code == 200
            assert (len(small.calls), len(large.calls)) == ((0, 4) if only_large else (2, 2))

    run(test())


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 0}, {"max_tokens": 1, "echo": True}])
@pytest.mark.parametrize(("p_length", "d_length"), [(100, 300), (300, 300), (None, 300)])
def test_what_is_too_long_for_the_prefill_servers_alone_is_computed_by_a_decode_server(
    p_length: int | None, d_length: int, asked: dict[str, Any]
) -> None:
    async def test() -> None:
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
            labels = {"role": "prefill", "url": prefill[0].url}
            assert rig.metric("baton_proxy_upstream_in_flight", **labels) == 0

    run(test())

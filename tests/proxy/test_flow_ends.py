"""Requests that end badly after the answer has begun, and clients that leave."""

import asyncio
import json
from typing import Any

import pytest

from proxy.health import SILENCES
from proxy.membership import Kind
from tests.proxy.fakes import (
    KV_PARAMS,
    Call,
    Drop,
    Fake,
    Rig,
    breaks_off,
    decodes,
    drops,
    fails,
    hangs,
    prefills,
    releases,
    streams,
    until,
)


@pytest.mark.parametrize("tail", [b"", b'data: {"half'])
async def test_a_stream_that_breaks_ends_in_an_error_event(tail: bytes) -> None:
    async with Rig(decode=[Fake(streams(b"data: 1\n\n" + tail, ends=False))]) as rig:
        response = await rig.complete(stream=True)
        assert response.status_code == 200
        first, event, data, *rest = response.text.split("\n")[0:1] + [
            line for line in response.text.split("\n")[1:] if line
        ]
        assert (first, event, rest) == ("data: 1", "event: error", [])
        error = json.loads(data.removeprefix("data: "))["error"]
        assert (error["code"], error["phase"]) == ("decode_server_lost", "decode")


async def test_a_stream_that_ends_without_its_last_event_ends_in_an_error_event() -> None:
    async with Rig(decode=[Fake(streams(b"data: 1\n\n"))]) as rig:
        response = await rig.complete(stream=True)
        assert "event: error" in response.text
        assert "[DONE]" not in response.text
        await until(lambda: rig.metric("baton_proxy_responses", status="broken") == 1)


async def test_an_error_event_of_the_decode_server_is_relayed_alone_and_kv_given_back() -> None:
    text = b'data: 1\n\nevent: error\ndata: {"error": {"code": "engine_died"}}\n\n'

    async with Rig(decode=[Fake(streams(text))]) as rig:
        assert (await rig.complete(stream=True)).content == text
        await until(lambda: rig.metric("baton_proxy_responses", status="broken") == 1)
        await until(lambda: len(rig.prefill[0].releases) == 1)
        assert rig.prefill[0].releases[0].body == {"kv_transfer_params": KV_PARAMS}


async def test_an_answer_that_breaks_off_is_a_502() -> None:
    async with Rig(decode=[Fake(breaks_off)]) as rig:
        response = await rig.complete()
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "decode_server_lost"


@pytest.mark.parametrize(("prefill", "decode"), [(hangs, decodes), (prefills, hangs)])
async def test_a_silent_server_times_out(prefill: Any, decode: Any) -> None:
    async with Rig([Fake(prefill)], [Fake(decode)], read_timeout_s=0.2) as rig:
        response = await rig.complete()
        if prefill is hangs:
            assert response.status_code == 200
            assert rig.decode_only("timeout") == 1
        else:
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "decode_server_timeout"


@pytest.mark.parametrize("others", [0, 1])
async def test_a_prefill_server_that_does_not_answer_health_checks_either_is_not_waited_for(
    others: int,
) -> None:
    """As a whole server that is stopped: its connections stay, and nothing comes."""
    stopped = Fake(hangs)

    fakes = [stopped, *(Fake(prefills) for _ in range(others))]
    async with Rig(fakes, health_timeout_s=0.05, read_timeout_s=3600.0) as rig:
        request = asyncio.create_task(rig.complete())
        await until(lambda: len(stopped.calls) == 1)
        stopped.silent = True
        assert (await request).status_code == 200
        assert rig.decode_only("lost") == (not others)
        assert rig.in_flight() == 0


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_decode_server_that_answers_no_health_checks_for_long_is_not_waited_for(
    begun: bool, others: int
) -> None:
    async def stops(call: Call) -> None:
        if begun:
            await call.start()
            await call.write(b"data: 1\n\n")
        stopped.silent = True
        await call.gone()

    stopped = Fake(stops)

    fakes = [stopped, *(Fake(decodes) for _ in range(others))]
    async with Rig(decode=fakes, health_timeout_s=0.05, read_timeout_s=3600.0) as rig:
        answer = await rig.complete(stream=True)
        assert answer.status_code == (200 if begun or others else 502)
        if others and not begun:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert '"decode_server_lost"' in answer.text
            assert "health checks" in answer.text
            assert "[DONE]" not in answer.text
        assert rig.in_flight() == 0


async def test_a_decode_server_silent_for_a_while_keeps_its_requests() -> None:
    goes_on = asyncio.Event()

    async def pauses(call: Call) -> None:
        pausing.silent = True
        await goes_on.wait()
        pausing.silent = False
        await decodes(call)

    pausing = Fake(pauses)

    async with Rig(decode=[pausing], health_timeout_s=0.05) as rig:
        request = asyncio.create_task(rig.complete())
        (server,) = rig.app.fleet.of[Kind.DECODE]
        await until(lambda: server.health.silences > SILENCES)
        assert not server.health.ready
        goes_on.set()
        assert (await request).json() == {"text": "onetwo"}


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream"])
async def test_a_client_that_goes_away_ends_the_leg_in_flight(leg: str) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits(call: Call) -> None:
        if leg == "stream":
            await call.start()
            await call.write(b"data: 1\n\n")
        begun.set()
        await call.gone()
        ended.set()

    fakes = ([Fake(waits)], None) if leg == "prefill" else (None, [Fake(waits)])
    async with Rig(*fakes) as rig:
        request = asyncio.create_task(rig.complete(stream=leg == "stream"))
        await begun.wait()
        request.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await request
        if leg == "prefill":
            assert rig.decode[0].calls == []
        await until(lambda: rig.metric("baton_proxy_client_disconnects") == 1)
        assert rig.metric("baton_proxy_requests_in_progress") == 0
        assert rig.in_flight() == 0
        assert rig.is_ready(0) and rig.is_ready(1)


async def test_a_client_that_hangs_up_at_done_is_no_disconnect() -> None:
    hung_up = asyncio.Event()

    async def lingers(call: Call) -> None:
        await call.start()
        await call.write(b"data: 1\n\ndata: [DONE]\n\n")
        await call.gone()
        hung_up.set()

    async with Rig(decode=[Fake(lingers)]) as rig:
        body = {"prompt": "x", "stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in response.aiter_raw():
                if b"[DONE]" in chunk:
                    break
        await hung_up.wait()
        await until(lambda: rig.metric("baton_proxy_responses", status="200") == 1)
        assert rig.metric("baton_proxy_client_disconnects") == 0


@pytest.mark.parametrize("on_release", [releases, drops])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (502, "decode_server_lost"),
        (503, "overloaded"),
        (500, "engine_died"),
        (413, "payload_too_large"),
    ],
)
async def test_kv_is_given_back_when_no_decode_server_takes_the_request(
    status: int, code: str, on_release: Any
) -> None:
    prefill = Fake(prefills, on_release=on_release)
    decode = Fake(drops if "lost" in code else fails(status, code))
    async with Rig(prefill=[prefill], decode=[decode]) as rig:
        response = await rig.complete()
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        await until(lambda: len(prefill.releases) == 1)
        assert prefill.releases[0].body == {"kv_transfer_params": KV_PARAMS}


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_is_given_back_when_the_client_leaves_a_decode_server_thathangs(
    stream: bool,
) -> None:
    """A stopped decode server cannot tell the prefill server that nobody waits any more; one that
    runs is told first, and loses no lease before it knows."""
    begun, prefill = asyncio.Event(), Fake(prefills)
    when_told: list[int] = []

    async def is_stopped(call: Call) -> None:
        begun.set()
        await call.gone()
        when_told.append(len(prefill.releases))

    async with Rig(prefill=[prefill], decode=[Fake(is_stopped)]) as rig:
        request = asyncio.create_task(rig.complete(stream=stream))
        await begun.wait()
        request.cancel()
        await until(lambda: len(prefill.releases) == 1)
        assert when_told == [0]
        with pytest.raises(asyncio.CancelledError):
            await request


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 2, "stream": True}])
async def test_kv_is_given_back_when_the_client_leaves_between_two_decode_servers(
    fields: dict[str, Any],
) -> None:
    """The first one has refused, and left the lease to the proxy; the second has not answered."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def queues(call: Call) -> None:
        begun.set()
        await call.gone()
        ended.set()

    async with Rig(decode=[Fake(fails(503, "overloaded")), Fake(queues)]) as rig:
        request = asyncio.create_task(rig.complete(**fields))
        await begun.wait()
        assert rig.prefill[0].releases == []
        request.cancel()
        await ended.wait()
        await until(lambda: len(rig.prefill[0].releases) == 1)
        assert rig.prefill[0].releases[0].body == {"kv_transfer_params": KV_PARAMS}
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(lambda: rig.metric("baton_proxy_client_disconnects") == 1)
    assert len(rig.prefill[0].releases) == len(rig.prefill[0].calls) == 1


async def _stops_after_the_head(call: Call) -> None:
    await call.start(200, {"content-type": "application/json", "content-length": "100"})
    await call.gone()


async def _stops_before_the_last_byte(call: Call) -> None:
    body = json.dumps({"id": "p", "kv_transfer_params": KV_PARAMS}).encode()
    await call.start(
        200, {"content-type": "application/json", "content-length": str(len(body) + 1)}
    )
    await call.write(body)
    await call.gone()


@pytest.mark.parametrize("end", ["the client leaves", "time is up", "the connection breaks"])
@pytest.mark.parametrize("stops", [hangs, _stops_after_the_head, _stops_before_the_last_byte])
async def test_a_prefill_whose_answer_never_came_whole_is_called_off(stops: Any, end: str) -> None:
    """The prefill server may have leased KV that only its answer tells of."""
    begun = asyncio.Event()

    async def behaves(call: Call) -> None:
        begun.set()
        if end == "the connection breaks":
            call.gone = _at_once  # type: ignore[method-assign]
        await stops(call)
        raise Drop

    read_timeout_s = 0.2 if end == "time is up" else 3600.0
    async with Rig([Fake(behaves)], read_timeout_s=read_timeout_s) as rig:
        request = asyncio.create_task(rig.complete())
        await begun.wait()
        if end == "the client leaves":
            request.cancel()
        await until(lambda: len(rig.prefill[0].releases) == 1)
        (asked,), (released,) = rig.prefill[0].calls, rig.prefill[0].releases
        name = asked.body["kv_transfer_params"]["transfer_id"]
        assert released.body["kv_transfer_params"]["transfer_id"] == name
        await asyncio.gather(request, return_exceptions=True)


async def test_no_client_waits_for_a_prefill_server_that_is_slow_to_take_its_kv_back() -> None:
    goes_on = asyncio.Event()

    async def is_slow(call: Call) -> None:
        await goes_on.wait()
        await releases(call)

    refuses = Fake(fails(413, "payload_too_large"))
    async with Rig([Fake(prefills, on_release=is_slow)], [refuses]) as rig:
        assert (await rig.complete()).status_code == 413
        await until(lambda: len(rig.prefill[0].releases) == 1)
        goes_on.set()


async def _at_once() -> None:
    return


async def test_a_prefill_that_nobody_was_asked_for_is_not_called_off() -> None:
    async with Rig([Fake(prefills), Fake(prefills)], health_interval_s=60.0) as rig:
        await rig.prefill[0].stop()
        for _ in range(2):
            assert (await rig.complete()).status_code == 200
        assert rig.prefill[1].releases == []
        names = {c.body["kv_transfer_params"]["transfer_id"] for c in rig.prefill[1].calls}
        assert len(names) == 2


async def test_kv_of_a_request_that_ended_well_is_not_given_back() -> None:
    async with Rig() as rig:
        for stream in (False, True):
            assert (await rig.complete(stream=stream)).status_code == 200
    assert len(rig.prefill[0].calls) == 2 and rig.prefill[0].releases == []

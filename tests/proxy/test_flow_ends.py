"""Answers that break off, servers that become silent, and clients that disconnect."""

import asyncio
import json
from functools import partial

import pytest
from openai.types.responses import ResponseErrorEvent

from proxy.health import SILENCES
from proxy.membership import Kind
from tests.proxy.fakes import (
    KV_PARAMS,
    Call,
    Drop,
    Fake,
    Rig,
    Waits,
    breaks_off,
    decodes,
    fails,
    hangs,
    prefills,
    releases,
    streams,
    until,
)
from tests.proxy.scripted import OK, Reader, Writer, read_request

_ONE = b"data: 1\n\n"


@pytest.mark.parametrize(
    ("behave", "number"),
    [
        (streams(_ONE, ends=False), 0),
        (streams(_ONE + b'data: {"half', ends=False), 0),
        (streams(_ONE), 0),  # the last event is missing
        (streams(_ONE + b'data: {"sequence_number": 6, "delta": "\\ndata: 1"}\n\n'), 7),
    ],
)
async def test_stream_that_breaks_ends_with_an_error_event(behave, number):
    async with Rig(decode=[Fake(behave)]) as rig:
        for path in ("completions", "responses"):
            await until(lambda: rig.is_ready(1))
            response = await rig.client.post(f"/v1/{path}", json={"stream": True})
            assert response.status_code == 200
            first, *_, event, data = (
                line for line in response.text.split("\n") if line
            )
            assert (first, event) == ("data: 1", "event: error")
            body = json.loads(data.removeprefix("data: "))
            assert body["error"]["code"] == "decode_server_lost"
            assert body["error"]["phase"] == "decode"
        error_event = ResponseErrorEvent.model_validate(body, strict=True)
        assert error_event.sequence_number == number
        await until(lambda: rig.metric("baton_proxy_responses", status="broken") == 2)


async def test_stream_of_messages_that_breaks_ends_with_anthropics_error_event():
    broken = streams(b'event: ping\ndata: {"type": "ping"}\n\n', ends=False)
    async with Rig(decode=[Fake(broken)]) as rig:
        response = await rig.client.post("/v1/messages", json={"stream": True})
        event, data = response.text.strip().rpartition("\n\n")[2].split("\n")
        assert event == "event: error"
        body = json.loads(data.removeprefix("data: "))
        assert body["type"] == "error" and body["error"]["type"] == "api_error"
        assert body["request_id"] == response.headers["request-id"]


async def test_errors_of_the_proxy_have_the_form_of_the_api():
    async with Rig(decode=[]) as rig:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": []}
            response = await rig.client.post(path, json=body)
            assert response.status_code == 503
            error = response.json()
            assert error["type"] == "error"
            assert error["error"]["type"] == "overloaded_error"
            assert error["request_id"] == response.headers["request-id"]
            response = await rig.client.get(path)
            assert response.json()["error"]["type"] == "invalid_request_error"
        response = await rig.client.post("/v1/messages/batches", json={})
        assert response.json()["error"]["type"] == "not_found_error"
        response = await rig.client.post("/v1/chat/completions", json={})
        assert "request-id" not in response.headers
        assert response.json().keys() == {"error"}


async def test_error_event_is_relayed_without_another_and_kv_is_released():
    text = b'data: 1\n\nevent: error\ndata: {"error": {"code": "engine_died"}}\n\n'

    async with Rig(decode=[Fake(streams(text))]) as rig:
        assert (await rig.complete(stream=True)).content == text
        await until(lambda: rig.metric("baton_proxy_responses", status="broken") == 1)
        await until(lambda: len(rig.prefill[0].releases) == 1)
        assert rig.prefill[0].releases[0].body == {"kv_transfer_params": KV_PARAMS}


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "code"),
    [
        (hangs, decodes, 200, "timeout"),
        (prefills, hangs, 504, "decode_server_timeout"),
        (prefills, Waits(sends=_ONE), 200, "decode_server_timeout"),
        (prefills, breaks_off, 502, "decode_server_lost"),
    ],
)
async def test_silent_server_times_out_and_a_partial_answer_is_an_error(
    prefill, decode, status, code
):
    options = {"read_timeout_s": 0.2, "resume_wait_s": 0.05}
    async with Rig([Fake(prefill)], [Fake(decode)], **options) as rig:
        response = await rig.complete()
        assert response.status_code == status
        if prefill is hangs:
            assert rig.decode_only(code) == 1
        else:
            assert f'"code":"{code}"' in response.text
            assert code != "decode_server_timeout" or "0.2 s" in response.text


@pytest.mark.parametrize("num_others", [0, 1])
async def test_proxy_gives_up_a_prefill_server_that_answers_no_health_checks(
    num_others,
):
    """The server is suspended: its connections stay open, but no bytes arrive."""
    stopped = Fake(hangs)
    fakes = [stopped, *(Fake(prefills) for _ in range(num_others))]
    async with Rig(fakes, health_timeout_s=0.05, read_timeout_s=3600.0) as rig:
        request = asyncio.create_task(rig.complete())
        await until(lambda: len(stopped.calls) == 1)
        stopped.silent = True
        assert (await request).status_code == 200
        assert rig.decode_only("lost") == (not num_others)
        assert rig.in_flight() == 0


@pytest.mark.parametrize("num_others", [0, 1])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_proxy_gives_up_a_decode_server_that_is_silent_for_long(
    has_begun, num_others
):
    async def stops(call: Call) -> None:
        stopped.silent = True
        await Waits(sends=_ONE if has_begun else b"")(call)

    stopped = Fake(stops)
    fakes = [stopped, *(Fake(decodes) for _ in range(num_others))]
    async with Rig(decode=fakes, health_timeout_s=0.05, read_timeout_s=3600.0) as rig:
        answer = await rig.complete(stream=True)
        assert answer.status_code == (200 if has_begun or num_others else 502)
        if num_others and not has_begun:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert '"decode_server_lost"' in answer.text
            assert "health checks" in answer.text
            assert "[DONE]" not in answer.text
        assert rig.in_flight() == 0


async def test_decode_server_that_is_silent_for_a_short_time_keeps_its_requests():
    pauses = Waits(decodes)
    async with Rig(decode=[Fake(pauses)], health_timeout_s=0.05) as rig:
        request = asyncio.create_task(rig.complete())
        await pauses.begun.wait()
        rig.decode[0].silent = True
        (server,) = rig.app.fleet.by_kind[Kind.DECODE]
        await until(lambda: server.health.num_silences > SILENCES)
        assert not server.health.ready
        pauses.go.set()
        assert (await request).json() == {"text": "onetwo"}


# -- clients that disconnect


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream"])
async def test_disconnect_of_a_client_ends_the_leg_in_flight(leg):
    waits = Waits(sends=_ONE if leg == "stream" else b"")
    kind = "prefill" if leg == "prefill" else "decode"
    async with Rig(**{kind: [Fake(waits)]}) as rig:
        request = asyncio.create_task(rig.complete(stream=leg == "stream"))
        await waits.begun.wait()
        request.cancel()
        await waits.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await request
        if leg == "prefill":
            assert rig.decode[0].calls == []
        await until(lambda: rig.metric("baton_proxy_client_disconnects") == 1)
        assert rig.metric("baton_proxy_requests_in_progress") == 0
        assert rig.in_flight() == 0
        assert rig.is_ready(0) and rig.is_ready(1)


async def test_client_that_closes_after_done_is_not_counted_as_disconnect():
    lingers = Waits(sends=_ONE + b"data: [DONE]\n\n")
    async with Rig(decode=[Fake(lingers)]) as rig:
        body = {"prompt": "x", "stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in response.aiter_raw():
                if b"[DONE]" in chunk:
                    break
        await lingers.left.wait()
        await until(lambda: rig.metric("baton_proxy_responses", status="200") == 1)
        assert rig.metric("baton_proxy_client_disconnects") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refused_before", [False, True])
async def test_kv_is_released_when_clients_leave_a_decode_server_that_hangs(
    refused_before, stream
):
    """A suspended decode server cannot release the KV itself, so the proxy does.

    The proxy closes the connection to the decode server first. So a decode server that
    still runs sees the end of the request before the lease of the KV ends. The same
    must hold if another decode server has refused the request before.
    """
    has_begun = asyncio.Event()
    prefill = Fake(prefills)
    num_releases_at_disconnect: list[int] = []

    async def suspends(call: Call) -> None:
        has_begun.set()
        await call.disconnected()
        num_releases_at_disconnect.append(len(prefill.releases))

    refuses = [Fake(fails(503, "overloaded"))] if refused_before else []
    async with Rig([prefill], [*refuses, Fake(suspends)]) as rig:
        request = asyncio.create_task(rig.complete(stream=stream))
        await has_begun.wait()
        request.cancel()
        await until(lambda: len(prefill.releases) == 1)
        assert num_releases_at_disconnect == [0]
        assert prefill.releases[0].body == {"kv_transfer_params": KV_PARAMS}
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(lambda: rig.metric("baton_proxy_client_disconnects") == 1)
    assert len(prefill.releases) == len(prefill.calls) == 1


_JSON = {"content-type": "application/json"}


async def _stops_after_the_head(call: Call) -> None:
    await call.start(200, {**_JSON, "content-length": "100"})
    await call.disconnected()


async def _stops_before_the_last_byte(call: Call) -> None:
    body = json.dumps({"id": "p", "kv_transfer_params": KV_PARAMS}).encode()
    await call.start(200, {**_JSON, "content-length": str(len(body) + 1)})
    await call.write(body)
    await call.disconnected()


@pytest.mark.parametrize(
    "end", ["the client leaves", "time is up", "the connection breaks"]
)
@pytest.mark.parametrize(
    "stops", [hangs, _stops_after_the_head, _stops_before_the_last_byte]
)
async def test_prefill_with_an_incomplete_answer_is_cancelled(stops, end):
    """The prefill server may have leased KV, but the lease ID is in the part of the
    answer that did not arrive. So the proxy cancels by transfer ID.
    """
    has_begun = asyncio.Event()

    async def behaves(call: Call) -> None:
        has_begun.set()
        if end == "the connection breaks":
            call.disconnected = partial(asyncio.sleep, 0)  # type: ignore[method-assign]
        await stops(call)
        raise Drop

    read_timeout_s = 0.2 if end == "time is up" else 3600.0
    async with Rig([Fake(behaves)], read_timeout_s=read_timeout_s) as rig:
        request = asyncio.create_task(rig.complete())
        await has_begun.wait()
        if end == "the client leaves":
            request.cancel()
        await until(lambda: len(rig.prefill[0].releases) == 1)
        (prefill_call,) = rig.prefill[0].calls
        (release,) = rig.prefill[0].releases
        transfer_id = prefill_call.body["kv_transfer_params"]["transfer_id"]
        assert release.body["kv_transfer_params"]["transfer_id"] == transfer_id
        await asyncio.gather(request, return_exceptions=True)


async def test_no_client_waits_for_a_slow_release_of_kv():
    slow = Waits(releases)
    refuses = Fake(fails(413, "payload_too_large"))
    async with Rig([Fake(prefills, on_release=slow)], [refuses]) as rig:
        assert (await rig.complete()).status_code == 413
        await slow.begun.wait()
        slow.go.set()


async def test_kv_is_not_released_if_prefill_was_not_sent_or_its_kv_was_used():
    async with Rig([Fake(prefills), Fake(prefills)], health_interval_s=60.0) as rig:
        await rig.prefill[0].stop()
        for stream in (False, True):
            assert (await rig.complete(stream=stream)).status_code == 200
        transfer_ids = {
            call.body["kv_transfer_params"]["transfer_id"]
            for call in rig.prefill[1].calls
        }
        assert len(transfer_ids) == 2
    assert rig.prefill[1].releases == []


# -- a decode server that dies at each byte of its answer

STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
    b'a\r\ndata: {"a"\r\n4\r\n:1}\n\r\n1\r\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
)
JSON_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    b'content-length: 7\r\n\r\n{"a":1}'
)


class Dying:
    """A server that sends only the first `position` bytes of each answer, except to GET
    /ready.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.position = 0

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        try:
            while (await read_request(reader)).startswith(b"GET /ready"):
                writer.write(OK)
            writer.write(self.answer[: self.position])
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("answer", [STREAM, JSON_ANSWER])
async def test_client_gets_exactly_one_end_wherever_the_server_dies(answer):
    async def send_requests(rig: Rig, dying: Dying) -> None:
        head = answer.index(b"\r\n\r\n") + 4
        done = answer.find(b"[DONE]\n\n") + len(b"[DONE]\n\n")
        for dying.position in range(len(answer) + 1):
            await until(lambda: rig.is_ready(0))
            response = await rig.complete(stream=answer is STREAM)
            if answer is JSON_ANSWER:
                is_complete = dying.position == len(answer)
                assert response.status_code == (200 if is_complete else 502)
                continue
            assert response.status_code == (200 if dying.position >= head else 502)
            num_done = response.text.count("data: [DONE]\n\n")
            num_errors = response.text.count('"error":{')
            is_done = dying.position >= done
            expected = (1, 0) if is_done else (0, 1)
            assert (num_done, num_errors) == expected, dying.position

    dying = Dying(answer)
    async with await asyncio.start_server(dying, "127.0.0.1", 0) as server:
        # The fake receives no request, because `dying` gets the requests instead.
        fake = Fake(decodes)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        # The proxy need not wait, because there is no second server.
        async with Rig(prefill=[], decode=[fake], resume_wait_s=0.05) as rig:
            await send_requests(rig, dying)


async def test_expired_deadline_is_reported_when_the_client_reads_again():
    """An earlier answer, which the client has not read yet, fills the connection."""
    text = "x" * (1 << 24)
    body = b'{"model": "m", "prompt": "hello"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
    head += b"content-length: %d\r\n" % len(body)

    async def answer(call: Call) -> None:
        is_late = "x-request-timeout-s" in call.headers
        await call.answer(200, {"text": "" if is_late else text})

    async with Rig(prefill=[], decode=[Fake(answer)]) as rig:
        address = rig.listener.getsockname()[:2]
        reader, writer = await asyncio.open_connection(*address, limit=1 << 25)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        late_request_head = b"x-request-timeout-s: 0.3\r\n\r\n"
        writer.write(head + b"\r\n" + body + head + late_request_head + body)
        await until(lambda: len(rig.decode[0].calls) == 2)
        await until(lambda: rig.metric("baton_proxy_requests_in_progress") == 0)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        first = await reader.readuntil(b'"}')
        assert first.startswith(b"HTTP/1.1 200 ") and text.encode() in first
        second = await reader.readuntil(b"\r\n\r\n")
        assert second.startswith(b"HTTP/1.1 504 "), second
        await until(lambda: rig.metric("baton_proxy_responses", status="504") == 1)
        writer.close()

"""Full queues, deadlines and clients that do not read: the proxy in front of scripted servers."""

import asyncio
import json
import socket

import pytest

from protocol.http.deadlines import MAX_S, Deadline
from tests.proxy.fakes import (
    Behave,
    Call,
    Fake,
    Rig,
    Waits,
    answers,
    decodes,
    hangs,
    prefills,
    until,
)


def full(retry_after: int, phase: str = "admission") -> Behave:
    error = {"code": "rate_limit_exceeded", "phase": phase, "message": "no room"}
    return answers(429, {"error": error}, {"retry-after": str(retry_after)})


def fleet(*behaviours: Behave) -> list[Fake]:
    return [Fake(behave) for behave in behaviours]


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "retry_after", "num_asked"),
    [
        ((full(9), prefills), (decodes,), 200, None, (1, 1, 1)),
        ((prefills,), (full(9), decodes), 200, None, (1, 1, 1)),
        ((full(9), full(4)), (decodes,), 429, "4", (1, 1, 0)),  # D is not to do it all
        ((prefills,), (full(9), full(20)), 429, "9", (1, 1, 1)),
        ((), (full(9),), 429, "9", (1,)),
        ((prefills,), (full(7, "access"), decodes), 429, "7", (1, 1, 0)),  # a key's own limit
    ],
)
async def test_a_full_server_is_left_out_and_if_all_are_the_client_is_told_when_to_come_back(
    prefill, decode, status, retry_after, num_asked
):
    async with Rig(fleet(*prefill), fleet(*decode), routing="round_robin") as rig:
        answer = await rig.complete()
        assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
        if status == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        fakes = (*rig.prefill, *rig.decode)
        assert tuple(len(fake.calls) for fake in fakes) == num_asked
        if status == 429 and prefill and rig.prefill[0].behave is prefills:
            await until(lambda: len(rig.prefill[0].releases) == 1)  # its KV goes home
        assert rig.in_flight() == 0 and all(map(rig.is_ready, range(len(fakes))))


async def test_a_server_that_was_full_just_now_is_asked_by_the_shorter_and_more_urgent():
    prefill, decode = fleet(prefills), fleet(full(100))
    async with Rig(prefill, decode) as rig:
        for priority, length, num_asked in (
            *((0, 400, 1), (0, 400, 1), (3, 400, 1), (0, 900, 1)),
            *((-1, 400, 2), (0, 400, 2), (0, 100, 3), (3, 100, 3), (0, 300, 3)),
        ):
            refused = await rig.complete(prompt="x" * length, priority=priority)
            assert refused.status_code == 429 and 99 <= int(refused.headers["retry-after"]) <= 100
            assert len(prefill[0].calls) == len(decode[0].calls) == num_asked
        answer = await rig.client.post("/tokenize", json={"prompt": "a"})
        assert answer.status_code == 429 and len(decode[0].calls) == num_asked + 1


async def test_prompts_that_prefill_servers_have_yet_to_compute_are_a_queue():
    """Of servers that say nothing of their own, as vLLM's."""
    waits = Waits(prefills)
    async with Rig(fleet(waits), max_queue_s=10.0) as rig:  # it takes 25 s, as guessed
        first = asyncio.create_task(rig.complete(prompt="x" * 4_000_000))
        await waits.begun.wait()
        refused = await rig.complete()
        assert refused.status_code == 429 and len(rig.prefill[0].calls) == 1
        urgent = asyncio.create_task(rig.complete(priority=-1))
        await until(lambda: len(rig.prefill[0].calls) == 2)
        waits.go.set()
        assert {(await one).status_code for one in (first, urgent)} == {200}
        assert (await rig.complete()).status_code == 200


@pytest.mark.parametrize("bound", ["max_in_flight", "max_held_bytes"])
async def test_only_so_many_requests_are_under_way(bound):
    waits = Waits(decodes)
    async with Rig([], fleet(waits), **{bound: 1}) as rig:
        first = asyncio.create_task(rig.complete())
        await waits.begun.wait()
        for path in ("/v1/completions", "/tokenize"):
            refused = await rig.client.post(path, json={"prompt": "a"})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert f"--{bound}".replace("_", "-") in refused.text
        waits.go.set()
        assert (await first).status_code == 200
        assert (await rig.complete()).status_code == 200


# -- deadlines -----------------------------------------------------------------------------------

SOON = {"x-request-timeout-s": "0.2"}
SOON_LINE = "x-request-timeout-s: 0.02"


@pytest.mark.parametrize("given", ["0", "soon", "-3"])
async def test_a_time_that_is_none_is_refused(given):
    async with Rig() as rig:
        answer = await rig.complete(headers={"x-request-timeout-s": given})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "x-request-timeout-s")
        assert not rig.prefill[0].calls


@pytest.mark.parametrize("default", [False, True])
async def test_servers_are_told_what_is_left_of_the_time(default):
    options = {"request_timeout_s": 50.0} if default else {}
    async with Rig(**options) as rig:
        given = None if default else {"x-request-timeout-s": "50"}
        assert (await rig.complete(headers=given)).status_code == 200
        told = [
            float(fake.calls[0].headers["x-request-timeout-s"])
            for fake in (*rig.prefill, *rig.decode)
        ]
        assert 51.0 >= told[0] >= told[1] > 1.0
    now = asyncio.get_running_loop().time()
    for left_s, header in ((0, b"1.000"), (MAX_S, b"1000000.000")):  # the proxy's end comes first
        assert Deadline(50.0, now + left_s).header()[1] == header


@pytest.mark.parametrize(
    ("prefill", "decode", "gives_back"),
    [(hangs, decodes, "transfer_id"), (prefills, hangs, "remote_engine_id")],
    ids=["in prefill", "in decode"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_expired_request_is_504_and_its_legs_end(prefill, decode, gives_back, stream):
    async with Rig(fleet(prefill), fleet(decode)) as rig:
        answer = await rig.complete(headers=SOON, stream=stream)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: len(rig.prefill[0].releases) == 1)
        assert gives_back in rig.prefill[0].releases[0].body["kv_transfer_params"]
        assert rig.in_flight() == 0 and all(map(rig.is_ready, range(2)))


async def test_an_expired_stream_ends_in_an_error_event():
    waits = Waits(sends=b'data: {"text": "one"}\n\ndata: {"te')
    async with Rig(decode=fleet(waits)) as rig:
        answer = await rig.complete(headers=SOON, stream=True)
        first, last = answer.text.removesuffix("\n\n").split("\n\n")
        assert first == 'data: {"text": "one"}'
        name, _, data = last.partition("\ndata: ")
        assert name == "event: error"
        assert json.loads(data)["error"]["code"] == "deadline_exceeded"
        await waits.left.wait()
        assert rig.in_flight() == 0


async def test_a_body_that_comes_too_late_is_504():
    async with Rig() as rig:
        reader, writer = await asyncio.open_connection(*rig.listener.getsockname())
        lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Length: 9", SOON_LINE)
        writer.write("\r\n".join((*lines, "", "")).encode())
        assert b" 504 " in await reader.readline()
        writer.close()
        assert not rig.prefill[0].calls


async def test_a_client_that_does_not_read_holds_its_server_back():
    """Nothing piles up here: the server's own connection fills, and the server knows what to do."""
    sent, is_over, piece = 0, False, b'data: {"text": "' + b"x" * 60_000 + b'"}\n\n'

    async def floods(call: Call) -> None:
        nonlocal sent
        await call.start()
        while not is_over:
            await call.write(piece)
            sent += len(piece)

    async with Rig([], fleet(floods)) as rig:
        sock = socket.create_connection(rig.listener.getsockname())
        body = b'{"model": "m", "prompt": "a", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        sock.sendall(head + body)
        before = -1
        while before < sent or not sent:  # until half a second brings no more
            before = sent
            await asyncio.sleep(0.5)
        assert sent < 64 << 20  # what five sockets hold, however large the system lets them grow
        is_over = True
        sock.close()
        await until(lambda: rig.in_flight() == 0)

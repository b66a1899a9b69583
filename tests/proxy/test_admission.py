"""Full queues, deadlines, and clients that do not read their answers, with fake
servers.
"""

import asyncio
import json
import socket

import pytest

from protocol.errors import MAX_RETRY_AFTER_S
from protocol.http.deadlines import MAX_S, Deadline
from proxy.membership import Kind
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
from tests.proxy.test_foreign import decodes_as_vllm, prefills_as_vllm, vllm_server


def refuses_as_full(retry_after: int, phase: str = "admission") -> Behave:
    error = {"code": "rate_limit_exceeded", "phase": phase, "message": "no room"}
    return answers(429, {"error": error}, {"retry-after": str(retry_after)})


def fleet(*behaviours: Behave) -> list[Fake]:
    return [Fake(behave) for behave in behaviours]


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "retry_after", "num_calls"),
    [
        ((refuses_as_full(9), prefills), (decodes,), 200, None, (1, 1, 1)),
        ((prefills,), (refuses_as_full(9), decodes), 200, None, (1, 1, 1)),
        # If all prefill servers are full, the decode server does not compute the prompt
        # instead.
        ((refuses_as_full(9), refuses_as_full(4)), (decodes,), 429, "4", (1, 1, 0)),
        ((prefills,), (refuses_as_full(9), refuses_as_full(20)), 429, "9", (1, 1, 1)),
        ((), (refuses_as_full(9),), 429, "9", (1,)),
        # A 429 for the limit of an API key does not mean that the queue is full.
        ((prefills,), (refuses_as_full(7, "access"), decodes), 429, "7", (1, 1, 0)),
    ],
)
async def test_full_server_is_skipped_and_429_has_the_shortest_wait_if_all_are_full(
    prefill, decode, status, retry_after, num_calls
):
    async with Rig(fleet(*prefill), fleet(*decode), routing="round_robin") as rig:
        answer = await rig.complete()
        assert answer.status_code == status
        assert answer.headers.get("retry-after") == retry_after
        if status == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        fakes = (*rig.prefill, *rig.decode)
        assert tuple(len(fake.calls) for fake in fakes) == num_calls
        if status == 429 and prefill and rig.prefill[0].behave is prefills:
            await until(lambda: len(rig.prefill[0].releases) == 1)
        assert rig.in_flight() == 0
        assert all(rig.is_ready(index) for index in range(len(fakes)))


async def test_full_server_still_receives_shorter_and_more_urgent_requests():
    prefill = fleet(prefills)
    decode = fleet(refuses_as_full(50))
    async with Rig(prefill, decode) as rig:
        for priority, length, num_calls in (
            *((0, 400, 1), (0, 400, 1), (3, 400, 1), (0, 900, 1)),
            *((-1, 400, 2), (0, 400, 2), (0, 100, 3), (3, 100, 3), (0, 300, 3)),
        ):
            refused = await rig.complete(prompt="x" * length, priority=priority)
            assert refused.status_code == 429
            assert 49 <= int(refused.headers["retry-after"]) <= 50
            assert len(prefill[0].calls) == len(decode[0].calls) == num_calls
        answer = await rig.client.post("/tokenize", json={"prompt": "a"})
        assert answer.status_code == 429 and len(decode[0].calls) == num_calls + 1


async def test_foreign_prefill_servers_are_full_by_estimate():
    """Servers such as vLLM's have no admission control, so the proxy estimates their
    queues. The estimate for the first prompt exceeds --max-queue-s.
    """
    waits = Waits(prefills_as_vllm)
    prefill = vllm_server(waits, "m")
    decode = vllm_server(decodes_as_vllm, "m")
    async with Rig([prefill], [decode], max_queue_s=0.05) as rig:
        first = asyncio.create_task(rig.complete(prompt="x" * 40_000))
        await waits.begun.wait()
        refused = await rig.complete()
        assert refused.status_code == 429 and len(rig.prefill[0].calls) == 1
        waits.go.set()
        assert (await first).status_code == 200
        assert (await rig.complete()).status_code == 200


CONTEXT = 1000


def refuses_then(otherwise: Behave) -> Behave:
    """Return a behaviour that refuses bodies of more than 10,000 bytes as too long, and
    answers all others like `otherwise`.
    """

    async def behave(call: Call) -> None:
        if len(call.raw) > 10_000:
            error = {"code": "context_length_exceeded", "message": "too long"}
            await call.answer(400, {"error": error})
        else:
            await otherwise(call)

    return behave


async def test_prompt_that_will_be_refused_counts_as_one_full_context():
    """A prompt of many bytes may be far longer than the context. Until the server
    refuses it, the proxy estimates its load as that of one full context.
    """
    waits = Waits(refuses_then(prefills))
    prefill = Fake(waits, max_model_len=CONTEXT)
    decode = Fake(decodes, max_model_len=CONTEXT)
    async with Rig([prefill], [decode], max_queue_s=0.01) as rig:
        load_tracker = rig.app.load_tracker
        first = asyncio.create_task(rig.complete(prompt="x" * 4_000_000))
        await waits.begun.wait()
        server = rig.app.fleet.by_kind[Kind.PREFILL][0]
        assert load_tracker.wait_s(server) < 1.0
        prefill.behave = refuses_then(prefills)
        for number in range(5):
            assert (await rig.complete(prompt=f"{number}")).status_code == 200
        sizes = (len(load_tracker._prefixes), len(load_tracker._tails))
        waits.go.set()
        assert (await first).status_code == 400
        for number in range(5):
            refused = await rig.complete(prompt=f"{number}" * 20_000)
            assert refused.status_code == 400
        # The load tracker keeps nothing of the refused prompts.
        assert (len(load_tracker._prefixes), len(load_tracker._tails)) == sizes
        assert not load_tracker._pending_blocks
        assert load_tracker.loads[server].num_prompts == 0


async def test_proxy_leaves_the_refusal_to_servers_with_admission_control():
    waits = Waits(prefills)
    async with Rig(fleet(waits), max_queue_s=0.01) as rig:
        requests = [
            asyncio.create_task(rig.complete(prompt="x" * 400_000)) for _ in range(3)
        ]
        await until(lambda: len(rig.prefill[0].calls) == 3)
        waits.go.set()
        assert {(await request).status_code for request in requests} == {200}


@pytest.mark.parametrize("retry_after", [61, 2146, 26_970])
async def test_retry_after_is_limited_to_a_minute(retry_after):
    async with Rig([], fleet(refuses_as_full(retry_after))) as rig:
        refused = await rig.complete()
        assert refused.headers["retry-after"] == f"{MAX_RETRY_AFTER_S}" == "60"


@pytest.mark.parametrize("kind", list(Kind))
async def test_full_trial_queue_refuses_only_requests_with_new_schemas(kind):
    def refuses_schemas(otherwise: Behave) -> Behave:
        async def behave(call: Call) -> None:
            if "structured_outputs" in call.body:
                await refuses_as_full(5, "grammar")(call)
            else:
                await otherwise(call)

        return behave

    prefill: Behave = prefills
    decode: Behave = decodes
    if kind is Kind.PREFILL:
        prefill = refuses_schemas(prefill)
    else:
        decode = refuses_schemas(decode)
    async with Rig(fleet(prefill), fleet(decode)) as rig:
        for _ in range(3):
            refused = await rig.complete(structured_outputs={"regex": "a"})
            error = refused.json()["error"]
            assert (refused.status_code, error["phase"]) == (429, "grammar")
            assert refused.headers["retry-after"] == "5"
            assert (await rig.complete()).status_code == 200


@pytest.mark.parametrize("limit_option", ["max_in_flight", "max_held_bytes"])
async def test_requests_in_flight_have_a_limit(limit_option):
    waits = Waits(decodes)
    async with Rig([], fleet(waits), **{limit_option: 1}) as rig:
        first = asyncio.create_task(rig.complete())
        await waits.begun.wait()
        for path in ("/v1/completions", "/tokenize"):
            refused = await rig.client.post(path, json={"prompt": "a"})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert f"--{limit_option}".replace("_", "-") in refused.text
        waits.go.set()
        assert (await first).status_code == 200
        assert (await rig.complete()).status_code == 200


# -- deadlines

SHORT_TIMEOUT = {"x-request-timeout-s": "0.2"}
SHORT_TIMEOUT_LINE = "x-request-timeout-s: 0.02"


@pytest.mark.parametrize("timeout", ["0", "soon", "-3"])
async def test_invalid_timeout_is_refused(timeout):
    async with Rig() as rig:
        answer = await rig.complete(headers={"x-request-timeout-s": timeout})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "x-request-timeout-s")
        assert not rig.prefill[0].calls


@pytest.mark.parametrize("has_default_timeout", [False, True])
async def test_servers_receive_the_time_that_is_left(has_default_timeout):
    options = {"request_timeout_s": 50.0} if has_default_timeout else {}
    async with Rig(**options) as rig:
        headers = None if has_default_timeout else {"x-request-timeout-s": "50"}
        assert (await rig.complete(headers=headers)).status_code == 200
        times_left_s = [
            float(fake.calls[0].headers["x-request-timeout-s"])
            for fake in (*rig.prefill, *rig.decode)
        ]
        assert 51.0 >= times_left_s[0] >= times_left_s[1] > 1.0
    now = asyncio.get_running_loop().time()
    # Servers get one second more than is left, so that the proxy ends the request
    # first.
    for left_s, header in ((0, b"1.000"), (MAX_S, b"1000000.000")):
        assert Deadline(50.0, now + left_s).header()[1] == header


@pytest.mark.parametrize(
    ("prefill", "decode", "released_by"),
    [(hangs, decodes, "transfer_id"), (prefills, hangs, "remote_engine_id")],
    ids=["in prefill", "in decode"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_expired_request_is_504_and_its_legs_end(
    prefill, decode, released_by, stream
):
    async with Rig(fleet(prefill), fleet(decode)) as rig:
        answer = await rig.complete(headers=SHORT_TIMEOUT, stream=stream)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: len(rig.prefill[0].releases) == 1)
        assert released_by in rig.prefill[0].releases[0].body["kv_transfer_params"]
        assert rig.in_flight() == 0
        assert rig.is_ready(0) and rig.is_ready(1)


async def test_expired_stream_ends_with_an_error_event():
    waits = Waits(sends=b'data: {"text": "one"}\n\ndata: {"te')
    async with Rig(decode=fleet(waits)) as rig:
        answer = await rig.complete(headers=SHORT_TIMEOUT, stream=True)
        first, last = answer.text.removesuffix("\n\n").split("\n\n")
        assert first == 'data: {"text": "one"}'
        name, _, data = last.partition("\ndata: ")
        assert name == "event: error"
        assert json.loads(data)["error"]["code"] == "deadline_exceeded"
        await waits.left.wait()
        assert rig.in_flight() == 0


async def test_body_that_arrives_too_late_is_504():
    async with Rig() as rig:
        reader, writer = await asyncio.open_connection(*rig.listener.getsockname())
        lines = (
            "POST /v1/completions HTTP/1.1",
            "Host: x",
            "Content-Length: 9",
            SHORT_TIMEOUT_LINE,
        )
        writer.write("\r\n".join((*lines, "", "")).encode())
        assert b" 504 " in await reader.readline()
        writer.close()
        assert not rig.prefill[0].calls


async def test_client_that_does_not_read_slows_its_server_down():
    """The proxy buffers a bounded number of bytes, then no longer reads from the
    server.
    """
    sent = 0
    is_over = False
    piece = b'data: {"text": "' + b"x" * 60_000 + b'"}\n\n'

    async def floods(call: Call) -> None:
        nonlocal sent
        await call.start()
        while not is_over:
            await call.write(piece)
            sent += len(piece)

    async with Rig([], fleet(floods)) as rig:
        sock = socket.create_connection(rig.listener.getsockname())
        body = b'{"model": "m", "prompt": "a", "stream": true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        sock.sendall(head + body)
        before = -1
        # Wait until the server sends nothing for half a second.
        while before < sent or not sent:
            before = sent
            await asyncio.sleep(0.5)
        # The buffers of five sockets are smaller than 64 MiB, even at the system's
        # maximum size.
        assert sent < 64 << 20
        is_over = True
        sock.close()
        await until(lambda: rig.in_flight() == 0)

"""Failover of streams after the loss of a decode server. Servers send events in frames,
with the token ids that another server needs to continue.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from protocol import resume
from protocol.resume import BUSY, DIED, HEADER, MEMBER
from proxy.failover import MAX_MOVES
from proxy.membership import LISTED, Kind
from tests.proxy.fakes import (
    LENT,
    Behave,
    Call,
    Drop,
    Fake,
    Rig,
    answers,
    breaks_off,
    decodes,
    fails,
    prefills,
    until,
)

_SECRET = "a secret of sixteen bytes"
_ORIGIN = {"id": "x", "created": 1, "seed": 2, "limits": [9], "digest": "d"}
_EVENTS = [b"data: %d\n\n" % number for number in range(4)]
_EVENTS.append(b"data: 4\n\ndata: [DONE]\n\n")


def _texts(start: int, stop: int) -> list[Any]:
    """Return the texts (token ids by choice) in the frames of events [start, stop)."""
    return [[[0, [number]]] for number in range(start, stop)]


def _framed(start: int, stop: int) -> bytes:
    """Return the frames of events [start, stop). If `start` is 0, the frame with the
    origin comes first.
    """
    frames = [] if start else [resume.frame(_json(_ORIGIN), b"")]
    for text, event in zip(_texts(start, stop), _EVENTS[start:stop], strict=True):
        frames.append(resume.frame(_json(text), event))
    return b"".join(frames)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _num_received(call: Call) -> int:
    """Return the number of events that the client had received before this request,
    which asks for the rest.
    """
    texts = call.body.get(MEMBER, {"texts": [None]})["texts"]
    return len(texts) - 1


def _sends(data: bytes, *, drops: bool = False, piece_bytes: int = 7) -> Behave:
    """Return a behaviour that sends frames in small pieces.

    Args:
        data: the frames. If it is empty, the events that the client has not received
            yet.
        drops: whether to close the connection after `data`, without the end of the
            body.
    """

    async def behave(call: Call) -> None:
        assert bytes(call.headers[HEADER], "ascii") == resume.frames_request(
            _SECRET.encode(), call.headers["x-request-id"].encode("latin-1")
        )
        await call.start(200, {"content-type": "text/event-stream", HEADER: "1"})
        frames = data or _framed(_num_received(call), 5)
        for position in range(0, len(frames), piece_bytes):
            await call.write(frames[position : position + piece_bytes])
        if drops:
            raise Drop
        await call.write(b"", more=False)

    return behave


_CONTINUES = _sends(b"")
_ERROR = b'event: error\ndata: {"error": {"code": "engine_died"}}\n\n'
_DROPS = _sends(_framed(0, 2), drops=True)


def _silent(begun: bytes) -> Behave:
    async def behave(call: Call) -> None:
        await call.start(200, {"content-type": "text/event-stream", HEADER: "1"})
        await call.write(begun)
        await call.disconnected()

    return behave


def _servers_of(*behaves: Behave) -> list[Fake]:
    """Return one server for each behaviour, all with the same model."""
    return [Fake(behave, details={"kv_digest": "a.b.c"}) for behave in behaves]


def _in_turn(*behaves: Behave) -> Behave:
    """Return a behaviour for several servers: their n-th request in total gets the n-th
    of `behaves`.

    Later requests get the last of `behaves`.
    """
    remaining: Iterator[Behave] = iter(behaves)
    last = behaves[-1]

    async def behave(call: Call) -> None:
        await next(remaining, last)(call)

    return behave


_LOSSES: dict[str, tuple[Behave, int, str]] = {
    # The behaviour of the lost server, the number of its frames that are used, and the
    # reason in the metric.
    "it drops the connection": (_DROPS, 2, "lost"),
    "in the middle of a frame": (_sends(_framed(0, 3)[:-4], drops=True), 2, "lost"),
    "in the middle of a comment": (
        _sends(_framed(0, 2) + b":baton 00", drops=True),
        2,
        "lost",
    ),
    "it ends too soon": (_sends(_framed(0, 3)), 3, "error"),
    "its stream is not in frames": (
        _sends(_framed(0, 1) + b"data: 1\n\n", piece_bytes=99),
        0,
        "lost",
    ),
    "its engine dies": (_sends(_framed(0, 1) + resume.frame(DIED, _ERROR)), 1, "died"),
    "it ends in order": (_sends(_framed(0, 4) + resume.frame(BUSY, _ERROR)), 4, "busy"),
}


@pytest.mark.parametrize("name", _LOSSES)
async def test_another_server_continues_and_the_client_does_not_notice(name):
    first, num_frames, reason = _LOSSES[name]
    both = _in_turn(first, _CONTINUES)
    async with Rig(decode=_servers_of(both, both), cluster_secret=_SECRET) as rig:
        forged = {MEMBER: {"texts": [], "mac": "forged"}}
        prediction = {"type": "content", "content": "x"}
        answer = await rig.complete(stream=True, prediction=prediction, **forged)
        assert answer.content == b"".join(_EVENTS)
        assert HEADER not in answer.headers
        calls = [call for fake in rig.decode for call in fake.calls]
        first_call, second_call = sorted(calls, key=lambda call: len(call.raw))
        assert [len(fake.calls) for fake in rig.decode] == [1, 1]
        assert MEMBER not in first_call.body, "the client's member was not removed"
        assert all(call.body["prediction"] == prediction for call in calls)
        if num_frames:
            sent = second_call.body[MEMBER]
            assert resume.open_resume(sent, _SECRET.encode()).origin.id == "x"
            assert sent["texts"] == [_ORIGIN, *_texts(0, num_frames)]
        assert len(rig.prefill[0].calls) == 2, "the prompt was not computed again"
        assert rig.metric("baton_proxy_resumes", reason=reason, outcome="resumed") == 1
        assert rig.metric("baton_proxy_requests", path="pd", reason="routed") == 1
        assert rig.in_flight() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_failover_does_not_need_a_prefill_server(stream):
    """All prefill servers are full, so the decode server that continues computes the
    prompt.
    """
    full = answers(429, {"error": {"phase": "admission"}})
    both = _in_turn(_DROPS, _CONTINUES) if stream else _in_turn(breaks_off, decodes)
    prefill = Fake(_in_turn(prefills, full))
    async with Rig([prefill], _servers_of(both, both), cluster_secret=_SECRET) as rig:
        answer = await rig.complete(stream=stream)
        content = b"".join(_EVENTS) if stream else b'{"text": "onetwo"}'
        assert (answer.status_code, answer.content) == (200, content)
        assert len(rig.prefill[0].calls) == 2


async def test_stream_of_a_silent_server_continues_at_another_server():
    async def stops(call: Call) -> None:
        rig.decode[0].silent = True
        await _silent(_framed(0, 3))(call)

    settings = {
        "health_timeout_s": 0.05,
        "read_timeout_s": 3600.0,
        "cluster_secret": _SECRET,
    }
    async with Rig(decode=_servers_of(stops, _CONTINUES), **settings) as rig:
        assert (await rig.complete(stream=True)).content == b"".join(_EVENTS)
        assert rig.metric("baton_proxy_resumes", reason="lost", outcome="resumed") == 1


# The third id is not valid UTF-8.
@pytest.mark.parametrize("request_id", [b"r", b"\xc3\xa9", b"\xe9"])
# A second server, if there is one, has an incompatible model.
@pytest.mark.parametrize("others", [[], ["x.b.c"]])
async def test_server_that_only_broke_a_connection_continues_the_stream_itself(
    request_id, others
):
    async def drops(call: Call) -> None:
        server.ready = False
        server.polls = 0
        await _DROPS(call)

    (server,) = _servers_of(_in_turn(drops, _CONTINUES))
    fakes = [server]
    for digest in others:
        fakes.append(Fake(_REFUSES, details={"kv_digest": digest}))
    async with Rig(decode=fakes, cluster_secret=_SECRET, routing="round_robin") as rig:
        request = asyncio.create_task(
            rig.complete(stream=True, headers={"x-request-id": request_id})
        )
        await until(lambda: not server.ready and server.polls > 2)
        server.ready = True
        answer = await request
        assert answer.content == b"".join(_EVENTS)
        assert (b"x-request-id", request_id) in answer.headers.raw


async def test_stream_waits_if_the_server_that_should_continue_it_ends_too():
    def ending(then: Behave) -> Behave:
        async def behave(call: Call) -> None:
            for fake in fakes:
                fake.ready = fake.ready and call not in fake.calls
            await then(call)

        return behave

    behave = _in_turn(ending(_DROPS), ending(breaks_off), _CONTINUES)
    fakes = _servers_of(behave, behave)
    async with Rig(decode=fakes, cluster_secret=_SECRET, resume_wait_s=60.0) as rig:
        request = asyncio.create_task(rig.complete(stream=True))
        await until(lambda: not any(fake.ready for fake in fakes))
        polls = fakes[0].polls
        await until(lambda: fakes[0].polls > polls + 2)
        assert not request.done()
        fakes[0].ready = True
        assert (await request).content == b"".join(_EVENTS)


@pytest.mark.parametrize("is_written", [True, False])
async def test_slow_client_gets_the_end_of_a_stream_whose_server_was_lost(is_written):
    """If the server was lost before it had written the end, the client gets an error
    instead.
    """
    reads = asyncio.Event()
    end = resume.frame(b"[]", _EVENTS[-1])
    large = resume.frame(b"[]", b"data: %b\n\n" % (b"x" * (1 << 24)))

    async def behave(call: Call) -> None:
        await call.start(200, {"content-type": "text/event-stream", HEADER: "1"})
        await call.write(large + end if is_written else large)
        await reads.wait()
        await call.write(b"" if is_written else end)
        (server,) = fakes
        server.silent = True
        await call.disconnected()

    fakes = _servers_of(behave)
    async with Rig(
        decode=fakes,
        cluster_secret=_SECRET,
        max_resumes=0,
        health_timeout_s=0.05,
        read_timeout_s=3600.0,
    ) as rig:
        body = {"model": "m", "prompt": "hello", "stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as answer:
            reads.set()
            await until(lambda: rig.in_flight() == 0)
            last_bytes = (await answer.aread())[-1000:]
        assert (b"[DONE]" in last_bytes) is is_written
        assert (b"decode_server_lost" in last_bytes) is not is_written


@pytest.mark.parametrize("stream", [True, False])
async def test_number_of_lost_servers_per_request_is_limited(stream):
    async def breaks(call: Call) -> None:
        start = _num_received(call)
        if stream:
            await _sends(_framed(start, start + 1), drops=True)(call)
        await breaks_off(call)

    async with Rig(
        decode=_servers_of(*[breaks] * 6), cluster_secret=_SECRET, max_resumes=2
    ) as rig:
        answer = await rig.complete(stream=stream)
        assert sum(len(fake.calls) for fake in rig.decode) == 3
        assert '"decode_server_lost"' in answer.text
        assert answer.status_code == (200 if stream else 502)
        num_outcomes = {
            outcome: rig.metric("baton_proxy_resumes", reason="lost", outcome=outcome)
            for outcome in ("limit_reached", "resumed")
        }
        assert num_outcomes == {"limit_reached": 1, "resumed": 2}
        await until(lambda: len(rig.prefill[0].releases) == 3)


async def test_answer_that_breaks_off_is_generated_again():
    both = _in_turn(breaks_off, decodes)
    async with Rig(decode=_servers_of(both, both)) as rig:
        assert (await rig.complete()).json() == {"text": "onetwo"}


_REFERENCE = {"do_remote_prefill": True, "remote_num_tokens": 7}
_MOVED = resume.MOVED + json.dumps(_REFERENCE).encode()


def _hands_over(start: int, stop: int) -> Behave:
    return _sends(_framed(start, stop) + resume.frame(_MOVED, _ERROR))


def _hands_over_answer() -> Behave:
    """Return a behaviour that hands over a request without a stream, after two
    events.
    """
    texts = [_ORIGIN, *_texts(0, 2)]
    frames = [resume.frame(_json(text), b"") for text in texts]
    return _sends(b"".join([*frames, resume.frame(_MOVED, _ERROR)]))


@pytest.mark.parametrize(
    "others", [[_CONTINUES], [fails(503, "resume_refused"), _CONTINUES], []]
)
async def test_stream_that_is_handed_over_continues_with_its_kv(others):
    """The stream continues at another server, or at the same one if there is no
    other.
    """
    first = _in_turn(_hands_over(0, 2), *others, _CONTINUES)
    fakes = _servers_of(*[first] * (1 + len(others)))
    async with Rig(decode=fakes, cluster_secret=_SECRET, max_resumes=1) as rig:
        assert (await rig.complete(stream=True)).content == b"".join(_EVENTS)
        assert len(rig.prefill[0].calls) == 1, "the prompt was computed again"
        calls = [
            call for fake in rig.decode for call in fake.calls if MEMBER in call.body
        ]
        assert len(calls) == max(1, len(others))
        for call in calls:
            params = call.body["kv_transfer_params"]
            assert params == {**_REFERENCE, "sender_releases": True}
            assert call.body[MEMBER]["texts"] == [_ORIGIN, *_texts(0, 2)]
        assert all(len(fake.calls) == 1 for fake in rig.decode) or not others
        assert rig.metric("baton_proxy_resumes", reason="moved", outcome="resumed") == 1
        assert rig.in_flight() == 0


async def test_stream_returns_to_a_removed_server_if_no_other_has_its_model():
    """A new server gets the name of the removed one. The requests of the removed server
    must not be counted for the new server.
    """

    async def leaves(call: Call) -> None:
        rig.app.fleet.leave(server, LISTED)
        await _hands_over(0, 2)(call)

    async def successor_joins(call: Call) -> None:
        new = rig.app.fleet.join(Kind.DECODE, "http://127.0.0.1:1", LISTED)
        assert new.name == server.name
        await _CONTINUES(call)

    fakes = [
        Fake(
            _in_turn(leaves, successor_joins),
            details={"kv_digest": "a.b.c", "model": "m"},
        ),
        Fake(decodes, details={"kv_digest": "a.b.c", "model": "other"}),
    ]
    async with Rig([], fakes, cluster_secret=_SECRET, fixed_series=False) as rig:
        server, other = rig.app.fleet.servers
        assert (await rig.complete(stream=True)).content == b"".join(_EVENTS)
        await until(lambda: server.in_flight == 0)
        new, _ = rig.app.fleet.servers
        assert rig.app.fleet.servers == [new, other]
        assert {*rig.app.load_tracker.loads} <= {new, other}
        assert rig.in_flight() == 0


@pytest.mark.parametrize("is_refused", [False, True])
async def test_answer_without_a_stream_is_handed_over_too(is_refused):
    """If all servers refuse to continue the answer, it is generated again."""
    refusals = [_REFUSES, _REFUSES] if is_refused else []
    both = _in_turn(_hands_over_answer(), *refusals, decodes)
    async with Rig(decode=_servers_of(both, both), cluster_secret=_SECRET) as rig:
        answer = await rig.complete()
        assert (answer.status_code, answer.json()) == (200, {"text": "onetwo"})
        calls = [
            call for fake in rig.decode for call in fake.calls if MEMBER in call.body
        ]
        assert len(calls) == 1 + is_refused
        for call in calls:
            assert call.body["kv_transfer_params"] == {
                **_REFERENCE,
                "sender_releases": True,
            }
            assert call.body[MEMBER]["texts"] == [_ORIGIN, *_texts(0, 2)]
        assert len(rig.prefill[0].calls) == 1 + is_refused
        assert rig.metric("baton_proxy_resumes", reason="moved", outcome="resumed") == 1
        assert rig.in_flight() == 0


async def test_answer_with_too_long_a_history_is_generated_again(monkeypatch):
    """The proxy has not recorded all tokens of the answer, so no server can use the KV
    that is handed over.
    """
    monkeypatch.setattr(resume, "MAX_HISTORY_BYTES", 40)
    both = _in_turn(_hands_over_answer(), decodes)
    async with Rig(decode=_servers_of(both, both), cluster_secret=_SECRET) as rig:
        assert (await rig.complete()).json() == {"text": "onetwo"}
        calls = [call for fake in rig.decode for call in fake.calls]
        assert [call.body["kv_transfer_params"] for call in calls] == [LENT, LENT]


@pytest.mark.parametrize(("num_moves", "reason"), [(3, "lost"), (40, "moved")])
async def test_moves_do_not_count_as_losses_and_are_limited(num_moves, reason):
    async def moves(call: Call) -> None:
        nonlocal num_moves
        num_moves -= 1
        if num_moves < 0:
            await _DROPS_AFTER_EVENT_1(call)
            return
        start = _num_received(call)
        stop = 1 if start == 0 else start
        await _hands_over(start, stop)(call)

    async with Rig(
        decode=_servers_of(moves, moves), cluster_secret=_SECRET, max_resumes=1
    ) as rig:
        answer = await rig.complete(stream=True)
        assert answer.content.count(b"event: error") == 1
        labels = {"reason": reason, "outcome": "limit_reached"}
        assert rig.metric("baton_proxy_resumes", **labels) == 1
        moved = sum(
            rig.metric("baton_proxy_resumes", reason="moved", outcome=outcome)
            for outcome in ("resumed", "limit_reached")
        )
        assert moved == (3 if reason == "lost" else MAX_MOVES + 1)
        await until(lambda: sum(len(fake.releases) for fake in rig.decode) == moved)


_DROPS_AFTER_EVENT_1 = _sends(_framed(1, 2), drops=True)
_REFUSES = fails(503, "resume_refused")


@pytest.mark.parametrize(
    ("first", "second_behave", "outcome", "error"),
    [
        (_DROPS, _CONTINUES, None, b"decode_server_lost"),
        (_DROPS, _REFUSES, "failed", b"decode_server_lost"),
        (_DROPS, decodes, "failed", b"decode_server_lost"),  # a stream without frames
        (_DROPS, fails(400, "resume_rejected"), "failed", b"decode_server_lost"),
        (
            _sends(_framed(0, 2) + resume.frame(DIED, _ERROR)),
            _REFUSES,
            "failed",
            _ERROR,
        ),
        (_DROPS, _CONTINUES, "not_resumable", b"decode_server_lost"),
    ],
)
async def test_stream_that_cannot_continue_ends_with_one_error(
    first, second_behave, outcome, error, monkeypatch
):
    if outcome == "not_resumable":
        monkeypatch.setattr(resume, "MAX_HISTORY_BYTES", 40)
    if outcome is None:  # max_resumes is 0, so the proxy does not request frames

        async def drops(call: Call) -> None:
            assert HEADER not in call.headers
            await call.start()
            await call.write(b"data: 0\n\ndata: 1\n\n")
            raise Drop

        first = drops
    both = _in_turn(first, second_behave)
    max_resumes = 0 if outcome is None else 3
    async with Rig(
        decode=_servers_of(both, both), cluster_secret=_SECRET, max_resumes=max_resumes
    ) as rig:
        answer = await rig.complete(stream=True)
        events = answer.content.split(b"\n\n")
        assert events[:2] == [b"data: 0", b"data: 1"]
        assert events[2].startswith(b"event: error") and error.strip() in events[2]
        assert events[3:] == [b""]
        for name in ("resumed", "failed", "not_resumable"):
            for reason in ("lost", "died"):
                num_resumes = rig.metric(
                    "baton_proxy_resumes", reason=reason, outcome=name
                )
                has_died = error == _ERROR
                assert num_resumes == (
                    name == outcome and (reason == "died") == has_died
                )
        assert rig.in_flight() == 0

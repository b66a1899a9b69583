"""Streams whose decode server is lost, in front of servers that frame what they send."""

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
_EVENTS = [b"data: %d\n\n" % at for at in range(4)] + [b"data: 4\n\ndata: [DONE]\n\n"]


def _texts(start: int, stop: int) -> list[Any]:
    return [[[0, [at]]] for at in range(start, stop)]


def _framed(start: int, stop: int) -> bytes:
    """Events of a stream, with its origin where it begins."""
    origin = resume.frame(json.dumps(_ORIGIN, separators=(",", ":")).encode(), b"")
    told = [
        json.dumps(text, separators=(",", ":")).encode() for text in _texts(start, stop)
    ]
    frames = map(resume.frame, told, _EVENTS[start:stop])
    return b"".join([*([] if start else [origin]), *frames])


def _sends(data: bytes, *, drops: bool = False, at_once: int = 7) -> Behave:
    """A stream of frames in small pieces."""

    async def behave(call: Call) -> None:
        rest = call.body.get(MEMBER, {"texts": [None]})["texts"]
        assert bytes(call.headers[HEADER], "ascii") == resume.frames_request(
            _SECRET.encode(), call.headers["x-request-id"].encode("latin-1")
        )
        await call.start(200, {"content-type": "text/event-stream", HEADER: "1"})
        told = _framed(len(rest) - 1, 5) if not data else data
        for at in range(0, len(told), at_once):
            await call.write(told[at : at + at_once])
        if drops:
            raise Drop
        await call.write(b"", more=False)

    return behave


_GOES_ON = _sends(b"")
_ERROR = b'event: error\ndata: {"error": {"code": "engine_died"}}\n\n'
_DROPS = _sends(_framed(0, 2), drops=True)


def _silent(begun: bytes) -> Behave:
    async def behave(call: Call) -> None:
        await call.start(200, {"content-type": "text/event-stream", HEADER: "1"})
        await call.write(begun)
        await call.gone()

    return behave


def _of(*behaves: Behave) -> list[Fake]:
    """One server for each, of which every call is of the same model."""
    return [Fake(behave, told={"kv_digest": "a.b.c"}) for behave in behaves]


def _in_turn(*behaves: Behave) -> Behave:
    """The n-th request that any server gets is answered by the n-th, later ones by the last."""
    left: Iterator[Behave] = iter(behaves)
    last = behaves[-1]

    async def behave(call: Call) -> None:
        await next(left, last)(call)

    return behave


_LOSSES: dict[str, tuple[Behave, int, str]] = {
    # what the first server does, how many frames of it count, and the reason
    "it drops the connection": (_DROPS, 2, "lost"),
    "in the middle of a frame": (_sends(_framed(0, 3)[:-4], drops=True), 2, "lost"),
    "in the middle of a comment": (
        _sends(_framed(0, 2) + b":baton 00", drops=True),
        2,
        "lost",
    ),
    "it ends too soon": (_sends(_framed(0, 3)), 3, "error"),
    "what it sends is no frame": (
        _sends(_framed(0, 1) + b"data: 1\n\n", at_once=99),
        0,
        "lost",
    ),
    "its engine dies": (_sends(_framed(0, 1) + resume.frame(DIED, _ERROR)), 1, "died"),
    "it ends in order": (_sends(_framed(0, 4) + resume.frame(BUSY, _ERROR)), 4, "busy"),
}


@pytest.mark.parametrize("name", _LOSSES)
async def test_another_server_goes_on_and_the_client_does_not_notice(name):
    first, num_frames, reason = _LOSSES[name]
    both = _in_turn(first, _GOES_ON)
    async with Rig(decode=_of(both, both), cluster_secret=_SECRET) as rig:
        answer = await rig.complete(
            stream=True, **{MEMBER: {"texts": [], "mac": "forged"}}
        )
        assert answer.content == b"".join(_EVENTS)
        assert HEADER not in answer.headers
        calls = sorted(
            (c for fake in rig.decode for c in fake.calls), key=lambda c: len(c.raw)
        )
        assert [len(fake.calls) for fake in rig.decode] == [1, 1]
        assert MEMBER not in calls[0].body, "not even the client's"
        if num_frames:
            sent = calls[1].body[MEMBER]
            assert resume.open_resume(sent, _SECRET.encode()).origin.id == "x"
            assert sent["texts"] == [_ORIGIN, *_texts(0, num_frames)]
        assert len(rig.prefill[0].calls) == 2, "the prompt is had again"
        assert rig.metric("baton_proxy_resumes", reason=reason, outcome="resumed") == 1
        assert rig.metric("baton_proxy_requests", path="pd", reason="routed") == 1
        assert rig.in_flight() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_had_from_another_server_though_no_prefill_server_has_room(
    stream,
):
    """It had begun: the one that goes on with it computes the prompt itself."""
    full = answers(429, {"error": {"phase": "admission"}})
    both = _in_turn(_DROPS if stream else breaks_off, _GOES_ON if stream else decodes)
    fakes = [Fake(_in_turn(prefills, full))], _of(both, both)
    async with Rig(*fakes, cluster_secret=_SECRET) as rig:
        answer = await rig.complete(stream=stream)
        whole = b"".join(_EVENTS) if stream else b'{"text": "onetwo"}'
        assert (answer.status_code, answer.content) == (200, whole)
        assert len(rig.prefill[0].calls) == 2


async def test_a_server_that_falls_silent_is_left_if_there_is_another():
    async def stops(call: Call) -> None:
        rig.decode[0].silent = True
        await _silent(_framed(0, 3))(call)

    settings = {
        "health_timeout_s": 0.05,
        "read_timeout_s": 3600.0,
        "cluster_secret": _SECRET,
    }
    async with Rig(decode=_of(stops, _GOES_ON), **settings) as rig:
        assert (await rig.complete(stream=True)).content == b"".join(_EVENTS)
        assert rig.metric("baton_proxy_resumes", reason="lost", outcome="resumed") == 1


@pytest.mark.parametrize("given", [b"r", b"\xc3\xa9", b"\xe9"])  # which is no UTF-8
@pytest.mark.parametrize("others", [[], ["x.b.c"]])  # of another model
async def test_a_server_that_only_broke_a_connection_goes_on_itself(given, others):
    async def drops(call: Call) -> None:
        own.ready, own.polls = False, 0
        await _DROPS(call)

    (own,) = _of(_in_turn(drops, _GOES_ON))
    fakes = [own, *(Fake(_REFUSES, told={"kv_digest": each}) for each in others)]
    async with Rig(decode=fakes, cluster_secret=_SECRET, routing="round_robin") as rig:
        asked = asyncio.create_task(
            rig.complete(stream=True, headers={"x-request-id": given})
        )
        await until(lambda: not own.ready and own.polls > 2)
        own.ready = True
        answer = await asked
        assert answer.content == b"".join(_EVENTS)
        assert (b"x-request-id", given) in answer.headers.raw


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_slow_client_is_told_the_end_of_a_server_that_is_lost_behind_it(
    is_written,
):
    """Of an end that could not be written yet, that there is none."""
    reads, end = asyncio.Event(), resume.frame(b"[]", _EVENTS[-1])
    large = resume.frame(b"[]", b"data: %b\n\n" % (b"x" * (1 << 24)))

    async def behave(call: Call) -> None:
        await call.start(200, {"content-type": "text/event-stream", HEADER: "1"})
        await call.write(large + end * is_written)
        await reads.wait()
        await call.write(end * (not is_written))
        fakes[0].silent = True
        await call.gone()

    fakes, settings = _of(behave), {"health_timeout_s": 0.05, "read_timeout_s": 3600.0}
    async with Rig(
        decode=fakes, cluster_secret=_SECRET, max_resumes=0, **settings
    ) as rig:
        asked = {"model": "m", "prompt": "hello", "stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=asked) as answer:
            reads.set()
            await until(lambda: rig.in_flight() == 0)
            told = (await answer.aread())[-1000:]
        assert (b"[DONE]" in told, b"decode_server_lost" in told) == (
            is_written,
            not is_written,
        )


@pytest.mark.parametrize("stream", [True, False])
async def test_losses_have_a_limit(stream):
    async def breaks(call: Call) -> None:
        start = len(call.body.get(MEMBER, {"texts": [None]})["texts"]) - 1
        if stream:
            await _sends(_framed(start, start + 1), drops=True)(call)
        await breaks_off(call)

    async with Rig(
        decode=_of(*[breaks] * 6), cluster_secret=_SECRET, max_resumes=2
    ) as rig:
        answer = await rig.complete(stream=stream)
        assert sum(len(fake.calls) for fake in rig.decode) == 3
        assert '"decode_server_lost"' in answer.text
        assert answer.status_code == (200 if stream else 502)
        assert (
            rig.metric("baton_proxy_resumes", reason="lost", outcome="limit_reached")
            == 1
        )
        assert rig.metric("baton_proxy_resumes", reason="lost", outcome="resumed") == 2
        await until(lambda: len(rig.prefill[0].releases) == 3)


async def test_an_answer_that_breaks_off_is_had_again():
    both = _in_turn(breaks_off, decodes)
    async with Rig(decode=_of(both, both)) as rig:
        assert (await rig.complete()).json() == {"text": "onetwo"}


_REFERENCE = {"do_remote_prefill": True, "remote_num_tokens": 7}
_MOVED = resume.MOVED + json.dumps(_REFERENCE).encode()


def _moves(start: int, stop: int) -> Behave:
    return _sends(_framed(start, stop) + resume.frame(_MOVED, _ERROR))


def _moves_whole() -> Behave:
    """What is told of an answer that is no stream."""
    told = (
        json.dumps(each, separators=(",", ":")).encode()
        for each in (_ORIGIN, *_texts(0, 2))
    )
    frames = [resume.frame(each, b"") for each in told]
    return _sends(b"".join([*frames, resume.frame(_MOVED, _ERROR)]))


@pytest.mark.parametrize(
    "others", [[_GOES_ON], [fails(503, "resume_refused"), _GOES_ON], []]
)
async def test_a_stream_that_is_handed_over_goes_on_elsewhere_with_its_kv(others):
    """However many were lost before; where there is no other server, at its own."""
    first = _in_turn(_moves(0, 2), *others, _GOES_ON)
    fakes = _of(*[first] * (1 + len(others)))
    async with Rig(decode=fakes, cluster_secret=_SECRET, max_resumes=1) as rig:
        assert (await rig.complete(stream=True)).content == b"".join(_EVENTS)
        assert len(rig.prefill[0].calls) == 1, "its KV is there"
        calls = [
            call for fake in rig.decode for call in fake.calls if MEMBER in call.body
        ]
        assert len(calls) == max(1, len(others))
        for call in calls:
            told = call.body["kv_transfer_params"]
            assert told == {**_REFERENCE, "sender_releases": True}
            assert call.body[MEMBER]["texts"] == [_ORIGIN, *_texts(0, 2)]
        assert all(len(fake.calls) == 1 for fake in rig.decode) or not others
        assert rig.metric("baton_proxy_resumes", reason="moved", outcome="resumed") == 1
        assert rig.in_flight() == 0


async def test_a_stream_comes_back_to_the_last_server_of_its_model_though_that_has_left():
    """And is not counted as that of a server which got its name meanwhile."""

    async def leaves(call: Call) -> None:
        rig.app.fleet.leave(own, LISTED)
        await _moves(0, 2)(call)

    async def is_succeeded(call: Call) -> None:
        new = rig.app.fleet.join(Kind.DECODE, "http://127.0.0.1:1", LISTED)
        assert new.name == own.name
        await _GOES_ON(call)

    told = [{"kv_digest": "a.b.c", "model": name} for name in ("m", "other")]
    fakes = [
        Fake(_in_turn(leaves, is_succeeded), told=told[0]),
        Fake(decodes, told=told[1]),
    ]
    async with Rig([], fakes, cluster_secret=_SECRET, fixed_series=False) as rig:
        own, other = rig.app.fleet.servers
        assert (await rig.complete(stream=True)).content == b"".join(_EVENTS)
        await until(lambda: own.in_flight == 0)
        new, _ = rig.app.fleet.servers
        assert rig.app.fleet.servers == [new, other]
        assert {*rig.app.load_tracker.loads} <= {new, other}
        assert rig.in_flight() == 0


@pytest.mark.parametrize("is_refused", [False, True])
async def test_so_does_an_answer_that_is_no_stream(is_refused):
    """Or it begins anew, where nobody goes on."""
    both = _in_turn(_moves_whole(), *[_REFUSES] * 2 * is_refused, decodes)
    async with Rig(decode=_of(both, both), cluster_secret=_SECRET) as rig:
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


async def test_an_answer_of_which_too_much_was_told_begins_anew(monkeypatch):
    """Its KV is of tokens that nobody knows."""
    monkeypatch.setattr(resume, "MAX_HISTORY_BYTES", 40)
    both = _in_turn(_moves_whole(), decodes)
    async with Rig(decode=_of(both, both), cluster_secret=_SECRET) as rig:
        assert (await rig.complete()).json() == {"text": "onetwo"}
        given = [
            call.body["kv_transfer_params"]
            for fake in rig.decode
            for call in fake.calls
        ]
        assert given == [LENT, LENT]


@pytest.mark.parametrize(("num", "reason"), [(3, "lost"), (40, "moved")])
async def test_moves_cost_no_resume_and_have_a_limit(num, reason):
    async def moves(call: Call) -> None:
        nonlocal num
        start, num = len(call.body.get(MEMBER, {"texts": [None]})["texts"]) - 1, num - 1
        await (_moves(start, start + (start == 0)) if num >= 0 else _DROPS_LATER)(call)

    async with Rig(
        decode=_of(moves, moves), cluster_secret=_SECRET, max_resumes=1
    ) as rig:
        answer = await rig.complete(stream=True)
        assert answer.content.count(b"event: error") == 1
        assert (
            rig.metric("baton_proxy_resumes", reason=reason, outcome="limit_reached")
            == 1
        )
        moved = sum(
            rig.metric("baton_proxy_resumes", reason="moved", outcome=outcome)
            for outcome in ("resumed", "limit_reached")
        )
        assert moved == (3 if reason == "lost" else MAX_MOVES + 1)
        await until(lambda: sum(len(fake.releases) for fake in rig.decode) == moved)


_DROPS_LATER = _sends(_framed(1, 2), drops=True)
_REFUSES = fails(503, "resume_refused")


@pytest.mark.parametrize(
    ("first", "then", "outcome", "told"),
    [
        (_DROPS, _GOES_ON, None, b"decode_server_lost"),
        (_DROPS, _REFUSES, "failed", b"decode_server_lost"),
        (_DROPS, decodes, "failed", b"decode_server_lost"),  # not the rest of it
        (_DROPS, fails(400, "resume_rejected"), "failed", b"decode_server_lost"),
        (
            _sends(_framed(0, 2) + resume.frame(DIED, _ERROR)),
            _REFUSES,
            "failed",
            _ERROR,
        ),
        (_DROPS, _GOES_ON, "not_resumable", b"decode_server_lost"),
    ],
)
async def test_what_cannot_go_on_has_one_error(first, then, outcome, told, monkeypatch):
    if outcome == "not_resumable":
        monkeypatch.setattr(resume, "MAX_HISTORY_BYTES", 40)
    if outcome is None:  # nobody asks for frames

        async def drops(call: Call) -> None:
            assert HEADER not in call.headers
            await call.start()
            await call.write(b"data: 0\n\ndata: 1\n\n")
            raise Drop

        first = drops
    both = _in_turn(first, then)
    async with Rig(
        decode=_of(both, both), cluster_secret=_SECRET, max_resumes=3 * bool(outcome)
    ) as rig:
        answer = await rig.complete(stream=True)
        events = answer.content.split(b"\n\n")
        assert events[:2] == [b"data: 0", b"data: 1"]
        assert events[2].startswith(b"event: error") and told.strip() in events[2]
        assert events[3:] == [b""]
        for name in ("resumed", "failed", "not_resumable"):
            for reason in ("lost", "died"):
                num = rig.metric("baton_proxy_resumes", reason=reason, outcome=name)
                assert num == (
                    name == outcome and (reason == "died") == (told == _ERROR)
                )
        assert rig.in_flight() == 0

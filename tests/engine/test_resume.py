"""A stream that is cut behind any of its frames goes on at another server, byte for byte."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from engine.http.resume import Framing
from engine.text.tokenizer import Tokenizer
from protocol import resume
from protocol.messages import (
    MOVED,
    AddRequest,
    ErrorInfo,
    KVUsage,
    TokenDelta,
    TokenLogprobs,
)
from tests.engine.test_harmony import CALL as HARMONY_CALL
from tests.engine.test_harmony import FINAL, START, THINK
from tests.engine.test_http_responses import FLAT, SHOWS
from tests.engine.test_http_tools import CALL, TOOL
from tests.proxy.fakes import until
from tests.rigs.http_server import (
    READY,
    SECRET,
    Server,
    serving,
    serving_4k,
    serving_harmony,
    with_template,
)
from tests.rigs.scripted_engine import hang

_CHAT, _RESPONSES, _COMPLETIONS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
)
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_LOGPROBS = {"logprobs": True, "top_logprobs": 1}
_INCLUDE = {"include": ["message.output_text.logprobs"]}


def _script(tokenizer: Tokenizer, texts: Sequence[str], cached: int = 2) -> Any:
    """Says a text in each choice, by turns, behind what is known of it. Of the prompt so many
    tokens were cached."""
    said = [tokenizer.encode(text) for text in texts]

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        name, usage = request.request_id, KVUsage(recomputed=3, cached_tokens=cached)
        if request.num_prompt_logprobs is not None:
            found = [None, *[TokenLogprobs(-1.5)] * (len(request.token_ids) - 1)]
            yield TokenDelta(request_id=name, prompt_logprobs=found)
        for at in range(max(map(len, said)) + 1):
            for choice, ids in enumerate(said[: request.num_choices]):
                known = (
                    request.resumed_choices[choice] if request.resumed_choices else None
                )
                if known and (known.has_ended or at < len(known.token_ids)):
                    continue
                logprob = TokenLogprobs(-at / 8, [7], [-at / 4])
                logprobs = (
                    [logprob] if request.sampling.num_logprobs is not None else None
                )
                if at < len(ids):
                    told = {"token_ids": ids[at : at + 1], "logprobs": logprobs}
                    told |= {"usage": usage} if at == 0 else {}
                    yield TokenDelta(request_id=name, choice=choice, **told)
                elif at == len(ids):
                    told = {"finish_reason": "length", "usage": usage}
                    yield TokenDelta(request_id=name, choice=choice, **told)
                if at:  # first tokens come together, as of one step
                    await asyncio.sleep(0)

    return script


Frames = list[tuple[bytes, bytes]]


async def _ask(
    server: Server, path: str, body: dict[str, Any], texts: Sequence[bytes] = ()
) -> httpx.Response:
    """As a proxy asks for a stream, or for the rest of one."""
    kept = resume.FrameHistory()
    for text in texts:
        kept.add(text + b",")
    more = {resume.MEMBER: msgspec.json.decode(kept.sign(SECRET))} if texts else {}
    headers = {
        "x-request-id": "r",
        resume.HEADER: resume.frames_request(SECRET, b"r").decode(),
    }
    whole = {"model": "m", "stream": True, **body, **more}
    return await server.http.post(path, json=whole, headers=headers)


async def _frames(server: Server, *asked: Any) -> Frames:
    answer = await _ask(server, *asked)
    assert answer.status_code == 200, answer.text
    frames = resume.Frames()
    found = frames.feed(answer.content)
    assert not frames.feed(b"") and answer.headers[resume.HEADER]
    return found


def _joined(frames: Frames) -> bytes:
    return b"".join(events for _, events in frames)


# The endpoint, the request, and what is said in each choice.
_STREAMS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "characters of several tokens": (_CHAT, _HI, ["häß€𝄞!"]),
    "logprobs": (_CHAT, {**_HI, **_LOGPROBS}, ["añb"]),
    "stop strings": (
        _CHAT,
        {**_HI, "stop": ["lala!", "xyz"]},
        ["lalala lalxy lala! more"],
    ),
    "a stop string that is kept": (
        _COMPLETIONS,
        {
            "prompt": "ab",
            "stop": ["END"],
            "include_stop_str_in_output": True,
            "min_tokens": 4,
        },
        ["END ENEND beyond"],
    ),
    "calls": (_CHAT, {**_HI, "tools": [TOOL]}, ["So: " + CALL + CALL + " <tool"]),
    "a required call": (
        _CHAT,
        {**_HI, "tools": [TOOL], "tool_choice": "required"},
        ['[{"name": "add", "parameters": {"a": 12}}]'],
    ),
    "reasoning": (
        _CHAT,
        {**_HI, "stop": ["!!"]},
        ["<think>I thînk</think>\nYes! Yes!!"],
    ),
    "a call in reasoning": (
        _CHAT,
        {**_HI, "tools": [TOOL]},
        [f"<think>hm {CALL} or {CALL}</think> so"],
    ),
    "items": (
        _RESPONSES,
        {"input": "Hi", "tools": [FLAT]},
        ["<think>hm</think>ok" + CALL + "."],
    ),
    "logprobs of items": (
        _RESPONSES,
        {"input": "Hi", "tools": [FLAT], **_INCLUDE, "top_logprobs": 1},
        ["<think>hm</think>\nök <too" + CALL + "\n."],
    ),
    "choices": (_CHAT, {**_HI, "n": 3, **_LOGPROBS}, ["é1 stop", "a", "four ö"]),
    "usage": (
        _CHAT,
        {
            **_HI,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        ["a<é"],
    ),
    "an echo": (
        _COMPLETIONS,
        {"prompt": "äb", "echo": True, "logprobs": 1, "return_token_ids": True, "n": 2},
        ["cé", "d"],
    ),
    "harmony": (
        _CHAT,
        {**_HI, "stop": ["!!", "analysis"]},
        [f"{THINK}I thî!{START}{THINK}so{START}{FINAL}Yes! <|end|>Yes!! more"],
    ),
    "harmony's calls": (
        _CHAT,
        {**_HI, "tools": [TOOL], "n": 2},
        [f"{THINK}I{START}{HARMONY_CALL}{{}}<|call|> so", f"{FINAL}Yes"],
    ),
    "harmony's items": (
        _RESPONSES,
        {"input": "Hi", "tools": [FLAT]},
        [
            f"{THINK}hm{START}<|channel|>final<|message|>Ah{START}{THINK}a{START}{HARMONY_CALL}{{}}"
        ],
    ),
    "several prompts": (_COMPLETIONS, {"prompt": ["ab", "cde"], "n": 2}, ["é", "xyz"]),
}


@pytest.mark.parametrize("name", _STREAMS)
async def test_a_stream_goes_on_behind_each_of_its_frames(name, tokenizer, harmony):
    path, body, said = _STREAMS[name]
    body = {"max_output_tokens" if path == _RESPONSES else "max_tokens": 200, **body}
    knowing = harmony if "harmony" in name else with_template(tokenizer, SHOWS)
    serve = partial(serving_harmony, knowing)
    scripts = _script(knowing, said), _script(knowing, said, 1)
    async with serve(scripts[0]) as first, serve(scripts[1]) as other:
        whole = await _frames(first, path, body)
        assert len(whole) >= 3
        plain = await first.http.post(path, json={"model": "m", "stream": True, **body})
        assert _anonymous(plain.content) == _anonymous(_joined(whole))
        for cut in range(1, len(whole), 1 + len(whole) // 50):
            texts = [text for text, _ in whole[:cut]]
            server = (
                other if cut > 1 else first
            )  # before a token nothing is known of the cache
            rest = await _frames(server, path, body, texts)
            assert _joined(whole[:cut] + rest) == _joined(whole), cut
            if len(rest) > 1 and cut % 4 == 1:  # and once more
                again = await _frames(first, path, body, [*texts, rest[0][0]])
                assert _joined([*whole[:cut], rest[0], *again]) == _joined(whole), cut


def _anonymous(stream: bytes) -> bytes:
    """Without what is an answer's own."""
    ids = rb'(cmpl-|resp_|msg_|rs_|fc_|call_)[0-9a-f]{24,32}|"created(_at)?":\d+'
    return re.sub(ids, b"", stream)


async def test_a_stream_goes_on_with_its_own_request_and_model_only(tokenizer):
    body = {"prompt": "abc", "max_tokens": 9, "temperature": 0.5, "stop": ["x"]}
    others = [
        {"prompt": "abd"},
        {"temperature": 0.6},
        {"n": 2},
        {"stop_token_ids": [5]},
    ]
    others += [{"cache_salt": "a"}]
    script = _script(tokenizer, ["hello"])
    async with (
        serving(tokenizer, script) as first,
        serving(tokenizer, script) as second,
    ):
        texts = [text for text, _ in (await _frames(first, _COMPLETIONS, body))[:3]]
        for other in others:
            answer = await _ask(second, _COMPLETIONS, {**body, **other}, texts)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "resume_refused"
        beyond = await _ask(second, _COMPLETIONS, body, [texts[0], b"[[0,[99999999]]]"])
        assert beyond.status_code == 503 and "beyond" in beyond.text
        assert await _frames(second, _COMPLETIONS, body, texts)
        assert len(second.engine.added) == 1
    dtype = replace(READY, geometry={"dtype": "bfloat16"})
    short = replace(READY, max_model_len=8)
    for ready, wanted in ((dtype, "dtype"), (short, "context")):
        async with serving(tokenizer, script, ready=ready) as other:
            asked = {**body, "max_tokens": 5} if ready is short else body
            answer = await _ask(other, _COMPLETIONS, asked, texts)
            assert (answer.status_code, wanted in answer.text) == (503, True), (
                answer.text
            )


async def test_only_a_proxy_of_the_cluster_gets_frames_or_has_a_stream_go_on(tokenizer):
    body = {"prompt": "abc", "max_tokens": 3, "stream": True}
    async with serving(tokenizer, _script(tokenizer, ["hello"])) as server:
        for value in (
            "1",
            resume.frames_request(b"another secret..", b"r").decode(),
            "",
        ):
            headers = {"x-request-id": "r", resume.HEADER: value}
            answer = await server.post(headers=headers, **body)
            assert (
                answer.content.startswith(b"data: ")
                and resume.HEADER not in answer.headers
            )
        for forged in ({}, 5, {"texts": [], "mac": "é"}, {"texts": [{}], "mac": "00"}):
            answer = await server.post(**{resume.MEMBER: forged}, **body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == resume.MEMBER


async def test_what_ends_a_stream_early_says_whether_it_may_go_on(tokenizer):
    ends = {"engine_died": b"!died", "overloaded": b"!busy", "internal_error": b"[]"}
    for code, text in ends.items():

        async def script(
            request: AddRequest, code: str = code
        ) -> AsyncIterator[TokenDelta]:
            yield TokenDelta(request_id=request.request_id, token_ids=[70])
            for _ in range(50):  # its head goes out
                await asyncio.sleep(0)
            yield TokenDelta(request_id=request.request_id, error=ErrorInfo(code, "x"))

        async with serving(tokenizer, script) as server:
            *_, (told, event) = await _frames(server, _COMPLETIONS, {"prompt": "a"})
            assert told == text and code.encode() in event


@pytest.mark.parametrize("stop", [[], ["calls"]], ids=["", "that are not shown yet"])
async def test_a_stream_that_moves_ends_with_where_its_kv_is(tokenizer, stop):
    """Behind all of its tokens, however late they are read."""
    first, *others = tokenizer.encode("Icall")
    assert len(others) > 1

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        name = request.request_id
        yield TokenDelta(request_id=name, token_ids=[first])
        for _ in range(50):
            await asyncio.sleep(0)
        yield TokenDelta(request_id=name, token_ids=others)
        yield TokenDelta(
            request_id=name, finish_reason=MOVED, kv_transfer_params={"a": [1]}
        )

    async with serving(tokenizer, script) as server:
        asked = {"prompt": "a", "stop": stop}
        *_, last, (told, event) = await _frames(server, _COMPLETIONS, asked)
        assert (
            msgspec.json.decode(last[0]) == [[0, others]]
            and told == b'!moved {"a":[1]}'
        )
        assert bool(last[1]) == (not stop) and b"no_server_available" in event
        assert not server.engine.aborted, "who goes on comes for it"


@pytest.mark.parametrize(
    "name", ["logprobs", "characters of several tokens", "choices"]
)
@pytest.mark.parametrize("num", [1, 4])
async def test_an_answer_that_is_no_stream_moves_with_its_tokens(tokenizer, name, num):
    path, body, said = _STREAMS[name]
    body = {"max_tokens": 90, "stream": False, **body}
    knowing = with_template(tokenizer, SHOWS)
    script = _script(knowing, said)

    async def moves(request: AddRequest) -> AsyncIterator[TokenDelta]:
        left, open_choices = (
            num * request.num_choices,
            dict.fromkeys(range(request.num_choices)),
        )
        async for delta in script(request):
            if not (left := left - 1) or delta.finish_reason:
                break
            yield delta
        for choice in open_choices:
            told = {
                "choice": choice,
                "kv_transfer_params": None if choice else {"a": [1]},
            }
            yield TokenDelta(request_id=request.request_id, finish_reason=MOVED, **told)

    async with (
        serving_4k(knowing, moves) as first,
        serving_4k(knowing, script) as other,
    ):
        expected = await _ask(other, path, body)
        *frames, (told, _) = await _frames(first, path, body)
        assert told == b'!moved {"a":[1]}' and not _joined(frames)
        found = await _ask(other, path, body, [text for text, _ in frames])
        assert _anonymous(found.content) == _anonymous(expected.content)
        assert (
            found.headers["content-type"] == "application/json"
            and found.status_code == 200
        )
        known = [one.token_ids for one in other.engine.added[-1].resumed_choices]
        assert sum(map(len, known)) >= num - 1 and resume.HEADER not in found.headers


@pytest.mark.parametrize(("is_movable", "size", "num_kept"), [
    (False, 1, 0), (True, resume.MAX_HISTORY_BYTES, 2), (True, resume.MAX_HISTORY_BYTES * 99 // 200, 3)
])  # fmt: skip
def test_an_answer_keeps_its_tokens_only_while_it_could_move(
    is_movable, size, num_kept
):
    """It may have been told to just before there are too many."""
    origin = resume.Origin(id="a", created=1, seed=2, limits=[3], digest="d")
    framing = Framing(origin, True, is_movable=is_movable, is_stream=False)
    for num in (1, size, 1):
        framing.take(0, TokenDelta(request_id="a", token_ids=[5] * num))
        framing.hold()
        assert b" []\n" in framing.wrap(b""), "nothing else is kept of them"
    assert framing.may_move == (size == 1)
    kept = resume.Frames().feed(framing.moved({}, b""))
    assert [text.startswith(b"[[0,") for text, _ in kept].count(True) == num_kept


async def test_only_answers_to_one_prompt_in_frames_are_told_to_move(tokenizer):
    """Those whose prompt is still computed, too: a server that ends listens until they have."""
    async with serving(tokenizer, hang) as server:
        moves = {"prompt": "a"}
        stay = [
            {"prompt": "a", "echo": True, "logprobs": 1, "stream": False},
            {"prompt": ["a", "b"]},
        ]
        asked = [
            asyncio.create_task(_ask(server, _COMPLETIONS, body))
            for body in (moves, *stay)
        ]
        asked.append(asyncio.create_task(server.post(model="m", stream=True, **moves)))
        await until(
            lambda: len(server.engine.added) == 5 and bool(server.engine.movable)
        )
        for wrong in ({}, {"requests": 0}, {"requests": "1"}, {"request": 1}):
            answer = await server.http.post("/migrate", json=wrong)
            assert (
                answer.status_code == 400
                and answer.json()["error"]["param"] == "requests"
            )
        for path in ("/drain", "/migrate"):
            page = {"origin": "https://a.page"}
            answer = await server.http.post(path, json={"requests": 1}, headers=page)
            assert answer.status_code == 403
        answer = await server.http.post("/migrate", json={"requests": 9})
        assert answer.json() == {"moving": 1}
        (name,) = server.engine.moving
        assert name == server.engine.added[0].request_id
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: not (server.engine.moving or server.engine._subscriptions))


async def test_what_is_tokenized_when_a_drained_server_listens_no_more_ends_there(
    tokenizer,
):
    """Else it goes on elsewhere, and the server listens until its KV was fetched."""
    leave = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        await leave.wait()
        yield TokenDelta(request_id=request.request_id, finish_reason=MOVED)

    async with serving(tokenizer, script) as server:
        engine = server.engine
        ask = lambda: asyncio.create_task(_ask(server, _COMPLETIONS, {"prompt": "a"}))  # noqa: E731
        asked = [ask()]
        await until(lambda: bool(engine.movable))
        handing = asyncio.create_task(engine.hand_over(math.inf))
        asked.append(ask())
        await until(lambda: len(engine.moving) == 2)
        engine.stats["baton_leases_held"] = 1.0
        leave.set()
        assert all(b"!moved" in one.content for one in await asyncio.gather(*asked))
        assert not handing.done()
        engine.stats.clear()
        await handing
        leave.clear()
        late = ask()
        await until(lambda: len(engine.added) == 3 and bool(engine.movable))
        assert not engine.moving
        leave.set()
        await late

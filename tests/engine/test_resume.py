"""A stream that is cut after any frame resumes at another server, byte for byte."""

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
from tests.engine.test_http_messages import TOOL as ANTHROPIC_TOOL
from tests.engine.test_http_responses import FLAT, TEMPLATE
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
_ITEMS: dict[str, Any] = {"input": "Hi", "tools": [FLAT]}
_INCLUDE = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def _script(tokenizer: Tokenizer, texts: Sequence[str], cached: int = 2) -> Any:
    """Return a script that generates one of `texts` for each choice.

    If a request is resumed, the script continues after the tokens of the request.
    `cached` tokens of the prompt come from the cache.
    """
    output = [tokenizer.encode(text) for text in texts]

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        name = request.request_id
        usage = KVUsage(recomputed=3, cached_tokens=cached)
        if request.num_prompt_logprobs is not None:
            actual = [None, *[TokenLogprobs(-1.5)] * (len(request.token_ids) - 1)]
            yield TokenDelta(request_id=name, prompt_logprobs=actual)
        for position in range(max(map(len, output)) + 1):
            for choice, ids in enumerate(output[: request.num_choices]):
                resumed_choice = (
                    request.resumed_choices[choice] if request.resumed_choices else None
                )
                if resumed_choice and (
                    resumed_choice.has_ended or position < len(resumed_choice.token_ids)
                ):
                    continue
                logprob = TokenLogprobs(-position / 8, [7], [-position / 4])
                logprobs = (
                    [logprob] if request.sampling.num_logprobs is not None else None
                )
                if position < len(ids):
                    delta_fields = {
                        "token_ids": ids[position : position + 1],
                        "logprobs": logprobs,
                    }
                    delta_fields |= {"usage": usage} if position == 0 else {}
                    yield TokenDelta(request_id=name, choice=choice, **delta_fields)
                elif position == len(ids):
                    delta_fields = {"finish_reason": "length", "usage": usage}
                    yield TokenDelta(request_id=name, choice=choice, **delta_fields)
                if position:  # the first tokens of all choices are sent without a pause
                    await asyncio.sleep(0)

    return script


Frames = list[tuple[bytes, bytes]]


async def _post(
    server: Server, path: str, body: dict[str, Any], texts: Sequence[bytes] = ()
) -> httpx.Response:
    """Request a stream, or the continuation of a stream, as a proxy does."""
    history = resume.FrameHistory()
    for text in texts:
        history.add(text + b",")
    resumed_fields = (
        {resume.MEMBER: msgspec.json.decode(history.sign(SECRET))} if texts else {}
    )
    headers = {
        "x-request-id": "r",
        resume.HEADER: resume.frames_request(SECRET, b"r").decode(),
    }
    request_body = {"model": "m", "stream": True, **body, **resumed_fields}
    return await server.http.post(path, json=request_body, headers=headers)


async def _request_frames(server: Server, *request: Any) -> Frames:
    answer = await _post(server, *request)
    assert answer.status_code == 200, answer.text
    frames = resume.Frames()
    # The proxy does not store reports, because no server needs them to resume a stream.
    actual = [
        frame
        for frame in frames.feed(answer.content)
        if not frame[0].startswith(resume.REPORT_PREFIX)
    ]
    assert not frames.feed(b"") and answer.headers[resume.HEADER]
    return actual


def _join_events(frames: Frames) -> bytes:
    return b"".join(events for _, events in frames)


# The endpoint, the request, and the text of each choice.
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
    "items": (_RESPONSES, _ITEMS, [f"<think>hm</think>ok{CALL}."]),
    "logprobs of items": (
        _RESPONSES,
        {**_ITEMS, **_INCLUDE},
        ["<think>hm</think>\nök <too" + CALL + "\n."],
    ),
    "blocks": (
        "/v1/messages",
        {**_HI, "tools": [ANTHROPIC_TOOL]},
        [f"<think>hm</think>ök{CALL}."],
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
        _ITEMS,
        [
            f"{THINK}hm{START}<|channel|>final<|message|>Ah{START}{THINK}a{START}"
            f"{HARMONY_CALL}{{}}"
        ],
    ),
    "several prompts": (_COMPLETIONS, {"prompt": ["ab", "cde"], "n": 2}, ["é", "xyz"]),
}


@pytest.mark.parametrize("name", _STREAMS)
async def test_stream_resumes_after_any_of_its_frames(name, tokenizer, harmony):
    path, body, output = _STREAMS[name]
    body = {"max_output_tokens" if path == _RESPONSES else "max_tokens": 200, **body}
    templated = harmony if "harmony" in name else with_template(tokenizer, TEMPLATE)
    serve = partial(serving_harmony, templated)
    scripts = _script(templated, output), _script(templated, output, 1)
    async with serve(scripts[0]) as first, serve(scripts[1]) as other:
        frames = await _request_frames(first, path, body)
        assert len(frames) >= 3
        plain = await first.http.post(path, json={"model": "m", "stream": True, **body})
        assert _anonymous(plain.content) == _anonymous(_join_events(frames))
        for cut in range(1, len(frames), 1 + len(frames) // 50):
            texts = [text for text, _ in frames[:cut]]
            # `other` reports another number of cached tokens. Frames before the first
            # token do not contain the number, so `first` must resume them.
            server = other if cut > 1 else first
            rest = await _request_frames(server, path, body, texts)
            assert _join_events(frames[:cut] + rest) == _join_events(frames), cut
            if len(rest) > 1 and cut % 4 == 1:  # resume a second time
                again = await _request_frames(first, path, body, [*texts, rest[0][0]])
                assert _join_events([*frames[:cut], rest[0], *again]) == _join_events(
                    frames
                ), cut


def _anonymous(stream: bytes) -> bytes:
    """Return a response without ids and times, which differ between responses."""
    ids = rb'(cmpl-|resp_|msg_|rs_|fc_|call_)[0-9a-f]{24,32}|"created(_at)?":\d+'
    return re.sub(ids, b"", stream)


async def test_stream_resumes_only_with_the_same_request_and_model(tokenizer):
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
        texts = [
            text for text, _ in (await _request_frames(first, _COMPLETIONS, body))[:3]
        ]
        for other in others:
            answer = await _post(second, _COMPLETIONS, {**body, **other}, texts)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "resume_refused"
        beyond = await _post(
            second, _COMPLETIONS, body, [texts[0], b"[[0,[99999999]]]"]
        )
        assert beyond.status_code == 503 and "token ids above" in beyond.text
        assert await _request_frames(second, _COMPLETIONS, body, texts)
        assert len(second.engine.added) == 1
    dtype = replace(READY, geometry={"dtype": "bfloat16"})
    short = replace(READY, max_model_len=8)
    for ready, reason in ((dtype, "dtype"), (short, "context")):
        async with serving(tokenizer, script, ready=ready) as other:
            request = {**body, "max_tokens": 5} if ready is short else body
            answer = await _post(other, _COMPLETIONS, request, texts)
            assert answer.status_code == 503 and reason in answer.text, answer.text


async def test_only_a_proxy_of_the_cluster_gets_frames_or_resumes_a_stream(tokenizer):
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


async def test_error_frame_reports_whether_a_stream_may_resume(tokenizer):
    ends = {"engine_died": b"!died", "overloaded": b"!busy", "internal_error": b"[]"}
    for code, text in ends.items():

        async def script(
            request: AddRequest, code: str = code
        ) -> AsyncIterator[TokenDelta]:
            yield TokenDelta(request_id=request.request_id, token_ids=[70])
            for _ in range(50):  # gives the server time to send the response's head
                await asyncio.sleep(0)
            yield TokenDelta(request_id=request.request_id, error=ErrorInfo(code, "x"))

        async with serving(tokenizer, script) as server:
            *_, (marker, event) = await _request_frames(
                server, _COMPLETIONS, {"prompt": "a"}
            )
            assert marker == text and code.encode() in event


@pytest.mark.parametrize("stop", [[], ["calls"]], ids=["text", "text held back"])
async def test_migrating_stream_ends_with_a_reference_to_its_kv(tokenizer, stop):
    """The reference is sent after all tokens, even if the server reads the last tokens
    and the reference together."""
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
        requested = {"prompt": "a", "stop": stop}
        *_, last, (marker, event) = await _request_frames(
            server, _COMPLETIONS, requested
        )
        assert (
            msgspec.json.decode(last[0]) == [[0, others]]
            and marker == b'!moved {"a":[1]}'
        )
        assert bool(last[1]) == (not stop) and b"no_server_available" in event
        assert not server.engine.aborted, "the next server will pull the KV"


@pytest.mark.parametrize(
    "name", ["logprobs", "characters of several tokens", "choices"]
)
@pytest.mark.parametrize("num_tokens", [1, 4])
async def test_answer_without_a_stream_migrates_with_its_tokens(
    tokenizer, name, num_tokens
):
    path, body, output = _STREAMS[name]
    body = {"max_tokens": 90, "stream": False, **body}
    templated = with_template(tokenizer, TEMPLATE)
    script = _script(templated, output)

    async def migrate(request: AddRequest) -> AsyncIterator[TokenDelta]:
        num_left = num_tokens * request.num_choices
        open_choices = dict.fromkeys(range(request.num_choices))
        async for delta in script(request):
            num_left -= 1
            if not num_left or delta.finish_reason:
                break
            yield delta
        for choice in open_choices:
            delta_fields = {
                "choice": choice,
                "kv_transfer_params": None if choice else {"a": [1]},
            }
            yield TokenDelta(
                request_id=request.request_id, finish_reason=MOVED, **delta_fields
            )

    async with (
        serving_4k(templated, migrate) as first,
        serving_4k(templated, script) as other,
    ):
        expected = await _post(other, path, body)
        *frames, (marker, _) = await _request_frames(first, path, body)
        assert marker == b'!moved {"a":[1]}' and not _join_events(frames)
        actual = await _post(other, path, body, [text for text, _ in frames])
        assert _anonymous(actual.content) == _anonymous(expected.content)
        assert (
            actual.headers["content-type"] == "application/json"
            and actual.status_code == 200
        )
        resumed_choices = other.engine.added[-1].resumed_choices
        num_resumed = sum(len(choice.token_ids) for choice in resumed_choices)
        assert num_resumed >= num_tokens - 1
        assert resume.HEADER not in actual.headers


@pytest.mark.parametrize(
    ("is_movable", "size", "num_retained"),
    [
        (False, 1, 0),
        (True, resume.MAX_HISTORY_BYTES, 2),
        (True, resume.MAX_HISTORY_BYTES * 99 // 200, 3),
    ],
)
def test_answer_keeps_its_frames_only_while_it_can_migrate(
    is_movable, size, num_retained
):
    """The order to migrate may arrive just before the frames exceed the limit."""
    origin = resume.Origin(id="a", created=1, seed=2, limits=[3], digest="d")
    framing = Framing(origin, True, is_movable=is_movable, is_stream=False)
    for num in (1, size, 1):
        framing.add_delta(0, TokenDelta(request_id="a", token_ids=[5] * num))
        framing.hold_frame()
        assert b" []\n" in framing.wrap(b""), "the deltas are dropped"
    assert framing.may_migrate == (size == 1)
    history = resume.Frames().feed(framing.migration_end({}, b""))
    assert [text.startswith(b"[[0,") for text, _ in history].count(True) == num_retained


async def test_only_framed_answers_to_one_prompt_migrate(tokenizer):
    """A request whose prompt is still computed migrates later. Until then, the server
    listens."""
    async with serving(tokenizer, hang) as server:
        movable = {"prompt": "a"}
        not_movable = [
            {"prompt": "a", "echo": True, "logprobs": 1, "stream": False},
            {"prompt": ["a", "b"]},
        ]
        tasks = [
            asyncio.create_task(_post(server, _COMPLETIONS, body))
            for body in (movable, *not_movable)
        ]
        tasks.append(
            asyncio.create_task(server.post(model="m", stream=True, **movable))
        )
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not (server.engine.moving or server.engine._subscriptions))


async def test_request_tokenized_after_the_handover_ends_at_the_drained_server(
    tokenizer,
):
    """A request that was tokenized before the handover migrates. The server then
    listens until the KV of this request has been pulled.
    """
    may_end = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        await may_end.wait()
        yield TokenDelta(request_id=request.request_id, finish_reason=MOVED)

    async with serving(tokenizer, script) as server:
        engine = server.engine

        def send() -> asyncio.Task[Any]:
            return asyncio.create_task(_post(server, _COMPLETIONS, {"prompt": "a"}))

        requested = [send()]
        await until(lambda: bool(engine.movable))
        handover = asyncio.create_task(engine.hand_over(math.inf))
        requested.append(send())
        await until(lambda: len(engine.moving) == 2)
        engine.stats["baton_leases_held"] = 1.0
        may_end.set()
        answers = await asyncio.gather(*requested)
        assert all(b"!moved" in answer.content for answer in answers)
        assert not handover.done()
        engine.stats.clear()
        await handover
        may_end.clear()
        late_request = send()
        await until(lambda: len(engine.added) == 3 and bool(engine.movable))
        assert not engine.moving
        may_end.set()
        await late_request

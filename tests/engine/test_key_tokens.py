"""A key is charged for the tokens of its answer once the answer has ended."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RateLimited
from protocol.messages import AddRequest, TokenDelta
from proxy.keys import KeyLine, LimitedKey
from tests.proxy.fakes import Behave, Fake, Rig, Waits, answers, fails, streams, until
from tests.rigs.http_server import SECRET, Running, end, serving_4k

KEY = "sk-alice-0123456789"
HEADERS = {"x-api-key": KEY}
PER_MINUTE = 1000
COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
PROMPT = {"model": "m", "prompt": "ab"}
MUCH, LITTLE = 5000, 10
EVENT = b'data: {"text": "x"}\n\n'
DONE = b"data: [DONE]\n\n"


def limited_rig(tmp_path: Path, *decode: Any, **options: Any) -> Rig:
    """Returns a proxy with one key, which has a token limit."""
    file = tmp_path / "keys"
    file.write_text(
        json.dumps({"name": "one", "key": KEY, "tokens_per_minute": PER_MINUTE})
    )
    return Rig([], [*decode], api_keys_file=str(file), **options)


def complete_answer(num_tokens: int) -> Behave:
    return answers(
        200, {"usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}}
    )


def response_body(num_tokens: int) -> dict[str, Any]:
    return {"usage": {"input_tokens": 1, "output_tokens": num_tokens}}


def event(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def streamed_answer(num_tokens: int) -> Behave:
    usage = event({"usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}})
    return streams(EVENT, event({"text": "x", "usage": None}), usage, DONE)


def response_events(num_tokens: int) -> Behave:
    last = event({"type": "response.completed", "response": response_body(num_tokens)})
    return streams(
        b"event: response.created\n" + EVENT, b"event: response.completed\n" + last
    )


def message_usage(num_tokens: int) -> dict[str, Any]:
    """Return the usage of a message. Most of its tokens were read from a cache."""
    num_read = max(num_tokens - 3, 0)
    usage = {"input_tokens": 1, "cache_creation_input_tokens": 1, "output_tokens": 1}
    return {"usage": {**usage, "cache_read_input_tokens": num_read}}


def message_events(num_tokens: int) -> Behave:
    delta = event({"type": "message_delta", **message_usage(num_tokens)})
    return streams(
        b"event: content_block_delta\n" + EVENT,
        b"event: message_delta\n" + delta,
        b"event: message_stop\n" + event({"type": "message_stop"}),
    )


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (COMPLETIONS, complete_answer),
        (CHAT, complete_answer),
        (RESPONSES, lambda number: answers(200, response_body(number))),
        (CHAT, streamed_answer),
        (RESPONSES, response_events),
        (MESSAGES, lambda number: answers(200, message_usage(number))),
        (MESSAGES, message_events),
        (CHAT, lambda number: streams(EVENT * number, DONE)),
    ],
    ids=[
        "completion",
        "chat",
        "response",
        "stream",
        "response's stream",
        "message",
        "message's stream",
        "stream without usage",
    ],
)
async def test_generated_tokens_are_charged_instead_of_an_estimate(
    path, answer, tmp_path
):
    async with limited_rig(tmp_path, Fake(answer(MUCH))) as rig:
        statuses = [await post_for_status(rig, path, **PROMPT) for _ in range(2)]
        assert statuses == [200, 429]
    async with limited_rig(tmp_path, Fake(answer(LITTLE))) as rig:
        limit = {
            "max_output_tokens" if path == RESPONSES else "max_tokens": PER_MINUTE - 50
        }
        statuses = [
            await post_for_status(rig, path, **PROMPT, **limit) for _ in range(3)
        ]
        assert statuses == [200, 200, 200]


async def post_for_status(rig: Rig, path: str, **body: Any) -> int:
    return (await rig.client.post(path, json=body, headers=HEADERS)).status_code


async def test_error_costs_no_tokens(tmp_path):
    async with limited_rig(tmp_path, Fake(fails(400, "invalid_request"))) as rig:
        statuses = [
            await post_for_status(rig, CHAT, **PROMPT, max_tokens=PER_MINUTE)
            for _ in range(3)
        ]
        assert statuses == [400, 400, 400]


async def test_request_that_is_not_answered_in_time_costs_no_tokens(tmp_path):
    async with limited_rig(tmp_path, Fake(Waits())) as rig:
        for _ in range(2):
            response = await rig.client.post(
                CHAT,
                json={**PROMPT, "max_tokens": PER_MINUTE},
                headers={**HEADERS, "x-request-timeout-s": "0.1"},
            )
            assert response.status_code == 504


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/tokenize", {"prompt": "ab"}, {"count": MUCH, "tokens": []}),
        ("/v1/messages/count_tokens", {"messages": []}, {"input_tokens": MUCH}),
        ("/detokenize", {"tokens": [1] * MUCH}, {"prompt": "ab"}),
    ],
)
async def test_tokenizing_is_charged_as_prompts_are(path, body, answer, tmp_path):
    async with limited_rig(tmp_path, Fake(answers(200, answer))) as rig:
        assert [await post_for_status(rig, path, **body) for _ in range(2)] == [
            200,
            429,
        ]
        assert await post_for_status(rig, CHAT, **PROMPT) == 429


async def test_disconnected_client_is_charged_for_its_tokens(tmp_path):
    waits = Waits(sends=EVENT * MUCH)
    async with limited_rig(tmp_path, Fake(waits)) as rig:
        async with rig.client.stream(
            "POST", CHAT, json=PROMPT, headers=HEADERS
        ) as stream:
            received = 0
            async for chunk in stream.aiter_bytes():
                received += len(chunk)
                if received == len(EVENT) * MUCH:
                    break
        await waits.left.wait()
        await until(lambda: not rig.app._running)
        assert await post_for_status(rig, CHAT, **PROMPT) == 429


async def test_all_tokens_of_events_with_many_tokens_are_charged(tokenizer, tmp_path):
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for _ in range(3):  # each delta is one event of many tokens
            yield TokenDelta(request_id=request.request_id, token_ids=[65] * PER_MINUTE)
        yield TokenDelta(request_id=request.request_id, **end())

    async with serving_4k(tokenizer, script, role="decode") as server:
        url = f"http://{server.host}:{server.port}"
        secret = {"cluster_secret": SECRET.decode(), "disaggregate": "always"}
        async with limited_rig(tmp_path, Running(url), **secret) as rig:
            streamed_answer = {**PROMPT, "stream": True, "max_tokens": 3 * PER_MINUTE}
            assert [
                await post_for_status(rig, COMPLETIONS, **streamed_answer)
                for _ in range(2)
            ] == [200, 429]


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 600), st.floats(0, 60)),
        max_size=60,
    )
)
def test_key_never_exceeds_its_token_limit_over_time(requests):
    now = [5.0]
    key = LimitedKey(KeyLine(name="one", tokens_per_minute=100), lambda: now[0])
    num_charged = 0
    for estimated, used, pause_s in requests:
        now[0] += pause_s
        try:
            key.charge(estimated)
        except RateLimited as error:
            now[0] += float(error.headers["retry-after"])
            key.charge(estimated)
        key.settle(used - estimated)
        num_charged += used
        assert num_charged <= 100 * (1 + (now[0] - 5.0) / 60) + max(
            used, estimated, 100
        )

"""The public API's shapes: every member that its reference lists is there, with its type.

The shapes are written down here by hand from the reference's examples: a type per member, a list of
one shape for lists, None where null is what the reference shows. Members of our own may follow.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, TokenDelta, TokenLogprobs
from tests.rigs.http_server import USAGE, chunks, serving

ANY = object()

USAGE_SHAPE = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int},
}
HEAD = {"created": int, "model": "m", "system_fingerprint": "fp_"}
COMPLETION_CHUNK = {
    **HEAD,
    "id": "cmpl-",
    "object": "text_completion",
    "choices": [{"text": str, "index": 0, "logprobs": None, "finish_reason": ANY}],
}
COMPLETION = {
    **COMPLETION_CHUNK,
    "choices": [{"text": str, "index": 0, "logprobs": None, "finish_reason": "length"}],
    "usage": USAGE_SHAPE,
}
COMPLETION_LOGPROBS = {
    "tokens": [str],
    "token_logprobs": [float],
    "top_logprobs": [dict],
    "text_offset": [int],
}
CHAT = {
    **HEAD,
    "id": "chatcmpl-",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": str, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ],
    "usage": USAGE_SHAPE,
}
TOKEN = {"token": str, "logprob": float, "bytes": [int]}
CHAT_LOGPROBS = {"content": [{**TOKEN, "top_logprobs": [TOKEN]}], "refusal": None}
CHUNK = {
    **HEAD,
    "id": "chatcmpl-",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": dict, "logprobs": None, "finish_reason": ANY}],
}
MODEL = {"id": "m", "object": "model", "created": int, "owned_by": str}
MODELS = {"object": "list", "data": [MODEL]}
ERROR = {"error": {"message": str, "type": "invalid_request_error", "param": str, "code": str}}


def assert_shape(value: Any, shape: Any, where: str = "body") -> None:
    """A type, the beginning of a text, a value, an object with at least these members, a list."""
    if isinstance(shape, dict):
        for name, member in shape.items():
            assert name in value, f"{where}.{name} is missing"
            assert_shape(value[name], member, f"{where}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list) and value, where
        for item in value:
            assert_shape(item, shape[0], f"{where}[]")
    elif isinstance(shape, type):
        assert type(value) is shape, (where, value)
    elif isinstance(shape, str):
        assert isinstance(value, str) and value.startswith(shape), (where, value)
    elif shape is not ANY:
        assert value == shape, (where, value)


async def hello(request: AddRequest) -> AsyncIterator[TokenDelta]:
    for token_id in b"hello":
        ids = [token_id - 33, 5]  # of the byte-level alphabet
        found = TokenLogprobs(-0.5, ids, [-0.5, -1.5])
        logprobs = [found] if request.sampling.num_logprobs is not None else None
        yield TokenDelta(request_id=request.request_id, token_ids=ids[:1], logprobs=logprobs)
        await asyncio.sleep(0)
    yield TokenDelta(request_id=request.request_id, finish_reason="length", usage=USAGE)


async def test_completions(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, hello, fingerprint="fp_1") as server:
        body = (await server.post()).json()
        assert_shape(body, COMPLETION)
        assert Completion.model_validate(body).choices[0].text == "hello"
        (choice,) = (await server.post(logprobs=2)).json()["choices"]
        assert_shape(choice["logprobs"], COMPLETION_LOGPROBS)
        for chunk in chunks(await server.post(stream=True)):
            assert_shape(chunk, COMPLETION_CHUNK)


async def test_chat(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, hello, fingerprint="fp_1") as server:
        body = (await server.chat()).json()
        assert_shape(body, CHAT)
        assert ChatCompletion.model_validate(body).choices[0].message.content == "hello"
        (choice,) = (await server.chat(logprobs=True, top_logprobs=2)).json()["choices"]
        assert_shape(choice["logprobs"], CHAT_LOGPROBS)


async def test_a_chat_stream(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, hello, fingerprint="fp_1") as server:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        *told, last = chunks(await server.chat(**asked))
        for chunk in told:
            assert_shape(chunk, {**CHUNK, "usage": None})
            ChatCompletionChunk.model_validate(chunk)
        assert told[0]["choices"][0]["delta"]["role"] == "assistant"
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in told]
        assert reasons == [None] * (len(told) - 1) + ["length"]
        assert_shape(last, {"id": "chatcmpl-", "choices": ANY, "usage": USAGE_SHAPE})
        assert last["choices"] == []


async def test_models_and_errors(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        assert_shape((await server.http.get("/v1/models")).json(), MODELS)
        assert_shape((await server.post(temperature=9)).json(), ERROR)
        assert_shape((await server.post(model="x")).json(), ERROR)


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_the_clients_streaming_helper(tokenizer: Tokenizer, num_choices: int) -> None:
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        async for delta in hello(request):
            for choice in range(request.num_choices):
                reason = delta.finish_reason and "stop"
                yield msgspec.structs.replace(delta, choice=choice, finish_reason=reason)

    async with serving(tokenizer, script) as server:
        url = f"{server.http.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            asked: dict[str, Any] = {
                "model": "m",
                "messages": [{"role": "user", "content": "Hi"}],
                "n": num_choices,
                "logprobs": True,
                "top_logprobs": 1,
            }
            seen = dict.fromkeys(range(num_choices), "")
            state = ChatCompletionStreamState()
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                state.handle_chunk(chunk)
                for choice in chunk.choices:
                    seen[choice.index] += choice.delta.content or ""
            assert seen == dict.fromkeys(range(num_choices), "hello")
            whole = state.get_final_completion()
            assert [c.message.content for c in whole.choices] == ["hello"] * num_choices
            async with client.chat.completions.stream(**asked) as stream:
                texts = [e.delta async for e in stream if e.type == "content.delta"]
                assert "".join(texts) == "hello" * num_choices or num_choices > 1
                final = await stream.get_final_completion()
                content = final.choices[0].logprobs.content  # type: ignore[union-attr]
                assert content is not None and len(content) == 5

"""Answers and errors are what the types of OpenAI's own client declare, read strictly. Members of
our own may follow."""

import asyncio
from collections.abc import AsyncIterator

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from protocol.messages import AddRequest, TokenDelta, TokenLogprobs
from tests.rigs.http_server import USAGE, chunks, serving


async def hello(request: AddRequest) -> AsyncIterator[TokenDelta]:
    for token_id in b"hello":
        ids = [token_id - 33, 5]  # of the byte-level alphabet
        found = TokenLogprobs(-0.5, ids, [-0.5, -1.5])
        logprobs = [found] if request.sampling.num_logprobs is not None else None
        yield TokenDelta(
            request_id=request.request_id, token_ids=ids[:1], logprobs=logprobs
        )
        await asyncio.sleep(0)
    yield TokenDelta(request_id=request.request_id, finish_reason="length", usage=USAGE)


async def test_completions(tokenizer):
    async with serving(tokenizer, hello, fingerprint="fp_1") as server:
        for asked in ({}, {"logprobs": 2}):
            found = Completion.model_validate(
                (await server.post(**asked)).json(), strict=True
            )
            assert (
                found.choices[0].text == "hello"
                and found.choices[0].finish_reason == "length"
            )
            assert (found.id[:5], found.system_fingerprint) == ("cmpl-", "fp_1")
            assert found.usage and found.usage.prompt_tokens_details
            assert bool(found.choices[0].logprobs) == bool(asked)
        for chunk in chunks(await server.post(stream=True)):
            chunk["choices"][0]["finish_reason"] = (
                chunk["choices"][0]["finish_reason"] or "stop"
            )
            part = Completion.model_validate(chunk, strict=True)
            assert (part.id[:5], part.system_fingerprint) == ("cmpl-", "fp_1")


async def test_chat(tokenizer):
    async with serving(tokenizer, hello, fingerprint="fp_1") as server:
        for asked in ({}, {"logprobs": True, "top_logprobs": 2}):
            found = ChatCompletion.model_validate(
                (await server.chat(**asked)).json(), strict=True
            )
            assert found.choices[0].message.content == "hello"
            assert (found.id[:9], found.system_fingerprint) == ("chatcmpl-", "fp_1")
            assert found.usage and found.usage.prompt_tokens_details
            assert bool(found.choices[0].logprobs) == bool(asked)


async def test_a_chat_stream(tokenizer):
    async with serving(tokenizer, hello, fingerprint="fp_1") as server:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        found = chunks(await server.chat(**asked))
        parsed = [
            ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in found
        ]
        assert {(c.id[:9], c.system_fingerprint) for c in parsed} == {
            ("chatcmpl-", "fp_1")
        }
        *told, last = found
        assert {chunk["usage"] for chunk in told} == {None}
        assert told[0]["choices"][0]["delta"]["role"] == "assistant"
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in told]
        assert reasons == [None] * (len(told) - 1) + ["length"]
        assert last["choices"] == [] and parsed[-1].usage


async def test_models_and_errors(tokenizer):
    async with serving(tokenizer) as server:
        models = (await server.http.get("/v1/models")).json()
        (model,) = models["data"]
        assert (
            models["object"] == "list"
            and Model.model_validate(model, strict=True).id == "m"
        )
        for asked in ({"temperature": 9}, {"model": "x"}):
            error = (await server.post(**asked)).json()["error"]
            assert error["type"] == "invalid_request_error"
            assert {type(error[name]) for name in ("message", "param", "code")} == {str}

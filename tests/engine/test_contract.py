"""Answers and errors match the types of OpenAI's own client, in strict validation.

Answers may have additional fields.
"""

import asyncio
from collections.abc import AsyncIterator

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from protocol.messages import AddRequest, TokenDelta, TokenLogprobs
from tests.rigs.http_server import USAGE, chunks, serving


async def generate_hello(request: AddRequest) -> AsyncIterator[TokenDelta]:
    for token_id in b"hello":
        ids = [token_id - 33, 5]  # tokens of the byte-level alphabet
        row = TokenLogprobs(-0.5, ids, [-0.5, -1.5])
        logprobs = [row] if request.sampling.num_logprobs is not None else None
        yield TokenDelta(
            request_id=request.request_id, token_ids=ids[:1], logprobs=logprobs
        )
        await asyncio.sleep(0)
    yield TokenDelta(request_id=request.request_id, finish_reason="length", usage=USAGE)


async def test_completions_match_the_clients_types(tokenizer):
    async with serving(tokenizer, generate_hello, fingerprint="fp_1") as server:
        for fields in ({}, {"logprobs": 2}):
            completion = Completion.model_validate(
                (await server.post(**fields)).json(), strict=True
            )
            assert completion.choices[0].text == "hello"
            assert completion.choices[0].finish_reason == "length"
            assert completion.id[:5] == "cmpl-"
            assert completion.system_fingerprint == "fp_1"
            assert completion.usage and completion.usage.prompt_tokens_details
            assert bool(completion.choices[0].logprobs) == bool(fields)
        for chunk in chunks(await server.post(stream=True)):
            chunk["choices"][0]["finish_reason"] = (
                chunk["choices"][0]["finish_reason"] or "stop"
            )
            part = Completion.model_validate(chunk, strict=True)
            assert (part.id[:5], part.system_fingerprint) == ("cmpl-", "fp_1")


async def test_chat_completions_match_the_clients_types(tokenizer):
    async with serving(tokenizer, generate_hello, fingerprint="fp_1") as server:
        for fields in ({}, {"logprobs": True, "top_logprobs": 2}):
            completion = ChatCompletion.model_validate(
                (await server.chat(**fields)).json(), strict=True
            )
            assert completion.choices[0].message.content == "hello"
            assert completion.id[:9] == "chatcmpl-"
            assert completion.system_fingerprint == "fp_1"
            assert completion.usage and completion.usage.prompt_tokens_details
            assert bool(completion.choices[0].logprobs) == bool(fields)


async def test_chat_chunks_match_the_clients_types(tokenizer):
    async with serving(tokenizer, generate_hello, fingerprint="fp_1") as server:
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        received = chunks(await server.chat(**fields))
        parsed = [
            ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in received
        ]
        assert {(c.id[:9], c.system_fingerprint) for c in parsed} == {
            ("chatcmpl-", "fp_1")
        }
        *deltas, last = received
        assert {chunk["usage"] for chunk in deltas} == {None}
        assert deltas[0]["choices"][0]["delta"]["role"] == "assistant"
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in deltas]
        assert reasons == [None] * (len(deltas) - 1) + ["length"]
        assert last["choices"] == [] and parsed[-1].usage


async def test_models_and_errors_match_the_clients_types(tokenizer):
    async with serving(tokenizer) as server:
        models = (await server.http.get("/v1/models")).json()
        (model,) = models["data"]
        assert (
            models["object"] == "list"
            and Model.model_validate(model, strict=True).id == "m"
        )
        for fields in ({"temperature": 9}, {"model": "x"}):
            error = (await server.post(**fields)).json()["error"]
            assert error["type"] == "invalid_request_error"
            assert {type(error[name]) for name in ("message", "param", "code")} == {str}

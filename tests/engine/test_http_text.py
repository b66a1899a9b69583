"""Texts are tokenized in threads, and their total size is limited."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from engine.http.api import ServerHooks
from engine.http.limits import guided_decodings
from engine.http.text_encoder import INLINE_CHARS, LONG_CHARS, TextEncoder
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from protocol.http.endpoints import ENDPOINTS
from protocol.messages import AddRequest
from protocol.openai.chat import ChatRequest
from protocol.openai.requests import validate
from protocol.openai.sampling import GenerationRequest
from protocol.openai.structured import GuidedDecoding
from tests.rigs.http_server import CONTEXT, READY, serving, text_script

_LARGE_CONTEXT = msgspec.structs.replace(READY, max_model_len=100_000)


# -- work off the event loop -----------------------------------------------------------


class _RecordingTokenizer(Tokenizer):
    """A tokenizer that records the threads in which it renders and tokenizes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__ = {**tokenizer.__dict__}
        self.threads: list[int] = []
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        self.encoded.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def render_chat(self, messages: Any, **options: Any) -> str:
        self.threads.append(threading.get_ident())
        return super().render_chat(messages, **options)


_LONG_TEXT = "x" * INLINE_CHARS
_TOOL = {"type": "function", "function": {"name": "f", "description": _LONG_TEXT}}
_HI = {"role": "user", "content": "Hi"}
_LONG_CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": {"a": _LONG_TEXT}}}],
}


@pytest.mark.parametrize(
    ("request_fields", "is_off_loop"),
    [
        ({"messages": [_HI]}, [False, False]),
        ({"messages": [{"role": "user", "content": _LONG_TEXT}]}, [True, True]),
        ({"messages": [_HI] * 100}, [True, False]),
        ({"messages": [_HI], "tools": [_TOOL]}, [True, True]),
        ({"messages": [{**_HI, "name": _LONG_TEXT}]}, [True, False]),
        ({"messages": [_LONG_CALL]}, [True, True]),
        (
            {"messages": [_HI], "bad_words": ["x" * 250] * 9},
            [True, False, *[True] * 18],
        ),
        ({"messages": [_HI], "bad_words": ["x"]}, [False] * 4),
    ],
)
async def test_long_texts_are_rendered_and_tokenized_on_other_threads(
    tokenizer, request_fields, is_off_loop
):
    """Any part of a request can be long: messages, tools, prompts or variables."""
    recorder = _RecordingTokenizer(tokenizer)
    async with serving(
        recorder, text_script(tokenizer, "x"), ready=_LARGE_CONTEXT
    ) as server:
        assert (await server.chat(**request_fields)).status_code == 200
        assert [
            thread != threading.get_ident() for thread in recorder.threads
        ] == is_off_loop


@pytest.mark.parametrize(("num_messages", "is_off_loop"), [(10, False), (3000, True)])
async def test_large_bodies_are_checked_on_other_threads(
    tokenizer, monkeypatch, num_messages, is_off_loop
):
    threads: list[int] = []

    def parse(members: dict[str, Any]) -> GenerationRequest:
        threads.append(threading.get_ident())
        return validate(ChatRequest, members)

    def record_grammars(parsed: GenerationRequest) -> list[GuidedDecoding]:
        # Checking the schemas of many tools may take as long as parsing the body.
        threads.append(threading.get_ident())
        return guided_decodings(parsed)

    def prepare(
        hooks: ServerHooks, request: object, adds: list[AddRequest], ready: object
    ) -> Any:
        # Hooks may be slow, because KV references contain logprobs of long prompts.
        threads.append(threading.get_ident())
        return adds

    monkeypatch.setattr("engine.http.generate.guided_decodings", record_grammars)
    monkeypatch.setattr(ServerHooks, "prepare", prepare)
    path = "/v1/chat/completions"
    monkeypatch.setitem(ENDPOINTS, path, ENDPOINTS[path]._replace(parse=parse))

    async with serving(
        tokenizer, text_script(tokenizer, "x"), ready=_LARGE_CONTEXT, max_body=10**6
    ) as server:
        assert (await server.chat(messages=[_HI] * num_messages)).status_code == 200
        assert [thread != threading.get_ident() for thread in threads] == [
            is_off_loop
        ] * 3


# -- texts beyond the context ----------------------------------------------------------

# Generation requests tokenize texts up to this length. /tokenize also tokenizes much
# longer texts. In these tests, <end> is one token, and each other byte is a token.
_MAX_CHARS = INLINE_CHARS


def _message(size: int) -> dict[str, Any]:
    return {"role": "user", "content": "x" * size}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * (LONG_CHARS + 1)}, "prompt"),
        ("/tokenize", {"messages": [_message(LONG_CHARS)]}, "messages"),
        ("/v1/completions", {"prompt": ["a", "x" * (_MAX_CHARS + 1)]}, "prompt"),
        ("/v1/chat/completions", {"messages": [_message(_MAX_CHARS)]}, "messages"),
        ("/v1/responses", {"input": "x" * _MAX_CHARS}, "input"),
        ("/v1/chat/completions", {"messages": [_HI], "tools": [_TOOL]}, "messages"),
    ],
    ids=["tokenize", "tokenize chat", "completions", "chat", "responses", "tools"],
)
async def test_text_beyond_the_context_is_refused_after_its_first_piece(
    tokenizer, path, body, param
):
    recorder = _RecordingTokenizer(tokenizer)
    async with serving(recorder, max_body=2 * LONG_CHARS) as server:
        response = await server.http.post(path, json={"model": "m", **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert error["code"] == "context_length_exceeded"
        assert f"context length is {CONTEXT} tokens" in error["message"]
        assert "it has at least " in error["message"]
        assert max(map(len, recorder.encoded)) <= 1 << 16 and not server.engine.added
        assert len(recorder.encoded) == 1, "the first piece already has too many tokens"


async def test_texts_that_a_context_might_hold_are_tokenized(tokenizer):
    """/tokenize also counts texts that exceed the context, for clients that shorten
    them.
    """
    texts = {"<end>" * CONTEXT: CONTEXT, "x" * 3000: 3000}
    async with serving(tokenizer) as server:
        refused = (await server.post(prompt="x" * _MAX_CHARS)).json()["error"][
            "message"
        ]
        assert f"too long: it has {_MAX_CHARS}. " in refused
        for text, count in texts.items():
            for body in ({"prompt": text}, {"prompt": text, "return_token_strs": True}):
                actual = (await server.http.post("/tokenize", json=body)).json()
                assert actual["count"] == len(actual["tokens"]) == count
            back = await server.http.post(
                "/detokenize", json={"tokens": actual["tokens"]}
            )
            assert back.json() == {"prompt": text}


async def test_text_left_out_by_a_template_does_not_count(tokenizer, monkeypatch):
    short = ChatTemplate("{% for m in messages %}{{ m.content[:3] }}{% endfor %}")
    monkeypatch.setattr(tokenizer, "chat_template", short)

    async with serving(tokenizer, text_script(tokenizer, "x")) as server:
        answer = await server.chat(messages=[_message(5 * _MAX_CHARS)])
        assert answer.status_code == 200
        assert server.engine.added[0].token_ids == tokenizer.encode("xxx")


@pytest.mark.parametrize(
    ("size", "max_concurrent"), [(LONG_CHARS, 2), (LONG_CHARS + 1, 1)]
)
async def test_very_long_texts_are_tokenized_one_at_a_time(
    tokenizer, size, max_concurrent
):
    begun: list[int] = []
    may_end = threading.Event()

    def work() -> None:
        begun.append(1)
        assert may_end.wait(120)

    texts = TextEncoder(tokenizer)
    running = [asyncio.create_task(texts.run(size, work)) for _ in range(2)]
    try:
        while len(begun) < max_concurrent:
            await asyncio.sleep(0.001)
        for _ in range(3):  # shorter texts overtake the long texts
            await texts.run(LONG_CHARS, lambda: None)
        assert len(begun) == max_concurrent
    finally:
        may_end.set()
    await asyncio.gather(*running)
    assert len(begun) == 2


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_chat_with_a_very_long_prompt_waits_for_its_turn(
    tokenizer, monkeypatch, path
):
    """The prompt's length is only known after the template has been rendered."""
    monkeypatch.setattr("engine.http.text_encoder.LONG_CHARS", INLINE_CHARS)
    sizes: list[int] = []
    original_run = TextEncoder.run

    async def record_size(texts: TextEncoder, size: int, work: Any) -> Any:
        sizes.append(size)
        return await original_run(texts, size, work)

    monkeypatch.setattr(TextEncoder, "run", record_size)
    text = "x" * (2 * INLINE_CHARS)

    async with serving(
        tokenizer, text_script(tokenizer, "x"), ready=_LARGE_CONTEXT
    ) as server:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        assert (await server.http.post(path, json=body)).status_code == 200
        assert len(f"user:{text};") in sizes

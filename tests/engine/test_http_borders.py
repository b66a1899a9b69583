"""Characters that begin in a prompt of token ids and end in the generated text."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, TokenDelta, TokenLogprobs
from tests.engine.test_http_answers import post_both_ways
from tests.engine.test_resume import _frames, _joined
from tests.engine.test_tokenizer import write_sentencepiece_style
from tests.rigs.http_server import READY, USAGE, end, scripted, serving

_READY = replace(READY, vocab_size=4096)
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_GLOBE = "🌍"


@pytest.fixture(params=["bytes", "pieces"])
def made(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Any
) -> Tokenizer:
    """Return a byte-level tokenizer, and one with words and byte tokens."""
    if request.param == "bytes":
        return tokenizer
    write_sentencepiece_style(tmp_path)
    return Tokenizer(tmp_path)


def ids(made: Tokenizer, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False)


def saying_ids(token_ids: list[int], num_choices: int = 1) -> Any:
    """Return a script that generates these tokens in each choice."""
    choices = range(num_choices)
    tokens = [{"choice": at, "token_ids": [i]} for i in token_ids for at in choices]
    return scripted(*tokens, *(end(at) for at in choices))


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("echo", [False, True])
async def test_character_completed_by_the_output_belongs_to_its_text(made, num, echo):
    all_ids = ids(made, f"Hello world {_GLOBE}")
    prompt = all_ids[: num - 4]
    output = [*all_ids[num - 4 :], *ids(made, _GLOBE)[-4:-3]]
    async with serving(made, saying_ids(output, 2), ready=_READY) as server:
        whole = await post_both_ways(
            server, prompt=prompt, echo=echo, max_tokens=9, n=2
        )
    expected = "Hello world " * echo + _GLOBE + _BROKEN
    assert [choice["text"] for choice in whole["choices"]] == [expected] * 2


@pytest.mark.parametrize("text", ["", "A", _GLOBE])
@pytest.mark.parametrize("echo", [False, True])
async def test_incomplete_character_belongs_to_the_prompt(made, text, echo):
    """Its U+FFFD is in the echo, and not at the beginning of the generated text."""
    prompt = ids(made, f"Hi {_GLOBE}")[:-2]
    output = ids(made, f"a{text}")[len(ids(made, "a")) :]
    async with serving(made, saying_ids(output), ready=_READY) as server:
        whole = await post_both_ways(server, prompt=prompt, echo=echo, max_tokens=9)
    (choice,) = whole["choices"]
    assert choice["text"] == (made.decode([*prompt, *output]) if echo else text)


async def test_prompt_keeps_its_last_complete_character(made):
    for prompt in ("Hi \ufffd", "Hi é", f"Hi {_GLOBE}"):
        output = ids(made, "aA")[len(ids(made, "a")) :]
        async with serving(made, saying_ids(output), ready=_READY) as server:
            for given in (prompt, ids(made, prompt)):
                plain = await post_both_ways(server, prompt=given, max_tokens=9)
                echoed = await post_both_ways(
                    server, prompt=given, max_tokens=9, echo=True
                )
                assert plain["choices"][0]["text"] == "A"
                assert echoed["choices"][0]["text"] == f"{prompt}A"


async def test_stop_strings_and_offsets_refer_to_the_joined_text(made):
    all_ids = ids(made, f"ab{_GLOBE}cd")
    at = len(all_ids) - 4
    prompt = all_ids[:at]
    output = all_ids[at:]
    scored = {"prompt_logprobs": [None, *[TokenLogprobs(-1.0)] * (at - 1)]}
    tokens = [{"token_ids": [i], "logprobs": [TokenLogprobs(-1.0)]} for i in output]
    async with serving(made, scripted(scored, *tokens, end()), ready=_READY) as server:
        whole = await post_both_ways(
            server, prompt=prompt, echo=True, logprobs=0, stop=[f"{_GLOBE}c"]
        )
    (choice,) = whole["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("ab", f"{_GLOBE}c")
    assert choice["logprobs"]["text_offset"][-5:] == [2, 2, 2, 2, 3]


async def test_resumed_stream_has_the_same_text(made):
    all_ids = ids(made, f"ab {_GLOBE} cd")
    at = len(all_ids) - 5
    output = all_ids[at:]

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        sent = (
            len(request.resumed_choices[0].token_ids) if request.resumed_choices else 0
        )
        for token_id in output[sent:]:
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
            await asyncio.sleep(0)
        yield TokenDelta(
            request_id=request.request_id, finish_reason="length", usage=USAGE
        )

    body = {"prompt": all_ids[:at], "max_tokens": 9, "echo": True}
    async with (
        serving(made, script, ready=_READY) as first,
        serving(made, script, ready=_READY) as other,
    ):
        whole = await _frames(first, "/v1/completions", body)
        assert len(whole) > 3
        for cut in range(1, len(whole)):
            texts = [text for text, _ in whole[:cut]]
            rest = await _frames(other, "/v1/completions", body, texts)
            assert _joined(whole[:cut] + rest) == _joined(whole), cut

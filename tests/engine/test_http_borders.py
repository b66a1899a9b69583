"""Characters that begin in a prompt of token ids and end in the generated text."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, TokenDelta, TokenLogprobs
from tests.engine.test_http_answers import post_both_ways
from tests.engine.test_resume import _join_events, _request_frames
from tests.engine.test_tokenizer import write_sentencepiece_style
from tests.rigs.http_server import READY, USAGE, end, scripted, serving

_READY = replace(READY, vocab_size=4096)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_GLOBE = "🌍"


@pytest.fixture(params=["bytes", "pieces"])
def any_tokenizer(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Any
) -> Tokenizer:
    """A byte-level tokenizer, or a tokenizer with words and byte tokens."""
    if request.param == "bytes":
        return tokenizer
    write_sentencepiece_style(tmp_path)
    return Tokenizer(tmp_path)


def encode(any_tokenizer: Tokenizer, text: str) -> list[int]:
    return any_tokenizer.encode(text, add_special_tokens=False)


def generate_ids(token_ids: list[int], num_choices: int = 1) -> Any:
    """Return a script that generates these tokens in each choice."""
    choices = range(num_choices)
    tokens = [
        {"choice": choice, "token_ids": [i]} for i in token_ids for choice in choices
    ]
    return scripted(*tokens, *(end(choice) for choice in choices))


@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3])
@pytest.mark.parametrize("echo", [False, True])
async def test_character_completed_by_the_output_belongs_to_its_text(
    any_tokenizer, num_prompt_bytes, echo
):
    all_ids = encode(any_tokenizer, f"Hello world {_GLOBE}")
    prompt = all_ids[: num_prompt_bytes - 4]
    output = [*all_ids[num_prompt_bytes - 4 :], *encode(any_tokenizer, _GLOBE)[-4:-3]]
    async with serving(any_tokenizer, generate_ids(output, 2), ready=_READY) as server:
        complete_response = await post_both_ways(
            server, prompt=prompt, echo=echo, max_tokens=9, n=2
        )
    expected = "Hello world " * echo + _GLOBE + _REPLACEMENT
    assert [choice["text"] for choice in complete_response["choices"]] == [expected] * 2


@pytest.mark.parametrize("text", ["", "A", _GLOBE])
@pytest.mark.parametrize("echo", [False, True])
async def test_incomplete_character_belongs_to_the_prompt(any_tokenizer, text, echo):
    """The U+FFFD of the incomplete character is in the echo, but not in the output."""
    prompt = encode(any_tokenizer, f"Hi {_GLOBE}")[:-2]
    output = encode(any_tokenizer, f"a{text}")[len(encode(any_tokenizer, "a")) :]
    async with serving(any_tokenizer, generate_ids(output), ready=_READY) as server:
        complete_response = await post_both_ways(
            server, prompt=prompt, echo=echo, max_tokens=9
        )
    (choice,) = complete_response["choices"]
    assert choice["text"] == (
        any_tokenizer.decode([*prompt, *output]) if echo else text
    )


async def test_prompt_keeps_its_last_complete_character(any_tokenizer):
    for prompt in ("Hi \ufffd", "Hi é", f"Hi {_GLOBE}"):
        output = encode(any_tokenizer, "aA")[len(encode(any_tokenizer, "a")) :]
        async with serving(any_tokenizer, generate_ids(output), ready=_READY) as server:
            for prompt_form in (prompt, encode(any_tokenizer, prompt)):
                plain = await post_both_ways(server, prompt=prompt_form, max_tokens=9)
                echoed = await post_both_ways(
                    server, prompt=prompt_form, max_tokens=9, echo=True
                )
                assert plain["choices"][0]["text"] == "A"
                assert echoed["choices"][0]["text"] == f"{prompt}A"


async def test_stop_strings_and_offsets_refer_to_the_joined_text(any_tokenizer):
    all_ids = encode(any_tokenizer, f"ab{_GLOBE}cd")
    split = len(all_ids) - 4
    prompt = all_ids[:split]
    output = all_ids[split:]
    scored = {"prompt_logprobs": [None, *[TokenLogprobs(-1.0)] * (split - 1)]}
    tokens = [{"token_ids": [i], "logprobs": [TokenLogprobs(-1.0)]} for i in output]
    async with serving(
        any_tokenizer, scripted(scored, *tokens, end()), ready=_READY
    ) as server:
        complete_response = await post_both_ways(
            server, prompt=prompt, echo=True, logprobs=0, stop=[f"{_GLOBE}c"]
        )
    (choice,) = complete_response["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("ab", f"{_GLOBE}c")
    assert choice["logprobs"]["text_offset"][-5:] == [2, 2, 2, 2, 3]


async def test_resumed_stream_has_the_same_text(any_tokenizer):
    all_ids = encode(any_tokenizer, f"ab {_GLOBE} cd")
    split = len(all_ids) - 5
    output = all_ids[split:]

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        num_sent = (
            len(request.resumed_choices[0].token_ids) if request.resumed_choices else 0
        )
        for token_id in output[num_sent:]:
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
            await asyncio.sleep(0)
        yield TokenDelta(
            request_id=request.request_id, finish_reason="length", usage=USAGE
        )

    body = {"prompt": all_ids[:split], "max_tokens": 9, "echo": True}
    async with (
        serving(any_tokenizer, script, ready=_READY) as first,
        serving(any_tokenizer, script, ready=_READY) as other,
    ):
        frames = await _request_frames(first, "/v1/completions", body)
        assert len(frames) > 3
        for cut in range(1, len(frames)):
            texts = [text for text, _ in frames[:cut]]
            rest = await _request_frames(other, "/v1/completions", body, texts)
            assert _join_events(frames[:cut] + rest) == _join_events(frames), cut

"""Predictions of clients reach the engine."""

import threading
from typing import Any

import pytest

from engine.http.text_encoder import PREDICTION_MARGIN_TOKENS
from engine.http.text_workers import INLINE_CHARS
from engine.text.tokenizer import Tokenizer
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import validate
from tests.rigs.http_server import end, scripted, serving, serving_4k, text_script

CHAT, COMPLETIONS, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
)
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "ab"},
    RESPONSES: {"input": "Hi"},
}


def predict(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


# -- from the body to the engine -------------------------------------------------------


class RecordingTokenizer(Tokenizer):
    """A tokenizer that records how much it encodes, and in which threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__ = {**tokenizer.__dict__}
        self.encoded: list[tuple[int, int]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append((len(text), threading.get_ident()))
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_only_the_useful_part_of_a_prediction_is_tokenized_off_the_loop(
    tokenizer,
):
    recorder = RecordingTokenizer(tokenizer)
    size = 200_000  # each character is a token
    limit = 5 + PREDICTION_MARGIN_TOKENS
    async with serving_4k(recorder, text_script(tokenizer, "ok")) as server:
        await server.chat(max_tokens=5, **predict("x" * 9))
        await server.post(max_tokens=5, **predict("x" * (INLINE_CHARS + 1)))
        small, large = server.engine.added
        assert small.prediction == tokenizer.encode("x" * 9)
        assert large.prediction == tokenizer.encode("x" * limit)
        on_loop = [thread == threading.get_ident() for _, thread in recorder.encoded]
        assert on_loop == [True, True, True, False]
    async with serving_4k(
        recorder, text_script(tokenizer, "ok"), max_body=2 * size
    ) as server:
        await server.post(max_tokens=5, **predict("x" * size))
        assert server.engine.added[0].prediction == tokenizer.encode("x" * limit)
        assert max(num_chars for num_chars, _ in recorder.encoded) < size // 4


async def test_text_of_a_prediction_does_not_become_special_tokens(tokenizer):
    """The model would end its answer with such a token."""
    without_template = RecordingTokenizer(tokenizer)
    without_template.chat_template = None
    async with serving(tokenizer, text_script(tokenizer, "ok")) as server:
        await server.chat(**predict("a<end>b"))
        ids = server.engine.added[0].prediction
        assert tokenizer.decode(ids) == "a<end>b" and len(ids) == len("a<end>b")
    async with serving(without_template, text_script(tokenizer, "ok")) as server:
        await server.post(**predict("a<end>b"))
        assert server.engine.added[0].prediction == tokenizer.encode("ab")


async def test_prefill_leg_and_scored_prompt_have_no_prediction(tokenizer):
    prefill = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    async with serving(tokenizer, text_script(tokenizer, "o")) as server:
        for fields in (prefill, {"max_tokens": 0, "echo": True}, {"max_tokens": 1}):
            answer = await server.post(**fields, **predict("Yo"))
            assert answer.status_code == 200, answer.text
        assert [bool(add.prediction) for add in server.engine.added] == [
            False,
            False,
            True,
        ]


async def test_each_prompt_and_choice_has_the_prediction(tokenizer):
    text = "x" * (INLINE_CHARS + 1)
    fields = {"prompt": ["a", "b"], "n": 2, "max_tokens": 7}
    async with serving_4k(tokenizer, scripted(end(), end(1))) as server:
        await server.post(**fields, **predict(text))
        adds = server.engine.added
        assert [add.num_choices for add in adds] == [2, 2]
        expected = tokenizer.encode("x" * (7 + PREDICTION_MARGIN_TOKENS))
        assert [add.prediction for add in adds] == [expected, expected]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["x"], "n": 2, "logit_bias": {"5": 1}, "min_tokens": 1},
    ],
)
async def test_prediction_is_accepted_together_with_other_fields(tokenizer, fields):
    """OpenAI refuses these combinations. Here a prediction changes no token."""
    async with serving_4k(tokenizer, scripted(end(), end(1))) as server:
        answer = await server.chat(max_tokens=9, **fields, **predict("Yo"))
        assert answer.status_code == 200, answer.text
        assert server.engine.added[0].prediction == tokenizer.encode("Yo")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_text_of_a_prediction_is_freed_while_an_answer_is_generated(kind):
    body = {**PROMPTS[kind.endpoint], "model": "m", **predict("Yo")}
    request = validate(kind, body)
    assert request.prediction is not None and request.prediction.text == "Yo"
    assert request.without_prompt_fields().prediction is None

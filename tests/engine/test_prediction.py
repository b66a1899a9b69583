"""Predictions of clients reach the engine, and the usage counts proposed tokens."""

import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.http import text_encoder
from engine.http.text_encoder import PREDICTION_MARGIN_TOKENS
from engine.http.text_workers import INLINE_CHARS
from engine.http.truncation import first_tokens
from engine.text.tokenizer import Tokenizer
from protocol import resume
from protocol.messages import MOVED, AddRequest, KVUsage, TokenDelta
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import validate
from tests.rigs.http_server import (
    READY,
    SECRET,
    Server,
    chunks,
    end,
    events,
    scripted,
    serving,
    serving_4k,
    text_script,
)

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
    """A tokenizer that records the length and the thread of each encoded text."""

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


@pytest.mark.parametrize("limit", [0, 1, 500, 1024, 5000])
@pytest.mark.parametrize("token_chars", [1, 100])
def test_first_tokens_are_those_of_the_whole_text(limit, token_chars):
    """Tokens of 100 characters are longer than the first estimate assumes."""
    text = "".join(chr(0x4E00 + index % 9973) for index in range(250_000))
    sizes = []

    def encode(part: str) -> list[int]:
        sizes.append(len(part))
        starts = range(0, len(part), token_chars)
        return [hash(part[start : start + token_chars]) for start in starts]

    actual = first_tokens(text, limit, encode)
    assert max(sizes) <= max(2048, 16 * limit, 4 * token_chars * (limit + 64))
    assert actual == encode(text)[:limit]


async def test_text_of_a_prediction_does_not_become_special_tokens(tokenizer):
    """If the model drew a special token such as <end>, its answer would end."""
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


async def test_predictions_of_many_prompts_are_bounded_together(tokenizer, monkeypatch):
    """Each prompt has a copy of the prediction, so one text could fill the memory."""
    monkeypatch.setattr(text_encoder, "MAX_PREDICTED_TOKENS", 3000)
    fields = {"prompt": ["a", "b", "c"], "max_tokens": 7, **predict("x" * 5000)}
    script = scripted(end())
    async with serving_4k(tokenizer, script, max_body=10_000) as server:
        await server.post(**fields)
        assert [len(add.prediction) for add in server.engine.added] == [1000] * 3


async def test_tokens_that_the_model_lacks_are_not_predicted(tokenizer):
    """A tokenizer may have more tokens than the model. A step with such a token ends
    the engine."""
    (first_missing_id,) = tokenizer.encode("y")
    ready = replace(READY, vocab_size=first_missing_id)
    script = scripted(end(token_ids=[5]))
    async with serving(tokenizer, script, ready=ready) as server:
        answer = await server.post(prompt=[5], **predict("axyzb"))
        assert answer.status_code == 200, answer.text
        assert server.engine.added[0].prediction == tokenizer.encode("axb")


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
    """OpenAI refuses these combinations. In Baton, a prediction changes no token."""
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


# -- usage -----------------------------------------------------------------------------


def prediction_counts(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    return accepted, details["rejected_prediction_tokens"]


async def counts_both_ways(
    server: Server, path: str, **fields: Any
) -> tuple[int, int, int]:
    """Return the accepted, rejected and completion tokens of a usage. Check that a
    stream has the same usage."""
    body = {"model": "m", **PROMPTS[path], **fields}
    usage = (await server.http.post(path, json=body)).json()["usage"]
    if path == RESPONSES:
        streamed = await server.http.post(path, json={**body, "stream": True})
        last = events(streamed)[-1][1]["response"]
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        last = chunks(await server.http.post(path, json=body))[-1]
    assert last["usage"] == usage
    num_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
    return *prediction_counts(usage), num_tokens


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(("accepted", "rejected"), [(0, 0), (3, 2)])
async def test_usage_counts_proposed_tokens(tokenizer, path, accepted, rejected):
    script = scripted(
        {"token_ids": tokenizer.encode("Hello")},
        end(accepted_tokens=accepted, rejected_tokens=rejected),
    )
    async with serving(tokenizer, script) as server:
        actual = await counts_both_ways(server, path)
        assert actual == (accepted, rejected, 5)


async def test_usage_adds_up_the_choices_of_all_prompts(tokenizer):
    script = scripted(
        {"token_ids": tokenizer.encode("Hello")},
        end(accepted_tokens=3, rejected_tokens=1),
        {"choice": 1, "token_ids": tokenizer.encode("Hi")},
        end(1, accepted_tokens=1, rejected_tokens=5),
    )
    async with serving(tokenizer, script) as server:
        fields = {"prompt": ["a", "b"], "n": 2}
        assert await counts_both_ways(server, COMPLETIONS, **fields) == (8, 12, 14)


async def test_tokens_after_a_stop_string_count_as_rejected(tokenizer):
    """The engine accepts 10 proposals, but the client receives only some of them."""
    ids = tokenizer.encode("Hello world")
    script = scripted(end(token_ids=ids, accepted_tokens=10, rejected_tokens=1))
    async with serving(tokenizer, script) as server:
        actual = await counts_both_ways(server, COMPLETIONS, stop="l")
        assert actual == (3, 8, 3)


async def test_usage_of_each_chunk_counts_the_choices_that_have_ended(tokenizer):
    script = scripted(
        {"token_ids": tokenizer.encode("He")},
        end(accepted_tokens=1, rejected_tokens=2),
        {"choice": 1, "token_ids": tokenizer.encode("Hi")},
        end(1, accepted_tokens=1),
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(tokenizer, script) as server:
        answer = await server.chat(n=2, stream=True, stream_options=options)
        counts = [prediction_counts(chunk["usage"]) for chunk in chunks(answer)]
    assert counts[0] == (0, 0) and counts[-1] == (2, 2)
    assert counts == sorted(counts) and (1, 2) in counts


# -- failover and migration ------------------------------------------------------------


async def post_framed(
    server: Server, body: dict[str, Any], texts: Sequence[bytes] = ()
) -> tuple[list[bytes], dict[str, Any]]:
    """Send a request as a proxy does. With `texts`, it resumes an answer that has these
    frames.

    Returns:
        The texts of the frames, and the last usage of the answer; {} if it has none.
    """
    history = resume.FrameHistory()
    for text in texts:
        history.add(text + b",")
    resumed = {}
    if texts:
        resumed = {resume.MEMBER: msgspec.json.decode(history.sign(SECRET))}
    headers = {
        "x-request-id": "r",
        resume.HEADER: resume.frames_request(SECRET, b"r").decode(),
    }
    answer = await server.http.post(
        CHAT, json={"model": "m", **body, **resumed}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return [], answer.json()["usage"]
    frames = resume.Frames().feed(answer.content)
    usages = [
        message["usage"]
        for _, data in frames
        for line in data.split(b"\n")
        if line.startswith(b"data: {")
        and (message := msgspec.json.decode(line[6:])).get("usage")
    ]
    return [text for text, _ in frames], usages[-1] if usages else {}


@pytest.mark.parametrize("is_stream", [True, False])
async def test_usage_adds_up_the_servers_of_a_migrated_answer(tokenizer, is_stream):
    """Choice 0 has ended at the first server, and choice 1 migrates."""

    async def first_script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        name = request.request_id
        for choice, text in enumerate(("Hello", "wor")):
            ids = tokenizer.encode(text)
            yield TokenDelta(request_id=name, choice=choice, token_ids=ids)
        ended = end(accepted_tokens=4, rejected_tokens=1)
        yield TokenDelta(request_id=name, **ended)
        moved = end(1, finish_reason=MOVED, accepted_tokens=2, rejected_tokens=3)
        yield TokenDelta(request_id=name, kv_transfer_params={"a": [1]}, **moved)

    async def other_script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        assert request.prediction == tokenizer.encode("Hello")
        name = request.request_id
        ids = tokenizer.encode("ld")
        yield TokenDelta(request_id=name, choice=1, token_ids=ids)
        ended = end(1, accepted_tokens=1, rejected_tokens=7)
        yield TokenDelta(request_id=name, **ended)

    body = {**PROMPTS[CHAT], "n": 2, "max_tokens": 9, **predict("Hello")}
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        serving(tokenizer, first_script) as first,
        serving(tokenizer, other_script) as other,
    ):
        *texts, last = (await post_framed(first, body))[0]
        assert last.startswith(resume.MOVED)
        _, usage = await post_framed(other, body, texts)
        assert (*prediction_counts(usage), usage["completion_tokens"]) == (7, 11, 10)


async def test_usage_after_a_failover_has_the_counts_that_the_server_had_reported(
    tokenizer,
):
    """A lost server has reported counts only for choices that had ended."""
    script = scripted(
        {"token_ids": tokenizer.encode("He"), "usage": KVUsage()},
        end(accepted_tokens=1, rejected_tokens=2),
        {"choice": 1, "token_ids": tokenizer.encode("Hi")},
        end(1, accepted_tokens=1),
    )
    body = {
        **PROMPTS[CHAT],
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    continued = scripted(
        {"choice": 1, "token_ids": tokenizer.encode("i")}, end(1, rejected_tokens=4)
    )
    async with (
        serving(tokenizer, script) as first,
        serving(tokenizer, continued) as other,
    ):
        texts, usage = await post_framed(first, body)
        assert prediction_counts(usage) == (2, 2)
        texts = [text for text in texts if not text.startswith(resume.REPORT_PREFIX)]
        ended = next(i for i, text in enumerate(texts) if b'"length"' in text)
        _, usage = await post_framed(other, body, texts[: ended + 1])
        assert prediction_counts(usage) == (1, 6)


async def test_stream_resumes_with_another_prediction(tokenizer):
    """A prediction changes no token, so a resumed stream may have a different one."""
    async with serving(
        tokenizer, text_script(tokenizer, "ok"), ready=replace(READY, max_model_len=256)
    ) as server:
        body = {**PROMPTS[CHAT], "stream": True, "max_tokens": 9}
        texts, _ = await post_framed(server, {**body, **predict("a")})
        await post_framed(server, {**body, **predict("b")}, texts[:2])
        assert server.engine.added[1].prediction == tokenizer.encode("b")

"""Complete and streamed responses: text, tokens, logprobs, choices, finish reasons."""

from collections.abc import AsyncIterator
from threading import get_ident
from typing import Any

import pytest
from msgspec.structs import replace

from engine.http.choice import PromptGeneration
from engine.text.tokenizer import Tokenizer
from protocol.messages import (
    AddRequest,
    KVUsage,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import validate
from protocol.settings.options import ModelOptions
from tests.engine.test_http_tools import CALL, TOOL
from tests.engine.test_tokenizer import write_sentencepiece_style
from tests.rigs.http_server import (
    READY,
    Server,
    chunks,
    end,
    scripted,
    serving,
    serving_4k,
    text_script,
)

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MINUS_INFINITY = float("-inf")
BYTE_TOKENS = (r"bytes:\xc3", r"bytes:\xa9")


def merge_into(into: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """Add a piece of a choice to `into`, with texts and lists concatenated."""
    for key, value in piece.items():
        if isinstance(value, dict):
            into[key] = merge_into(into.get(key) or {}, value)
        elif isinstance(value, str | list):
            into[key] = (into.get(key) or type(value)()) + value
        elif value is not None or key not in into:
            into[key] = value
    return into


async def post_both_ways(
    server: Server, path: str = TEXT, **fields: Any
) -> dict[str, Any]:
    """Return the complete response, and check that a stream has the same content."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    if path == TEXT:
        body = {"prompt": "ab", **{k: v for k, v in body.items() if k != "messages"}}
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    complete_response: dict[str, Any] = response.json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *actual, last = chunks(await server.http.post(path, json=body))
    assert len({(c["id"], c["created"], c["model"]) for c in [*actual, last]}) == 1
    assert last["usage"] == complete_response["usage"] and {
        c["usage"] for c in actual
    } == {None}
    assert ["baton_kv" in c for c in [*actual, last]] == [False] * len(actual) + [True]
    kv = ", ".join(f"{name}={count}" for name, count in last["baton_kv"].items())
    assert response.headers["x-baton-kv"] == kv
    streamed: dict[int, Any] = {}
    for choice in (chunk["choices"][0] for chunk in actual):
        merge_into(streamed.setdefault(choice["index"], {"index": 0}), choice)
    for choice in complete_response["choices"]:
        expected = {
            k: v for k, v in choice.items() if k not in ("message", "prompt_logprobs")
        }
        if "message" in choice:
            expected["delta"] = {
                k: v for k, v in choice["message"].items() if k != "refusal"
            }
        assert streamed[choice["index"]] == expected
    return complete_response


def usage(*, prompt: int, completion: int, cached: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    details = {
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    return {**counts, "total_tokens": prompt + completion, **details}


def make_deltas(tokenizer: Tokenizer, *pieces: Any) -> list[dict[str, Any]]:
    """Return the fields of deltas, made from texts or pairs of a text and its logprobs.

    In the logprobs of a token, the first entry belongs to the token itself."""
    actual = []
    for piece in pieces:
        text, reports = (piece, ()) if isinstance(piece, str) else piece
        delta: dict[str, Any] = {"token_ids": tokenizer.encode(text)}
        for report in reports:
            ids = [tokenizer.encode(top)[0] for top in report]
            values = list(report.values())
            logprobs = delta.setdefault("logprobs", [])
            logprobs.append(TokenLogprobs(values[0], ids, values))
        actual.append(delta)
    return actual


@pytest.mark.parametrize(
    ("path", "texts", "fields", "expected"),
    [
        (TEXT, ["Hé 🙂"], {}, {"text": "Hé 🙂", "finish_reason": "length"}),
        (CHAT, ["Hé 🙂"], {}, {"message": {
            "role": "assistant", "content": "Hé 🙂", "refusal": None}}),
        # The end token has no text. Text that may begin a stop string is held back
        # until the end. A stop string cuts the text.
        (TEXT, ["Hi wor<end>"], {"stop": "world"}, {"text": "Hi wor"}),
        (TEXT, ["Hello world"], {"stop": "o w"},
         {"text": "Hell", "stop_reason": "o w", "finish_reason": "stop"}),
        (TEXT, ["Hello world"],
         {"stop": ["rld", "o w"], "include_stop_str_in_output": True},
         {"text": "Hello w", "stop_reason": "o w"}),
        (TEXT, [*"Hello world"], {"stop": "o w", "min_tokens": 7},
         {"text": "Hello world", "finish_reason": "length"}),
        (TEXT, [*"Hello world"], {"stop": "rld", "min_tokens": 5},
         {"text": "Hello wo", "stop_reason": "rld"}),
        (TEXT, ["a<end>b"], {"ignore_eos": True}, {"text": "ab"}),
        (TEXT, ["a<end>b"], {"ignore_eos": True, "skip_special_tokens": False},
         {"text": "a<end>b"}),
        # Logprobs, in the formats of both endpoints.
        (TEXT,
         [("a", [{"a": -0.5, "b": -1.5}]), ("c", [{"c": MINUS_INFINITY, "b": -2.0}])],
         {"logprobs": 2},
         {"logprobs": {"tokens": ["a", "c"], "token_logprobs": [-0.5, -9999.0],
                       "top_logprobs": [{"a": -0.5, "b": -1.5},
                                        {"c": -9999.0, "b": -2.0}],
                       "text_offset": [0, 1]}}),
        (CHAT, [("a", [{"a": -0.5, "b": -1.0, "c": -3.0}])],
         {"logprobs": True, "top_logprobs": 2},
         {"logprobs": {"refusal": None,
                       "content": [{"token": "a", "logprob": -0.5, "bytes": [97],
                                    "top_logprobs": [{"token": "a", "logprob": -0.5,
                                                      "bytes": [97]},
                                                     {"token": "b", "logprob": -1.0,
                                                      "bytes": [98]}]}]}}),
        (CHAT, [("é", [{"a": -0.25}, {"a": MINUS_INFINITY}])], {"logprobs": True},
         {"logprobs": {"refusal": None,
                       "content": [{"token": BYTE_TOKENS[0], "logprob": -0.25,
                                    "bytes": [0xC3], "top_logprobs": []},
                                   {"token": BYTE_TOKENS[1], "logprob": -9999.0,
                                    "bytes": [0xA9], "top_logprobs": []}]}}),
        (CHAT, ["a"], {}, {"logprobs": None}),
    ],
)  # fmt: skip
async def test_answer_is_the_same_with_and_without_a_stream(
    tokenizer, path, texts, fields, expected
):
    async with serving(
        tokenizer, scripted(*make_deltas(tokenizer, *texts), end())
    ) as server:
        (choice,) = (await post_both_ways(server, path, **fields))["choices"]
        assert {key: choice[key] for key in expected} == expected


async def test_token_ids_and_usage(tokenizer):
    async with serving(
        tokenizer, text_script(tokenizer, "Hé 🙂"), fingerprint="fp_1"
    ) as server:
        complete_response = await post_both_ways(server, return_token_ids=True)
        assert complete_response["system_fingerprint"] == "fp_1"
        (choice,) = complete_response["choices"]
        assert choice["token_ids"] == tokenizer.encode("Hé 🙂")
        assert choice["prompt_token_ids"] == tokenizer.encode("ab")
        assert complete_response["usage"] == usage(prompt=2, completion=8, cached=1)


async def test_chat_answer_has_prompt_token_ids_at_its_top_level(tokenizer):
    """As in vLLM, the response has these ids once, and not in each choice."""
    text = {"token_ids": tokenizer.encode("Hi")}
    call = tokenizer.encode(CALL)
    script = scripted(
        *({"choice": c, **text} for c in (1, 0)), {"token_ids": call}, end(), end(1)
    )
    request: dict[str, Any] = {
        "n": 2,
        "return_token_ids": True,
        "tools": [TOOL],
        "max_tokens": 90,
    }
    async with serving_4k(tokenizer, script) as server:
        complete_response = (await server.chat(**request)).json()
        prompt = server.engine.added[0].token_ids
        assert complete_response["prompt_token_ids"] == prompt
        expected = [[*text["token_ids"], *call], text["token_ids"]]
        assert [
            choice["token_ids"] for choice in complete_response["choices"]
        ] == expected
        first, *others = chunks(await server.chat(**request, stream=True))
        assert first["prompt_token_ids"] == prompt
        events = [first, *others]
        assert not any("prompt_token_ids" in event for event in others)
        actual = [
            *complete_response["choices"],
            *(event["choices"][0] for event in events),
        ]
        assert not any("prompt_token_ids" in choice for choice in actual)
        plain = (await server.chat(n=2)).json()
        assert "prompt_token_ids" not in plain


async def test_tokens_can_be_named_by_their_ids(tokenizer):
    a, b = tokenizer.encode("ab")
    script = scripted(*make_deltas(tokenizer, ("a", [{"a": -0.5, "b": -1.0}])), end())
    async with serving(tokenizer, script) as server:
        (choice,) = (
            await post_both_ways(server, return_tokens_as_token_ids=True, logprobs=2)
        )["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{a}"]
        tops = {f"token_id:{a}": -0.5, f"token_id:{b}": -1.0}
        assert choice["logprobs"]["top_logprobs"] == [tops]
        assert [add.sampling.num_logprobs for add in server.engine.added] == [2, 2]


async def test_client_stop_token_is_the_stop_reason_and_has_no_text(tokenizer):
    (dot,) = tokenizer.encode(".")
    async with serving(
        tokenizer, text_script(tokenizer, "Hi.", finish_reason="stop")
    ) as server:
        request = {"stop_token_ids": [dot], "ignore_eos": True}
        (choice,) = (await post_both_ways(server, **request))["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("Hi", dot)
        (retained,) = (
            await post_both_ways(server, **request, include_stop_str_in_output=True)
        )["choices"]
        assert retained["text"] == "Hi."
        (plain,) = (await post_both_ways(server, stop_token_ids=[dot]))["choices"]
        assert plain["stop_reason"] == dot
        ids = [add.stop_token_ids for add in server.engine.added[::2]]
        assert ids == [[dot], [dot], [*tokenizer.eos_ids, dot]]


# -- the prompt ------------------------------------------------------------------------


def scores(tokenizer: Tokenizer, prompt: str) -> dict[str, Any]:
    """Return prompt logprobs: -i for token i, with "z" as the most likely token."""
    (z,) = tokenizer.encode("z")
    num_tokens = len(tokenizer.encode(prompt))
    rest = [TokenLogprobs(-float(i), [z], [-0.125]) for i in range(1, num_tokens)]
    return {"prompt_logprobs": [None, *rest]}


async def test_echoed_prompt_has_logprobs_before_those_of_the_answer(tokenizer):
    actual = scores(tokenizer, "aéb")["prompt_logprobs"]
    parts = [{"prompt_logprobs": actual[:1]}, {"prompt_logprobs": actual[1:]}]
    script = scripted(*parts, *make_deltas(tokenizer, ("x", [{"x": -0.5}])), end())
    async with serving(tokenizer, script) as server:
        complete_response = await post_both_ways(
            server, prompt="aéb", echo=True, logprobs=1, max_tokens=1
        )
        (choice,) = complete_response["choices"]
        assert choice["text"] == "aébx"
        assert choice["logprobs"] == {
            "tokens": ["a", *BYTE_TOKENS, "b", "x"],
            "token_logprobs": [None, -1.0, -2.0, -3.0, -0.5],
            "top_logprobs": [
                None,
                {BYTE_TOKENS[0]: -1.0, "z": -0.125},
                {BYTE_TOKENS[1]: -2.0, "z": -0.125},
                {"b": -3.0, "z": -0.125},
                {"x": -0.5},
            ],
            "text_offset": [0, 1, 1, 2, 3],
        }
        added = server.engine.added[0]
        assert (added.num_prompt_logprobs, added.max_tokens) == (1, 1)


async def test_nothing_is_generated_with_max_tokens_0(tokenizer):
    async with serving(tokenizer, scripted(scores(tokenizer, "ab"), end())) as server:
        complete_response = await post_both_ways(
            server, max_tokens=0, echo=True, logprobs=0
        )
        (choice,) = complete_response["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}]
        assert complete_response["usage"]["completion_tokens"] == 0
        assert (await server.post(prompt=[5] * 64, max_tokens=0)).status_code == 200


async def test_echo_without_logprobs_has_only_text(tokenizer):
    async with serving(tokenizer) as server:
        for prompt, text in (
            ("Hi<end>", "Hi<end>"),
            (tokenizer.encode("Hi<end>"), "Hi"),
        ):
            (choice,) = (
                await post_both_ways(server, prompt=prompt, echo=True, max_tokens=1)
            )["choices"]
            assert choice["text"].startswith(text) and choice["logprobs"] is None
        assert {request.num_prompt_logprobs for request in server.engine.added} == {
            None
        }
    # An echo also has only text if best_of ranks several candidates.
    async with serving(tokenizer, scripted(end(), end(1))) as server:
        (choice,) = (await server.post(echo=True, best_of=2, max_tokens=1)).json()[
            "choices"
        ]
        assert (choice["text"], choice["logprobs"]) == ("ab", None)


@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [
        ("Hi é", [0, 0, 0, 1, 2]),
        # Detokenizing would drop a space of this text.
        ("Hi <s> it", [0, 0, 0, 1, 2, 3]),
        ("<s> it", [0, 0, 3]),
    ],
)
async def test_tokenizer_prefix_has_no_characters_in_an_echo(tmp_path, prompt, offsets):
    write_sentencepiece_style(tmp_path)  # puts <s> and a space before every text
    tokenizer = Tokenizer(tmp_path)
    num_tokens = len(tokenizer.encode(prompt))
    script = scripted({"prompt_logprobs": [None] * num_tokens}, end())
    async with serving(
        tokenizer, script, ready=replace(READY, vocab_size=4096)
    ) as server:
        complete_response = await post_both_ways(
            server, prompt=prompt, echo=True, logprobs=0, max_tokens=0
        )
        (choice,) = complete_response["choices"]
        assert choice["text"] == prompt and choice["logprobs"]["tokens"][0] == "<s>"
        assert choice["logprobs"]["text_offset"][: len(offsets)] == offsets


async def test_prompt_logprobs_are_objects_by_token_id(tokenizer):
    a, b, z = tokenizer.encode("abz")
    actual = [None, TokenLogprobs(-2.0, [z, b], [-0.5, -2.0], 2)]
    async with serving(
        tokenizer, scripted({"prompt_logprobs": actual, "token_ids": [a]}, end())
    ) as server:
        (choice,) = (await server.post(prompt_logprobs=2)).json()["choices"]
        assert choice["prompt_logprobs"] == [
            None,
            {
                str(b): {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
                str(z): {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
            },
        ]
        assert choice["logprobs"] is None
        fewer = (await server.post(prompt_logprobs=1)).json()["choices"][0]
        assert fewer["prompt_logprobs"][1][str(b)]["rank"] == 2


@pytest.mark.parametrize(
    "request_fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}]
)
async def test_logprobs_of_a_long_prompt_are_bounded_and_delay_no_other_request(
    tokenizer, request_fields
):
    threads = set[int]()

    def record_thread(token_id: int) -> Any:
        threads.add(get_ident())
        return tokenizer.token_text(token_id)

    recording_tokenizer = object.__new__(Tokenizer)
    recording_tokenizer.__dict__ = {**tokenizer.__dict__, "token_text": record_thread}
    top = TokenLogprobs(-2.0, list(range(20)), [-3.0] * 20)
    script = scripted({"prompt_logprobs": [None, *[top] * 499]}, end())
    async with serving_4k(recording_tokenizer, script) as server:
        response = await server.post(prompt=[5] * 500, max_tokens=0, **request_fields)
        assert response.status_code == 200
        assert threads and get_ident() not in threads
        for too_many in (
            {"prompt": [[5] * 4000] * 2, "n": 8},
            {"prompt": [5] * 2000, "stream": True},
        ):
            error = (
                await server.post(**too_many, max_tokens=0, **request_fields)
            ).json()["error"]
            assert (
                error["param"] in request_fields and error["code"] == "invalid_request"
            )


async def test_logprobs_of_an_answer_without_a_stream_are_bounded(
    tokenizer, monkeypatch
):
    monkeypatch.setattr("engine.http.limits.MAX_OUTPUT_LOGPROBS", 2 * 3 * 100)
    request = {"prompt": "a", "logprobs": 2, "n": 2}
    async with serving_4k(tokenizer, text_script(tokenizer, "ab")) as server:
        error = (await server.post(**request, max_tokens=101)).json()["error"]
        assert error["param"] == "logprobs" and "`max_tokens`" in error["message"]
        for fits in (
            {"max_tokens": 100, "n": 1},
            {"max_tokens": 101, "n": 1, "stream": True},
        ):
            assert (await server.post(**{**request, **fits})).status_code == 200


def test_echo_of_a_long_prompt_is_made_on_another_thread(tokenizer):
    for size in (500, 5000):
        add = AddRequest(
            request_id="a",
            token_ids=[5] * size,
            sampling=SamplingParams(),
            max_tokens=1,
        )
        request = validate(
            CompletionRequest, {"model": "m", "prompt": add.token_ids, "echo": True}
        )
        prompt = PromptGeneration(request, add, None, tokenizer, ModelOptions())
        assert prompt.is_slow_to_report == (size == 5000)
        assert len(prompt.prompt_report()[1]) == size and not prompt.is_slow_to_report


async def test_engine_that_scores_too_few_tokens_is_an_error(tokenizer):
    async with serving(
        tokenizer, scripted({"prompt_logprobs": [None]}, end())
    ) as server:
        response = await server.post(prompt_logprobs=0)
        assert response.status_code == 500
        message = response.json()["error"]["message"]
        assert "logprobs for 1 of the prompt's 2 tokens" in message


# -- several prompts and choices -------------------------------------------------------


async def counting(request: AddRequest) -> AsyncIterator[TokenDelta]:
    """Yield deltas in which choice k repeats the token (last prompt token + 1 + k)."""
    deltas = [
        {"choice": choice, "token_ids": [request.token_ids[-1] + 1 + choice]}
        for _ in range(request.max_tokens)
        for choice in range(request.num_choices)
    ]
    n = len(request.token_ids)
    usage = KVUsage(
        transferred=1, recomputed=n, skipped=2, cached_tokens=1, prefill_skipped=n
    )
    deltas[0]["usage"] = usage
    ends = [end(choice, usage=usage) for choice in reversed(range(request.num_choices))]
    async for delta in scripted(*deltas, *ends)(request):
        yield delta


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_choices_of_several_prompts_have_indices_in_order(tokenizer, path):
    prompts = {"prompt": [[10], [20, 30]]} if path == TEXT else {}
    ids = [[11, 11], [12, 12], [13, 13], [31, 31], [32, 32], [33, 33]]
    async with serving(tokenizer, counting) as server:
        complete_response = await post_both_ways(
            server, path, **prompts, n=3, max_tokens=2, return_token_ids=True
        )
        assert {add.num_choices for add in server.engine.added} == {3}
        if path == CHAT:
            assert [c["index"] for c in complete_response["choices"]] == [0, 1, 2]
            return
        assert [c["index"] for c in complete_response["choices"]] == list(range(6))
        assert [c["token_ids"] for c in complete_response["choices"]] == ids
        assert complete_response["usage"] == usage(prompt=3, completion=12, cached=2)
        answer = await server.post(**prompts, n=3)
        assert answer.headers["x-baton-kv"] == "transferred=2, recomputed=3, skipped=4"
        streamed = await server.post(prompt=[1, 2, 3], stream=True)
        for head in (answer.headers, streamed.headers):
            assert (
                head["x-baton-kv-prefill"] == "transferred=0, recomputed=0, skipped=3"
            )

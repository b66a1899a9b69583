"""Requests are read strictly, responses have OpenAI's shapes."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.http.sse import SSEParser
from protocol.messages import KVUsage
from protocol.openai.chat import ChatRequest, parse_chat
from protocol.openai.completions import CompletionRequest, parse_completion
from protocol.openai.logprobs import TokenReport, TokenText
from protocol.openai.requests import neutral_fields, parse_json_object
from protocol.openai.responses import (
    ChatWriter,
    ChoicePiece,
    CompletionWriter,
    Usage,
    add_kv,
    kv_header,
)


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"model": "m", "prompt": "Hello", **fields})


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields})


# -- bodies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b'{"a": NaN}', b"\xff\xfe", b'"\\ud800"', b"[" * 100_000]
)
def test_malformed_json_is_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        parse_json_object(raw)


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"text"', b"null", b"true"])
def test_a_body_must_be_an_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="send a JSON object"):
        parse_json_object(raw)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_an_invalid_request(raw: bytes) -> None:
    try:
        assert isinstance(parse_json_object(raw), dict)
    except InvalidRequest:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stream",
        "logprobs",
        "max_tokens",
        "n",
        "prompt",
        "model",
        "messages",
        "stream_options",
        "kv_transfer_params",
        "echo",
        "zzz",
    ]
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_any_json_is_a_request_or_an_invalid_request(fields: dict[str, Any]) -> None:
    for parse in (
        lambda: parse_completion({"model": "m", "prompt": "x", **fields}),
        lambda: parse_chat({"model": "m", "messages": [{"role": "user", "content": ""}], **fields}),
    ):
        try:
            parse()
        except InvalidRequest as error:
            assert error.param and error.message


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_is_text_or_ids_or_several(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        [[]],
        ["a", 1],
        [1, "a"],
        [[1], []],
        [[1], "a"],
        [True],
        [1.0],
        3,
        {},
        ["a"] * 1025,
        [[1, [2]]],
    ],
)
def test_no_other_prompt_is_accepted(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="`prompt`") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    parsed = parse_chat({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert parsed.messages[0].content == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": "Hi", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "Hi", "colour": "red"}], "messages[0].colour"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].function",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]"),
    ],
)
def test_a_bad_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat({"model": "m", "messages": messages})
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


# -- numbers -----------------------------------------------------------------------------------

BAD_VALUES = {
    "temperature": [-1, -1e-9, 2.1, 1e308, "1", True, [0.5], float("nan"), float("inf")],
    "top_p": [0, -0.1, 1.1, "1", False],
    "top_k": [-2, 1.5, "4", True, 2**31],
    "min_p": [-0.1, 1.1, "0"],
    "seed": [-1, 2**63, 10**30, 1.0, "7", True],
    "max_tokens": [-1, 1.5, "16", True, 2**31, 10**30],
    "max_completion_tokens": [-1, "1"],
    "n": [0, 129, 1.0, True, "2"],
    "best_of": [0, 129, True],
    "echo": [0, "true"],
    "prompt_logprobs": [-1, 21, True],
    "stop": [3, [3], [""], "", ["a"] * 65, "x" * 1025, {"a": 1}, [["a"]]],
    "stream": [1, "true", 0],
    "stream_options": [True, {"include_usage": 1}, []],
    "ignore_eos": [1, "yes"],
    "return_token_ids": [0],
    "logprobs": [-1, 21, 1.0, True, "5"],
    "min_tokens": [-1, 1.5, "2", False, 2**31],
    "presence_penalty": [-2.1, 2.1, "0", False],
    "frequency_penalty": [-2.1, 2.1, []],
    "repetition_penalty": [0, -1, 101, "1"],
    "logit_bias": [3, [], {"x": 1}, {"-1": 1}, {"5": 101}, {"5": -101}, {"5": "1"}, {"5": True}],
    "skip_special_tokens": [1, "no"],
    "return_tokens_as_token_ids": [1],
    "include_stop_str_in_output": ["x"],
    "stop_token_ids": [5, ["5"], [-1], [True], [2**31], [1] * 65, {"5": 1}],
    "user": [3, []],
    "model": [3, "", []],
    "kv_transfer_params": [3, "x", True],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values]
)
def test_a_bad_value_is_named_with_the_fix(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"`{field}.*must be") as caught:
        completion(**{field: value})
    assert str(caught.value.param).partition(".")[0] == field
    assert len(caught.value.message) < 400


def test_the_edges_of_every_number_are_accepted() -> None:
    low = completion(temperature=0, top_p=1e-9, top_k=-1, min_p=0, seed=0, logprobs=0)
    high = completion(
        temperature=2.0, top_p=1, top_k=2**31 - 1, min_p=1.0, seed=2**63 - 1, logprobs=20
    )
    assert low.sampling(low.seed or 0).top_k == 0
    assert high.sampling(5).seed == 5


def test_a_temperature_too_cold_for_float32_is_greedy() -> None:
    assert completion(temperature=1e-30).sampling(0).temperature == 0.0
    assert completion(temperature=0.01).sampling(0).temperature == 0.01


def test_both_token_limits_count() -> None:
    assert completion().token_limit is None
    assert completion(max_tokens=5).token_limit == 5
    assert completion(max_tokens=500, max_completion_tokens=1).token_limit == 1


def test_what_shapes_the_distribution_reaches_the_engine() -> None:
    sampling = completion(
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "7": 2},
        min_tokens=3,
    ).sampling(0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 0.5)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.2, 3)
    assert sampling.logit_bias == {5: -100.0, 7: 2.0}


def test_more_tokens_than_the_limit_are_not_asked_for() -> None:
    with pytest.raises(InvalidRequest, match="`min_tokens` is 9, above `max_tokens`, which is 8"):
        completion(min_tokens=9, max_tokens=8)
    with pytest.raises(InvalidRequest, match="above `max_completion_tokens`, which is 7"):
        completion(min_tokens=9, max_tokens=8, max_completion_tokens=7)
    leg = completion(min_tokens=9, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert leg.min_tokens == 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 2, "n": 3}, "`best_of` is 2, below `n`, which is 3"),
        ({"best_of": 2, "stream": True}, "`best_of` is 2 .*no ranking can be streamed"),
        ({"prompt_logprobs": 1, "stream": True}, "`prompt_logprobs` cannot be streamed"),
    ],
)
def test_contradictions_of_a_completion_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        completion(**fields)


def test_what_is_wanted_of_the_prompt_and_the_candidates() -> None:
    assert completion(echo=True).num_prompt_logprobs is None
    assert completion(echo=True, logprobs=2, prompt_logprobs=5).num_prompt_logprobs == 5
    assert completion(logprobs=2).num_prompt_logprobs is None
    assert completion(n=2).num_candidates == 2
    ranked = completion(n=2, best_of=4)
    assert (ranked.num_candidates, ranked.num_logprobs, ranked.wants_logprobs) == (4, 0, False)
    assert chat(prompt_logprobs=3, n=2).num_prompt_logprobs == 3


def test_stop_is_one_string_or_several() -> None:
    assert completion(stop="\n").stop == ("\n",)
    assert completion(stop=["a", "b"]).stop == ("a", "b")
    assert completion(stop=[]).stop == ()


def test_what_is_not_given_has_openai_s_defaults() -> None:
    sampling = completion().sampling(9)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.num_logprobs is None and sampling.seed == 9
    assert not completion().stream and not completion().include_usage


# -- fields that are not implemented -----------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "model"), [(completion, CompletionRequest), (chat, ChatRequest)], ids=["text", "chat"]
)
def test_every_neutral_value_is_accepted_and_null_too(parse: Any, model: Any) -> None:
    assert len(neutral_fields(model)) > 18
    for field, values in neutral_fields(model).items():
        assert parse(**{field: None}) == parse()
        for value in values:
            assert parse(**{field: value}) == parse(), field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("continue_final_message", True),
        ("include_reasoning", False),
        ("suffix", "end"),
        ("nonsense", 1),
        ("messages", []),
    ],
)
def test_a_field_that_would_matter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"`{field}`") as caught:
        completion(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 5),
        ("top_logprobs", 2),
        ("echo", True),
        ("continue_final_message", 1),
        ("tools", "all"),
        ("tool_choice", "required"),
        ("prompt", "x"),
    ],
)
def test_chat_refuses_what_it_does_not_do(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"`{field}`"):
        chat(**{field: value})


def test_an_endless_field_name_does_not_make_an_endless_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{"x" * 100_000: 1})
    assert len(caught.value.message) < 400


def test_stream_options_are_checked_within() -> None:
    assert completion(stream_options={"include_usage": True}).include_usage
    assert not completion(stream_options={"include_obfuscation": False}).include_usage
    with pytest.raises(InvalidRequest, match=r"`stream_options\.speed`"):
        completion(stream_options={"speed": 3})


# -- chat ---------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_tools_turns_are_history() -> None:
    user = {"role": "user", "content": "Hi"}
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    told = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]}
    _, turn, answer = chat(messages=[user, asked, told]).messages
    assert turn.content == ""
    assert turn.tool_calls[0].function.model_dump() == {"name": "f", "arguments": {"x": 1}}
    assert (answer.role, answer.content, answer.tool_call_id) == ("tool", "42", "c1")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": CALL}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
    ],
)
def test_a_bad_turn_of_tools_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[message])
    assert caught.value.param is not None and caught.value.param.startswith(param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "`max_tokens` is 0; .* from 1"),
        ({"top_logprobs": 3}, "`top_logprobs` is 3; it needs `logprobs`: true"),
        ({"top_logprobs": 21, "logprobs": True}, "`top_logprobs` is 21; .* from 0 to 20"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both true"),
        ({"chat_template_kwargs": {"messages": []}}, "`chat_template_kwargs` sets `messages`"),
        ({"chat_template_kwargs": [1]}, "`chat_template_kwargs`"),
    ],
)
def test_contradictions_of_a_chat_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chat(**fields)


# -- responses ---------------------------------------------------------------------------------

USAGE = Usage(
    prompt_tokens=7,
    completion_tokens=3,
    kv=KVUsage(transferred=4, recomputed=1, skipped=2, cached_tokens=5),
)


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(text) for _, text in SSEParser().feed(data)]


def test_a_whole_completion_has_usage_and_extras() -> None:
    piece = ChoicePiece(0, "Hi", [4, 5], finish_reason="stop", prompt_token_ids=[1])
    writer = CompletionWriter("x", 12, "m", return_token_ids=True)
    body = json.loads(writer.full([piece], USAGE, {"kv_transfer_params": {"a": 1}}))
    assert body["id"] == "cmpl-x" and body["object"] == "text_completion" and body["created"] == 12
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hi",
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [4, 5],
            "prompt_token_ids": [1],
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert body["kv_transfer_params"] == {"a": 1}
    assert kv_header(USAGE) == "transferred=4, recomputed=1, skipped=2"


def test_a_chat_stream_names_the_role_once_and_the_usage_last() -> None:
    writer = ChatWriter("x", 12, "m", include_usage=True)
    first, second = (ChoicePiece(0, "Hi", first=True), ChoicePiece(0, "", finish_reason="length"))
    chunks = events(writer.chunk(first) + writer.last_chunk(second, USAGE, {}))
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        ("chatcmpl-x", 12, "m", "chat.completion.chunk")
    }
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Hi"}
    assert chunks[1]["choices"][0]["delta"] == {}
    assert chunks[1]["choices"][0]["finish_reason"] == "length"
    assert [c["usage"] and c["usage"]["total_tokens"] for c in chunks] == [None, None, 10]
    assert chunks[2]["choices"] == []
    assert chunks[2]["baton_kv"] == {"transferred": 4, "recomputed": 1, "skipped": 2}
    assert not any("baton_kv" in chunk for chunk in chunks[:2])


def test_without_usage_the_last_chunk_is_the_one_that_finishes() -> None:
    writer = CompletionWriter("x", 12, "m")
    (chunk,) = events(writer.last_chunk(ChoicePiece(0, "!", finish_reason="stop"), USAGE, {}))
    assert chunk["choices"][0]["text"] == "!" and "usage" not in chunk
    assert chunk["baton_kv"]["transferred"] == 4


def test_pieces_add_up() -> None:
    one, two = TokenReport(TokenText("a", b"a"), -1.0), TokenReport(TokenText("b", b"b"), -2.0)
    piece = ChoicePiece(0, "a", [1], [one])
    piece.extend(ChoicePiece(0, "b", [2], [two], "stop", "b"))
    assert piece == ChoicePiece(0, "ab", [1, 2], [one, two], "stop", "b")


def test_kv_usage_adds_up_over_prompts() -> None:
    one = KVUsage(transferred=1, recomputed=2, skipped=3, cached_tokens=4)
    assert msgspec.structs.astuple(add_kv([one, one])) == (2, 4, 6, 8)


def test_a_misspelt_field_is_told_its_name() -> None:
    with pytest.raises(InvalidRequest, match="did you mean max_tokens"):
        chat(max_token=3)

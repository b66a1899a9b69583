"""Errors about invalid requests have the path of the wrong member, its value and the
fix.
"""

import gc
import itertools
import json
import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import Strict, neutral, parse_json_object, validate
from protocol.openai.responses_request import parse_responses
from protocol.openai.tokenize import TokenizeRequest

Parse = Callable[..., Any]
USER = {"role": "user", "content": "Hi"}


def completion(**fields: Any) -> Any:
    return validate(CompletionRequest, {"model": "m", "prompt": "Hello", **fields})


def chat(**fields: Any) -> Any:
    return validate(ChatRequest, {"model": "m", "messages": [USER], **fields})


def responses(**fields: Any) -> Any:
    return parse_responses({"model": "m", "input": "a", **fields})


def tokenize(**fields: Any) -> Any:
    return validate(TokenizeRequest, {"prompt": "a", **fields})


# -- bodies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"nonsense", b'{"a": NaN}', b"\xff\xfe", b'"\\ud800"', b"[" * 100_000,
     b'{"a": "\xff\xfe"}', b'{"a": "\\ud800"}', b'{"a": ' + b"9" * 100_000 + b"}"],
)  # fmt: skip
def test_malformed_json_is_an_invalid_request(raw):
    with pytest.raises(InvalidRequest, match="JSON"):
        parse_json_object(raw)


@pytest.mark.parametrize(
    "raw", [b"[]", b"1", b'"text"', b"null", b"true", b'[null, "x"]']
)
def test_body_that_is_not_an_object_is_refused(raw):
    with pytest.raises(InvalidRequest) as caught:
        parse_json_object(raw)
    assert caught.value.message == f"The body is {raw.decode()}; send a JSON object."


@given(st.binary(max_size=200))
def test_property_any_body_is_an_object_or_an_invalid_request(raw):
    try:
        assert isinstance(parse_json_object(raw), dict)
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    "body", [b'{"prompt": [' + b"[]," * 400_000 + b"[]]}", b"[" * (1 << 20)]
)
def test_garbage_collector_is_paused_only_while_a_large_body_is_decoded(body):
    phases: list[str] = []

    def on_collection(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.collect()
    gc.callbacks.append(on_collection)
    try:
        parse_json_object(body)
    except InvalidRequest:
        assert body.startswith(b"[[")
    finally:
        gc.callbacks.remove(on_collection)
    assert gc.isenabled()
    assert len(phases) <= 4  # start and stop of at most two collections


# -- members --------------------------------------------------------------------------

BAD_VALUES = {
    "temperature": [-1, -1e-9, 2.1, 1e308, "1", True, [0.5], math.nan, math.inf],
    "top_p": [-0.1, 1.1, "1", False],
    "top_k": [-2, 1.5, "4", True, 2**31],
    "min_p": [-0.1, 1.1, "0"],
    "seed": [-(2**63) - 1, 2**63, 10**30, 1.0, "7", True],
    "max_tokens": [-1, 1.5, "16", True, 2**31, 10**30],
    "max_completion_tokens": [-1, "1"],
    "n": [0, 129, 1.0, True, "2"],
    "best_of": [-1, 129, True],
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
    "logit_bias": [
        3,
        [],
        {"x": 1},
        {"-1": 1},
        {"5": 101},
        {"5": -101},
        {"5": "1"},
        {"5": True},
    ],
    "skip_special_tokens": [1, "no"],
    "return_tokens_as_token_ids": [1],
    "include_stop_str_in_output": ["x"],
    "stop_token_ids": [5, ["5"], [-1], [True], [2**31], [1] * 65, {"5": 1}],
    "user": [3, []],
    "model": [3, "", []],
    "kv_transfer_params": [3, "x", True],
    "prompt": [
        *(None, "", [], [""], [[]], ["a", 1], [1, "a"], [[1], []], [[1], "a"], [True]),
        *([1.0], 3, {}, ["a"] * 1025, [[1, [2]]]),
    ],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_VALUES.items() for value in values],
)
def test_error_about_a_bad_value_has_the_field_and_the_fix(field, value):
    with pytest.raises(InvalidRequest, match=f"`{field}.*must be") as caught:
        completion(**{field: value})
    assert str(caught.value.param).partition(".")[0] == field
    assert len(caught.value.message) < 400


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"x": 1}'},
}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}
FLAT = {"type": "function", "name": "f"}
PLAIN = {"type": "object"}
IMAGE = [{"type": "image_url"}]
JSON_OBJECT = {"response_format": {"type": "json_object"}}


def messages(**members: Any) -> dict[str, Any]:
    return {"messages": [members]}


def calling(*calls: Any) -> dict[str, Any]:
    return messages(role="assistant", tool_calls=list(calls))


def tool(**members: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **members}}]}


def schema(**members: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": members}}


def text(**members: Any) -> dict[str, Any]:
    return {"text": {"format": members}}


MISTAKES: list[tuple[Parse, dict[str, Any], str]] = [
    *((parse, {name: value}, name) for parse, name, value in [
        (chat, "messages", None), (chat, "messages", []), (chat, "logprobs", 5),
        (chat, "top_logprobs", 2), (chat, "echo", True),
        (chat, "continue_final_message", 1), (chat, "parallel_tool_calls", 1),
        (chat, "tool_choice", "required"), (completion, "continue_final_message", True),
        (completion, "include_reasoning", False), (completion, "suffix", "end"),
        (completion, "nonsense", 1), (responses, "input", []),
        (responses, "max_output_tokens", 0), (responses, "max_tokens", 5),
        (responses, "store", "yes"), (responses, "previous_response_id", "resp_1"),
        (responses, "background", True),
    ]),
    (chat, messages(content="Hi"), "messages[0].role"),
    (chat, messages(role="user"), "messages[0].content"),
    (chat, messages(role="user", content=None), "messages[0].content"),
    (chat, messages(**USER, name=3), "messages[0].name"),
    (chat, messages(**USER, colour="red"), "messages[0].colour"),
    (chat, messages(role="user", content=IMAGE), "messages[0].content[0]"),
    (chat, messages(**USER, tool_call_id="c"), "messages[0].tool_call_id"),
    (chat, messages(role="tool", content="x", tool_call_id=3),
     "messages[0].tool_call_id"),
    (chat, messages(**USER, tool_calls=[CALL]), "messages[0].tool_calls"),
    (chat, calling(), "messages[0].content"),
    *((chat,
       messages(role="assistant", **{name: [{"type": "thinking", "thinking": 1}]}),
       f"messages[0].{name}[0]{member}")
      for name, member in (("content", ""), ("thinking_blocks", ".thinking"))),
    (completion, {"stream": True, "stream_options": {"speed": 3}},
     "stream_options.speed"),
    (chat, {"tools": [TOOL] * 129}, "tools"),
    (chat, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (chat, {"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (chat, tool(parameters="x"), "tools[0].function.parameters"),
    (chat, tool(strict=1), "tools[0].function.strict"),
    (chat, {"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    (chat, {"tools": [TOOL], "tool_choice": NAMED}, "tool_choice.function.name"),
    (chat, {**tool(), "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    *((parse, fields, param) for parse in (chat, completion) for fields, param in [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (schema(schema={}), "response_format.json_schema.name"),
        (schema(name="n", schema=1), "response_format.json_schema.schema"),
        (schema(name="n", strict="yes"), "response_format.json_schema.strict"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": ""}},
         "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_regex": ""}, "guided_regex"),
        ({**JSON_OBJECT, "guided_regex": "a"}, "guided_regex"),
    ]),
    (responses, {"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
    (responses, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    (responses, {"input": [{"role": "user"}]}, "input[0].content"),
    (responses, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (responses, {"tools": [FLAT, FLAT]}, "tools[1].name"),
    (responses, {"tools": [FLAT], "tool_choice": {**FLAT, "name": "g"}},
     "tool_choice.name"),
    *((responses, {"tools": [], "tool_choice": {**FLAT, "name": name}},
       "tool_choice.name")
      for name in ("", "a b", "x" * 129, "f\n")),
    (responses, text(type="json_schema", schema={}), "text.format.name"),
    (responses, text(type="text", name="n"), "text.format"),
    (responses, {"metadata": {"a": 1}}, "metadata"),
]  # fmt: skip


TURN = {
    "role": "assistant",
    "content": [{"type": "text", "text": "a"}],
    "tool_calls": [CALL],
}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "a"},
]
ALL = {
    "seed": 1,
    "stream": True,
    "temperature": 0.5,
    "stream_options": {"include_usage": True},
}
MANY = ALL | {
    "logit_bias": {"5": 1.0},
    "stop": ["a"],
    "stop_token_ids": [3],
    "min_tokens": 1,
}
FULL: list[tuple[Parse, dict[str, Any]]] = [
    (
        completion,
        MANY | {"prompt": ["a"], "best_of": 1, "structured_outputs": {"regex": "a"}},
    ),
    (
        chat,
        MANY
        | JSON_OBJECT
        | {"messages": [USER, TURN], "tools": [TOOL], "tool_choice": "auto"},
    ),
    (chat, schema(name="n", schema=PLAIN) | {"tools": [TOOL], "tool_choice": "none"}),
    (chat, {"tools": [TOOL], "tool_choice": TOOL, "chat_template_kwargs": {"a": 1}}),
    (
        tokenize,
        {"prompt": None, "messages": [USER, TURN], "chat_template_kwargs": {"a": 1}},
    ),
    (
        responses,
        ALL
        | {"input": ITEMS, "tools": [FLAT], "tool_choice": FLAT, "instructions": "a"},
    ),
    (
        responses,
        text(type="json_schema", name="n", schema=PLAIN)
        | {"reasoning": {"effort": "low"}},
    ),
]


def paths_in(value: Any, *path: Any) -> list[tuple[Any, ...]]:
    """Returns the paths of all values inside of `value`, which itself is at `path`.

    A path consists of keys of objects and indices of lists.
    """
    keys: Any = range(len(value)) if isinstance(value, list) else value
    paths = [(*path, key) for key in keys] if isinstance(value, dict | list) else []
    for child in list(paths):
        paths += paths_in(value[child[-1]], *child)
    return paths


WRONG = [
    None,
    True,
    -1,
    0.5,
    "",
    "a b",
    "required",
    [],
    ["a"],
    {},
    {"a": None},
    FLAT,
    TOOL,
    CALL,
]


# The error may name one of these members instead of the changed member, because the
# named member contains the changed member or contradicts it.
WHOLE = {
    "stop",
    "stop_token_ids",
    "logit_bias",
    "prompt",
    "structured_outputs",
    "response_format",
    "response_format.json_schema.schema",
    *(f"input[{index}].role" for index in range(4)),
    "tool_choice",
    "tool_choice.name",
    "tool_choice.function.name",
    "stream_options",
}


@pytest.mark.parametrize(("parse", "body"), FULL)
def test_error_about_a_wrong_value_has_the_path_of_the_value(parse, body):
    parse(**body)
    for keys, wrong in itertools.product(paths_in(body), WRONG):
        changed = json.loads(json.dumps(body))
        reduce(operator.getitem, keys[:-1], changed)[keys[-1]] = wrong
        path = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys)[1:]
        try:
            parse(**changed)
        except InvalidRequest as error:
            param = str(error.param)
            is_list_item = param.endswith("]") and path.startswith(param)
            assert param.startswith(path) or is_list_item or param in WHOLE


@pytest.mark.parametrize(("parse", "fields", "param"), MISTAKES)
def test_error_about_a_mistake_names_the_field(parse, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


@pytest.mark.parametrize(
    ("parse", "fields", "error_text"),
    [
        (completion, {"min_tokens": 9, "max_tokens": 8},
         "is 9, above `max_tokens`, which is 8"),
        (completion, {"min_tokens": 9, "max_completion_tokens": 7},
         "above `max_completion_toke"),
        (completion, {"best_of": 2, "n": 3}, "`best_of` is 2, below `n`, which is 3"),
        (completion, {"best_of": 2, "stream": True}, "a ranking cannot be streamed"),
        (completion, {"prompt_logprobs": 1, "stream": True},
         "`prompt_logprobs` cannot be stream"),
        (chat, {"max_tokens": 0}, "`max_tokens` is 0; it must be an integer from 1"),
        (chat, {"top_logprobs": 3}, "`top_logprobs` is 3; it needs `logprobs`: true"),
        (chat, {"top_logprobs": 21, "logprobs": True},
         "is 21; it must be an integer from 0 to 20"),
        (chat, {"continue_final_message": True, "add_generation_prompt": True},
         "are both true"),
        (chat, {"chat_template_kwargs": {"messages": []}},
         "`chat_template_kwargs` sets `messages"),
        (chat, {"chat_template_kwargs": {"eos_token": "x" * 9}},
         "`chat_template_kwargs` sets `eos_token"),
        (completion, {"guided_json": '{"const": "\\ud800"}'}, "`guided_json`"),
        # Options that would have no effect:
        *((parse, {"stream_options": {}, **more}, "needs `stream`: true")
          for parse in (completion, chat, responses)
          for more in ({}, {"stream": False})),
        (chat, {"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "`stream_options.continuous_usage_stats` is true; it needs `include_usage`: "
         "true"),
        (responses,
         {"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "`stream_options.continuous_usage_stats` is not supported"),
        (completion, {"prompt": [1, 2], "add_special_tokens": True},
         "`add_special_tokens` is true, but no `prompt` is a text"),
        *((tokenize, {name: value}, f"`{name}` is for `messages`") for name, value in [
            ("tools", []), ("tool_choice", "none"), ("add_generation_prompt", False),
            ("chat_template_kwargs", {}), ("enable_thinking", True),
            ("reasoning_effort", "low"), ("verbosity", "low"),
            ("continue_final_message", False)]),
        # Values as JSON:
        (completion, {"prompt": {"a": None}}, '{"a": null}'),
        (completion, {"stop": [True]}, "[true]"),
        (completion, {"suffix": "it's"}, '"it\'s"'),
        (completion, {"use_beam_search": True}, "send false"),
        (completion, {"logit_bias": {"1": "a"}}, '{"1": "a"}'),
        (chat, {"messages": [None]}, "`messages[0]` is null"),
        (chat, {"messages": {"role": False}}, '{"role": false}'),
        (chat, {"modalities": ["audio"]},
         'is ["audio"], which is not implemented; send ["text"]'),
        (chat, {"tool_choice": {"type": []}}, "`tool_choice.type` is []"),
        (chat, {"stream_options": {"include_usage": "True"}}, '"True"'),
        (responses, {"input": [None]}, "`input[0]` is null"),
        (responses, {"tools": [{"type": "web_search"}]},
         'type` is "web_search"; it must be func'),
        (responses, {"tools": [{"type": "function"}]}, "`tools[0].name` is missing"),
        (responses, {"tool_choice": "required"}, "but no `tools` are given"),
        (responses,
         {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
         "`input[0].call_id` is missing; it must be a string."),
        (responses, {"input": [{"type": "image"}]},
         'type` is "image"; it must be message, func'),
        (responses, {"text": {"format": True}}, "true"),
        (tokenize, {"prompt": False}, "`prompt` is false"),
        (tokenize, {"prompt": None}, "`prompt` is null"),
        (tokenize, {"messages": 3},
         "it must be a list, not empty, of objects with `role` and"),
        # Fields of other endpoints, and misspelt fields:
        (responses, {"n": 2}, "`n` is not a parameter of /v1/responses but of "
         "/v1/chat/completions and /v1/completions; leave it out."),
        (responses, {"max_tokens": 1},
         "is called `max_output_tokens` at /v1/responses; send that"),
        (responses, {"messages": []}, "is called `input` at /v1/responses; send that."),
        (completion, {"messages": []},
         "is called `prompt` at /v1/completions; send that."),
        (chat, {"prompt": "x"},
         "is called `messages` at /v1/chat/completions; send that."),
        (completion, {"tools": []},
         "but of /tokenize and /v1/chat/completions and /v1/messages and "),
        (tokenize, {"input": "x"}, "is called `messages` at /tokenize; send that."),
        (responses, {"topp": 1},
         "`topp` is not supported (did you mean top_p or stop?)"),
        (chat, {"max_token": 1},
         "`max_token` is not supported (did you mean max_tokens or min_"),
        (chat, {"weather": 1}, "`weather` is not supported; leave it out."),
        (chat, {"x" * 100_000: 1}, "xxx"),
    ],
)  # fmt: skip
def test_error_has_the_reason(parse, fields, error_text):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert error_text in caught.value.message and len(caught.value.message) < 400


def test_neutral_float_may_be_written_as_an_integer_but_not_as_false():
    class Body(Strict):
        number: Any = neutral(0.0)
        one: Any = neutral(1)
        switch: Any = neutral(True)

    for body in (
        {"number": 0, "one": 1, "switch": True},
        {"number": 0.0},
        {"one": None},
    ):
        assert validate(Body, body) == Body()
    for field, value in (("number", False), ("one", True), ("one", 1.0), ("switch", 1)):
        with pytest.raises(InvalidRequest, match=f"`{field}`"):
            validate(Body, {field: value})

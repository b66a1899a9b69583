"""Validated requests: the meaning and the default of each member of a body."""

import json
from typing import Any

import pytest

from protocol.messages import Grammar
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import neutral_fields
from protocol.openai.structured import GuidedDecoding
from protocol.openai.tools import Tools
from tests.protocol.test_openai_mistakes import USER, chat, completion, responses

RANKED = {"num_candidates": 4, "num_logprobs": 0, "wants_logprobs": False}
LEG = {"do_remote_decode": True}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
NAMED = {"name": "n", "strict": True, "schema": SCHEMA}
OF_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (completion(prompt=["a", "b"]), {"prompts": ["a", "b"]}),
        (completion(prompt=[1, 2]), {"prompts": [[1, 2]]}),
        (completion(prompt=[[1, 2], [3]]), {"prompts": [[1, 2], [3]]}),
        (
            completion(),
            {"prompts": ["Hello"], "token_limit": None, "num_candidates": 1},
        ),
        (completion(), {"stream": False, "include_usage": False, "num_logprobs": None}),
        (completion(max_tokens=500, max_completion_tokens=1), {"token_limit": 1}),
        (
            completion(min_tokens=9, max_tokens=1, kv_transfer_params=LEG),
            {"min_tokens": 9},
        ),
        (completion(echo=True), {"num_prompt_logprobs": None}),
        (
            completion(echo=True, logprobs=2, prompt_logprobs=5),
            {"num_prompt_logprobs": 5},
        ),
        (completion(logprobs=2), {"num_prompt_logprobs": None, "wants_logprobs": True}),
        (chat(prompt_logprobs=3, n=2), {"num_prompt_logprobs": 3, "num_candidates": 2}),
        (completion(n=2, best_of=4), RANKED),
        (completion(stop="\n"), {"stop": ("\n",)}),
        (completion(stop=["a", "b"]), {"stop": ("a", "b")}),
        (
            completion(stream=True, stream_options={"include_usage": True}),
            {"include_usage": True},
        ),
        (
            completion(stream=True, stream_options={"include_obfuscation": False}),
            {"stream": True},
        ),
        # A router may set `stream` to false for the prefill server, but keep
        # `stream_options`.
        (
            completion(stream_options={}, kv_transfer_params=LEG),
            {"include_usage": False},
        ),
        (completion(response_format={"type": "text"}), {"guided_decoding": None}),
        (
            completion(response_format=None, structured_outputs=None),
            {"guided_decoding": None},
        ),
        (responses(text={"format": {"type": "text"}}), {"guided_decoding": None}),
        (
            responses(text={"format": {"type": "json_schema", **NAMED}}),
            {"guided_decoding": GuidedDecoding(OF_SCHEMA, "text.format.schema")},
        ),
        (
            responses(max_output_tokens=7, seed=3),
            {"token_limit": 7, "seed": 3, "guided_decoding": None},
        ),
    ],
)
def test_members_are_parsed_to_their_meaning(request_, expected):
    assert {name: getattr(request_, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (completion, {"seed": [-(2**63), -1, 0, 2**63 - 1], "best_of": [0, 1, 20]}),
        (completion, {"logprobs": [0, 5], "max_tokens": [0, 1]}),
        (completion, {"prompt": [[0], [[5], [6]]]}),
        (chat, {"seed": [-(2**63), -1, 0, 2**63 - 1]}),
        (chat, {"max_completion_tokens": [1, 2**31 - 1]}),
        (responses, {"max_output_tokens": [16], "max_tool_calls": [1, 128]}),
        *((parse, {"temperature": [0, 2, 0.5], "top_p": [0, 0.0, 0.5, 1]})
          for parse in (completion, chat, responses)),
        *((parse, {"frequency_penalty": [-2, 2.0], "presence_penalty": [-2.0, 0, 2],
                   "n": [1, 128],
                   "logit_bias": [{"50256": -100}, {"5": 100, "6": 1.5}, {}]})
          for parse in (completion, chat)),
    ],
)  # fmt: skip
def test_numbers_within_the_bounds_of_openais_api_are_accepted(parse, fields):
    for name, values in fields.items():
        for value in values:
            request = parse(**{name: value})
            body = getattr(request, "original", request)
            assert name in body.model_fields_set, (name, value)


def test_top_p_of_0_becomes_a_tiny_positive_number():
    assert 0 < completion(top_p=0).sampling_params(1).top_p < 1e-6


def test_best_of_0_means_that_it_is_not_set():
    assert completion(best_of=0, n=2).num_candidates == 2


SHAPES = {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "seed": 9,
                "num_logprobs": None,
            },
        ),
        (
            {"top_p": 1e-9, "top_k": -1, "min_p": 0, "logprobs": 0},
            {"top_k": 0, "num_logprobs": 0},
        ),
        (
            {"top_k": 2**31 - 1, "min_p": 1.0, "logprobs": 20},
            {"min_p": 1.0, "num_logprobs": 20},
        ),
        ({"temperature": 1e-30}, {"temperature": 0.0}),  # too small for float32
        ({"temperature": 0.01}, {"temperature": 0.01}),
        ({**SHAPES, "min_tokens": 3}, {**SHAPES, "min_tokens": 3}),
        ({"logit_bias": {"5": -100, "7": 2}}, {"logit_bias": {5: -100.0, 7: 2.0}}),
    ],
)
def test_sampling_fields_reach_the_engine(fields, expected):
    sampling = completion(**fields).sampling_params(9)
    assert {name: getattr(sampling, name) for name in expected} == expected


def turns(parsed: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in parsed.messages]


def test_every_form_of_a_conversation_is_accepted():
    part = {"type": "text", "text": "b"}
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": 1}'},
    }
    calling_message = {"role": "assistant", "content": None, "tool_calls": [call]}
    # In a later request, litellm adds this member to the model's answers.
    calling_message["provider_specific_fields"] = {"refusal": None}
    tool_message = {"role": "tool", "tool_call_id": "c1", "content": [part, part]}
    parsed = chat(messages=[USER, calling_message, tool_message])
    assert turns(parsed) == [("user", "Hi"), ("assistant", None), ("tool", "b\nb")]
    _, parsed_calling, parsed_tool = parsed.messages
    assert parsed_calling.tool_calls[0].function.model_dump() == {
        "name": "f",
        "arguments": {"x": 1},
    }
    assert parsed_tool.tool_call_id == "c1"
    # Some clients write a call without arguments in one of these forms.
    for text in ("", " ", "null"):
        call["function"]["arguments"] = text
        parsed = chat(messages=[calling_message])
        assert parsed.messages[0].tool_calls[0].function.arguments == {}


def test_input_of_responses_becomes_a_conversation():
    assert turns(responses(instructions="Be kind.")) == [
        ("system", "Be kind."),
        ("user", "a"),
    ]
    part = {"type": "input_text", "text": "b"}
    answer = {
        "id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
    }  # fmt: skip
    items = [USER, answer, {"role": "user", "content": [part, part]}]
    assert turns(responses(input=items)) == [
        ("user", "Hi"),
        ("assistant", "x"),
        ("user", "b\nb"),
    ]


@pytest.mark.parametrize(
    ("parse", "model"), [(completion, CompletionRequest), (chat, ChatRequest)]
)
def test_every_neutral_value_and_null_are_accepted(parse, model):
    assert len(neutral_fields(model)) > 10
    for field, values in neutral_fields(model).items():
        for value in (None, *values):
            assert parse(**{field: value}) == parse(), field


# -- tools ----------------------------------------------------------------------------


def tool(name: str = "f", **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


def toolset_of(**fields: Any) -> Tools:
    toolset: Tools = chat(**fields).toolset
    return toolset


def test_default_of_tool_choice_is_none_without_tools_and_auto_with_tools():
    assert toolset_of().mode == "none" and not toolset_of(tools=[]).is_active
    assert toolset_of(tool_choice="auto").mode == "none"
    assert not toolset_of(tools=[tool()], tool_choice="none").is_active
    result = toolset_of(tools=[tool(description="d", parameters=None)])
    assert (result.mode, result.is_active, result.is_parallel) == ("auto", True, True)
    assert result.offered == (tool(description="d"),)
    assert result.guided_decoding is None


def test_answer_must_match_the_schema_of_a_named_tool():
    choice = {"type": "function", "function": {"name": "g"}}
    tools = [tool(), tool("g", parameters=NUMBER)]
    result = toolset_of(tools=tools, tool_choice=choice)
    assert (result.mode, result.name) == ("named", "g")
    assert result.guided_decoding is not None
    assert result.guided_decoding.field == "tools[1].function.parameters"
    assert json.loads(result.guided_decoding.grammar.text) == NUMBER


@pytest.mark.parametrize("parallel", [True, False])
def test_answer_must_consist_of_calls_if_a_call_is_required(parallel):
    fields = {"tools": [tool(parameters=NUMBER)], "tool_choice": "required"}
    result = toolset_of(**fields, parallel_tool_calls=parallel)
    assert (
        result.guided_decoding is not None
        and result.guided_decoding.grammar.kind == "calls"
    )
    demanded = json.loads(result.guided_decoding.grammar.text)
    assert demanded == {"tools": [["f", NUMBER]], "is_parallel": parallel}


# -- structured output ----------------------------------------------------------------

REGEX, CHOICE = Grammar("regex", "a"), Grammar("choice", '["é", "b"]')


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def structured(**members: Any) -> dict[str, Any]:
    return {"structured_outputs": members}


@pytest.mark.parametrize(
    ("fields", "field", "grammar"),
    [
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            Grammar("json_object"),
        ),
        (named(NAMED), "response_format.json_schema.schema", OF_SCHEMA),
        (named({"name": "n"}), "response_format.json_schema", Grammar("json_object")),
        (
            structured(json=json.dumps(SCHEMA), regex=None),
            "structured_outputs.json",
            OF_SCHEMA,
        ),
        (structured(regex="a", json_object=False), "structured_outputs.regex", REGEX),
        (structured(choice=["é", "b"]), "structured_outputs.choice", CHOICE),
        (
            structured(json_object=True),
            "structured_outputs.json_object",
            Grammar("json_object"),
        ),
        ({"guided_json": SCHEMA}, "guided_json", OF_SCHEMA),
        (
            {"guided_grammar": "start: /a/"},
            "guided_grammar",
            Grammar("grammar", "start: /a/"),
        ),
        ({"guided_choice": ["é", "b"]}, "guided_choice", CHOICE),
        ({"guided_regex": "a"}, "guided_regex", REGEX),
    ],
)
def test_every_field_for_structured_output_is_accepted(fields, field, grammar):
    for parsed in (completion(**fields), chat(**fields)):
        assert parsed.guided_decoding == GuidedDecoding(grammar, field)
        assert parsed.sampling_params(1).grammar == grammar

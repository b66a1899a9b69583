"""Requests as they are read: what a member means, and its defaults."""

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
    ("parsed", "read"),
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
        # A router that sets `stream` for the prefill server may leave the rest as it is.
        (
            completion(stream_options={}, kv_transfer_params=LEG),
            {"include_usage": False},
        ),
        (completion(response_format={"type": "text"}), {"guided": None}),
        (completion(response_format=None, structured_outputs=None), {"guided": None}),
        (responses(text={"format": {"type": "text"}}), {"guided": None}),
        (
            responses(text={"format": {"type": "json_schema", **NAMED}}),
            {"guided": GuidedDecoding(OF_SCHEMA, "text.format.schema")},
        ),
        (
            responses(max_output_tokens=7, seed=3),
            {"token_limit": 7, "seed": 3, "guided": None},
        ),
    ],
)
def test_members_are_parsed_to_their_meaning(parsed, read):
    assert {name: getattr(parsed, name) for name in read} == read


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (completion, {"seed": [-(2**63), -1, 0, 2**63 - 1], "best_of": [0, 1, 20]}),
        (completion, {"logprobs": [0, 5], "max_tokens": [0, 1], "prompt": [[0], [[5], [6]]]}),
        (chat, {"seed": [-(2**63), -1, 0, 2**63 - 1], "max_completion_tokens": [1, 2**31 - 1]}),
        (responses, {"max_output_tokens": [16], "max_tool_calls": [1, 128]}),
        *((parse, {"temperature": [0, 2, 0.5], "top_p": [0, 0.0, 0.5, 1]})
          for parse in (completion, chat, responses)),
        *((parse, {"frequency_penalty": [-2, 2.0], "presence_penalty": [-2.0, 0, 2],
                   "n": [1, 128], "logit_bias": [{"50256": -100}, {"5": 100, "6": 1.5}, {}]})
          for parse in (completion, chat)),
    ],
)  # fmt: skip
def test_the_numbers_of_openais_reference_are_accepted_to_their_bounds(parse, fields):
    for name, values in fields.items():
        for value in values:
            request = parse(**{name: value})
            body = getattr(request, "original", request)
            assert name in body.model_fields_set, (name, value)


def test_top_p_of_0_leaves_only_the_most_likely_token():
    assert 0 < completion(top_p=0).sampling(1).top_p < 1e-6


def test_a_best_of_of_0_is_as_none():
    assert completion(best_of=0, n=2).num_candidates == 2


SHAPES = {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("fields", "drawn"),
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
        ({"temperature": 1e-30}, {"temperature": 0.0}),  # too cold for float32
        ({"temperature": 0.01}, {"temperature": 0.01}),
        ({**SHAPES, "min_tokens": 3}, {**SHAPES, "min_tokens": 3}),
        ({"logit_bias": {"5": -100, "7": 2}}, {"logit_bias": {5: -100.0, 7: 2.0}}),
    ],
)
def test_what_shapes_the_distribution_reaches_the_engine(fields, drawn):
    sampling = completion(**fields).sampling(9)
    assert {name: getattr(sampling, name) for name in drawn} == drawn


def turns(parsed: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in parsed.messages]


def test_every_form_of_a_conversation_is_accepted():
    part = {"type": "text", "text": "b"}
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": 1}'},
    }
    request = {"role": "assistant", "content": None, "tool_calls": [call]}
    request["provider_specific_fields"] = {
        "refusal": None
    }  # as litellm's clients send it back
    expected = {"role": "tool", "tool_call_id": "c1", "content": [part, part]}
    parsed = chat(messages=[USER, request, expected])
    assert turns(parsed) == [("user", "Hi"), ("assistant", None), ("tool", "b\nb")]
    _, turn, answer = parsed.messages
    assert turn.tool_calls[0].function.model_dump() == {
        "name": "f",
        "arguments": {"x": 1},
    }
    assert answer.tool_call_id == "c1"
    for text in ("", " ", "null"):  # as some write a call without arguments
        call["function"]["arguments"] = text
        assert (
            chat(messages=[request]).messages[0].tool_calls[0].function.arguments == {}
        )


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
    sent_back = [USER, answer, {"role": "user", "content": [part, part]}]
    read = turns(responses(input=sent_back))
    assert read == [("user", "Hi"), ("assistant", "x"), ("user", "b\nb")]


@pytest.mark.parametrize(
    ("parse", "model"), [(completion, CompletionRequest), (chat, ChatRequest)]
)
def test_every_neutral_value_is_accepted_and_null_too(parse, model):
    assert len(neutral_fields(model)) > 10
    for field, values in neutral_fields(model).items():
        for value in (None, *values):
            assert parse(**{field: value}) == parse(), field


# -- tools -------------------------------------------------------------------------------------


def tool(name: str = "f", **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


def read(**fields: Any) -> Tools:
    toolset: Tools = chat(**fields).toolset
    return toolset


def test_the_default_is_none_without_tools_and_auto_with_them():
    assert read().mode == "none" and not read(tools=[]).active
    assert read(tool_choice="auto").mode == "none"
    assert not read(tools=[tool()], tool_choice="none").active
    result = read(tools=[tool(description="d", parameters=None)])
    assert (result.mode, result.active, result.parallel) == ("auto", True, True)
    assert result.offered == (tool(description="d"),)
    assert result.guided is None


def test_a_named_tool_demands_its_arguments():
    choice = {"type": "function", "function": {"name": "g"}}
    result = read(tools=[tool(), tool("g", parameters=NUMBER)], tool_choice=choice)
    assert (result.mode, result.name) == ("named", "g")
    assert result.guided is not None
    assert result.guided.field == "tools[1].function.parameters"
    assert json.loads(result.guided.grammar.text) == NUMBER


@pytest.mark.parametrize("parallel", [True, False])
def test_required_demands_a_list_of_calls(parallel):
    request = {"tools": [tool(parameters=NUMBER)], "tool_choice": "required"}
    result = read(**request, parallel_tool_calls=parallel)
    assert result.guided is not None and result.guided.grammar.kind == "calls"
    demanded = json.loads(result.guided.grammar.text)
    assert demanded == {"tools": [["f", NUMBER]], "is_parallel": parallel}


# -- structured output ---------------------------------------------------------------------------

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
        assert parsed.guided == GuidedDecoding(grammar, field)
        assert parsed.sampling(1).grammar == grammar

"""Requests as they are read: what a member means, and its defaults."""

import json
from typing import Any

import pytest

from protocol.messages import Grammar
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import neutral_fields, validate
from protocol.openai.responses_request import parse_responses
from protocol.openai.structured import GuidedDecoding
from protocol.openai.tools import Tools


def completion(**fields: Any) -> CompletionRequest:
    return validate(CompletionRequest, {"model": "m", "prompt": "Hello", **fields})


def chat(**fields: Any) -> Any:
    return validate(
        ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    )


def responses(**fields: Any) -> Any:
    return parse_responses({"model": "m", "input": "a", **fields})


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_is_text_or_ids_or_several(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    parsed = chat(messages=[{"role": "user", "content": parts}])
    assert parsed.messages[0].content == "one\ntwo"


def test_tools_turns_are_history() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    user = {"role": "user", "content": "Hi"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]}
    _, turn, answer = chat(messages=[user, asked, told]).messages
    assert turn.content == ""
    assert turn.tool_calls[0].function.model_dump() == {"name": "f", "arguments": {"x": 1}}
    assert (answer.role, answer.content, answer.tool_call_id) == ("tool", "42", "c1")


def test_a_text_is_a_users_message() -> None:
    asked = responses(instructions="Be kind.", max_output_tokens=7, temperature=0.5, seed=3)
    told = [("system", "Be kind."), ("user", "a")]
    assert [(m.role, m.content) for m in asked.messages] == told
    assert (asked.token_limit, asked.temperature, asked.seed, asked.stream) == (7, 0.5, 3, False)
    assert asked.guided is None


def test_a_conversation_with_an_earlier_answer_sent_back() -> None:
    part = {"type": "input_text", "text": "b"}
    answer = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
    }
    turns = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": [part, part]}]
    read = [(m.role, m.content) for m in responses(input=turns).messages]
    assert read == [("user", "a"), ("assistant", "x"), ("user", "b\nb")]


# -- numbers -----------------------------------------------------------------------------------


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


def test_both_token_limits_count_but_for_a_prefill() -> None:
    assert completion().token_limit is None
    assert completion(max_tokens=5).token_limit == 5
    assert completion(max_tokens=500, max_completion_tokens=1).token_limit == 1
    leg = completion(min_tokens=9, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert leg.min_tokens == 9


def test_what_shapes_the_distribution_reaches_the_engine() -> None:
    penalties = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    read = completion(**penalties, logit_bias={"5": -100, "7": 2}, min_tokens=3).sampling(0)
    assert (read.presence_penalty, read.frequency_penalty) == (-2.0, 0.5)
    assert (read.repetition_penalty, read.min_tokens) == (1.2, 3)
    assert read.logit_bias == {5: -100.0, 7: 2.0}


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


@pytest.mark.parametrize(("parse", "model"), [(completion, CompletionRequest), (chat, ChatRequest)])
def test_every_neutral_value_is_accepted_and_null_too(parse: Any, model: Any) -> None:
    assert len(neutral_fields(model)) > 18
    for field, values in neutral_fields(model).items():
        assert parse(**{field: None}) == parse()
        for value in values:
            assert parse(**{field: value}) == parse(), field


def test_stream_options_are_read_within() -> None:
    assert completion(stream_options={"include_usage": True}).include_usage
    assert not completion(stream_options={"include_obfuscation": False}).include_usage


# -- tools -------------------------------------------------------------------------------------


def tool(name: str = "f", **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


def read(**fields: Any) -> Tools:
    toolset: Tools = chat(**fields).toolset
    return toolset


def test_the_default_is_none_without_tools_and_auto_with_them() -> None:
    assert read().mode == "none" and not read(tools=[]).active
    assert read(tool_choice="auto").mode == "none"
    assert not read(tools=[tool()], tool_choice="none").active
    found = read(tools=[tool(description="d", parameters=None)])
    assert (found.mode, found.active, found.parallel) == ("auto", True, True)
    assert found.offered == (tool(description="d"),)
    assert found.guided is None


def test_a_named_tool_demands_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    found = read(tools=[tool(), tool("g", parameters=NUMBER)], tool_choice=choice)
    assert (found.mode, found.name) == ("named", "g")
    assert found.guided is not None
    assert found.guided.field == "tools[1].function.parameters"
    assert json.loads(found.guided.grammar.text) == NUMBER


def test_required_demands_a_list_of_calls() -> None:
    found = read(tools=[tool(parameters=NUMBER)], tool_choice="required")
    assert found.guided is not None and found.guided.grammar.kind == "grammar"
    assert "* " in found.guided.grammar.text
    one = read(tools=[tool(parameters=NUMBER)], tool_choice="required", parallel_tool_calls=False)
    assert one.guided is not None and "* " not in one.guided.grammar.text


# -- structured output ---------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
NAMED = {"name": "n", "strict": True, "schema": SCHEMA}
OF_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize(
    ("fields", "field", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", Grammar("json_object")),
        (named(NAMED), "response_format.json_schema.schema", OF_SCHEMA),
        (named({"name": "n"}), "response_format.json_schema", Grammar("json_object")),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
            "structured_outputs.json",
            OF_SCHEMA,
        ),
        (
            {"structured_outputs": {"regex": "a+", "json_object": False}},
            "structured_outputs.regex",
            Grammar("regex", "a+"),
        ),
        (
            {"structured_outputs": {"choice": ["é", "b"]}},
            "structured_outputs.choice",
            Grammar("choice", '["é", "b"]'),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            Grammar("json_object"),
        ),
        ({"guided_json": SCHEMA}, "guided_json", OF_SCHEMA),
        ({"guided_grammar": "start: /a/"}, "guided_grammar", Grammar("grammar", "start: /a/")),
        ({"guided_choice": ["a"]}, "guided_choice", Grammar("choice", '["a"]')),
        ({"guided_regex": "a"}, "guided_regex", Grammar("regex", "a")),
    ],
)
def test_every_way_to_say_what_to_match(
    fields: dict[str, Any], field: str, grammar: Grammar
) -> None:
    for parsed in (completion(**fields), chat(**fields)):
        assert parsed.guided == GuidedDecoding(grammar, field)
        assert parsed.sampling(1).grammar == grammar


@pytest.mark.parametrize(
    "parsed",
    [
        chat(),
        completion(response_format=None, structured_outputs=None),
        completion(response_format={"type": "text"}),
        responses(text={"format": {"type": "text"}}),
        responses(text={}),
    ],
)
def test_saying_nothing_demands_nothing(parsed: Any) -> None:
    assert parsed.guided is None


def test_a_flat_format_is_a_demand_as_well() -> None:
    demand = responses(text={"format": {"type": "json_schema", **NAMED}}).guided
    assert demand == GuidedDecoding(OF_SCHEMA, "text.format.schema")

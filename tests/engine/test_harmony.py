"""Answers of gpt-oss are separated into reasoning, content and calls."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from engine.text.grammar import COMPLETE, GrammarCompiler
from engine.text.harmony import HarmonyParser, messages_for_gpt_oss, tag_characters
from engine.text.reasoning import reasoning_start
from engine.text.request_grammar import answer_grammar
from engine.text.tool_parser import create_tool_parser
from protocol.messages import AddRequest, Grammar, SamplingParams, TokenLogprobs
from protocol.openai.chat import ChatRequest
from protocol.openai.tools import Tools, join_pieces
from protocol.settings.options import ModelOptions
from protocol.settings.settings import DecodeSettings
from tests.engine.test_grammar import VOCAB, allowed
from tests.engine.test_http_responses import FLAT
from tests.engine.test_http_tools import NAMED, TOOL, call_of, reasoning_and_content
from tests.rigs.http_server import chunks, end, scripted, serving_harmony, text_script

THINK, START = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
TOOLS = Tools((TOOL,), "auto")

# The model's text, and the reasoning, content and calls that the text contains.
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{THINK}I add.{START}{FINAL} 2 <b>\n<|return|>", "I add.", " 2 <b>\n", []),
    (f'{THINK}a{START}{CALL}{{"a": 1}}<|call|>', "a", "", [("add", '{"a": 1}')]),
    ('<|channel|>analysis to=functions.add code<|message|>{"a": 1}<|call|>', "", "",
     [("add", '{"a": 1}')]),
    (f"{THINK}a{START} to=functions.add<|channel|>commentary json<|message|>{{}}", "a",
     "", [("add", "{}")]),
    (" to=functions.nobody<|channel|>commentary<|message|> <|call|>", "", "",
     [("nobody", " {}")]),
    (f"{CALL}<|call|>", "", "", [("add", "{}")]),
    ("<|channel|>commentary to=browser.search code<|message|>{}<|call|>", "", "",
     [("browser.search", "{}")]),
    (f'{CALL}{{"a"', "", "", [("add", '{"a"')]),
    (CALL, "", "", [("add", "")]),
    (f"{CALL}{{}}{START}{CALL}{{}}", "", "", [("add", "{}")] * 2),
    (f"{THINK}a{START}{THINK}b{START}<|channel|>commentary<|message|>"
     f"Wait.{START}{FINAL}2",
     "a\n\nb", "Wait.\n\n2", []),
    (f"<|channel|>commentary<|message|>Wait.{START}{THINK}a{START}{CALL}{{}}", "a",
     "Wait.", [("add", "{}")]),
    # Reasoning that is not closed, and contains the head of a call.
    *((f"{THINK}I add.{head}<|message|>{{}}<|call|>", "I add.", "",
       [("add", "{}")])
      for head in (
        "<|start|>assistant<|channel|>commentary to=functions.add json",
        "<|channel|>commentary to=functions.add <|constrain|>json",
        " to=functions.add<|channel|>commentary json",
        "\n\nto=functions.add <|constrain|>json", " to=functions.add",
        " to=functions.add code")),
    (f"{THINK}I add.{START} to=functions.add<|message|>{{}}", "I add.", "",
     [("add", "{}")]),
    (f"{THINK}I write to=functions.add or to=functions.x{START}{FINAL}2",
     "I write to=functions.add or to=functions.x", "2", []),
    (f"{THINK}I write to=functions.add", "I write to=functions.add", "", []),
    (f"{THINK}I add to<|message|>a", "I add toa", "", []),
    # Text that ends within a head.
    *((f"{THINK}a{START}{cut}", "a", "", []) for cut in (
        "", "<|channel|>", "<|channel|>fin", "<|channel|>commentary to=functions.ad",
        " to=fun", "<|channel|>commentary to=functions.add <|constrain|>js")),
    (f"{THINK}a<|end|><|start|>assis", "a", "", []),
    # Malformed heads.
    ("Hello <|end|>", "", "Hello ", []),
    ("to be or not", "", "to be or not", []),
    ("to", "", "to", []),
    ("", "", "", []),
    (f"{THINK}a<|end|>So.<|start|>assistant{FINAL}2", "a", "So.\n\n2", []),
    (f"<|start|>assistant{FINAL}2", "", "2", []),
    ("<|message|>2", "", "2", []),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}", []),
    ("<|channel|>--commentary?<|message|>2", "", "2", []),
    ("<|channel|>commentary to=assistant<|channel|>commentary?<|message|>"
     f"a{START}{FINAL}b", "", "a\n\nb", []),
    (f"<|channel|>?? 2?{START}{THINK}a", "a", "?? 2?", []),
    ("<|channel|>Sure, it is 2.<|return|>", "", "Sure, it is 2.", []),
    (f"<|channel|>Sure, {'x' * 600} 2", "", f"Sure, {'x' * 600} 2", []),
    ("<|channel|>analysis I think<|message|> so", " I think so", "", []),
    ("<|channel|>Yes<|return|>", "", "Yes", []),
    (f"{FINAL}2{THINK}a<|constrain|>b<|message|>c", "abc", "2", []),
    (f"{FINAL}2<|return|><|start|>user<|message|>3", "", "2\n\n3", []),
    (" to=functions.add <|constrain|>json<|message|>{}<|call|>", "", "",
     [("add", "{}")])
]  # fmt: skip


def characters_of(text: str) -> list[str]:
    """Return the characters of a text. A tag is one character."""
    tokenizer: Any = SimpleNamespace(id_of=str)
    for name, tag in tag_characters(tokenizer).items():
        text = text.replace(name, tag)
    return list(text)


def parse(
    pieces: list[str], tools: Tools = TOOLS
) -> tuple[str, str, list[tuple[str, str]]]:
    parser = HarmonyParser("", {}, tools.mode == "auto")
    calls = create_tool_parser(tools, "harmony")
    content = ""
    actual = []
    results = [*map(parser.feed, pieces), parser.finish()]
    for _, text in results:
        parsed = calls.feed(text) if calls else None
        content += parsed.content if parsed else text
        actual += parsed.calls if parsed else []
    if calls:
        content += calls.finish().content
    named = [(call.name or "", call.arguments) for call in join_pieces(actual)]
    return "".join(thought for thought, _ in results), content, named


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_answer_is_read_the_same_in_any_pieces(text, reasoning, content, calls):
    chars = characters_of(text)
    cuts = [["".join(chars)], chars]
    cuts += [["".join(chars[:i]), "".join(chars[i:])] for i in range(len(chars))]
    for pieces in cuts:
        assert parse(pieces) == (reasoning, content, calls), pieces


def test_any_text_is_read_the_same_in_any_pieces_and_no_tag_is_text():
    rng = random.Random(1)
    words = [*map("".join, map(characters_of, (
        THINK, START, FINAL, CALL, "<|channel|>", "<|message|>", "<|start|>",
        "<|call|>", " Xy zw", "assistant", "analysis", " to=functions.add", "\n", "{}",
        "<|end|>", "<|constrain|>"
    )))]  # fmt: skip
    for _ in range(3000):
        text = "".join(rng.choices(words, k=rng.randrange(9)))
        parsed = parse([text])
        assert parse([*text]) == parsed
        # Tags are lone surrogates, which cannot be encoded.
        json.dumps(parsed, ensure_ascii=False).encode()
        assert text.count("Xy zw") == str(parsed).count("Xy zw"), (
            "no text is lost or repeated"
        )


def test_call_is_text_where_no_tool_may_be_called():
    chars = characters_of(f"{THINK}a{START}{CALL}{{}}<|end|>")
    assert parse(chars, Tools((TOOL,), "none")) == ("a", "{}", [])
    chars = characters_of("<|channel|>analysis to=python code<|message|>1+1<|end|>")
    assert parse(chars, Tools()) == ("1+1", "", [])


# -- over HTTP -------------------------------------------------------------------------

STOPPED = {"finish_reason": "stop"}


@pytest.mark.parametrize(
    ("text", "request_fields", "expected", "finish_reason", "num_reasoning"),
    [
        (f"{THINK}I <|x.{START}{FINAL}Yö<|return|>", {}, ("I <|x.", "Yö"), "stop", 7),
        (f"{THINK}I.{START}{CALL}{{}}<|call|>", {"tools": [TOOL]}, ("I.", None),
         "tool_calls", 3),
        (f"{THINK}I.{START}{CALL}{{}}<|call|>", {}, ("I.", "{}"), "stop", 3),
        (f"{THINK}I.{START}{CALL}{{}}<|call|>",
         {"tools": [TOOL], "tool_choice": "none"}, ("I.", "{}"), "stop", 3),
        (f'{THINK}I.{START}{FINAL}{{"a": 1}}', {"tools": [TOOL], "tool_choice": NAMED},
         ("I.", None), "tool_calls", 3),
        (f'{FINAL}[{{"name": "add", "parameters": {{"a": 1}}}}]',
         {"tools": [TOOL], "tool_choice": "required"}, (None, None), "tool_calls", 0),
        (f"{THINK}I.{START}{FINAL}Yo", {"include_reasoning": False}, (None, "Yo"),
         "stop", 3),
        (f"{THINK}final{START}{FINAL}A final ENDo", {"stop": ["END", "assist"]},
         ("final", "A final "), "stop", 6),
        (f"{THINK}I END", {"stop": ["END", "analysis"]}, ("I ", ""), "stop", 6),
        (f"{THINK}A{START}{FINAL}Bo", {"stop": ["A<"], "min_tokens": 8}, ("A", "Bo"),
         "stop", 2)
    ]
)  # fmt: skip
async def test_harmony_answer_is_the_same_with_and_without_a_stream(
    harmony, text, request_fields, expected, finish_reason, num_reasoning
):
    async with serving_harmony(
        harmony, text_script(harmony, text, **STOPPED)
    ) as server:
        answer = (await server.chat(**request_fields)).json()
        (choice,) = answer["choices"]
        assert (reasoning_and_content(choice), choice["finish_reason"]) == (
            expected,
            finish_reason,
        )
        calls = choice["message"].get("tool_calls", [])
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == num_reasoning
        streamed = chunks(await server.chat(stream=True, **request_fields))
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        assert (reasoning or None, content) == (expected[0], expected[1] or "")
        pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
        streamed_text = "".join(piece["function"]["arguments"] for piece in pieces)
        assert len(pieces) > len(calls) or not calls
        assert streamed_text == "".join(call["function"]["arguments"] for call in calls)
        assert streamed[-1]["choices"][0]["finish_reason"] == finish_reason


@pytest.mark.parametrize("num_tokens", range(1, 67, 4))
async def test_answer_cut_anywhere_is_returned_up_to_the_cut(harmony, num_tokens):
    ids = harmony.encode(f'{THINK}I.{START}{CALL}{{"a": 1}}')[:num_tokens]
    script = scripted(*({"token_ids": [token_id]} for token_id in ids), end())
    async with serving_harmony(harmony, script) as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
        thought = {0: None, 1: "I"}.get(max(num_tokens - 10, 0), "I.")
        content = "" if num_tokens < 58 else None
        assert reasoning_and_content(choice) == (thought, content)
        assert choice["finish_reason"] == "length"
        if num_tokens >= 58:
            assert call_of(choice) == ("add", '{"a": 1}'[: num_tokens - 58])


async def test_each_choice_is_read_separately_and_logprobs_cover_all_tokens(harmony):
    ids = [harmony.encode(f"{THINK}{n}{START}{FINAL}{n}") for n in "12"]
    turns = (
        {"choice": i, "token_ids": [turn[i]], "logprobs": [TokenLogprobs(-1.0)]}
        for turn in zip(*ids, strict=True)
        for i in (1, 0)
    )
    async with serving_harmony(harmony, scripted(*turns, end(0), end(1))) as server:
        choices = (await server.chat(n=2, logprobs=True)).json()["choices"]
        assert [reasoning_and_content(choice) for choice in choices] == [
            ("1", "1"),
            ("2", "2"),
        ]
        for choice, choice_ids in zip(choices, ids, strict=True):
            tokens = choice["logprobs"]["content"]
            token_texts = [bytes(token["bytes"]).decode() for token in tokens]
            assert "".join(token_texts) == harmony.decode_all(choice_ids)


async def test_tag_that_is_spelled_out_is_text(harmony):
    """The answer explains the format, so it contains tags as plain text."""
    ids = harmony.encode(FINAL)
    for part in ("<|e", "nd|> <|chan", "nel|>"):
        ids += harmony.encode(part)
    script = scripted(*({"token_ids": [token_id]} for token_id in ids), end())
    async with serving_harmony(harmony, script) as server:
        (choice,) = (await server.chat()).json()["choices"]
        assert reasoning_and_content(choice) == (None, "<|end|> <|channel|>")


async def test_responses_have_items_for_reasoning_text_and_calls(harmony):
    text = (
        f"{THINK}I.{START}<|channel|>commentary<|message|>Wait."
        f"{START}{CALL}{{}}<|call|>"
    )
    request = {"input": "Hi", "tools": [FLAT]}
    async with serving_harmony(
        harmony, text_script(harmony, text, **STOPPED)
    ) as server:
        response = (await server.http.post("/v1/responses", json=request)).json()
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["reasoning", "message", "function_call"]
        thought, message, call = response["output"]
        texts = [item["content"][0]["text"] for item in (thought, message)]
        assert texts == ["I.", "Wait."]
        assert (call["name"], call["arguments"]) == ("add", "{}")
        # The prompt of the next turn contains the items as the model wrote them.
        output = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": "3",
        }
        again = {
            **request,
            "input": [{"role": "user", "content": "Hi"}, *response["output"], output],
        }
        assert (await server.http.post("/v1/responses", json=again)).status_code == 200
        prompt = harmony.decode_all(server.engine.added[-1].token_ids)
        old_head = "<|channel|>commentary to=functions.add <|constrain|>"
        expected = text.replace(old_head, " to=functions.add<|channel|>commentary ")
        result = (
            "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
            '"3"<|end|>'
        )
        assert prompt.endswith(
            f"<|start|>assistant{expected}{result}<|start|>assistant"
        )


# -- the prompt ------------------------------------------------------------------------


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": name,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def test_one_system_message_has_the_text_of_several(harmony):
    """For example, a Responses request may have instructions and developer messages."""
    turns = [
        {"role": role, "content": role}
        for role in ("system", "developer", "user", "system")
    ]
    actual = messages_for_gpt_oss(turns)
    assert actual == [{"role": "system", "content": "system\n\ndeveloper"}, *turns[2:]]
    assert "system\n\ndeveloper" in harmony.render_chat(actual)


async def test_turn_with_several_calls_becomes_turns_with_one_call(harmony):
    """Grammars for `tool_choice` allow several calls, and some models write them."""
    calls = [call("add", '{"a": 1}'), call("sub", {"b": 2})]
    turns = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "sub", "content": "s"},
        {"role": "tool", "tool_call_id": "add", "content": "a"},
        {"role": "tool", "tool_call_id": "?", "content": "o"},
    ]
    async with serving_harmony(harmony, text_script(harmony, "x")) as server:
        assert (await server.chat(messages=turns)).status_code == 200
        prompt = harmony.decode_all(server.engine.added[0].token_ids)
    answers = [
        f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
        f'"{result}"<|end|>'
        for name, result in (("add", "a"), ("sub", "s"), ("sub", "o"))
    ]
    head = (
        "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>"
        "{}<|call|>"
    )
    expected_turns = (
        f"<|start|>assistant{THINK}I.<|end|>"
        + head.format("add", '{"a": 1}')
        + answers[0]
    )
    expected_turns += head.format("sub", '{"b": 2}') + "".join(answers[1:])
    assert prompt.endswith(f"Hi<|end|>{expected_turns}<|start|>assistant")


def test_tool_result_follows_its_call_wherever_the_client_put_it():
    """Clients may send all calls of an answer first, and then their results."""
    add, sub = (
        {
            "role": "assistant",
            "content": "",
            "thinking": name,
            "tool_calls": [call(name, {})],
        }
        for name in ("add", "sub")
    )
    add_result, sub_result = (
        {"role": "tool", "tool_call_id": name} for name in ("add", "sub")
    )
    assert messages_for_gpt_oss([add, sub, add_result, sub_result]) == [
        add,
        add_result,
        sub,
        sub_result,
    ]


@pytest.mark.parametrize(("before", "text", "expected"), [
    ("So", "more", (None, "more")), ("So", f"more{START}{THINK}I", ("I", "more")),
    (f"So{START}{CALL}", "{}", (None, "{}")),  # tags in a client's text are text
])  # fmt: skip
async def test_final_message_is_continued(harmony, before, text, expected):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": before},
    ]
    request = {"messages": turns, "continue_final_message": True, "tools": [TOOL]}
    async with serving_harmony(harmony, text_script(harmony, text)) as server:
        (choice,) = (await server.chat(**request)).json()["choices"]
        assert reasoning_and_content(choice) == expected
        await server.chat(**request, structured_outputs={"regex": "a"})
        assert server.engine.added[1].sampling.grammar == Grammar("regex", "a")


async def test_call_is_continued_where_message_text_may_become_tags(harmony):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": f"So{START}{CALL}"},
    ]
    request = {"messages": turns, "continue_final_message": True, "tools": [TOOL]}
    script = text_script(harmony, "{}<|call|>")
    async with serving_harmony(harmony, script, split_special_tokens=False) as server:
        (choice,) = (await server.chat(**request)).json()["choices"]
        assert reasoning_and_content(choice) == (None, None) and call_of(choice) == (
            "add",
            "{}",
        )


# -- grammars --------------------------------------------------------------------------

# True if the text is complete, False if it is incomplete, None if it is not allowed.
_IS_COMPLETE: dict[str, bool | None] = {
    f"{THINK}I <x\n\n.{START}{THINK}{START}{FINAL}ab": True,
    f"{FINAL}ab": True,
    "<|start|>assistant<|channel|>final <|constrain|>json<|message|>ab": True,
    f"{THINK}I{START}{FINAL}a": False,
    f"{THINK}I{START}{FINAL}b": None,
    f"{THINK}I<|return|>": None,
    "ab": None,
    "<|channel|>commentary<|message|>": None,
    f"{THINK}I{START}{CALL}{{": False,
    " to=functions.add<|channel|>commentary json<|message|>{}": False,
    "<|channel|>commentary to=functions.nobody": None,
}


@pytest.mark.parametrize("text", _IS_COMPLETE)
def test_grammar_applies_to_the_final_message_and_allows_calls(harmony, text):
    requested = {"tools": [TOOL], "structured_outputs": {"choice": ["ab"]}}
    request = ChatRequest(
        model="m", messages=[{"role": "user", "content": "Hi"}], **requested
    )
    assert request.guided_decoding is not None
    prompt = harmony.encode(harmony.render_chat([{"role": "user", "content": "Hi"}]))
    settings = DecodeSettings(_cli_parse_args=[])
    grammar = answer_grammar(
        request.guided_decoding.grammar, request, prompt, harmony, settings
    )
    assert grammar is not None and grammar.reasoning == "harmony"
    sampling = SamplingParams(grammar=grammar)
    add = AddRequest(request_id="a", token_ids=[1], max_tokens=9, sampling=sampling)
    compiler = GrammarCompiler(harmony.folder, VOCAB, lambda: None)
    state = compiler.new_state(replace(add, stop_token_ids=harmony.eos_ids))
    outputs = list[int]()
    ending = None
    for token_id in harmony.encode(text):
        if token_id not in allowed(compiler, state):
            break
        outputs.append(token_id)
        ending = state.consume(outputs, 0)
    is_written = outputs == harmony.encode(text)
    assert (ending is COMPLETE if is_written else None) == _IS_COMPLETE[text]
    compiler.close()


# -- options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasoning", "calls", "start"),
    [
        ("auto", "auto", "harmony"),
        ("harmony", "auto", "harmony"),
        ("auto", "harmony", "harmony"),
        ("harmony", "harmony", "harmony"),
        ("none", "auto", None),
        ("auto", "hermes", None),
        ("qwen3", "auto", "perhaps"),
    ],
)
def test_harmony_comes_from_the_options_or_the_template(
    harmony, reasoning, calls, start
):
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}])
    options = ModelOptions(reasoning_parser=reasoning, tool_call_parser=calls)
    assert reasoning_start(options, request, [1], harmony) == start


@pytest.mark.parametrize(
    ("reasoning", "calls"), [("none", "harmony"), ("harmony", "hermes")]
)
def test_options_that_contradict_each_other_are_refused(reasoning, calls):
    options = {"reasoning_parser": reasoning, "tool_call_parser": calls}
    with pytest.raises(
        ValidationError, match=f"{reasoning} cannot be combined with --tool-call-parser"
    ):
        DecodeSettings(_cli_parse_args=[], **options)


async def test_model_without_the_tags_is_refused(tokenizer):
    with pytest.raises(ValueError, match="which this model lacks"):
        async with serving_harmony(tokenizer, tool_call_parser="harmony"):
            pass


async def test_all_text_is_content_without_a_reasoning_parser(harmony):
    text = f"{THINK}I.{START}{FINAL}Yo"
    options = {"reasoning_parser": "none"}
    async with serving_harmony(
        harmony, text_script(harmony, text), **options
    ) as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
        assert reasoning_and_content(choice) == (None, "analysisI.assistantfinalYo")

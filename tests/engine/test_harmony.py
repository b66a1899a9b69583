"""gpt-oss's answers: what it thinks, says and calls, by its messages' heads."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from engine.text.grammar import COMPLETE, GrammarCompiler
from engine.text.harmony import HarmonyParser, one_call_each, tags_of
from engine.text.reasoning import reasoning_begins
from engine.text.request_grammar import grammar_of
from engine.text.tool_parser import create_tool_parser
from protocol.messages import AddRequest, Grammar, SamplingParams, TokenLogprobs
from protocol.openai.chat import ChatRequest
from protocol.openai.tools import Tools, join_pieces
from protocol.settings.options import ModelOptions
from protocol.settings.settings import DecodeSettings
from tests.engine.test_grammar import VOCAB, allowed
from tests.engine.test_http_responses import FLAT
from tests.engine.test_http_tools import NAMED, TOOL, call_of, said
from tests.rigs.http_server import chunks, end, scripted, serving_harmony, text_script

THINK, START = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
TOOLS = Tools((TOOL,), "auto")

# What the model says; the reasoning, the content and the calls.
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{THINK}I add.{START}{FINAL} 2 <b>\n<|return|>", "I add.", " 2 <b>\n", []),
    (f'{THINK}a{START}{CALL}{{"a": 1}}<|call|>', "a", "", [("add", '{"a": 1}')]),
    ('<|channel|>analysis to=functions.add code<|message|>{"a": 1}<|call|>', "", "",
     [("add", '{"a": 1}')]),
    (f"{THINK}a{START} to=functions.add<|channel|>commentary json<|message|>{{}}", "a", "",
     [("add", "{}")]),
    (" to=functions.nobody<|channel|>commentary<|message|> <|call|>", "", "", [("nobody", " {}")]),
    (f"{CALL}<|call|>", "", "", [("add", "{}")]),
    ("<|channel|>commentary to=browser.search code<|message|>{}<|call|>", "", "",
     [("browser.search", "{}")]),
    (f'{CALL}{{"a"', "", "", [("add", '{"a"')]),
    (CALL, "", "", [("add", "")]),
    (f"{CALL}{{}}{START}{CALL}{{}}", "", "", [("add", "{}")] * 2),
    (f"{THINK}a{START}{THINK}b{START}<|channel|>commentary<|message|>Wait.{START}{FINAL}2",
     "a\n\nb", "Wait.\n\n2", []),
    (f"<|channel|>commentary<|message|>Wait.{START}{THINK}a{START}{CALL}{{}}", "a", "Wait.",
     [("add", "{}")]),
    # Reasoning that is never ended, and the head of a call in it.
    *((f"{THINK}I add.{head}<|message|>{{}}<|call|>", "I add.", "", [("add", "{}")]) for head in (
        "<|start|>assistant<|channel|>commentary to=functions.add json",
        "<|channel|>commentary to=functions.add <|constrain|>json",
        " to=functions.add<|channel|>commentary json",
        "\n\nto=functions.add <|constrain|>json", " to=functions.add", " to=functions.add code")),
    (f"{THINK}I add.{START} to=functions.add<|message|>{{}}", "I add.", "", [("add", "{}")]),
    (f"{THINK}I write to=functions.add or to=functions.x{START}{FINAL}2",
     "I write to=functions.add or to=functions.x", "2", []),
    (f"{THINK}I write to=functions.add", "I write to=functions.add", "", []),
    (f"{THINK}I add to<|message|>a", "I add toa", "", []),
    # Cut in a head.
    *((f"{THINK}a{START}{cut}", "a", "", []) for cut in (
        "", "<|channel|>", "<|channel|>fin", "<|channel|>commentary to=functions.ad", " to=fun",
        "<|channel|>commentary to=functions.add <|constrain|>js")),
    (f"{THINK}a<|end|><|start|>assis", "a", "", []),
    # Heads amiss.
    ("Hello <|end|>", "", "Hello ", []),
    ("to be or not", "", "to be or not", []),
    ("to", "", "to", []),
    ("", "", "", []),
    (f"{THINK}a<|end|>So.<|start|>assistant{FINAL}2", "a", "So.\n\n2", []),
    (f"<|start|>assistant{FINAL}2", "", "2", []),
    ("<|message|>2", "", "2", []),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}", []),
    ("<|channel|>--commentary?<|message|>2", "", "2", []),
    (f"<|channel|>commentary to=assistant<|channel|>commentary?<|message|>a{START}{FINAL}b", "",
     "a\n\nb", []),
    (f"<|channel|>?? 2?{START}{THINK}a", "a", "?? 2?", []),
    ("<|channel|>Sure, it is 2.<|return|>", "", "Sure, it is 2.", []),
    (f"<|channel|>Sure, {'x' * 600} 2", "", f"Sure, {'x' * 600} 2", []),
    ("<|channel|>analysis I think<|message|> so", " I think so", "", []),
    ("<|channel|>Yes<|return|>", "", "Yes", []),
    (f"{FINAL}2<|channel|>analysis<|message|>a<|constrain|>b<|message|>c", "abc", "2", []),
    (f"{FINAL}2<|return|><|start|>user<|message|>3", "", "2\n\n3", []),
    (" to=functions.add <|constrain|>json<|message|>{}<|call|>", "", "", [("add", "{}")]),
]  # fmt: skip


def tagged(text: str) -> list[str]:
    """Characters, where a tag is one."""
    for name, tag in tags_of(SimpleNamespace(id_of=str)).items():  # type: ignore[arg-type]
        text = text.replace(name, tag)
    return list(text)


def read(
    pieces: list[str], tools: Tools = TOOLS
) -> tuple[str, str, list[tuple[str, str]]]:
    parser = HarmonyParser("", {}, tools.mode == "auto")
    calls, content, found = create_tool_parser(tools, "harmony"), "", []
    told = [*map(parser.feed, pieces), parser.finish()]
    for _, text in told:
        parsed = calls.feed(text) if calls else None
        content += parsed.content if parsed else text
        found += parsed.calls if parsed else []
    if calls:
        content += calls.finish().content
    named = [(call.name or "", call.arguments) for call in join_pieces(found)]
    return "".join(thought for thought, _ in told), content, named


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_an_answer_is_read_the_same_however_it_is_cut(text, reasoning, content, calls):
    chars = tagged(text)
    cuts = [["".join(chars)], chars]
    cuts += [["".join(chars[:at]), "".join(chars[at:])] for at in range(len(chars))]
    for pieces in cuts:
        assert read(pieces) == (reasoning, content, calls), pieces


def test_whatever_a_model_writes_is_read_the_same_and_no_tag_is_text():
    rng = random.Random(1)
    words = [*map("".join, map(tagged, (
        THINK, START, FINAL, CALL, "<|channel|>", "<|message|>", "<|start|>", "<|call|>", " Xy zw",
        "assistant", "analysis", " to=functions.add", "\n", "{}", "<|end|>", "<|constrain|>"
    )))]  # fmt: skip
    for _ in range(3000):
        text = "".join(rng.choices(words, k=rng.randrange(9)))
        whole = read([text])
        assert read([*text]) == whole
        json.dumps(
            whole, ensure_ascii=False
        ).encode()  # which half a surrogate pair cannot be
        assert text.count("Xy zw") == str(whole).count("Xy zw"), "lost or told twice"


def test_where_no_tool_may_be_called_a_call_is_text():
    chars = tagged(f"{THINK}a{START}{CALL}{{}}<|end|>")
    assert read(chars, Tools((TOOL,), "none")) == ("a", "{}", [])
    chars = tagged("<|channel|>analysis to=python code<|message|>1+1<|end|>")
    assert read(chars, Tools()) == ("1+1", "", [])


# -- over HTTP -------------------------------------------------------------------------------------

STOPPED = {"finish_reason": "stop"}


@pytest.mark.parametrize(
    ("text", "asked", "expected", "finish_reason", "num_reasoning"),
    [
        (f"{THINK}I <|x.{START}{FINAL}Yö<|return|>", {}, ("I <|x.", "Yö"), "stop", 7),
        (f"{THINK}I.{START}{CALL}{{}}<|call|>", {"tools": [TOOL]}, ("I.", None), "tool_calls", 3),
        (f"{THINK}I.{START}{CALL}{{}}<|call|>", {}, ("I.", "{}"), "stop", 3),
        (f"{THINK}I.{START}{CALL}{{}}<|call|>", {"tools": [TOOL], "tool_choice": "none"},
         ("I.", "{}"), "stop", 3),
        (f'{THINK}I.{START}{FINAL}{{"a": 1}}', {"tools": [TOOL], "tool_choice": NAMED},
         ("I.", None), "tool_calls", 3),
        (f'{FINAL}[{{"name": "add", "parameters": {{"a": 1}}}}]',
         {"tools": [TOOL], "tool_choice": "required"}, (None, None), "tool_calls", 0),
        (f"{THINK}I.{START}{FINAL}Yo", {"include_reasoning": False}, (None, "Yo"), "stop", 3),
        (f"{THINK}final{START}{FINAL}A final ENDo", {"stop": ["END", "assist"]},
         ("final", "A final "), "stop", 6),
        (f"{THINK}I END", {"stop": ["END", "analysis"]}, ("I ", ""), "stop", 6),
        (f"{THINK}A{START}{FINAL}Bo", {"stop": ["A<"], "min_tokens": 8}, ("A", "Bo"), "stop", 2),
    ],
)  # fmt: skip
async def test_an_answer_whole_and_streamed(
    harmony, text, asked, expected, finish_reason, num_reasoning
):
    async with serving_harmony(
        harmony, text_script(harmony, text, **STOPPED)
    ) as server:
        answer = (await server.chat(**asked)).json()
        (choice,) = answer["choices"]
        assert (said(choice), choice["finish_reason"]) == (expected, finish_reason)
        calls = choice["message"].get("tool_calls", [])
        details = answer["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": num_reasoning}
        streamed = chunks(await server.chat(stream=True, **asked))
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        assert (reasoning or None, content) == (expected[0], expected[1] or "")
        pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
        told = "".join(piece["function"]["arguments"] for piece in pieces)
        assert len(pieces) > len(calls) or not calls
        assert told == "".join(call["function"]["arguments"] for call in calls)
        assert streamed[-1]["choices"][0]["finish_reason"] == finish_reason


@pytest.mark.parametrize("at", range(1, 67, 4))
async def test_an_answer_that_is_cut_anywhere_is_told_as_far_as_it_came(harmony, at):
    ids = harmony.encode(f'{THINK}I.{START}{CALL}{{"a": 1}}')[:at]
    script = scripted(*({"token_ids": [token_id]} for token_id in ids), end())
    async with serving_harmony(harmony, script) as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
        thought = {0: None, 1: "I"}.get(max(at - 10, 0), "I.")
        assert said(choice) == (thought, "" if at < 58 else None)
        assert choice["finish_reason"] == "length"
        if at >= 58:
            assert call_of(choice) == ("add", '{"a": 1}'[: at - 58])


async def test_each_choice_is_read_by_itself_and_logprobs_are_of_all_tokens(harmony):
    ids = [harmony.encode(f"{THINK}{n}{START}{FINAL}{n}") for n in "12"]
    turns = (
        {"choice": at, "token_ids": [turn[at]], "logprobs": [TokenLogprobs(-1.0)]}
        for turn in zip(*ids, strict=True)
        for at in (1, 0)
    )
    async with serving_harmony(harmony, scripted(*turns, end(0), end(1))) as server:
        choices = (await server.chat(n=2, logprobs=True)).json()["choices"]
        assert [said(choice) for choice in choices] == [("1", "1"), ("2", "2")]
        for choice, of in zip(choices, ids, strict=True):
            told = [
                bytes(one["bytes"]).decode() for one in choice["logprobs"]["content"]
            ]
            assert "".join(told) == harmony.decode_all(of)


async def test_a_tag_that_is_spelled_out_is_text(harmony):
    """Asked how such a model writes, it tells."""
    ids = harmony.encode(FINAL)
    for part in ("<|e", "nd|> <|chan", "nel|>"):
        ids += harmony.encode(part)
    script = scripted(*({"token_ids": [token_id]} for token_id in ids), end())
    async with serving_harmony(harmony, script) as server:
        (choice,) = (await server.chat()).json()["choices"]
        assert said(choice) == (None, "<|end|> <|channel|>")


async def test_responses_have_items_of_what_was_thought_said_and_called(harmony):
    text = f"{THINK}I.{START}<|channel|>commentary<|message|>Wait.{START}{CALL}{{}}<|call|>"
    asked = {"input": "Hi", "tools": [FLAT]}
    async with serving_harmony(
        harmony, text_script(harmony, text, **STOPPED)
    ) as server:
        whole = (await server.http.post("/v1/responses", json=asked)).json()
        kinds = [item["type"] for item in whole["output"]]
        assert kinds == ["reasoning", "message", "function_call"]
        thought, told, call = whole["output"]
        assert (thought["content"][0]["text"], told["content"][0]["text"]) == (
            "I.",
            "Wait.",
        )
        assert (call["name"], call["arguments"]) == ("add", "{}")
        # And back: the next turn's prompt has them as the model wrote them.
        output = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": "3",
        }
        again = {
            **asked,
            "input": [{"role": "user", "content": "Hi"}, *whole["output"], output],
        }
        assert (await server.http.post("/v1/responses", json=again)).status_code == 200
        prompt = harmony.decode_all(server.engine.added[-1].token_ids)
        wrote = text.replace("<|channel|>commentary to=functions.add <|constrain|>",
                             " to=functions.add<|channel|>commentary ")  # fmt: skip
        result = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>'
        assert prompt.endswith(f"<|start|>assistant{wrote}{result}<|start|>assistant")


# -- the prompt ------------------------------------------------------------------------------------


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": name,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def test_one_system_message_has_the_text_of_several(harmony):
    """As a response's instructions come before a developer's message."""
    turns = [
        {"role": role, "content": role}
        for role in ("system", "developer", "user", "system")
    ]
    found = one_call_each(turns)
    assert found == [{"role": "system", "content": "system\n\ndeveloper"}, *turns[2:]]
    assert "system\n\ndeveloper" in harmony.render_chat(found)


async def test_a_turn_of_several_calls_is_told_as_turns_of_one(harmony):
    """As a grammar for `tool_choice` lets the model write them, or another model did."""
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
        f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{said}"<|end|>'
        for name, said in (("add", "a"), ("sub", "s"), ("sub", "o"))
    ]
    head = "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{}<|call|>"
    told = (
        f"<|start|>assistant{THINK}I.<|end|>"
        + head.format("add", '{"a": 1}')
        + answers[0]
    )
    told += head.format("sub", '{"b": 2}') + "".join(answers[1:])
    assert prompt.endswith(f"Hi<|end|>{told}<|start|>assistant")


def test_what_a_tool_said_stands_behind_its_call_wherever_it_came():
    """As clients tell calls that one answer made with thoughts between them."""
    add, sub = (
        {
            "role": "assistant",
            "content": "",
            "thinking": name,
            "tool_calls": [call(name, {})],
        }
        for name in ("add", "sub")
    )
    of_add, of_sub = ({"role": "tool", "tool_call_id": name} for name in ("add", "sub"))
    assert one_call_each([add, sub, of_add, of_sub]) == [add, of_add, sub, of_sub]


@pytest.mark.parametrize(("before", "say", "expected"), [
    ("So", "more", (None, "more")), ("So", f"more{START}{THINK}I", ("I", "more")),
    (f"So{START}{CALL}", "{}", (None, "{}")),  # spelled out by a client, tags are text
])  # fmt: skip
async def test_a_final_message_is_continued(harmony, before, say, expected):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": before},
    ]
    asked = {"messages": turns, "continue_final_message": True, "tools": [TOOL]}
    async with serving_harmony(harmony, text_script(harmony, say)) as server:
        (choice,) = (await server.chat(**asked)).json()["choices"]
        assert said(choice) == expected
        await server.chat(**asked, structured_outputs={"regex": "a"})
        assert server.engine.added[1].sampling.grammar == Grammar("regex", "a")


async def test_a_call_is_continued_where_the_text_of_messages_may_be_tags(harmony):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": f"So{START}{CALL}"},
    ]
    asked = {"messages": turns, "continue_final_message": True, "tools": [TOOL]}
    script = text_script(harmony, "{}<|call|>")
    async with serving_harmony(harmony, script, split_special_tokens=False) as server:
        (choice,) = (await server.chat(**asked)).json()["choices"]
        assert said(choice) == (None, None) and call_of(choice) == ("add", "{}")


# -- grammars --------------------------------------------------------------------------------------

_ALLOWED: dict[str, bool | None] = {  # whether it is complete, if it may be said
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


@pytest.mark.parametrize("text", _ALLOWED)
def test_a_grammar_is_for_the_final_message_and_leaves_room_for_calls(harmony, text):
    asked = {"tools": [TOOL], "structured_outputs": {"choice": ["ab"]}}
    request = ChatRequest(
        model="m", messages=[{"role": "user", "content": "Hi"}], **asked
    )
    assert request.guided is not None
    prompt = harmony.encode(harmony.render_chat([{"role": "user", "content": "Hi"}]))
    settings = DecodeSettings(_cli_parse_args=[])
    grammar = grammar_of(request.guided.grammar, request, prompt, harmony, settings)
    assert grammar is not None and grammar.reasoning == "harmony"
    sampling = SamplingParams(grammar=grammar)
    add = AddRequest(request_id="a", token_ids=[1], max_tokens=9, sampling=sampling)
    compiler = GrammarCompiler(harmony.folder, VOCAB, lambda: None)
    state = compiler.state(replace(add, stop_token_ids=harmony.eos_ids))
    outputs, ending = list[int](), None
    for token_id in harmony.encode(text):
        if token_id not in allowed(compiler, state):
            break
        outputs.append(token_id)
        ending = state.follow(outputs, 0)
    is_said = outputs == harmony.encode(text)
    assert (ending is COMPLETE if is_said else None) == _ALLOWED[text]
    compiler.close()


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasoning", "calls", "begins"),
    [
        ("auto", "auto", "harmony"), ("harmony", "auto", "harmony"), ("auto", "harmony", "harmony"),
        ("harmony", "harmony", "harmony"), ("none", "auto", None), ("auto", "hermes", None),
        ("qwen3", "auto", "perhaps"),
    ],
)  # fmt: skip
def test_the_format_is_the_options_or_the_template_s(harmony, reasoning, calls, begins):
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}])
    options = ModelOptions(reasoning_parser=reasoning, tool_call_parser=calls)
    assert reasoning_begins(options, request, [1], harmony) == begins


@pytest.mark.parametrize(
    ("reasoning", "calls"), [("none", "harmony"), ("harmony", "hermes")]
)
def test_options_that_contradict_each_other_are_refused(reasoning, calls):
    options = {"reasoning_parser": reasoning, "tool_call_parser": calls}
    with pytest.raises(
        ValidationError, match=f"{reasoning} cannot go with --tool-call-parser"
    ):
        DecodeSettings(_cli_parse_args=[], **options)


async def test_a_model_without_the_tags_is_not_served_so(tokenizer):
    with pytest.raises(ValueError, match="model has no token"):
        async with serving_harmony(tokenizer, tool_call_parser="harmony"):
            pass


async def test_without_the_format_all_is_content(harmony):
    text = f"{THINK}I.{START}{FINAL}Yo"
    how = {"reasoning_parser": "none"}
    async with serving_harmony(harmony, text_script(harmony, text), **how) as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
        assert said(choice) == (None, "analysisI.assistantfinalYo")

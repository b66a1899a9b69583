"""Which grammars compile, and how the others are refused. A grammar that would stop a server is
refused in time, and delays no other request."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from engine.text import grammar_check
from engine.text.grammar import GrammarCompiler
from engine.text.grammar_check import GrammarChecker
from engine.text.grammar_compile import (
    MAX_GBNF_CHARS,
    MAX_GRAMMAR_CHARS,
    compiling_threads,
    judge,
)
from engine.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest, Overloaded
from protocol.messages import Grammar
from protocol.openai.structured import GuidedDecoding
from tests import stopping
from tests.engine.test_tokenizer import write_byte_level
from tests.rigs.http_server import serving, text_script

ENDLESS = {
    "type": "integer",
    "multipleOf": 4_999_999,
}  # a state of its automaton for each number
TOOL = {"type": "function", "function": {"name": "f", "parameters": ENDLESS}}


def schema(number: int) -> GuidedDecoding:
    return GuidedDecoding(
        Grammar("json_schema", f'{{"type": "integer", "multipleOf": {number}}}'), "here"
    )


def regex(text: str) -> GuidedDecoding:
    return GuidedDecoding(Grammar("regex", text), "there")


@asynccontextmanager
async def checking(
    tokenizer: Tokenizer, timeout_s: float
) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer, timeout_s)
    await checker.start()
    try:
        yield checker
    finally:
        checker.close()


def chain(length: int) -> str:
    rules = "\n".join(f'r{i}: "a"?' for i in range(length))
    return f"start: {' '.join(f'r{i}' for i in range(length))}\n{rules}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", schema(999_999_937).grammar.text),
        ("json_schema", schema(4_999_999).grammar.text),
        ("grammar", chain(4500)),
        ("regex", "(" * 60_000 + ")" * 60_000),
    ],
    ids=["numbers", "fewer", "chain", "nested"],
)
async def test_what_takes_too_much_is_refused_and_named(tokenizer, kind, text):
    async with checking(tokenizer, 1.0) as checker:
        with pytest.raises(InvalidRequest, match="`here`") as caught:
            await checker.check(
                [regex("a"), GuidedDecoding(Grammar(kind, text), "here")]
            )
        assert caught.value.param == "here"


async def test_memory_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_check, "MEMORY_BYTES", 16 << 20)
    async with checking(tokenizer, 60.0) as checker:
        with pytest.raises(InvalidRequest, match="16 MB"):
            await checker.check([schema(4_999_999)])
        await checker.check([regex("a")])


async def test_others_get_their_turn_beside_slow_ones(tokenizer):
    async with checking(tokenizer, 1.0) as checker:
        slow = [
            asyncio.create_task(checker.check([schema(4_999_999 + 2 * i)]))
            for i in range(4)
        ]
        await asyncio.gather(*(checker.check([regex(f"a{i}")]) for i in range(20)))
        assert not all(task.done() for task in slow)
        refused = await asyncio.gather(*slow, return_exceptions=True)
        assert {type(error) for error in refused} <= {InvalidRequest, Overloaded}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_gone_or_hangs_is_replaced(
    tokenizer, monkeypatch, number
):
    monkeypatch.setattr(grammar_check, "_MAX_WAIT_S", 2.0)
    async with checking(tokenizer, 2.0) as checker:
        before = checker.pid
        assert before is not None
        stopping.send(before, number)
        await checker.check([regex("a")])
        assert checker.pid != before


async def test_a_template_that_another_takes_the_place_of_may_be_broken(tmp_path):
    write_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for")
    (tmp_path / "another").touch()
    async with checking(Tokenizer(tmp_path, tmp_path / "another"), 30.0) as checker:
        await checker.check([regex("a")])
    with contextlib.closing(GrammarCompiler(tmp_path, 600, lambda: None)) as compiler:
        assert compiler.compiled(regex("a").grammar).exception() is None


async def test_nothing_goes_on_for_a_client_that_has_gone(tokenizer):
    async with checking(tokenizer, 60.0) as checker:
        children = Path(f"/proc/{checker.pid}/task/{checker.pid}/children")
        task = asyncio.create_task(checker.check([schema(4_999_999)]))
        while not children.read_text():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        while children.read_text():
            await asyncio.sleep(0)


async def test_open_requests_grammars_have_a_limit_together(tokenizer, monkeypatch):
    async with checking(tokenizer, 30.0) as checker:
        one, other = regex("a+"), regex("b+")
        await checker.check([one, other])
        monkeypatch.setattr(
            grammar_check, "MAX_HELD_BYTES", checker.nbytes(one.grammar)
        )
        assert checker.nbytes(other.grammar) > 0
        ends = [checker.hold(one.grammar) for _ in range(2)]
        for end in ends:
            with pytest.raises(Overloaded):
                checker.hold(other.grammar)
            end()
        checker.hold(other.grammar)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": ENDLESS}}, "structured_outputs.json"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
    ],
)
async def test_a_server_refuses_one_and_answers_the_other(tokenizer, fields, param):
    async with serving(
        tokenizer, text_script(tokenizer, "ab"), grammar_timeout_s=4.0
    ) as server:
        asked = asyncio.create_task(server.chat(**fields))
        good = await server.post(structured_outputs={"regex": "ab"})
        assert good.status_code == 200 and good.json()["choices"][0]["text"] == "ab"
        refused = await asked
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "4 s" in refused.json()["error"]["message"]
        assert len(server.engine.added) == 1


# -- compiling ---------------------------------------------------------------------------------

BYTES = LLTokenizer("byte")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar(
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        ),
        Grammar("regex", r"\d{3}-[a-z]+"),
        Grammar("choice", json.dumps(["yes", 'say "no"\\', "", "é\n"])),
        Grammar(
            "choice",
            json.dumps([chr(code) for code in (*range(0x300), 0x2028, 0x1F98A)]),
        ),
        Grammar("grammar", 'start: "a" rest\nrest: /[0-9]+/'),
        Grammar("grammar", 'root ::= "a" rest\nrest ::= [0-9]+'),
        Grammar("grammar", '\n // x ::= y\n\tstart : "::="' + " " * MAX_GBNF_CHARS),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_what_can_be_used(grammar):
    assert judge(BYTES, grammar).mistake is None


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"$ref": "#/$defs/gone"}', "gone"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "not present"),
        ("json_schema", '{"enum": []}', "at least one value"),
        ("json_schema", '{"type": "string", "not": {"type": "string"}}', "not"),
        ("json_schema", "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("regex", "[a-z", "unclosed"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "", "empty"),
        ("regex", r"a?[^\s\S]", "no text"),
        ("choice", '[""]', "empty"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "root ::= (", "line 1"),
        ("regex", "a" * (MAX_GRAMMAR_CHARS + 1), str(MAX_GRAMMAR_CHARS)),
        ("grammar", 'root ::= "' + "a" * MAX_GBNF_CHARS + '"', str(MAX_GBNF_CHARS)),
        (
            "grammar",
            "\n" * MAX_GRAMMAR_CHARS,
            str(MAX_GBNF_CHARS),
        ),  # llguidance looks for minutes
    ],
)
def test_a_mistake_is_named_in_one_line(kind, text, said):
    mistake = judge(BYTES, Grammar(kind, text)).mistake  # type: ignore[arg-type]
    assert mistake is not None
    assert said in mistake and "\n" not in mistake and len(mistake) <= 300


def test_rules_in_a_long_row_do_not_end_the_process():
    """They overflow the stack of an ordinary thread, which no handler survives."""
    length = 4000
    rules = "\n".join(f'r{i}: r{i + 1} "x" | "y"' for i in range(length))
    lark = Grammar("grammar", f'start: r0\n{rules}\nr{length}: "z"')
    ends = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**ends, "d3000": {"type": "string"}}}
    with compiling_threads("test", 1) as pool:
        for grammar in (lark, Grammar("json_schema", json.dumps(schema))):
            assert len(grammar.text) <= MAX_GRAMMAR_CHARS
            assert pool.submit(judge, BYTES, grammar).result().mistake is None

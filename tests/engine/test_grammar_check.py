"""Usable grammars compile, and all other grammars are refused. A grammar that would
block the server is refused in time, and does not delay other requests.
"""

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
    try_grammar,
)
from engine.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest, Overloaded
from protocol.messages import Grammar
from protocol.openai.structured import GuidedDecoding
from tests import stopping
from tests.engine.test_tokenizer import write_byte_level
from tests.rigs.http_server import serving, text_script

# The automaton of this grammar has a state for each remainder, so millions of states.
ENDLESS = {"type": "integer", "multipleOf": 4_999_999}
TOOL = {"type": "function", "function": {"name": "f", "parameters": ENDLESS}}


def schema(divisor: int) -> GuidedDecoding:
    return GuidedDecoding(
        Grammar("json_schema", f'{{"type": "integer", "multipleOf": {divisor}}}'),
        "here",
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
async def test_grammar_that_exhausts_a_limit_is_refused_by_name(tokenizer, kind, text):
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


async def test_cache_of_verdicts_is_bounded_if_all_grammars_are_invalid(
    tokenizer, monkeypatch
):
    monkeypatch.setattr(grammar_check, "_MAX_VERDICTS", 2)
    async with checking(tokenizer, 60.0) as checker:
        for index in range(4):
            with pytest.raises(InvalidRequest):
                await checker.check([regex(f"({index}")])
        assert len(checker._verdicts) == 2


async def test_slow_grammars_do_not_delay_other_grammars(tokenizer):
    async with checking(tokenizer, 1.0) as checker:
        slow = [
            asyncio.create_task(checker.check([schema(4_999_999 + 2 * i)]))
            for i in range(4)
        ]
        await asyncio.gather(*(checker.check([regex(f"a{i}")]) for i in range(20)))
        assert not all(task.done() for task in slow)
        refused = await asyncio.gather(*slow, return_exceptions=True)
        assert {type(error) for error in refused} <= {InvalidRequest, Overloaded}


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_dead_or_hung_trial_process_is_replaced(
    tokenizer, monkeypatch, signal_number
):
    monkeypatch.setattr(grammar_check, "_MAX_WAIT_S", 2.0)
    async with checking(tokenizer, 2.0) as checker:
        before = checker.pid
        assert before is not None
        stopping.send(before, signal_number)
        await checker.check([regex("a")])
        assert checker.pid != before


async def test_replaced_template_may_be_broken(tmp_path):
    write_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for")
    (tmp_path / "another").touch()
    async with checking(Tokenizer(tmp_path, tmp_path / "another"), 30.0) as checker:
        await checker.check([regex("a")])
    with contextlib.closing(GrammarCompiler(tmp_path, 600, lambda: None)) as compiler:
        assert compiler.compile(regex("a").grammar).exception() is None


async def test_client_disconnect_ends_the_trial_of_its_grammar(tokenizer):
    async with checking(tokenizer, 60.0) as checker:
        children = Path(f"/proc/{checker.pid}/task/{checker.pid}/children")
        task = asyncio.create_task(checker.check([schema(4_999_999)]))
        while not children.read_text():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        while children.read_text():
            await asyncio.sleep(0)


async def test_grammars_of_open_requests_share_a_memory_limit(tokenizer, monkeypatch):
    async with checking(tokenizer, 30.0) as checker:
        one = regex("a+")
        other = regex("b+")
        await checker.check([one, other])
        monkeypatch.setattr(
            grammar_check, "MAX_HELD_BYTES", checker.nbytes(one.grammar)
        )
        assert checker.nbytes(other.grammar) > 0
        releases = [checker.reserve_memory(one.grammar) for _ in range(2)]
        for release in releases:
            with pytest.raises(Overloaded):
                checker.reserve_memory(other.grammar)
            release()
        checker.reserve_memory(other.grammar)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": ENDLESS}}, "structured_outputs.json"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
    ],
)
async def test_server_refuses_a_bad_grammar_and_answers_a_good_one(
    tokenizer, fields, param
):
    async with serving(
        tokenizer, text_script(tokenizer, "ab"), grammar_timeout_s=4.0
    ) as server:
        request = asyncio.create_task(server.chat(**fields))
        good = await server.post(structured_outputs={"regex": "ab"})
        assert good.status_code == 200 and good.json()["choices"][0]["text"] == "ab"
        refused = await request
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "4 s" in refused.json()["error"]["message"]
        assert len(server.engine.added) == 1


# -- compiling -------------------------------------------------------------------------

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
def test_usable_grammars_are_accepted(grammar):
    assert try_grammar(BYTES, grammar).mistake is None


@pytest.mark.parametrize(
    ("kind", "text", "output"),
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
        # llguidance would search for minutes.
        ("grammar", "\n" * MAX_GRAMMAR_CHARS, str(MAX_GBNF_CHARS)),
    ],
)
def test_mistake_is_reported_in_one_line(kind, text, output):
    mistake = try_grammar(BYTES, Grammar(kind, text)).mistake  # type: ignore[arg-type]
    assert mistake is not None
    assert output in mistake and "\n" not in mistake and len(mistake) <= 300


def test_long_chains_of_rules_do_not_crash_the_process():
    """Such chains overflow the stack of an ordinary thread, which kills the process."""
    length = 4000
    rules = "\n".join(f'r{i}: r{i + 1} "x" | "y"' for i in range(length))
    lark = Grammar("grammar", f'start: r0\n{rules}\nr{length}: "z"')
    ends = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**ends, "d3000": {"type": "string"}}}
    with compiling_threads("test", 1) as pool:
        for grammar in (lark, Grammar("json_schema", json.dumps(schema))):
            assert len(grammar.text) <= MAX_GRAMMAR_CHARS
            assert pool.submit(try_grammar, BYTES, grammar).result().mistake is None

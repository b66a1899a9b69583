"""Turns JSON schemas into grammars of the grammar library."""

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from llguidance import LLMatcher

from engine.text.schema.emit import library_json
from engine.text.schema.errors import GrammarError
from engine.text.schema.exact import OPTIONS, exact_lark, lark_string
from engine.text.schema.keywords import CheckedSchema
from protocol.messages import DemandedCalls

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_pattern": OPTIONS["whitespace_pattern"]
}
# Tokens that may contain "%json" without being a schema, and a schema's beginning.
_LARK_TOKEN: Final = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*(?={)'
)


def schema_source(text: str) -> str:
    """Return the grammar of a JSON schema.

    Raises:
        GrammarError: the schema cannot be enforced; names a keyword by its path.
    """
    checked = CheckedSchema(text)
    if id(checked.document) in checked.exact:
        return LLMatcher.grammar_from_lark(exact_lark(checked))
    written = library_json(checked, checked.document)
    return LLMatcher.grammar_from_json_schema(written, _JSON_OPTIONS)


def calls_source(text: str) -> str:
    """Return the grammar of tool calls, with one spelling of names and separators.

    Args:
        text: a DemandedCalls as JSON.

    Raises:
        GrammarError: a tool's schema cannot be enforced; names the tool.
    """
    demanded = msgspec.json.decode(text, type=DemandedCalls)
    more = ' (", " call)*' if demanded.is_parallel else ""
    lines = [
        f'start: "[" call{more} "]"',
        "call: " + " | ".join(f"call_{at}" for at in range(len(demanded.tools))),
    ]
    grammars: list[dict[str, Any]] = []
    for at, (name, schema) in enumerate(demanded.tools):
        begin = f'{{"name": {json.dumps(name)}, "parameters": '
        try:
            checked = CheckedSchema(bytes(schema).decode())
            if id(checked.document) in checked.exact:
                rule = f"@parameters_{at}"
                grammars.append({"name": rule[1:], "lark_grammar": exact_lark(checked)})
            else:
                rule = f"parameters_{at}"
                written = library_json(checked, checked.document, OPTIONS)
                lines.append(f"{rule}: %json {written}")
        except GrammarError as error:
            raise GrammarError(f"the tool {name}: {error}") from None
        lines.append(f'call_{at}: {lark_string(begin)} {rule} "}}"')
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *grammars]})


def with_checked_schemas(lark: str) -> str:
    """A grammar in Lark's form, its JSON schemas checked and written for the library.

    Raises:
        GrammarError: a schema cannot be enforced; names a keyword by its path.
    """
    decoder = json.JSONDecoder()
    parts: list[str] = []
    done = 0
    for token in _LARK_TOKEN.finditer(lark):
        if token.start() < done or not token.group().startswith("%json"):
            continue
        try:
            _, end = decoder.raw_decode(lark, token.end())
        except ValueError:
            line = lark.count("\n", 0, token.start()) + 1
            raise GrammarError(
                f"the schema after `%json` in line {line} is not JSON; send a JSON "
                "object there"
            ) from None
        checked = CheckedSchema(lark[token.end() : end])
        if id(checked.document) in checked.exact:
            raise GrammarError(
                "a schema after `%json` has numbers beyond 2**53 or of more than 17 "
                "digits, which are not exact there; send it as "
                "`structured_outputs.json`"
            )
        options = checked.document.get("x-guidance")
        written = library_json(checked, checked.document, _whitespace_options(options))
        parts += [lark[done : token.end()], written]
        done = end
    return "".join([*parts, lark[done:]])


def _whitespace_options(given: Any) -> dict[str, Any] | None:
    """Return the options for whitespace that a schema within a grammar may set."""
    if not isinstance(given, dict):
        return None
    texts = ("whitespace_pattern", "item_separator", "key_separator")
    options: dict[str, Any] = {
        name: given[name] for name in texts if isinstance(given.get(name), str)
    }
    if isinstance(given.get("whitespace_flexible"), bool):
        options["whitespace_flexible"] = given["whitespace_flexible"]
    return options or None

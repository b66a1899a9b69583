"""Turns JSON schemas into grammars of the library llguidance.

In engine/text/schema/, "exact" rules are grammar rules with all digits of numbers that
llguidance would round (exact.py).
"""

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from llguidance import LLMatcher

from engine.text.schema.emit import llguidance_json
from engine.text.schema.errors import GrammarError
from engine.text.schema.exact import OPTIONS, exact_lark, lark_string
from engine.text.schema.keywords import CheckedSchema
from protocol.messages import DemandedCalls

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_pattern": OPTIONS["whitespace_pattern"]
}
# Matches strings, regular expressions and comments, because a "%json" within them does
# not count. Also matches a "%json" that begins a schema.
_LARK_TOKEN: Final = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*(?={)'
)


def schema_grammar(text: str) -> str:
    """Return llguidance's grammar for a JSON schema.

    Raises:
        GrammarError: the schema cannot be enforced. The message names the unsupported
            keyword by its path.
    """
    checked = CheckedSchema(text)
    if id(checked.document) in checked.needs_exact_rules:
        return LLMatcher.grammar_from_lark(exact_lark(checked))
    written = llguidance_json(checked, checked.document)
    return LLMatcher.grammar_from_json_schema(written, _JSON_OPTIONS)


def calls_grammar(text: str) -> str:
    """Return llguidance's grammar for forced tool calls.

    Apart from the parameters, the grammar allows only one spelling of each call.

    Args:
        text: a DemandedCalls as JSON.

    Raises:
        GrammarError: a tool's schema cannot be enforced. The message names the tool.
    """
    demanded = msgspec.json.decode(text, type=DemandedCalls)
    more_calls = ' (", " call)*' if demanded.is_parallel else ""
    call_rules = [f"call_{index}" for index in range(len(demanded.tools))]
    lines = [
        f'start: "[" call{more_calls} "]"',
        "call: " + " | ".join(call_rules),
    ]
    grammars: list[dict[str, Any]] = []
    for index, (name, schema) in enumerate(demanded.tools):
        begin = f'{{"name": {json.dumps(name)}, "parameters": '
        try:
            checked = CheckedSchema(bytes(schema).decode())
            if id(checked.document) in checked.needs_exact_rules:
                rule = f"@parameters_{index}"
                grammars.append({"name": rule[1:], "lark_grammar": exact_lark(checked)})
            else:
                rule = f"parameters_{index}"
                written = llguidance_json(checked, checked.document, OPTIONS)
                lines.append(f"{rule}: %json {written}")
        except GrammarError as error:
            raise GrammarError(f"the tool {name}: {error}") from None
        lines.append(f'call_{index}: {lark_string(begin)} {rule} "}}"')
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *grammars]})


def with_checked_schemas(lark: str) -> str:
    """Return a grammar in Lark syntax with checked JSON schemas.

    Each schema after `%json` is replaced by its checked form for llguidance.

    Raises:
        GrammarError: a schema is not JSON or cannot be enforced. The message names the
            unsupported keyword by its path.
    """
    decoder = json.JSONDecoder()
    parts: list[str] = []
    num_copied = 0  # `parts` has the text of `lark` before this position
    for token in _LARK_TOKEN.finditer(lark):
        if token.start() < num_copied or not token.group().startswith("%json"):
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
        if id(checked.document) in checked.needs_exact_rules:
            raise GrammarError(
                "a schema after `%json` has numbers beyond 2**53 or of more than 17 "
                "digits, which cannot be enforced exactly in a grammar; send the "
                "schema as `structured_outputs.json`"
            )
        options = _whitespace_options(checked.document.get("x-guidance"))
        written = llguidance_json(checked, checked.document, options)
        parts += [lark[num_copied : token.end()], written]
        num_copied = end
    return "".join([*parts, lark[num_copied:]])


def _whitespace_options(guidance: Any) -> dict[str, Any] | None:
    """Return the valid whitespace options in `x-guidance` of a schema.

    Returns None if there are none.
    """
    if not isinstance(guidance, dict):
        return None
    texts = ("whitespace_pattern", "item_separator", "key_separator")
    options: dict[str, Any] = {
        name: guidance[name] for name in texts if isinstance(guidance.get(name), str)
    }
    if isinstance(guidance.get("whitespace_flexible"), bool):
        options["whitespace_flexible"] = guidance["whitespace_flexible"]
    return options or None

"""Finds the part of a JSON schema that the grammar library refuses."""

import time
from typing import Any, Final

from llguidance import LLMatcher

from engine.text.schema.emit import library_json
from engine.text.schema.errors import located, reworded
from engine.text.schema.keywords import CheckedSchema
from engine.text.schema.references import children

# Seconds of a core. The search then ends with a path that is less deep.
_MAX_CPU_S: Final = 0.05


def library_problem(text: str) -> str:
    """Return why the library refuses a schema, in words for clients; else ""."""
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    return reworded(message) if message else ""


def located_problem(text: str, problem: str) -> str:
    """Return a problem with the path of the deepest part that has it alone.

    Args:
        text: the schema, which CheckedSchema accepts.
        problem: why the library refuses it, in words for clients.
    """
    checked = CheckedSchema(text)
    until_s = time.thread_time() + _MAX_CPU_S
    seen: set[int] = set()
    worst: Any = checked.document
    waiting: list[Any] = [worst]
    while waiting and time.thread_time() < until_s:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        if schema is worst or library_problem(library_json(checked, schema)) == problem:
            worst = schema
            waiting = [each for _, each in reversed(children(schema))]
            if "$ref" in schema:
                waiting.append(checked.target(schema))
    return located(checked.path(worst), problem)

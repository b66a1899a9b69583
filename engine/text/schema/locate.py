"""Finds the part of a JSON schema that llguidance refuses."""

import time
from typing import Any, Final

from llguidance import LLMatcher

from engine.text.schema.emit import llguidance_json
from engine.text.schema.errors import located, reworded
from engine.text.schema.keywords import CheckedSchema
from engine.text.schema.references import children

# Limit of CPU seconds for a search. At the limit, the search returns the deepest part
# found so far.
_MAX_CPU_S: Final = 0.05


def llguidance_problem(text: str) -> str:
    """Return a message about why llguidance refuses a schema; "" if it is accepted."""
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    return reworded(message) if message else ""


def located_problem(text: str, problem: str) -> str:
    """Return a message about the deepest part of a schema that causes a problem.

    The message has the path of this part. A part causes the problem if llguidance
    refuses the part alone for the same reason.

    Args:
        text: a schema that CheckedSchema accepts.
        problem: why llguidance refuses the schema, as a message for clients.
    """
    checked = CheckedSchema(text)
    until_s = time.thread_time() + _MAX_CPU_S
    seen: set[int] = set()
    culprit: Any = checked.document
    waiting: list[Any] = [culprit]
    while waiting and time.thread_time() < until_s:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        is_refused = (
            schema is culprit
            or llguidance_problem(llguidance_json(checked, schema)) == problem
        )
        if is_refused:
            culprit = schema
            waiting = [each for _, each in reversed(children(schema))]
            if "$ref" in schema:
                waiting.append(checked.target(schema))
    return located(checked.path(culprit), problem)

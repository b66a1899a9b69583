"""Llama 3: an answer with calls consists only of JSON objects.

{"name": "f", "parameters": {...}}; {...}
"""

import re

from engine.text.tool_calls.answer_reader import BLANKS, Reader
from engine.text.tool_calls.json_calls import JsonCallFormat

_PYTHON_TAG = "<|python_tag|>"
_BETWEEN_CALLS = BLANKS + "[],;"


class JsonListFormat(JsonCallFormat):
    """A list of JSON objects, or JSON objects separated by semicolons."""

    def read(self) -> Reader[None]:
        """Read calls up to the first text that is not a call. The rest is content."""
        while (yield from self.answer.match_tag(_PYTHON_TAG, BLANKS + "[")):
            pass  # skip the tags that may precede the calls
        between = BLANKS
        while (yield from self.read_object_call(between)):
            self.answer.held_belongs_to_call = True
            between = _BETWEEN_CALLS
        yield from self.answer.read_rest_as_content()


class Llama3JsonFormat(JsonListFormat):
    name = "llama3_json"
    template_pattern = r"""["']parameters["']\s*:|""" + re.escape(_PYTHON_TAG)
    answer_starts = (_PYTHON_TAG, '{{"name": "{}"')
    openings = (_PYTHON_TAG + '{{"name":"{}"',)
    start_tags = (_PYTHON_TAG,)
    requires_offered_name = True

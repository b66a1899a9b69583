"""Mistral: a tag precedes a list of JSON objects, or each name and its arguments.

text [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
text [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]f{...}
"""

import re

from engine.text.tool_calls.answer_reader import BLANKS, Reader
from engine.text.tool_calls.format import NAME
from engine.text.tool_calls.json_calls import JsonCallFormat

_TAG = "[TOOL_CALLS]"
_HEAD = re.compile(rf"{NAME}(\[CALL_ID\][^\[{{]*)?(\[ARGS\])?\s*\{{")


class MistralFormat(JsonCallFormat):
    name = "mistral"
    template_pattern = re.escape(_TAG)
    answer_starts = (_TAG,)
    openings = (
        _TAG + '[{{"name":"{}"',
        _TAG + '{{"name":"{}"',
        _TAG + '[{{"arguments":',
        _TAG + "{}[ARGS]",
        _TAG + "{}[CALL_ID]",
        _TAG + "{}{{",
    )
    start_tags = (_TAG,)
    special_tags = (_TAG, "[ARGS]", "[CALL_ID]")
    has_short_ids = True

    def read(self) -> Reader[None]:
        """Read a list of objects, or a name with its arguments, after each tag."""
        while True:
            yield from self.answer.read_content_through(_TAG)
            if (yield from self.answer.peek()) not in ("[", "{"):
                yield from self.read_headed_call(_HEAD)
                continue
            between = BLANKS + "["
            while (yield from self.read_object_call(between)):
                if (yield from self.answer.skip_tag("]")):
                    break
                self.answer.held_belongs_to_call = True
                between = BLANKS + ","

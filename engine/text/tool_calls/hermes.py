"""Hermes, Qwen 2.5 and Qwen 3: JSON objects between tags.

text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...
"""

from engine.text.tool_calls.answer_reader import Reader
from engine.text.tool_calls.json_calls import JsonCallFormat

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesFormat(JsonCallFormat):
    name = "hermes"
    template_pattern = _OPEN
    answer_starts = (_OPEN,)
    openings = (_OPEN + '{{"name":"{}"', _OPEN + '{{"arguments":')
    start_tags = (_OPEN,)
    special_tags = (_OPEN, _CLOSE)
    stops_at_tags = True

    def read(self) -> Reader[None]:
        """Read objects between tags. The text around the tags is content."""
        while True:
            yield from self.answer.read_content_through(_OPEN)
            if (yield from self.read_object_call()):
                # Some models write one closing bracket too many.
                yield from self.answer.skip_tag("}")
                yield from self.answer.skip_tag(_CLOSE)

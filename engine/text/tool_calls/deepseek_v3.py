"""DeepSeek V3 and V3.1: tags around each call, and tags around all calls.

text <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json {...} ``` <｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>

Version 3.1 writes <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...} for a call.
"""

import re

from engine.text.tool_calls.answer_reader import Reader
from engine.text.tool_calls.format import NAME
from engine.text.tool_calls.json_calls import JsonCallFormat

_CALLS = "<｜tool▁calls▁begin｜>"
_END_CALLS = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_END_CALL = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_HEAD = re.compile(
    rf"(\s*function{_SEPARATOR})?{NAME}(```json|{_SEPARATOR})\s*\{{",
)


class DeepSeekV3Format(JsonCallFormat):
    name = "deepseek_v3"
    template_pattern = _CALL
    answer_starts = (_CALLS,)
    openings = (
        _CALLS + _CALL + "{}" + _SEPARATOR,
        _CALLS + _CALL + "function" + _SEPARATOR + "{}```json",
        _CALL + "{}" + _SEPARATOR,
        _CALL + "function" + _SEPARATOR + "{}```json",
    )
    start_tags = (_CALLS, _CALL)
    special_tags = (_CALLS, _END_CALLS, _CALL, _END_CALL, _SEPARATOR)
    stops_at_tags = True

    def read(self) -> Reader[None]:
        """Read calls. A call's end tag and the tags around all calls are optional."""
        while True:
            yield from self.answer.read_content_through(_CALLS, _CALL)
            if (yield from self.read_headed_call(_HEAD)):
                yield from self.answer.skip_tag("```")
                yield from self.answer.skip_tag(_END_CALL)
                yield from self.answer.skip_tag(_END_CALLS)

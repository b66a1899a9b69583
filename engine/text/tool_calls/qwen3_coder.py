"""Qwen3-Coder: tags around each function and each parameter.

text <tool_call><function=f><parameter=a> 1 </parameter> ...</function></tool_call>
"""

import re

from engine.text.tool_calls.format import NAME
from engine.text.tool_calls.parameter_tags import ParameterTagsFormat, Tags

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"


class Qwen3CoderFormat(ParameterTagsFormat):
    name = "qwen3_coder"
    template_pattern = _FUNCTION
    answer_starts = (_OPEN, _FUNCTION)
    openings = (_OPEN + _FUNCTION + "{}>", _FUNCTION + "{}>")
    start_tags = (_OPEN, _FUNCTION)
    special_tags = (_OPEN, _CLOSE)
    tags = Tags(
        begin=(_OPEN, _FUNCTION),
        name_end=">",
        key="<parameter=",
        key_end=">",
        value="",
        value_end="</parameter>",
        ends=(_END_FUNCTION, _CLOSE),
        after_call=(
            _END_FUNCTION + _CLOSE,
            _END_FUNCTION + _OPEN,
            _END_FUNCTION + _FUNCTION,
            _CLOSE + _OPEN,
        ),
    )
    head = re.compile(f"{NAME}>")

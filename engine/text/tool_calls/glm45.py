"""GLM 4.5: a call is the tool's name, then tags around each key and each value.

text <tool_call>f <arg_key>a</arg_key> <arg_value>1</arg_value> ...</tool_call>
"""

import re

from engine.text.tool_calls.format import NAME
from engine.text.tool_calls.parameter_tags import ParameterTagsFormat, Tags

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class Glm45Format(ParameterTagsFormat):
    name = "glm45"
    template_pattern = "<arg_key>"
    answer_starts = (_OPEN,)
    openings = (_OPEN + "{}<arg_key>", _OPEN + "{}" + _CLOSE)
    start_tags = (_OPEN,)
    tags = Tags(
        begin=(_OPEN,),
        name_end="<",
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        ends=(_CLOSE,),
        after_call=(_CLOSE + _OPEN,),
    )
    special_tags = (
        _OPEN, _CLOSE, tags.key, tags.key_end, tags.value, tags.value_end,
    )  # fmt: skip
    head = re.compile(f"{NAME}<")

"""All tool-call formats, by name."""

from collections.abc import Mapping
from typing import Final, cast

from engine.text.tool_calls.deepseek_v3 import DeepSeekV3Format
from engine.text.tool_calls.demanded import NamedFormat, RequiredFormat
from engine.text.tool_calls.format import ToolCallFormat
from engine.text.tool_calls.glm45 import Glm45Format
from engine.text.tool_calls.harmony import HarmonyFormat
from engine.text.tool_calls.hermes import HermesFormat
from engine.text.tool_calls.llama3_json import Llama3JsonFormat
from engine.text.tool_calls.mistral import MistralFormat
from engine.text.tool_calls.pythonic import PythonicFormat
from engine.text.tool_calls.qwen3_coder import Qwen3CoderFormat
from protocol.settings.options import ToolSyntax

# Formats in which models write calls that the request does not force. By default, the
# first format with a `template_pattern` that matches the chat template is used. So
# formats with more specific patterns come first.
_MODEL_FORMATS: tuple[type[ToolCallFormat], ...] = (
    MistralFormat,
    DeepSeekV3Format,
    Qwen3CoderFormat,
    Glm45Format,
    HermesFormat,
    PythonicFormat,
    Llama3JsonFormat,
    HarmonyFormat,
)
MODEL_FORMATS: Final[Mapping[ToolSyntax, type[ToolCallFormat]]] = {
    cast(ToolSyntax, format_class.name): format_class for format_class in _MODEL_FORMATS
}
# Formats of the calls that a request forces, by `Tools.mode`. The request's tool_choice
# is "required" or names a function.
FORCED_CALL_FORMATS: Final[Mapping[str, type[ToolCallFormat]]] = {
    format_class.name: format_class for format_class in (RequiredFormat, NamedFormat)
}
SPECIAL_TAGS: Final = tuple(
    dict.fromkeys(
        tag for format_class in _MODEL_FORMATS for tag in format_class.special_tags
    )
)

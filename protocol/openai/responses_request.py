"""The body of /v1/responses: text in, text out. It becomes a chat, which is what is served.

Nothing is stored, so an earlier response cannot be continued; the client sends the conversation.
"""

from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, WithJsonSchema

from protocol.errors import InvalidRequest
from protocol.openai.chat import ChatRequest
from protocol.openai.requests import ModelName, Strict, body_of, clean, neutral, validate, wrong
from protocol.openai.sampling import MAX_INT31, GenerationConfig, Switch, integer
from protocol.openai.structured import GuidedDecoding, find_guided

Role = Literal["system", "developer", "user", "assistant"]
_SAMPLING = {"temperature", "top_p"}
_PARTS = ("input_text", "output_text", "text")

_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_PARTS[:2])}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


class InputItem(Strict):
    """A message of the conversation."""

    type: Any = neutral("message")
    role: Role
    content: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})
    ]
    # Not read: of an earlier response, sent back.
    id: Any = None
    status: Any = None
    phase: Any = None


class TextOptions(Strict):
    """What the text of the answer must be."""

    format: Annotated[
        Any,
        WithJsonSchema(
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "json_object", "json_schema"]},
                    "name": {"type": "string"},
                    "schema": {"type": "object"},
                    "strict": {"type": "boolean"},
                    "description": {"type": "string"},
                },
                "required": ["type"],
            }
        ),
    ] = None
    verbosity: Any = neutral("medium")


_ITEMS = {"type": "array", "minItems": 1, "items": InputItem.model_json_schema()}


@body_of("/v1/responses", "Answers a text or a conversation.")
class ResponsesRequest(Strict):
    """What a client sends. A field's description ends its error message: "must be ..."."""

    model: ModelName = ""
    input: Annotated[
        Any,
        Field(description="a string, or a list of messages with `role` and `content`"),
        WithJsonSchema({"anyOf": [{"type": "string"}, _ITEMS]}),
    ]
    instructions: str | None = Field(None, description="a string")
    max_output_tokens: int | None = integer(None, 1, MAX_INT31)
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    text: Annotated[
        Any,
        Field(description="an object with `format`"),
        WithJsonSchema(TextOptions.model_json_schema()),
    ] = None
    stream: Switch = False
    metadata: dict[str, str] = Field(
        default_factory=dict, description="an object of strings; it comes back with the response"
    )
    user: str | None = Field(None, description="a string")
    safety_identifier: str | None = Field(None, description="a string")
    prompt_cache_key: str | None = Field(None, description="a string")
    # Not OpenAI's:
    seed: int | None = Field(None, ge=0, lt=2**63, description="an integer from 0 to 2**63 - 1")
    ignore_eos: Switch = False
    kv_transfer_params: dict[str, Any] | list[Any] | None = Field(
        None, description="an object, or a list of one"
    )

    background: Any = neutral(False)
    include: Any = neutral([])
    parallel_tool_calls: Any = neutral(True, False)
    reasoning: Any = neutral({})
    service_tier: Any = neutral("auto", "default")
    store: Any = neutral(False)
    stream_options: Any = neutral({}, {"include_obfuscation": False})
    tool_choice: Any = neutral("none", "auto")
    tools: Any = neutral([])
    top_logprobs: Any = neutral(0)
    truncation: Any = neutral("disabled")


class ResponsesChat(ChatRequest):
    """The chat that a request to /v1/responses is served as."""

    endpoint = "/v1/responses"

    asked: ResponsesRequest

    @cached_property
    def guided(self) -> GuidedDecoding | None:
        return _guided_of(self.asked.text)

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    def with_defaults(self, config: GenerationConfig) -> Self:
        chat = super().with_defaults(config)
        used = {name: getattr(chat, name) for name in _SAMPLING}  # as the answer tells them
        return chat.model_copy(update={"asked": self.asked.model_copy(update=used)})


def parse_responses(body: dict[str, Any]) -> ResponsesChat:
    """Validates the body of /v1/responses. Raises InvalidRequest naming the field."""
    asked = validate(ResponsesRequest, clean(body, ResponsesRequest))
    messages = _read_input(asked.input)
    if asked.instructions is not None:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    chat = ResponsesChat(
        asked=asked,
        model=asked.model,
        messages=tuple(messages),  # type: ignore[arg-type]  # pydantic makes Messages of them
        max_completion_tokens=asked.max_output_tokens,
        **{name: getattr(asked, name) for name in _SAMPLING & asked.model_fields_set},
        stream=asked.stream,
        seed=asked.seed,
        ignore_eos=asked.ignore_eos,
        kv_transfer_params=asked.kv_transfer_params,
    )
    chat.check()
    return chat


def _read_input(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "a string, or a list of messages, not empty")
    return [_read_item(item, f"input[{at}]") for at, item in enumerate(given)]


def _read_item(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong(where, item, "a message with `role` and `content`")
    kept = clean(item, InputItem, where + ".")
    role, content = kept.get("role"), kept.get("content")
    if not isinstance(role, str) or role not in get_args(Role):
        raise wrong(f"{where}.role", role, "system, developer, user or assistant")
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(_read_part(part, f"{where}.content[{at}]") for at, part in parts)
    if not isinstance(content, str):
        raise wrong(f"{where}.content", content, "a string or a list of text parts")
    return {"role": role, "content": content}


def _read_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type") not in _PARTS:
        raise wrong(where, part, 'a part {"type": "input_text", "text": "..."}')
    return text


def _guided_of(text: Any) -> GuidedDecoding | None:
    """`text.format` is `response_format`, but for a schema's members, which lie flat in it."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise wrong("text", text, "an object with `format`")
    given = clean(text, TextOptions, "text.").get("format")
    if isinstance(given, dict) and given.get("type") == "json_schema":
        named = {name: value for name, value in given.items() if name != "type"}
        given = {"type": "json_schema", "json_schema": named}
    try:
        guided = find_guided({"response_format": given})
    except InvalidRequest as error:
        raise InvalidRequest(_renamed(error.message), param=_renamed(error.param or "")) from None
    return None if guided is None else GuidedDecoding(guided.grammar, _renamed(guided.field))


def _renamed(text: str) -> str:
    inner = "response_format.json_schema"
    return text.replace(inner, "text.format").replace("response_format", "text.format")

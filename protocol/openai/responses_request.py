"""The body of /v1/responses: text in, text out. It becomes a chat, which is what is served.

Nothing is stored, so an earlier response cannot be continued; the client sends the conversation.
"""

from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, WithJsonSchema

from protocol.errors import InvalidRequest
from protocol.openai.chat import ChatRequest
from protocol.openai.fields import drop_neutral
from protocol.openai.requests import ModelName, Strict, body_of, clean, validate, wrong
from protocol.openai.sampling import MAX_INT31, GenerationConfig, Switch
from protocol.openai.structured import Demand, find_demand

NEUTRAL_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "parallel_tool_calls": (True, False),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_NEUTRAL_ITEM: dict[str, tuple[Any, ...]] = {"type": ("message",)}
_IGNORED_OF_ITEM = ("id", "status", "phase")  # of an earlier response, sent back
_ROLES = ("system", "developer", "user", "assistant")
_SAMPLING = {"temperature", "top_p"}
_PARTS = ("input_text", "output_text", "text")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_PARTS[:2])}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": list(_ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["role", "content"],
}
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _ITEM}]}
_TEXT = {
    "type": "object",
    "properties": {
        "format": {
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
    },
}


@body_of("/v1/responses")
class ResponsesRequest(Strict):
    """What a client sends. A field's description ends its error message: "must be ..."."""

    model: ModelName = ""
    input: Annotated[
        Any,
        Field(description="a string, or a list of messages with `role` and `content`"),
        WithJsonSchema(_INPUT),
    ]
    instructions: str | None = Field(None, description="a string")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_INT31, description=f"an integer from 1 to {MAX_INT31}"
    )
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    text: Annotated[Any, Field(description="an object with `format`"), WithJsonSchema(_TEXT)] = None
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


class ResponsesChat(ChatRequest):
    """The chat that a request to /v1/responses is served as."""

    endpoint = "/v1/responses"

    asked: ResponsesRequest

    @cached_property
    def demand(self) -> Demand | None:
        return _demand_of(self.asked.text)

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    def with_defaults(self, config: GenerationConfig) -> Self:
        chat = super().with_defaults(config)
        used = {name: getattr(chat, name) for name in _SAMPLING}  # as the answer tells them
        return chat.model_copy(update={"asked": self.asked.model_copy(update=used)})


def parse_responses(body: dict[str, Any]) -> ResponsesChat:
    """Validates the body of /v1/responses. Raises InvalidRequest naming the field."""
    asked = validate(ResponsesRequest, clean(body, ResponsesRequest, NEUTRAL_RESPONSES))
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
    kept = {name: value for name, value in item.items() if name not in _IGNORED_OF_ITEM}
    kept = drop_neutral(kept, frozenset(("role", "content")), _NEUTRAL_ITEM, where + ".")
    role, content = kept.get("role"), kept.get("content")
    if not isinstance(role, str) or role not in _ROLES:
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


def _demand_of(text: Any) -> Demand | None:
    """`text.format` is `response_format`, but for a schema's members, which lie flat in it."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise wrong("text", text, "an object with `format`")
    drop_neutral(text, frozenset(("format",)), {"verbosity": ("medium",)}, "text.")
    given = text.get("format")
    if isinstance(given, dict) and given.get("type") == "json_schema":
        named = {name: value for name, value in given.items() if name != "type"}
        given = {"type": "json_schema", "json_schema": named}
    try:
        demand = find_demand({"response_format": given})
    except InvalidRequest as error:
        raise InvalidRequest(_renamed(error.message), param=_renamed(error.param or "")) from None
    return None if demand is None else Demand(demand.grammar, _renamed(demand.field))


def _renamed(text: str) -> str:
    inner = "response_format.json_schema"
    return text.replace(inner, "text.format").replace("response_format", "text.format")

"""The body of /v1/responses: text in, text out. It becomes a chat, which is what is served.

Nothing is stored, so an earlier response cannot be continued; the client sends the conversation.
"""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from protocol.openai.chat import ChatRequest, Verbosity, joined
from protocol.openai.requests import Read, Strict, fault, neutral, validate
from protocol.openai.sampling import (
    MAX_INT31,
    CommonFields,
    GenerationConfig,
    StreamOptions,
    Temperature,
    Text,
    TopP,
    integer,
)
from protocol.openai.structured import FormatType, GuidedDecoding, SchemaMembers

_SAMPLING = {"temperature", "top_p"}
_AS_CHATS = {*_SAMPLING, *CommonFields.model_fields}


class InputPart(Strict):
    model_config = ConfigDict(extra="ignore")
    must_be: ClassVar[str] = 'a part {"type": "input_text", "text": "..."}'
    told_whole: ClassVar[bool] = True

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(Strict):
    """A message of the conversation."""

    must_be: ClassVar[str] = "a message with `role` and `content`"

    type: Any = neutral("message")
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="system, developer, user or assistant"
    )
    content: Annotated[
        str, Read(str | Annotated[list[InputPart], Field(fail_fast=True)], joined)
    ] = Field(description="a string or a list of text parts")
    # Not read: of an earlier response, sent back.
    id: Any = None
    status: Any = None
    phase: Any = None


class TextFormat(SchemaMembers):
    """`response_format`, but for a schema's members, which lie flat in it."""

    type: FormatType
    name: Text = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        is_named = self.type == "json_schema"
        if is_named and self.name is None:
            raise fault("name", "is missing; it must be a string.")
        if not is_named and self.model_fields_set != {"type"}:
            raise ValueError("members of a schema")
        return self


class TextOptions(Strict):
    """What the text of the answer must be."""

    format: Annotated[dict[str, Any] | None, Read(TextFormat)] = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"name": "...", "schema": {...}}',
    )
    verbosity: Verbosity = None


def _as_messages(given: str | list[InputItem]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [{"role": item.role, "content": item.content} for item in given]


_Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]


class ResponsesRequest(CommonFields):
    """What a client sends."""

    endpoint = "/v1/responses"
    summary = "Answers a text or a conversation."

    input: Annotated[list[dict[str, Any]], Read(str | _Items, _as_messages)] = Field(
        description="a string, or a list of messages with `role` and `content`, not empty"
    )
    instructions: Text = None
    max_output_tokens: int | None = integer(None, 1, MAX_INT31)
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    text: TextOptions | None = Field(None, description="an object with `format`")
    metadata: dict[str, str] = Field(
        default_factory=dict, description="an object of strings; it comes back with the response"
    )

    background: Any = neutral(False)
    include: Any = neutral([])
    parallel_tool_calls: Any = neutral(True, False)
    reasoning: Any = neutral({})
    stream_options: StreamOptions | None = Field(None, description="an object")
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
        asked = self.asked.text.format if self.asked.text else None
        if asked is None or asked["type"] == "text":
            return None
        return validate(TextFormat, asked).guided_at("text.format")

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    def with_defaults(self, config: GenerationConfig) -> Self:
        chat = super().with_defaults(config)
        used = {name: getattr(chat, name) for name in _SAMPLING}  # as the answer tells them
        return chat.model_copy(update={"asked": self.asked.model_copy(update=used)})


def parse_responses(body: dict[str, Any]) -> ResponsesChat:
    """Validates the body of /v1/responses. Raises InvalidRequest naming the field."""
    asked = validate(ResponsesRequest, body)
    told = asked.instructions
    first = [] if told is None else [{"role": "system", "content": told}]
    chat = ResponsesChat(
        asked=asked,
        messages=[*first, *asked.input],  # type: ignore[list-item]  # pydantic makes Messages
        max_completion_tokens=asked.max_output_tokens,
        verbosity=asked.text.verbosity if asked.text else None,
        **{name: getattr(asked, name) for name in _AS_CHATS & asked.model_fields_set},
    )
    chat.check()
    return chat

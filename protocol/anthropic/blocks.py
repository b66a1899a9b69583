"""The parts of a request to the Messages API: content blocks, tools and options."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from protocol.openai.chat import Effort
from protocol.openai.requests import Strict, fault, neutral
from protocol.openai.sampling import (
    MAX_INT31,
    UNREAD,
    Switch,
    Text,
    UnreadText,
    integer,
)
from protocol.openai.tools import FunctionName
from protocol.short_repr import short_repr

_BLOCK_TYPES: Final = (
    "text, thinking, redacted_thinking, tool_use or tool_result (Baton reads no "
    "images and no documents, and runs no tools itself)"
)
# For each type of block, the required and the optional members, without `type`.
_MEMBERS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "text": (("text",), ("cache_control",)),
    "thinking": (("thinking",), ("signature",)),
    "redacted_thinking": (("data",), ()),
    "tool_use": (("id", "name", "input"), ("cache_control", "toolset_name")),
    "tool_result": (
        ("tool_use_id",),
        ("content", "is_error", "cache_control", "toolset_name"),
    ),
}
# The types of blocks that a message of each role may have.
_TYPES_OF_ROLE: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class CacheControl(Strict):
    """Requests that the server keep the prompt cached up to this place."""

    must_be: ClassVar[str] = 'an object {"type": "ephemeral"}'

    type: Literal["ephemeral"] = Field(description="ephemeral")
    ttl: Literal["5m", "1h"] = Field("5m", description="5m or 1h")
    scope: UnreadText = None


CacheControlField = Annotated[
    CacheControl | None,
    Field(description='{"type": "ephemeral"}, perhaps with a `ttl` of 5m or 1h'),
]


class TextBlock(Strict):
    must_be: ClassVar[str] = 'a block {"type": "text", "text": "..."}'

    type: Literal["text"] = Field(
        description="text (Baton reads no images and no documents)"
    )
    text: str = Field(description="a string")
    cache_control: CacheControlField = None
    citations: Any = neutral([])

    @model_validator(mode="before")
    @classmethod
    def _check_type_first(cls, given: Any) -> Any:
        _check_type(given, ("text",), cls.model_fields["type"].description)
        return given


Texts = str | Annotated[list[TextBlock], Field(fail_fast=True)]


class ContentBlock(Strict):
    """A block of a message's content. `type` determines which members it may have."""

    must_be: ClassVar[str] = 'a block such as {"type": "text", "text": "..."}'

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: Text = None
    thinking: Text = None
    signature: UnreadText = None  # the text of a thinking block is not verified
    data: UnreadText = None  # Baton cannot read the reasoning of another provider
    id: Text = None
    name: Text = None
    input: dict[str, Any] | None = Field(None, description="an object")
    tool_use_id: Text = None
    content: Texts | None = Field(None, description="a string or a list of text blocks")
    is_error: Switch = False
    cache_control: CacheControlField = None
    citations: Any = neutral([])
    caller: Any = UNREAD
    toolset_name: UnreadText = None

    @model_validator(mode="before")
    @classmethod
    def _check_type_first(cls, given: Any) -> Any:
        _check_type(given, _MEMBERS, _BLOCK_TYPES)
        return given

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        required, optional = _MEMBERS[self.type]
        for name in required:
            if name not in self.model_fields_set:
                must_be = type(self).model_fields[name].description
                raise fault(name, f"is missing; it must be {must_be}.")
        surplus = self.model_fields_set - {"type", *required, *optional}
        if surplus:
            raise fault(
                min(surplus), f"is not a member of a {self.type} block; leave it out."
            )
        return self


def _check_type(given: Any, types: Collection[str], must_be: str | None) -> None:
    """Raises the error of `fault` if an object has an unknown `type`, or none.

    Without this check, the error would be about a different member of the object.
    """
    if not isinstance(given, dict):
        return
    given_type = given.get("type")
    if isinstance(given_type, str) and given_type in types:
        return
    shown = "missing" if given_type is None else short_repr(given_type)
    raise fault("type", f"is {shown}; it must be {must_be}.")


class InputMessage(Strict):
    must_be: ClassVar[str] = "an object with `role` and `content`"

    # Anthropic's API has `cache_control` only in blocks, not in messages.
    cache_control: CacheControlField = None
    role: Literal["user", "assistant", "system"] = Field(
        description="user, assistant or system"
    )
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)] = Field(
        description="a string or a list of content blocks"
    )

    @property
    def blocks(self) -> list[ContentBlock]:
        if isinstance(self.content, str):
            return [ContentBlock(type="text", text=self.content)]
        return self.content

    @model_validator(mode="after")
    def _check_blocks_fit_role(self) -> Self:
        if isinstance(self.content, str):
            return self
        if not self.content and self.role != "assistant":
            raise fault("content", "is empty; send at least one block.")
        types = _TYPES_OF_ROLE[self.role]
        for index, block in enumerate(self.content):
            if block.type not in types:
                raise fault(
                    f"content[{index}].type",
                    f"is {block.type}; a message of the role {self.role} may have "
                    f"blocks of type {' or '.join(types)}.",
                )
        return self


class ToolDefinition(Strict):
    must_be: ClassVar[str] = "an object with `name` and `input_schema`"

    type: Literal["custom"] = Field("custom", description="custom")
    name: FunctionName
    description: Text = None
    input_schema: dict[str, Any] = Field(description="a JSON schema, an object")
    strict: bool | None = Field(None, description="true or false")
    cache_control: CacheControlField = None
    defer_loading: Any = neutral(False)
    allowed_callers: Any = neutral(["direct"])
    # Arguments are always streamed, whatever the client sends.
    eager_input_streaming: Any = UNREAD
    input_examples: Any = UNREAD

    @model_validator(mode="before")
    @classmethod
    def _check_type_first(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") is not None:
            must_be = "custom, or left out (Baton has no tools of its own)"
            _check_type(given, ("custom",), must_be)
        return given


class ToolChoiceOption(Strict):
    must_be: ClassVar[str] = 'an object with a `type`, such as {"type": "auto"}'

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="auto, any, tool or none"
    )
    name: FunctionName | None = Field(None, description="the name of a tool")
    disable_parallel_tool_use: Switch = False

    @model_validator(mode="after")
    def _check_name_fits_type(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise fault("name", "is missing; it must be the name of a tool.")
        if self.type != "tool" and self.name is not None:
            raise fault("name", "is allowed only if `type` is tool; leave it out.")
        return self


class Thinking(Strict):
    must_be: ClassVar[str] = 'an object such as {"type": "adaptive"}'

    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = Field(
        description="enabled, adaptive, between_tools or disabled"
    )
    # Checked, but not enforced: no engine limits the reasoning alone.
    budget_tokens: int | None = integer(None, 1, MAX_INT31)
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="summarized or omitted"
    )


class OutputFormat(Strict):
    type: Literal["json_schema"] = Field(description="json_schema")
    schema_: dict[str, Any] = Field(
        alias="schema", description="a JSON schema, an object"
    )


class OutputConfig(Strict):
    effort: Effort = None
    format: OutputFormat | None = Field(
        None, description='{"type": "json_schema", "schema": {...}}'
    )
    task_budget: Any = UNREAD


class Metadata(Strict):
    user_id: UnreadText = None

"""The body of /v1/chat/completions."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import ConfigDict, Field, model_validator

from protocol.openai.requests import Read, Strict, fault, neutral, refuse
from protocol.openai.sampling import (
    MAX_LOGPROBS,
    UNREAD,
    GenerationRequest,
    Switch,
    Text,
    Variables,
    integer,
)
from protocol.openai.structured import GuidedDecoding, only_one
from protocol.openai.tools import OfferedTools, ToolChoice, Tools, read_tools

Role = Literal["system", "developer", "user", "assistant", "tool"]

# What a chat template gets from the server; a client's own variables cannot take their place.
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


class TextPart(Strict):
    must_be: ClassVar[str] = 'a part {"type": "text", "text": "..."}'
    told_whole: ClassVar[bool] = True

    type: Literal["text"]
    text: str
    cache_control: Any = UNREAD


class Thought(Strict):
    """A block of Anthropic's, as litellm sends it back, beside a turn's content or in it."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["thinking", "redacted_thinking"] = Field(description="thinking")
    text: str = Field("", alias="thinking", description="a string")


def joined(parts: Any, kind: Any = Strict) -> str:
    """A text, or those of the parts of a kind, joined by newlines."""
    if isinstance(parts, str):
        return parts
    return "\n".join(part.text for part in parts if isinstance(part, kind))


def _as_object(arguments: str | dict[str, Any]) -> Any:
    """An object where the text is one, or says nothing; models also write other things."""
    try:
        found: Any = arguments
        if isinstance(arguments, str):
            found = msgspec.json.decode(arguments.strip() or "null")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return {} if found is None else found if isinstance(found, dict) else arguments


class CalledFunction(Strict):
    model_config = ConfigDict(extra="ignore")

    name: str = Field(description="a string")
    arguments: Annotated[Any, Read(str | dict[str, Any], _as_object)] = Field(
        {}, description="a JSON text"
    )


class ToolCall(Strict):
    """An earlier one. Templates write `arguments` as JSON themselves, so it is an object here."""

    model_config = ConfigDict(extra="ignore")
    must_be: ClassVar[str] = "an object with `id`, `type` and `function`"

    id: str = Field("", description="a string")
    type: Literal["function"] = Field("function", description="function")
    function: CalledFunction = Field(
        description="an object with `name` and `arguments`"
    )


_Calls = Annotated[list[ToolCall], Field(fail_fast=True)]


class Message(Strict):
    """One turn. `content` given as text parts is joined by newlines; a template may use the rest.

    Chat templates tell a null content from an empty and from an absent one: some recognise a turn
    that is calls alone by its null.

    Attributes:
        tool_calls: of an assistant's turn.
        tool_call_id: of a tool's turn, the call that it answers.
    """

    keeps_null: ClassVar[frozenset[str]] = frozenset({"content"})

    role: Role = Field(description="system, developer, user, assistant or tool")
    content_: (
        str | Annotated[list[TextPart | Thought], Field(fail_fast=True)] | None
    ) = Field(
        None,
        alias="content",
        exclude=True,
        description="a string or a list of text parts",
    )
    name: Text = None
    tool_calls: Annotated[
        list[ToolCall] | None, Read(_Calls, lambda calls: calls or None)
    ] = Field(None, description="a list, in an assistant's message only")
    tool_call_id: Text = None
    cache_control: Any = UNREAD  # every prompt's beginning is cached
    provider_specific_fields: Any = (
        UNREAD  # what litellm adds to an answer and sends back
    )
    parsed: Any = UNREAD  # and OpenAI's client: the content as an object
    annotations: Any = neutral([])
    refusal: Any = neutral("")
    reasoning_content: Text = Field(None, exclude=True)
    reasoning: Text = Field(None, exclude=True)  # as some servers call it
    thinking_blocks: Annotated[list[Thought], Field(fail_fast=True)] = Field(
        [], exclude=True, description="a list of blocks of thoughts"
    )

    @property
    def content(self) -> str | None:
        """The text; None where the content is null or absent."""
        return None if self.content_ is None else joined(self.content_, TextPart)

    @property
    def thoughts(self) -> str:
        parts = self.thinking_blocks or self.content_ or ""
        blocks = "" if isinstance(parts, str) else joined(parts, Thought)
        return self.reasoning or self.reasoning_content or blocks

    @property
    def template_message(self) -> dict[str, Any]:
        """The turn for a chat template; `content` is in it if the client sent one."""
        message = self.model_dump(exclude_none=True)
        if "content_" in self.model_fields_set:
            message = {"content": self.content, **message}
        if thoughts := self.thoughts:
            message |= {
                "reasoning_content": thoughts,
                "thinking": thoughts,
            }  # as gpt-oss reads it
        return message

    @model_validator(mode="after")
    def _is_of_its_role(self) -> Self:
        if self.tool_call_id is not None and self.role != "tool":
            raise fault("tool_call_id", "must be in a tool's message only.")
        if self.tool_calls and self.role != "assistant":
            raise fault("tool_calls", "must be in an assistant's message only.")
        if self.content_ is None and not (self.tool_calls or self.thoughts):
            raise fault(
                "content", "is missing; it must be a string or a list of text parts."
            )
        return self


Messages = Annotated[
    list[Message],
    Field(
        fail_fast=True,
        min_length=1,
        description="a list, not empty, of objects with `role` and `content`",
    ),
]
Verbosity = Annotated[
    Literal["low", "medium", "high"] | None, Field(description="low, medium or high")
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    Field(description="none, minimal, low, medium, high, xhigh or max"),
]


class PromptFields(Strict):
    """What the text of a conversation depends on beside its messages."""

    add_generation_prompt: bool | None = Field(None, description="true or false")
    continue_final_message: Switch = False
    chat_template_kwargs: Variables = Field({})
    # Variables of the chat template, too; one that reads none of them is as ever.
    enable_thinking: bool | None = Field(None, description="true or false")
    reasoning_effort: Effort = None
    verbosity: Verbosity = None
    tools: OfferedTools = None
    tool_choice: ToolChoice = None


class ChatRequest(PromptFields, GenerationRequest):
    endpoint = "/v1/chat/completions"
    summary = "Answers a conversation."
    prompt_field = "messages"
    function_path: ClassVar[str] = "function."  # in a tool, to its function's members

    messages: Messages
    logprobs: Switch = False
    top_logprobs: int = integer(0, 0, MAX_LOGPROBS)
    add_special_tokens: Switch = False  # beside those that the chat template writes
    include_reasoning: Switch = True
    prediction: Any = UNREAD
    parallel_tool_calls: Switch = True

    documents: Any = neutral([])
    modalities: Any = neutral(["text"])
    functions: Any = neutral([])
    function_call: Any = neutral("none", "auto")

    @cached_property
    def toolset(self) -> Tools:
        """The tools that the model is told of, and whether it must call one."""
        how = self.parallel_tool_calls, self.function_path
        return read_tools(self.tools, self.tool_choice, *how)

    @cached_property
    def guided(self) -> GuidedDecoding | None:
        called, said = self.toolset.guided, super().guided
        if called and said and said.field.startswith(self.format_paths):
            return called  # a format is of what the model says, and it is to call
        return only_one([called, said])

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of ChatTemplate.render besides the messages."""
        begins, goes_on = self.add_generation_prompt, self.continue_final_message
        thinks, effort = self.enable_thinking, self.reasoning_effort
        if thinks is None and effort is not None:
            thinks = effort != "none"
        said = {  # how to think and to write, by the names that templates have for it
            "enable_thinking": thinks,
            "thinking": thinks,
            "reasoning_effort": None if effort == "none" else effort,
            "verbosity": self.verbosity,
        }
        known = {name: value for name, value in said.items() if value is not None}
        return {
            "add_generation_prompt": not goes_on if begins is None else begins,
            "continue_final_message": goes_on,
            "variables": {**known, **self.chat_template_kwargs},
        }

    def without_inputs(self) -> Self:
        return self.model_copy(update={"messages": [], "chat_template_kwargs": {}})

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", f"is {self.top_logprobs}; it needs `logprobs`: true")
        if self.continue_final_message and self.add_generation_prompt:
            refuse(
                "continue_final_message", "and `add_generation_prompt` are both true"
            )
        for name in self.chat_template_kwargs:
            if name in _OWN_VARIABLES:
                refuse(
                    "chat_template_kwargs",
                    f"sets `{name}`, which the server does itself",
                )

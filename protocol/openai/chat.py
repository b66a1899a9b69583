"""The request body of /v1/chat/completions."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import ConfigDict, Field, model_validator

from protocol.openai.prompt_cache import RETENTION_S, CacheMark, Marked
from protocol.openai.requests import ReadFrom, Strict, fault, neutral, refuse
from protocol.openai.sampling import (
    MAX_TOP_LOGPROBS,
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

# Variables that the server sets for a chat template. A client must not replace them.
_RESERVED_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    # Templates write some of these special tokens after each turn.
    "bos_token",
    "cls_token",
    "eos_token",
    "mask_token",
    "pad_token",
    "sep_token",
    "unk_token",
)


class TextPart(Strict):
    must_be: ClassVar[str] = 'a part {"type": "text", "text": "..."}'
    reported_whole: ClassVar[bool] = True

    type: Literal["text"]
    text: str
    cache_control: Marked = None


class Thought(Strict):
    """A reasoning block in the format of Anthropic's API.

    The client library litellm sends the reasoning of earlier answers in this format, as
    `thinking_blocks` or among the `content` of a message.
    """

    model_config = ConfigDict(extra="ignore")

    type: Literal["thinking", "redacted_thinking"] = Field(
        description="thinking or redacted_thinking"
    )
    text: str = Field("", alias="thinking", description="a string")


def join_texts(parts: Any, kind: Any = Strict) -> str:
    """Returns the content of a message as one text, with newlines between its parts.

    Args:
        parts: A string, or a list of parts.
        kind: Only parts of this class are included.
    """
    if isinstance(parts, str):
        return parts
    return "\n".join(part.text for part in parts if isinstance(part, kind))


def _as_object(arguments: str | dict[str, Any]) -> Any:
    """Returns the arguments of a tool call as an object if possible.

    An empty text and `null` become an object without members. A text that is not a JSON
    object is returned unchanged, because models also write such texts.
    """
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments.strip() or "null")
        except (msgspec.DecodeError, RecursionError):
            return arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else arguments


class CalledFunction(Strict):
    model_config = ConfigDict(extra="ignore")

    name: str = Field(description="a string")
    arguments: Annotated[Any, ReadFrom(str | dict[str, Any], _as_object)] = Field(
        {}, description="a JSON text or an object"
    )


class ToolCall(Strict):
    """An earlier tool call of the model.

    The `arguments` are converted to an object if possible, because chat templates write
    the JSON themselves.
    """

    model_config = ConfigDict(extra="ignore")
    must_be: ClassVar[str] = "an object with `id`, `type` and `function`"

    id: str = Field("", description="a string")
    type: Literal["function"] = Field("function", description="function")
    function: CalledFunction = Field(
        description="an object with `name` and `arguments`"
    )


_Calls = Annotated[list[ToolCall], Field(fail_fast=True)]


class Message(Strict):
    """One message of a conversation.

    Chat templates distinguish a null content from an empty content and from an absent
    content. For example, some templates recognize a message that consists of tool calls
    by its null content.

    Attributes:
        content_: The content as the client sent it; `content` joins its text parts.
        tool_calls: Calls in an assistant's message.
        tool_call_id: The id of the call that a tool's message answers.
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
        list[ToolCall] | None, ReadFrom(_Calls, lambda calls: calls or None)
    ] = Field(None, description="a list, in an assistant's message only")
    tool_call_id: Text = None
    cache_control: Marked = None
    provider_specific_fields: Any = UNREAD  # litellm adds this to earlier answers
    parsed: Any = UNREAD  # OpenAI's client puts the content here as an object
    annotations: Any = neutral([])
    refusal: Any = neutral("")
    reasoning_content: Text = Field(None, exclude=True)
    # The name that vLLM and other servers use for `reasoning_content`.
    reasoning: Text = Field(None, exclude=True)
    thinking_blocks: Annotated[list[Thought], Field(fail_fast=True)] = Field(
        [], exclude=True, description="a list of thinking blocks"
    )

    @property
    def content(self) -> str | None:
        """The text parts of the content, with newlines between them; None if the
        content is null or absent.
        """
        return None if self.content_ is None else join_texts(self.content_, TextPart)

    @property
    def reasoning_text(self) -> str:
        """The reasoning in the message; empty if there is none.

        Different clients send the reasoning in different fields.
        """
        parts = self.thinking_blocks or self.content_ or ""
        blocks = "" if isinstance(parts, str) else join_texts(parts, Thought)
        return self.reasoning or self.reasoning_content or blocks

    def cache_marks(self, num_messages: int) -> Iterator[CacheMark]:
        """Yields the marks in this message, in order.

        Args:
            num_messages: Number of messages up to and including this message.
        """
        parts = self.content_ if isinstance(self.content_, list) else []
        for number, part in enumerate(parts, 1):
            if isinstance(part, TextPart) and part.cache_control is not None:
                num_parts = None if number == len(parts) else number
                yield CacheMark(part.cache_control.seconds, num_messages, num_parts)
        if self.cache_control is not None:
            yield CacheMark(self.cache_control.seconds, num_messages)

    def first_parts(self, num_parts: int | None) -> Self:
        """Returns the message with only the first parts of its content; None: all."""
        if num_parts is None:
            return self
        assert isinstance(self.content_, list)
        return self.model_copy(update={"content_": self.content_[:num_parts]})

    @property
    def template_message(self) -> dict[str, Any]:
        """The message as chat templates receive it.

        If the client sent a content, even null, the message has a `content`.
        """
        message = self.model_dump(exclude_none=True)
        if "content_" in self.model_fields_set:
            message = {"content": self.content, **message}
        reasoning = self.reasoning_text
        if reasoning:
            message["reasoning_content"] = reasoning
            message["thinking"] = reasoning  # the name in gpt-oss's template
        return message

    @model_validator(mode="after")
    def _check_fits_role(self) -> Self:
        if self.tool_call_id is not None and self.role != "tool":
            raise fault("tool_call_id", "is allowed only in a tool's message.")
        if self.tool_calls and self.role != "assistant":
            raise fault("tool_calls", "is allowed only in an assistant's message.")
        if self.content_ is None and not (self.tool_calls or self.reasoning_text):
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
    """The fields, besides the messages, that determine the prompt of a conversation for
    /v1/chat/completions and /tokenize.
    """

    add_generation_prompt: bool | None = Field(None, description="true or false")
    continue_final_message: Switch = False
    chat_template_kwargs: Variables = Field({})
    # The next three fields become variables of the chat template, which may ignore
    # them.
    enable_thinking: bool | None = Field(None, description="true or false")
    reasoning_effort: Effort = None
    verbosity: Verbosity = None
    tools: OfferedTools = None
    tool_choice: ToolChoice = None


class ChatRequest(PromptFields, GenerationRequest):
    endpoint = "/v1/chat/completions"
    summary = "Answers a conversation."
    prompt_field = "messages"
    # See the attributes of the same names in Tools.
    function_path: ClassVar[str] = "function."
    parameters_name: ClassVar[str] = "parameters"

    messages: Messages
    logprobs: Switch = False
    top_logprobs: int = integer(0, 0, MAX_TOP_LOGPROBS)
    # Add special tokens in addition to those of the chat template.
    add_special_tokens: Switch = False
    include_reasoning: Switch = True
    parallel_tool_calls: Switch = True

    documents: Any = neutral([])
    modalities: Any = neutral(["text"])
    functions: Any = neutral([])
    function_call: Any = neutral("none", "auto")

    @cached_property
    def toolset(self) -> Tools:
        """The tools of the request, and how the model may use them."""
        return read_tools(
            self.tools,
            self.tool_choice,
            is_parallel=self.parallel_tool_calls,
            function_path=self.function_path,
            parameters_name=self.parameters_name,
        )

    @cached_property
    def guided_decoding(self) -> GuidedDecoding | None:
        calls_grammar = self.toolset.guided_decoding
        format_grammar = super().guided_decoding
        if calls_grammar and format_grammar:
            # The response format applies only to text, and the answer must consist of
            # tool calls.
            if format_grammar.field.startswith(self.format_paths):
                return calls_grammar
        return only_one([calls_grammar, format_grammar])

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def cache_marks(self) -> list[CacheMark]:
        """The parts of the conversation to keep: the longest one for each duration.

        Chat templates write the tools before or after the system messages, or into the
        first message. Therefore a mark of a tool covers the system messages, or the
        first message if there are no system messages.
        """
        marks: dict[int, CacheMark] = {}
        num_system = 0
        for message in self.messages:
            if message.role not in ("system", "developer"):
                break
            num_system += 1
        for tool in self.tools or ():
            if tool.get("cache_control") is not None:
                seconds = RETENTION_S[tool["cache_control"].get("ttl") or "5m"]
                marks[seconds] = CacheMark(seconds, max(num_system, 1))
        for number, message in enumerate(self.messages, 1):
            for mark in message.cache_marks(number):
                marks[mark.seconds] = mark
        return list(marks.values())

    def ends_at(self, mark: CacheMark) -> bool:
        """Whether a mark is at the end of the conversation."""
        return mark.num_parts is None and mark.num_messages == len(self.messages)

    def up_to(self, mark: CacheMark) -> Self:
        """Returns the request with only the part of the conversation that `mark`
        covers, for rendering.
        """
        *messages, last = self.messages[: mark.num_messages]
        return self.model_copy(
            update={
                "messages": [*messages, last.first_parts(mark.num_parts)],
                "add_generation_prompt": False,
                "continue_final_message": False,
            }
        )

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for ChatTemplate.render, except for the messages."""
        enable_thinking = self.enable_thinking
        effort = self.reasoning_effort
        if enable_thinking is None and effort is not None:
            enable_thinking = effort != "none"
        # The options for reasoning and verbosity, by the names that templates use.
        variables = {
            "enable_thinking": enable_thinking,
            "thinking": enable_thinking,
            "reasoning_effort": None if effort == "none" else effort,
            "verbosity": self.verbosity,
        }
        set_variables = {
            name: value for name, value in variables.items() if value is not None
        }
        add_generation_prompt = self.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not self.continue_final_message
        return {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "variables": {**set_variables, **self.chat_template_kwargs},
        }

    def without_prompt_fields(self) -> Self:
        # A continued message is still needed, because it determines whether the answer
        # starts inside the reasoning.
        messages = self.messages[-1:] if self.continue_final_message else []
        return (
            super()
            .without_prompt_fields()
            .model_copy(update={"messages": messages, "chat_template_kwargs": {}})
        )

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", f"is {self.top_logprobs}; it needs `logprobs`: true")
        if self.continue_final_message and self.add_generation_prompt:
            refuse(
                "continue_final_message",
                "and `add_generation_prompt` are both true; send only one of them",
            )
        for name in self.chat_template_kwargs:
            if name in _RESERVED_VARIABLES:
                refuse(
                    "chat_template_kwargs",
                    f"sets `{name}`, which only the server may set",
                )

"""The request bodies of /v1/messages and /v1/messages/count_tokens.

The bodies of both endpoints are converted to chat requests in the same way. Therefore
the number of tokens that count_tokens returns is exact.
"""

from typing import Annotated, Any, Final, Self

from pydantic import Field

from protocol.anthropic.blocks import (
    CacheControlField,
    InputMessage,
    Metadata,
    OutputConfig,
    Texts,
    Thinking,
    ToolChoiceOption,
    ToolDefinition,
)
from protocol.anthropic.conversation import cache_ttls, chat_messages, marked
from protocol.anthropic.errors import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    ThreadUnsupported,
)
from protocol.openai.chat import ChatRequest
from protocol.openai.requests import ModelName, Strict, neutral, refuse, validate
from protocol.openai.sampling import (
    MAX_INT31,
    MAX_STOP_CHARS,
    MAX_STOPS,
    CommonFields,
    SamplingFields,
    UnreadText,
    Variables,
    integer,
)
from protocol.openai.tools import MAX_TOOLS

# The fields that a chat request takes over unchanged.
_CHAT_FIELDS = {
    "chat_template_kwargs",
    *SamplingFields.model_fields,
    *CommonFields.model_fields,
}
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}

_StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Tools = Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ConversationFields(Strict):
    """The fields that both request bodies have, such as those of the prompt."""

    model: ModelName = ""
    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1)] = (
        Field(description="a list, not empty, of objects with `role` and `content`")
    )
    system: Texts | None = Field(None, description="a string or a list of text blocks")
    tools: _Tools = Field([], description=f"a list of at most {MAX_TOOLS} tools")
    tool_choice: ToolChoiceOption | None = Field(
        None,
        description='{"type": "auto"}, {"type": "any"}, {"type": "none"} or '
        '{"type": "tool", "name": "..."}, perhaps with `disable_parallel_tool_use`',
    )
    thinking: Thinking | None = Field(
        None,
        description="an object whose `type` is enabled, adaptive, "
        "between_tools or disabled",
    )
    output_config: OutputConfig = Field(
        OutputConfig(), description="an object with `effort` and `format`"
    )
    cache_control: CacheControlField = None
    # Baton never edits a conversation. If a request has this field, the response has an
    # empty list of edits.
    context_management: dict[str, Any] | None = Field(
        None, description="an object; it changes nothing here"
    )
    chat_template_kwargs: Variables = Field({})
    speed: UnreadText = None
    inference_geo: UnreadText = None
    mcp_servers: Any = neutral([])
    thread: Any = Field(None, description="left out: Baton stores no conversations")

    def check(self) -> None:
        """Raises ThreadUnsupported if the request refers to a stored conversation."""
        super().check()
        if self.thread is not None:
            raise ThreadUnsupported(
                "`thread` is not supported, because Baton stores no conversations; "
                "leave it out and send the whole conversation",
                param="thread",
            )


class CountTokensRequest(ConversationFields):
    endpoint = COUNT_TOKENS_PATH
    summary = "Counts the tokens of a conversation's prompt."


class MessagesRequest(ConversationFields, SamplingFields, CommonFields):
    endpoint = MESSAGES_PATH
    summary = "Answers a conversation, in the form of Anthropic's API."

    max_tokens: int = Field(
        ge=0,
        le=MAX_INT31,
        description=f"an integer from 0 to {MAX_INT31}; 0 only caches the prompt",
    )
    stop_sequences: Annotated[list[_StopSequence], Field(max_length=MAX_STOPS)] = Field(
        [],
        description=f"a list of at most {MAX_STOPS} strings, none of them empty or "
        f"longer than {MAX_STOP_CHARS} characters",
    )
    top_k: int = integer(0, 0, MAX_INT31)
    metadata: Metadata = Field(Metadata(), description="an object with `user_id`")

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0:
            self._check_needs_no_answer()

    def _check_needs_no_answer(self) -> None:
        """Raises InvalidRequest if a field needs an answer. Anthropic's API refuses the
        same fields with `max_tokens` 0.
        """
        thinking = self.thinking
        choice = self.tool_choice
        problems = {
            "stream": self.stream,
            "thinking.type": thinking is not None and thinking.type == "enabled",
            "output_config.format": self.output_config.format is not None,
            "tool_choice.type": choice is not None and choice.type in ("any", "tool"),
        }
        for field, needs_answer in problems.items():
            if needs_answer:
                refuse(
                    field,
                    "needs an answer, but with `max_tokens` 0 there is none; leave it "
                    "out, or set `max_tokens` to 1 or more",
                )


class MessagesChat(ChatRequest):
    """The chat request to which a request to the Messages API is converted.

    Attributes:
        original: The request to the Messages API.
        cache_ttls: The `ttl` of each `cache_control`, in the order of the prompt.
    """

    endpoint = MESSAGES_PATH
    usual_limit_field = "max_tokens"
    function_path = ""
    parameters_name = "input_schema"
    format_paths = ("output_config.format", "output_config.format")
    limit_may_exceed_context = True

    max_tokens: int | None = integer(None, 0, MAX_INT31)
    original: ConversationFields
    cache_ttls: tuple[str, ...] = ()

    @property
    def continuous_usage(self) -> bool:
        return True  # the first event of a stream has a usage

    @property
    def shows_thinking(self) -> bool:
        """Whether the response has the text of the reasoning."""
        thinking = self.original.thinking
        return thinking is None or thinking.display != "omitted"

    def without_prompt_fields(self) -> Self:
        chat = super().without_prompt_fields()
        original = self.original.model_copy(
            update={"messages": [], "system": None, "tools": []}
        )
        return chat.model_copy(update={"original": original})


def parse_messages(body: dict[str, Any]) -> MessagesChat:
    """Validates the body of /v1/messages and converts it to a chat.

    Raises:
        InvalidRequest: A field is wrong. The message has its name.
        ThreadUnsupported: The request refers to a stored conversation.
    """
    request = validate(MessagesRequest, body)
    answer_fields = {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        **{name: body[name] for name in _CHAT_FIELDS & request.model_fields_set},
    }
    return validate(MessagesChat, {**_prompt_fields(request), **answer_fields})


def parse_count_tokens(body: dict[str, Any]) -> MessagesChat:
    """Validates the body of /v1/messages/count_tokens and converts it to a chat.

    Raises:
        InvalidRequest: A field is wrong. The message has its name.
        ThreadUnsupported: The request refers to a stored conversation.
    """
    request = validate(CountTokensRequest, body)
    return validate(MessagesChat, _prompt_fields(request))


def _prompt_fields(request: ConversationFields) -> dict[str, Any]:
    """Returns the fields of the chat that the ConversationFields determine."""
    output = request.output_config
    return {
        "original": request,
        "cache_ttls": cache_ttls(
            request.tools, request.system, request.messages, request.cache_control
        ),
        "model": request.model or None,
        "messages": chat_messages(
            request.system, request.messages, request.cache_control
        ),
        "continue_final_message": request.messages[-1].role == "assistant",
        "enable_thinking": _enable_thinking(request.thinking),
        "reasoning_effort": output.effort,
        "response_format": _response_format(output),
        "chat_template_kwargs": request.chat_template_kwargs,
        **_tool_fields(request.tools, request.tool_choice),
    }


def _enable_thinking(thinking: Thinking | None) -> bool | None:
    """Returns whether the model should reason; None: the chat template decides."""
    return None if thinking is None else thinking.type != "disabled"


def _response_format(output: OutputConfig) -> dict[str, Any] | None:
    if output.format is None:
        return None
    json_schema = {"name": "output", "schema": output.format.schema_}
    return {"type": "json_schema", "json_schema": json_schema}


def _tool_fields(
    tools: list[ToolDefinition], choice: ToolChoiceOption | None
) -> dict[str, Any]:
    """Returns the fields of a chat about its tools.

    Raises:
        InvalidRequest: A call is required, and there are no tools.
    """
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [_chat_tool(tool) for tool in tools]
    if choice is None:
        return fields
    if not tools and choice.type in ("any", "tool"):
        refuse("tool_choice", f"is {choice.type}, but there are no `tools`; send some")
    fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = _TOOL_CHOICES[choice.type]
    return fields


def _chat_tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given, **marked(tool.cache_control)}

"""The request body of /v1/responses. The request is converted to a chat request.

The server does not store responses, so `previous_response_id` is not supported. The
client must send the whole conversation with each request.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from protocol.openai.chat import ChatRequest, Effort, Verbosity, join_texts
from protocol.openai.requests import ReadFrom, Strict, fault, neutral, refuse, validate
from protocol.openai.sampling import (
    MAX_INT31,
    MAX_TOP_LOGPROBS,
    UNREAD,
    CommonFields,
    SamplingAndStopFields,
    Switch,
    Text,
    UnreadText,
    Variables,
    integer,
)
from protocol.openai.structured import (
    FormatType,
    SchemaMembers,
    StructuredFields,
    StructuredOutputs,
)
from protocol.openai.tools import MAX_TOOLS, Function, FunctionName

LOGPROBS = "message.output_text.logprobs"  # a value of `include`
# The fields that a chat request takes over unchanged.
_CHAT_FIELDS = {
    "chat_template_kwargs",
    "parallel_tool_calls",
    "structured_outputs",
    "top_logprobs",
    *SamplingAndStopFields.model_fields,
    *CommonFields.model_fields,
}


class InputPart(Strict):
    model_config = ConfigDict(extra="ignore")
    must_be: ClassVar[str] = 'a part {"type": "input_text", "text": "..."}'
    reported_whole: ClassVar[bool] = True

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Parts = Annotated[
    str, ReadFrom(str | Annotated[list[InputPart], Field(fail_fast=True)], join_texts)
]
_REQUIRED_MEMBERS: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(Strict):
    """An item of the conversation: a message, a tool call, its output, or reasoning."""

    must_be: ClassVar[str] = "a message with `role` and `content`"

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = (
        Field(
            "message",
            description="message, function_call, function_call_output or reasoning",
        )
    )
    role: Literal["system", "developer", "user", "assistant"] | None = Field(
        None, description="system, developer, user or assistant"
    )
    content: Parts = Field("", description="a string or a list of text parts")
    call_id: Text = None
    name: Text = None
    arguments: Text = None
    output: Parts = Field("", description="a string or a list of text parts")
    summary_: Parts = Field("", alias="summary", description="a list of text parts")
    # Members of earlier responses that clients send back, and that are ignored.
    id: Any = None
    status: Any = None
    phase: Any = None
    encrypted_content: Any = None

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        for name in _REQUIRED_MEMBERS[self.type]:
            if name not in self.model_fields_set:
                must_be = type(self).model_fields[name].description
                raise fault(name, f"is missing; it must be {must_be}.")
        return self


class TextFormat(SchemaMembers):
    """The `text.format` of /v1/responses.

    Its members include those that the `response_format` of a chat request nests in
    `json_schema`.
    """

    type: FormatType
    name: Text = None

    @model_validator(mode="after")
    def _check_members_fit_type(self) -> Self:
        has_schema = self.type == "json_schema"
        if has_schema and self.name is None:
            raise fault("name", "is missing; it must be a string.")
        allowed = {"type"}
        if self.type == "json_object":
            allowed.add("schema_")
        if not has_schema and not self.model_fields_set <= allowed:
            raise ValueError(
                "`name`, `strict` and `description` require the `type` json_schema; "
                "`schema` requires the `type` json_schema or json_object"
            )
        return self


class TextOptions(Strict):
    format: Annotated[dict[str, Any] | None, ReadFrom(TextFormat)] = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "name": "...", "schema": {...}}',
    )
    verbosity: Verbosity = None


def _as_messages(given: str | list[InputItem]) -> list[dict[str, Any]]:
    """Converts the input to messages of a chat.

    Reasoning, and the assistant's text and tool calls after it, become one message. If
    this message has no text, its content is null, as in the chat API.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for item in given:
        turn = (
            messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        )
        if item.type == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "content": item.output,
                    "tool_call_id": item.call_id,
                }
            )
        elif item.type == "function_call":
            if turn is None:
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append(
                {"id": item.call_id, "function": function}
            )
        elif item.type == "reasoning":
            thought = item.content or item.summary_
            if thought:  # an item without text has only encrypted reasoning
                messages.append(
                    {"role": "assistant", "content": None, "reasoning_content": thought}
                )
        elif (
            item.role == "assistant"
            and turn
            and ("tool_calls" in turn or not turn["content"])
        ):
            # Some clients send the tool calls of a turn before its text. The text is
            # added to the message with the calls, because no message may stand between
            # a call and its output.
            turn["content"] = "\n\n".join(filter(None, (turn["content"], item.content)))
        else:
            messages.append({"role": item.role, "content": item.content})
    if not messages:
        raise ValueError("the input has no message, only reasoning without a text")
    return messages


class NamedFunction(Strict):
    type: Literal["function"] = Field(description="function")
    name: FunctionName


class FunctionTool(Function, NamedFunction):
    """A tool of /v1/responses.

    Its members include those that a tool of a chat request nests in `function`.
    """

    model_config = ConfigDict(extra="allow")


class ReasoningOptions(Strict):
    effort: Effort = None
    summary_: UnreadText = Field(None, alias="summary")  # reasoning is not summarized
    generate_summary: UnreadText = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: Switch = False  # accepted, but responses are not obfuscated
    include_usage: Any = neutral(True, False)  # the last event always has the usage


# Responses contain the reasoning as plain text, so "reasoning.encrypted_content"
# changes nothing.
Included = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
    Field(description=f'"{LOGPROBS}" or "reasoning.encrypted_content"'),
]
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
_Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]


class ResponsesRequest(SamplingAndStopFields, CommonFields):
    endpoint = "/v1/responses"
    summary = "Answers a text or a conversation."

    input: Annotated[list[dict[str, Any]], ReadFrom(str | _Items, _as_messages)] = (
        Field(
            description="a string, or a list of messages with `role` and `content`, "
            "not empty"
        )
    )
    instructions: Text = None
    max_output_tokens: int | None = integer(None, 1, MAX_INT31)
    max_tool_calls: int | None = Field(
        None, ge=1, le=MAX_INT31,
        description=f"an integer from 1 to {MAX_INT31}; it limits tools that OpenAI "
        "runs itself, so it changes nothing here",
    )  # fmt: skip
    text: TextOptions = Field(TextOptions(), description="an object with `format`")
    tools: Annotated[
        list[dict[str, Any]],
        ReadFrom(
            Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]
        ),
    ] = Field([], description=f"a list of at most {MAX_TOOLS} functions")
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = Field(
        "auto",
        description='"none", "auto", "required" or {"type": "function", "name": "..."}',
    )
    parallel_tool_calls: Switch = True
    reasoning: ReasoningOptions = Field(
        ReasoningOptions(), description="an object with `effort`"
    )
    metadata: _Metadata = Field(
        default_factory=dict,
        description="an object of at most 16 strings of at most 512 characters, with "
        "names of at most 64 characters; the response repeats it",
    )
    client_metadata: Any = UNREAD  # the client Codex sends this
    include: Annotated[list[Included], Field(fail_fast=True)] = Field(
        [], description=f'a list of "{LOGPROBS}" and "reasoning.encrypted_content"'
    )
    top_logprobs: int = integer(0, 0, MAX_TOP_LOGPROBS)
    chat_template_kwargs: Variables = Field({})
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description=StructuredFields.model_fields["structured_outputs"].description,
    )

    background: Any = neutral(False)
    stream_options: ResponsesStreamOptions | None = Field(None, description="an object")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto or disabled"
    )

    def check(self) -> None:
        super().check()
        if self.top_logprobs and LOGPROBS not in self.include:
            refuse(
                "top_logprobs",
                f'is {self.top_logprobs}; it needs `include`: ["{LOGPROBS}"]',
            )


class ResponsesChat(ChatRequest):
    """The chat request to which a request to /v1/responses is converted.

    Attributes:
        original: The request to /v1/responses.
    """

    endpoint = "/v1/responses"
    prompt_field = "input"
    usual_limit_field = "max_output_tokens"
    logprobs_field = "top_logprobs"
    streams_logprobs_once = False
    function_path = ""
    format_paths = ("text.format", "text.format")

    original: ResponsesRequest

    @property
    def drops_oldest_messages(self) -> bool:
        return self.original.truncation == "auto"

    def without_prompt_fields(self) -> Self:
        chat = super().without_prompt_fields()
        original = self.original.model_copy(update={"input": []})
        return chat.model_copy(update={"original": original})


def _nested(flat: dict[str, Any], outer: str) -> dict[str, Any]:
    """Returns the chat API's form of an object of /v1/responses.

    Args:
        outer: The name of the member that holds all members of `flat` except `type`.
    """
    return {"type": flat["type"], outer: {k: v for k, v in flat.items() if k != "type"}}


def parse_responses(body: dict[str, Any]) -> ResponsesChat:
    """Validates the body of /v1/responses and converts it to a chat.

    Raises:
        InvalidRequest: A field is wrong. The message has its name.
    """
    request = validate(ResponsesRequest, body)
    system_messages = []
    if request.instructions is not None:
        system_messages = [{"role": "system", "content": request.instructions}]
    choice = request.tool_choice
    response_format = request.text.format
    if response_format and response_format["type"] == "json_schema":
        response_format = _nested(response_format, "json_schema")
    chat = {
        "original": request,
        "messages": [*system_messages, *request.input],
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort,
        "verbosity": request.text.verbosity,
        "response_format": response_format,
        "tools": [_nested(tool, "function") for tool in request.tools],
        "tool_choice": (
            choice
            if isinstance(choice, str)
            else _nested(choice.model_dump(), "function")
        ),
        "logprobs": LOGPROBS in request.include,
        **{name: body[name] for name in _CHAT_FIELDS & request.model_fields_set},
    }
    return validate(ResponsesChat, chat)

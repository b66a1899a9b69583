"""The body of /v1/responses: text and tools. It becomes a chat, which is what is served.

Nothing is stored, so an earlier response cannot be continued; the client sends the conversation.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from protocol.openai.chat import ChatRequest, Effort, Verbosity, joined
from protocol.openai.requests import Read, Strict, fault, neutral, refuse, validate
from protocol.openai.sampling import (
    MAX_INT31,
    MAX_LOGPROBS,
    UNREAD,
    CommonFields,
    ShapingFields,
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

LOGPROBS = "message.output_text.logprobs"  # of `include`
# The fields that mean the same in a chat.
_AS_CHATS = {
    *(
        "chat_template_kwargs",
        "parallel_tool_calls",
        "structured_outputs",
        "top_logprobs",
    ),
    *ShapingFields.model_fields,
    *CommonFields.model_fields,
}


class InputPart(Strict):
    model_config = ConfigDict(extra="ignore")
    must_be: ClassVar[str] = 'a part {"type": "input_text", "text": "..."}'
    told_whole: ClassVar[bool] = True

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Parts = Annotated[
    str, Read(str | Annotated[list[InputPart], Field(fail_fast=True)], joined)
]
_NEEDED: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(Strict):
    """A message of the conversation, a call of a tool, its result, or what the model thought."""

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
    # Not read: of an earlier response, sent back.
    id: Any = None
    status: Any = None
    phase: Any = None
    encrypted_content: Any = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name in _NEEDED[self.type]:
            if name not in self.model_fields_set:
                must_be = type(self).model_fields[name].description
                raise fault(name, f"is missing; it must be {must_be}.")
        return self


class TextFormat(SchemaMembers):
    """`response_format`, but for a schema's members, which lie flat in it."""

    type: FormatType
    name: Text = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        is_named = self.type == "json_schema"
        if is_named and self.name is None:
            raise fault("name", "is missing; it must be a string.")
        of_others = {"type", "schema_"} if self.type == "json_object" else {"type"}
        if not is_named and not self.model_fields_set <= of_others:
            raise ValueError("members of a schema")
        return self


class TextOptions(Strict):
    format: Annotated[dict[str, Any] | None, Read(TextFormat)] = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"name": "...", "schema": {...}}',
    )
    verbosity: Verbosity = None


def _as_messages(given: str | list[InputItem]) -> list[dict[str, Any]]:
    """An assistant's turn is what it thought, what it said, and what it called. The content of a
    turn without a message is null, as it is in the chat API."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for item in given:
        turn = (
            messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        )
        if item.type == "function_call_output":
            told = {"content": item.output, "tool_call_id": item.call_id}
            messages.append({"role": "tool", **told})
        elif item.type == "function_call":
            if turn is None:
                messages.append(turn := {"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append(
                {"id": item.call_id, "function": function}
            )
        elif item.type == "reasoning":
            if thought := item.content or item.summary_:  # else it is encrypted
                messages.append(
                    {"role": "assistant", "content": None, "reasoning_content": thought}
                )
        elif (
            item.role == "assistant"
            and turn
            and ("tool_calls" in turn or not turn["content"])
        ):
            # Some clients tell of calls first; between a call and its output no turn may stand.
            turn["content"] = "\n\n".join(filter(None, (turn["content"], item.content)))
        else:
            messages.append({"role": item.role, "content": item.content})
    if not messages:
        raise ValueError("reasoning without a text is no conversation")
    return messages


class NamedFunction(Strict):
    type: Literal["function"] = Field(description="function")
    name: FunctionName


class FunctionTool(Function, NamedFunction):
    """`tools` of chats, but for the function's members, which lie flat in it."""

    model_config = ConfigDict(extra="allow")


class ReasoningOptions(Strict):
    effort: Effort = None
    summary_: UnreadText = Field(None, alias="summary")  # reasoning is told as it is
    generate_summary: UnreadText = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: Switch = False  # no answer has any
    include_usage: Any = neutral(True, False)  # the last event always has it


# OpenAI encrypts its reasoning. Here it is plain text, so the other one changes nothing.
Included = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
    Field(description=f'"{LOGPROBS}" or "reasoning.encrypted_content"'),
]
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
_Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]


class ResponsesRequest(ShapingFields, CommonFields):
    endpoint = "/v1/responses"
    summary = "Answers a text or a conversation."

    input: Annotated[list[dict[str, Any]], Read(str | _Items, _as_messages)] = Field(
        description="a string, or a list of messages with `role` and `content`, not empty"
    )
    instructions: Text = None
    max_output_tokens: int | None = integer(None, 1, MAX_INT31)
    max_tool_calls: int | None = Field(
        None, ge=1, le=MAX_INT31,
        description=f"an integer from 1 to {MAX_INT31}; it limits tools that OpenAI runs itself, "
        "so it changes nothing here",
    )  # fmt: skip
    text: TextOptions = Field(TextOptions(), description="an object with `format`")
    tools: Annotated[
        list[dict[str, Any]],
        Read(
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
        description="an object of at most 16 strings of at most 512 characters, whose names have "
        "at most 64; it comes back with the response",
    )
    client_metadata: Any = UNREAD  # of Codex
    include: Annotated[list[Included], Field(fail_fast=True)] = Field(
        [], description=f'a list of "{LOGPROBS}" and "reasoning.encrypted_content"'
    )
    top_logprobs: int = integer(0, 0, MAX_LOGPROBS)
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
    """The chat that a request to /v1/responses is served as."""

    endpoint = "/v1/responses"
    prompt_field, usual_limit = "input", "max_output_tokens"
    logprobs_field = "top_logprobs"
    streams_logprobs_once = False
    function_path = ""
    format_paths = ("text.format", "text.format")

    asked: ResponsesRequest

    @property
    def drops_oldest_messages(self) -> bool:
        return self.asked.truncation == "auto"

    def without_inputs(self) -> Self:
        kept = super().without_inputs()
        return kept.model_copy(
            update={"asked": self.asked.model_copy(update={"input": []})}
        )


def _nested(flat: dict[str, Any], name: str) -> dict[str, Any]:
    """As chats have it: all but the type within `name`."""
    return {"type": flat["type"], name: {k: v for k, v in flat.items() if k != "type"}}


def parse_responses(body: dict[str, Any]) -> ResponsesChat:
    """Validates the body of /v1/responses. Raises InvalidRequest naming the field."""
    asked = validate(ResponsesRequest, body)
    told, choice, form = asked.instructions, asked.tool_choice, asked.text.format
    first = [] if told is None else [{"role": "system", "content": told}]
    if form and form["type"] == "json_schema":
        form = _nested(form, "json_schema")
    chat = {
        "asked": asked,
        "messages": [*first, *asked.input],
        "max_completion_tokens": asked.max_output_tokens,
        "reasoning_effort": asked.reasoning.effort,
        "verbosity": asked.text.verbosity,
        "response_format": form,
        "tools": [_nested(tool, "function") for tool in asked.tools],
        "tool_choice": (
            choice
            if isinstance(choice, str)
            else _nested(choice.model_dump(), "function")
        ),
        "logprobs": LOGPROBS in asked.include,
        **{name: body[name] for name in _AS_CHATS & asked.model_fields_set},
    }
    return validate(ResponsesChat, chat)

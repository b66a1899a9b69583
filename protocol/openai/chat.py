"""The body of /v1/chat/completions."""

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import Field, WithJsonSchema

from protocol.errors import InvalidRequest
from protocol.openai.requests import Strict, body_of, clean, neutral, refusal, validate, wrong
from protocol.openai.sampling import (
    MAX_LOGPROBS,
    GenerationRequest,
    Switch,
    clean_request,
    integer,
    refuse,
)
from protocol.openai.structured import GuidedDecoding, only_one
from protocol.openai.tools import (
    CHOICE_MUST_BE,
    CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    Tools,
    read_tools,
)
from protocol.short_repr import short_repr

Role = Literal["system", "developer", "user", "assistant", "tool"]
_ROLES: tuple[Role, ...] = get_args(Role)

# What a chat template gets from the server; a client's own variables cannot take their place.
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}

_CONTENT_MUST_BE = "a string or a list of text parts"


class Message(Strict):
    """One turn. `content` given as text parts is joined by newlines; a template may use the rest.

    Attributes:
        tool_calls: of an assistant's earlier turn, as the API has them, but for `arguments`: an
            object where they are one, because templates write them as JSON themselves.
        tool_call_id: of a tool's turn, the call that it answers.
    """

    role: Role = Field(description=", ".join(_ROLES[:-1]) + f" or {_ROLES[-1]}")
    content: Annotated[str, WithJsonSchema(_CONTENT)] = Field("", description=_CONTENT_MUST_BE)
    name: str | None = Field(None, description="a string")
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: str | None = Field(None, description="a string")
    annotations: Any = neutral([])
    refusal: Any = neutral("")
    reasoning_content: Any = neutral("")
    reasoning: Any = neutral("")


@body_of("/v1/chat/completions", "Answers a conversation.")
class ChatRequest(GenerationRequest):
    messages: tuple[Message, ...] = Field(
        min_length=1, description="a list, not empty, of objects with `role` and `content`"
    )
    logprobs: Switch = False
    top_logprobs: int = integer(0, 0, MAX_LOGPROBS)
    add_special_tokens: Switch = False  # beside those that the chat template writes
    add_generation_prompt: bool | None = Field(None, description="true or false")
    continue_final_message: Switch = False
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="an object of variables for the chat template"
    )

    # OpenAI's, in place of `user`. Whose request it is and what it shares changes no answer here.
    safety_identifier: str | None = Field(None, description="a string")
    prompt_cache_key: str | None = Field(None, description="a string")

    # Read by read_tools, which names the member at fault.
    tools: Annotated[Any, Field(description="a list of tools"), WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: Annotated[
        Any, Field(description=CHOICE_MUST_BE), WithJsonSchema(CHOICE_SCHEMA)
    ] = None
    parallel_tool_calls: bool | None = Field(None, description="true or false")

    best_of: Any = neutral(1)
    echo: Any = neutral(False)
    documents: Any = neutral([])
    modalities: Any = neutral(["text"])
    functions: Any = neutral([])
    function_call: Any = neutral("none", "auto")

    @cached_property
    def toolset(self) -> Tools:
        """The tools that the model is told of, and whether it must call one."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @cached_property
    def guided(self) -> GuidedDecoding | None:
        all_guided = (self.toolset.guided, super().guided)
        return only_one([guided for guided in all_guided if guided is not None])

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of ChatTemplate.render besides the messages."""
        begins_turn = self.add_generation_prompt
        return {
            "add_generation_prompt": not self.continue_final_message
            if begins_turn is None
            else begins_turn,
            "continue_final_message": self.continue_final_message,
            "variables": self.chat_template_kwargs,
        }

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", f"is {self.top_logprobs}; it needs `logprobs`: true")
        if self.continue_final_message and self.add_generation_prompt:
            refuse("continue_final_message", "and `add_generation_prompt` are both true")
        for name in self.chat_template_kwargs:
            if name in _OWN_VARIABLES:
                refuse("chat_template_kwargs", f"sets `{name}`, which the server does itself")


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Validates the body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    cleaned = clean_request(body, ChatRequest)
    cleaned["messages"] = read_messages(ChatRequest, cleaned.get("messages"))
    parsed = validate(ChatRequest, cleaned)
    parsed.check()
    return parsed


def read_messages(model: type[Strict], messages: Any) -> tuple[Message, ...]:
    """The messages of a request; `model` has them as `messages`."""
    if not isinstance(messages, list) or not messages:
        raise refusal(model, "messages", messages)
    return tuple(_read_message(i, message) for i, message in enumerate(messages))


def _read_message(index: int, message: Any) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(
            f"`{where}` is {short_repr(message)}; it must be an object.", param=where
        )
    cleaned = clean(message, Message, where + ".")
    if isinstance(cleaned.get("content"), list):
        cleaned["content"] = "\n".join(_part_texts(cleaned["content"], where + ".content"))
    if cleaned.get("role") == "assistant" and cleaned.get("tool_calls"):
        cleaned.setdefault("content", "")
    calls = cleaned.pop("tool_calls", None)
    read = validate(Message, {"content": None, **cleaned}, where + ".")
    return read.model_copy(update=_read_roles_own(read, calls, where))


def _read_roles_own(message: Message, calls: Any, where: str) -> dict[str, Any]:
    """Checks what only one role may have; the message's `tool_calls`, where it has some."""
    if message.tool_call_id is not None and message.role != "tool":
        raise wrong(f"{where}.tool_call_id", message.tool_call_id, "in a tool's message only")
    if not calls and isinstance(calls, list | None):
        return {}
    if message.role != "assistant" or not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", calls, "a list, in an assistant's message only")
    read = (_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
    return {"tool_calls": tuple(read)}


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id", ""), str):
        raise wrong(where, call, "an object with `id`, `type` and `function`")
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise wrong(
            f"{where}.function", function, "an object with `name` and `arguments`, a JSON text"
        )
    if call.get("type", "function") != "function":
        raise wrong(f"{where}.type", call["type"], "function")
    plain = {"name": name, "arguments": _read_arguments(arguments)}
    return {"id": call.get("id", ""), "type": "function", "function": plain}


def _read_arguments(arguments: Any) -> Any:
    """An object where the text is one; models also write other things."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _part_texts(parts: list[Any], where: str) -> Iterable[str]:
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text" or len(part) != 2:
            raise InvalidRequest(
                f"`{where}[{index}]` is {short_repr(part)}; only parts "
                '{"type": "text", "text": "..."} are supported.',
                param=f"{where}[{index}]",
            )
        yield text

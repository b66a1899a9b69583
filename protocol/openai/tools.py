"""The tools that the model may or must call, and the tool calls of an answer.

If a call is required (`tool_choice` is "required" or names a tool), a grammar for the
whole answer enforces the call. With "auto" the model decides, and calls are recognized
in the format of the chat template (engine/text/tool_parser.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace
from pydantic import ConfigDict, Field

from protocol import exact_json
from protocol.messages import DemandedCalls, Grammar
from protocol.openai.prompt_cache import Marked
from protocol.openai.requests import ReadFrom, Strict, refuse, wrong_value
from protocol.openai.structured import GuidedDecoding
from protocol.short_repr import short_repr

MAX_TOOLS = 128
_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}

FunctionName = Annotated[
    str,
    Field(
        pattern="^[A-Za-z0-9_.-]{1,128}$",
        description="1 to 128 letters, digits, underscores, dots or dashes",
    ),
]


class Function(Strict):
    """The `function` of a tool. Unknown members are passed on to the chat template."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: str | None = Field(None, description="a string")
    parameters: dict[str, Any] | None = Field(
        None, description="a JSON schema, an object"
    )
    strict: bool | None = Field(None, description="true or false")


class Tool(Strict):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = Field(description="function")
    function: Function = Field(description="an object with `name`")
    cache_control: Marked = None


OfferedTools = Annotated[
    list[dict[str, Any]] | None,
    ReadFrom(Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]),
    Field(description=f"a list of at most {MAX_TOOLS} tools"),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Tool | None,
    Field(
        description='"none", "auto", "required" or '
        '{"type": "function", "function": {"name": "..."}}'
    ),
]

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and how the model may use them.

    Attributes:
        offered: The tools as the chat template receives them.
        mode: "none": the model does not see the tools. "auto": the model decides
            whether to call one. "required" or "named": the model must call one.
        name: In mode "named", the name of the tool that must be called.
        is_parallel: Whether an answer may have several calls.
        function_path: Path, within a tool, of the members of its function, for error
            messages: "function." in chats, empty in other APIs.
        parameters_name: The name, in the request, of the member of a tool with the
            schema of its arguments.
    """

    offered: tuple[dict[str, Any], ...] = ()
    mode: Mode = "none"
    name: str | None = None
    is_parallel: bool = True
    function_path: str = "function."
    parameters_name: str = "parameters"

    @property
    def is_active(self) -> bool:
        """Whether the model sees the tools."""
        return self.mode != "none"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.offered)

    @property
    def guided_decoding(self) -> GuidedDecoding | None:
        """The grammar that the answer must match; None unless a call is required."""
        if self.mode == "named":
            names = [tool["function"]["name"] for tool in self.offered]
            index = names.index(self.name)
            grammar = Grammar("json_schema", schema_text(self.offered[index]))
            return GuidedDecoding(grammar, self.schema_path(index))
        if self.mode == "required":
            tools = [
                (tool["function"]["name"], msgspec.Raw(schema_text(tool).encode()))
                for tool in self.offered
            ]
            calls = msgspec.json.encode(DemandedCalls(tools, self.is_parallel)).decode()
            return GuidedDecoding(Grammar("calls", calls), "tools")
        return None

    def schema_path(self, index: int) -> str:
        """Returns the path of a tool's schema in the request, for error messages."""
        return f"tools[{index}].{self.function_path}{self.parameters_name}"


def read_tools(
    tools: OfferedTools,
    choice: ToolChoice,
    *,
    is_parallel: bool,
    function_path: str,
    parameters_name: str,
) -> Tools:
    """Returns the validated tools of a request.

    Args:
        tools: The field `tools`; None if the client has not sent it.
        choice: The field `tool_choice`; None if the client has not sent it.
        is_parallel: See Tools.
        function_path: See Tools.
        parameters_name: See Tools.

    Raises:
        InvalidRequest: Two tools have the same name, or the choice requires a call and
            the required tool, or any tool, is missing.
    """
    functions = [
        {key: value for key, value in tool["function"].items() if value is not None}
        for tool in tools or ()
    ]
    offered: tuple[dict[str, Any], ...] = tuple(
        {"type": "function", "function": function} for function in functions
    )
    names = [tool["function"]["name"] for tool in offered]
    for index, name in enumerate(names):
        if name in names[:index]:
            path = f"tools[{index}].{function_path}name"
            raise wrong_value(path, name, "used once only")
    common: dict[str, Any] = {
        "offered": offered,
        "is_parallel": is_parallel,
        "function_path": function_path,
        "parameters_name": parameters_name,
    }
    if choice in (None, "auto", "none"):
        mode: Mode = "auto" if offered and choice != "none" else "none"
        return Tools(mode=mode, **common)
    chosen_name = choice.function.name if isinstance(choice, Tool) else None
    if not offered:
        shown = short_repr(chosen_name or choice)
        refuse("tool_choice", f"is {shown}, but no `tools` are given; send `tools`")
    if chosen_name is None:
        return Tools(mode="required", **common)
    if chosen_name not in names:
        must_be = "one of the tools: " + ", ".join(names[:20])
        raise wrong_value(f"tool_choice.{function_path}name", chosen_name, must_be)
    return Tools(mode="named", name=chosen_name, **common)


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments.

    A tool without a schema takes no arguments.
    """
    parameters: dict[str, Any] = tool["function"].get("parameters") or _NO_PARAMETERS
    return parameters


def schema_text(tool: dict[str, Any]) -> str:
    """Returns the schema of a tool's arguments as JSON text."""
    return exact_json.dumps(parameters_of(tool))


class ToolCallPiece(msgspec.Struct):
    """The part of a tool call that some tokens add.

    Attributes:
        index: Index of the call in the answer.
        arguments: The next part of the JSON text of the arguments.
        id: Only set on the first piece of the call.
        name: Only set on the first piece of the call.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def delta(self) -> dict[str, Any]:
        """Returns the piece as an entry of `tool_calls` in a stream."""
        function: dict[str, Any] = {"arguments": self.arguments}
        if self.name is None:
            return {"index": self.index, "function": function}
        function = {"name": self.name, **function}
        return {
            "index": self.index,
            "id": self.id,
            "type": "function",
            "function": function,
        }


def join_pieces(pieces: Sequence[ToolCallPiece]) -> list[ToolCallPiece]:
    """Joins the pieces of each call, which must be consecutive in `pieces`."""
    joined_calls = []
    for _, group in groupby(pieces, lambda piece: piece.index):
        call_pieces = list(group)
        arguments = "".join(piece.arguments for piece in call_pieces)
        joined_calls.append(replace(call_pieces[0], arguments=arguments))
    return joined_calls


def whole_calls(pieces: Sequence[ToolCallPiece]) -> list[dict[str, Any]]:
    """Returns the entries of a message's `tool_calls`."""
    entries = [call.delta() for call in join_pieces(pieces)]
    for entry in entries:
        del entry["index"]
    return entries


def call_id(answer_id: str, index: int, is_short: bool = False) -> str:
    """Returns the id of a call.

    The id is derived from the id of the answer. Therefore the id of a call stays the
    same if the stream moves to another server.

    Args:
        index: Index of the call in the answer.
        is_short: Return an id of nine letters and digits, as some chat templates
            require.
    """
    digest = hashlib.sha256(f"{answer_id} {index}".encode()).hexdigest()
    return digest[:9] if is_short else "call_" + digest[:24]

"""What a request demands of its output, to be tried before any work, and tools in the prompt.

A chat template that knows `tools` writes them itself. To a model whose template does not, a system
message says what there is and how to call it, in the form that engine/text/tool_parser.py reads.
"""

import json
from collections.abc import Sequence
from typing import Any

from engine.text.grammar_text import MAX_GRAMMAR_CHARS
from engine.text.tokenizer import Tokenizer
from engine.text.tool_parser import Syntax, ToolParser, create_tool_parser, detect_syntax
from protocol.errors import InvalidRequest
from protocol.messages import Grammar
from protocol.openai.chat import ChatRequest
from protocol.openai.sampling import GenerationRequest
from protocol.openai.structured import GuidedDecoding
from protocol.openai.tools import Tools, parameters_of

_HOW_TO_CALL = {
    "auto": "To call a tool, answer with\n"
    '<tool_call>{"name": <its name>, "arguments": <an object of its parameters>}</tool_call>\n'
    "and nothing else. Call one only where it helps to answer.",
    "required": "Answer with calls and nothing else, as a list: "
    '[{"name": <its name>, "parameters": <an object of its parameters>}]',
    "named": "Answer with the arguments of a call of `{name}` and nothing else, as a JSON object "
    "of its parameters.",
}


def guided_decodings(parsed: GenerationRequest) -> list[GuidedDecoding]:
    """What the output must match, and the schemas of tools, called or not.

    Raises:
        InvalidRequest: the schemas of the tools are too long.
    """
    all_guided = list(_tool_schemas(parsed.toolset)) if isinstance(parsed, ChatRequest) else []
    return all_guided if parsed.guided is None else [*all_guided, parsed.guided]


def _tool_schemas(tools: Tools) -> Sequence[GuidedDecoding]:
    """Of tools that need not be called, schemas may have what no grammar can enforce."""
    extra = {"x-guidance": {"lenient": True}} if tools.mode in ("none", "auto") else {}
    found = [
        GuidedDecoding(
            Grammar("json_schema", json.dumps({**parameters_of(tool), **extra})),
            f"tools[{at}].function.parameters",
        )
        for at, tool in enumerate(tools.offered)
    ]
    num_chars = sum(len(guided.grammar.text) for guided in found)
    if num_chars > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"`tools` have {num_chars} characters of schemas, at most {MAX_GRAMMAR_CHARS} are "
            "taken; send fewer or simpler ones.",
            param="tools",
        )
    return found


def with_tools(
    messages: list[dict[str, Any]], tools: Tools, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
    """The messages, and the tools for the chat template; either may be the way to tell of them."""
    template = tokenizer.chat_template
    if template is None or template.knows_tools:
        return messages, tools.offered if tools.active else None
    messages = [_without_tool_calls(message) for message in messages]
    if not tools.active:
        return messages, None
    told = _told(tools)
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        return [first, *messages[1:]], None
    return [{"role": "system", "content": told}, *messages], None


def _told(tools: Tools) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools.offered)
    how = _HOW_TO_CALL[tools.mode].replace("{name}", tools.name or "")
    return f"You can call these tools:\n{listed}\n{how}"


def _without_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """An earlier turn's calls as the text that they were."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        text = json.dumps(call["function"], ensure_ascii=False)
        texts.append(f"<tool_call>{text}</tool_call>")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(texts)}


def tool_syntax(option: str, tokenizer: Tokenizer) -> Syntax:
    """How the model writes calls: `--tool-call-parser`, or as its chat template shows."""
    if option == "hermes":
        return "hermes"
    if option == "llama3_json":
        return "llama3_json"
    template = tokenizer.chat_template
    return detect_syntax(template.source if template and template.knows_tools else "")


def new_tool_parser(
    parsed: GenerationRequest, option: str, tokenizer: Tokenizer
) -> ToolParser | None:
    """A parser for one answer to `parsed`, None where it can have no calls."""
    if not isinstance(parsed, ChatRequest):
        return None
    return create_tool_parser(parsed.toolset, tool_syntax(option, tokenizer))

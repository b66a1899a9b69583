"""Tools in the messages of a chat.

A chat template that knows `tools` writes them itself. For a model whose template does not, a system
message describes the tools and how to call them, in the form that engine/text/tool_parser.py reads.
"""

import json
from collections.abc import Sequence
from typing import Any

from engine.text.tokenizer import Tokenizer
from engine.text.tool_formats import tool_syntax
from protocol.openai.tools import Tools

_HOW_TO_CALL = {
    "auto": "To call a tool, answer with\n{call}\nand nothing else. "
    "Call one only where it helps to answer.",
    "required": "Answer with calls and nothing else, as a list: "
    '[{"name": <its name>, "parameters": <an object of its parameters>}]',
    "named": "Answer with the arguments of a call of `{name}` and nothing else, as a JSON object "
    "of its parameters.",
}
_CALL = '<tool_call>{"name": <its name>, "arguments": <an object of its parameters>}</tool_call>'
_OTHER_CALLS = {  # of models whose templates know no tools, too
    "llama3_json": '{"name": <its name>, "parameters": <an object of its parameters>}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><its name><｜tool▁sep｜>"
    "<an object of its parameters><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


def with_tools(
    messages: list[dict[str, Any]],
    tools: Tools,
    tokenizer: Tokenizer,
    option: str = "auto",
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
    """The messages, and the tools for the chat template; either may be the way to tell of them."""
    template = tokenizer.chat_template
    if template is None or template.knows_tools:
        return messages, tools.offered if tools.active else None
    call = _OTHER_CALLS.get(tool_syntax(option, template), _CALL)
    if call == _CALL or "tool_calls" not in template.source:
        messages = [_without_tool_calls(message) for message in messages]
    if not tools.active:
        return messages, None
    functions = (
        json.dumps(tool["function"], ensure_ascii=False) for tool in tools.offered
    )
    how = (
        _HOW_TO_CALL[tools.mode]
        .replace("{name}", tools.name or "")
        .replace("{call}", call)
    )
    told = "\n".join(["You can call these tools:", *functions, how])
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {
            **messages[0],
            "content": f"{messages[0].get('content') or ''}\n\n{told}",
        }
        return [first, *messages[1:]], None
    return [{"role": "system", "content": told}, *messages], None


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

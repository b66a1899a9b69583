"""Adds tools to the messages of a chat.

A chat template that uses the variable `tools` describes the tools itself. For any other
template, this module adds a system message that describes the tools. The message asks
the model for calls in a format that engine/text/tool_parser.py can parse.
"""

import json
from collections.abc import Sequence
from typing import Any

from engine.text.tokenizer import Tokenizer
from engine.text.tool_formats import tool_syntax
from protocol.openai.tools import Tools

# Instructions to the model on how to call a tool, by `Tools.mode`.
_HOW_TO_CALL = {
    "auto": "To call a tool, answer with\n{call}\nand nothing else. "
    "Call one only where it helps to answer.",
    "required": "Answer with calls and nothing else, as a list: "
    '[{"name": <its name>, "parameters": <an object of its parameters>}]',
    "named": "Answer with the arguments of a call of `{name}` and nothing else, as a "
    "JSON object of its parameters.",
}
_DEFAULT_CALL = (
    '<tool_call>{"name": <its name>, "arguments": <an object of its parameters>}'
    "</tool_call>"
)
# Examples of calls, by the name of the format. They are for models that were trained to
# call tools, although the models' templates do not use `tools`.
_LEARNED_CALLS = {
    "llama3_json": '{"name": <its name>, "parameters": <an object of its parameters>}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><its name><｜tool▁sep｜>"
    "<an object of its parameters><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


def add_tools(
    messages: list[dict[str, Any]],
    tools: Tools,
    tokenizer: Tokenizer,
    option: str = "auto",
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
    """Return the messages, and the tools to pass to the chat template.

    If the template does not use tools, the returned tools are None, and the returned
    messages describe the tools.

    Args:
        option: the value of --tool-call-parser.
    """
    template = tokenizer.chat_template
    if template is None or template.knows_tools:
        return messages, tools.offered if tools.is_active else None
    call = _LEARNED_CALLS.get(tool_syntax(option, template), _DEFAULT_CALL)
    if call == _DEFAULT_CALL or "tool_calls" not in template.source:
        messages = [_calls_as_text(message) for message in messages]
    if not tools.is_active:
        return messages, None
    description = _describe(tools, call)
    if messages and messages[0]["role"] in ("system", "developer"):
        content = messages[0].get("content") or ""
        first = {**messages[0], "content": f"{content}\n\n{description}"}
        return [first, *messages[1:]], None
    return [{"role": "system", "content": description}, *messages], None


def _describe(tools: Tools, call: str) -> str:
    """Return a text that describes the offered tools and how to call them.

    Args:
        call: an example of a call.
    """
    functions = [
        json.dumps(tool["function"], ensure_ascii=False) for tool in tools.offered
    ]
    instruction = _HOW_TO_CALL[tools.mode]
    instruction = instruction.replace("{name}", tools.name or "")
    instruction = instruction.replace("{call}", call)
    return "\n".join(["You can call these tools:", *functions, instruction])


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a message with its `tool_calls` written as text in `content`."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        text = json.dumps(call["function"], ensure_ascii=False)
        texts.append(f"<tool_call>{text}</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}

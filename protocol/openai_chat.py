"""The body of /v1/chat/completions."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from protocol.errors import InvalidRequest
from protocol.openai_fields import NEUTRAL_CHAT, NEUTRAL_MESSAGE, drop_neutral, shown
from protocol.openai_requests import Strict, refusal, validate
from protocol.openai_sampling import GenerationRequest, clean_request


class Message(Strict):
    """One turn. `content` given as text parts is joined by newlines."""

    role: Literal["system", "user", "assistant", "developer"]
    content: str
    name: str | None = None  # passed to the chat template, which may use it


class ChatRequest(GenerationRequest):
    endpoint = "/v1/chat/completions"

    messages: tuple[Message, ...] = Field(
        min_length=1, description="a list, not empty, of objects with `role` and `content`"
    )


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Validates the body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    cleaned = clean_request(body, ChatRequest, NEUTRAL_CHAT)
    messages = cleaned.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refusal(ChatRequest, "messages", messages)
    cleaned["messages"] = tuple(_clean_message(i, message) for i, message in enumerate(messages))
    parsed = validate(ChatRequest, cleaned)
    parsed.check()
    return parsed


def _clean_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"`{where}` is {shown(message)}; it must be an object.", param=where)
    cleaned = drop_neutral(message, frozenset(Message.model_fields), NEUTRAL_MESSAGE, where + ".")
    if isinstance(cleaned.get("content"), list):
        cleaned["content"] = "\n".join(_part_texts(cleaned["content"], where + ".content"))
    for field, must_be in (
        ("role", "system, user, assistant or developer"),
        ("content", "a string or a list of text parts"),
        ("name", "a string"),
    ):
        value = cleaned.get(field, "" if field == "name" else None)
        allowed = field != "role" or value in ("system", "user", "assistant", "developer")
        if not isinstance(value, str) or not allowed:
            raise InvalidRequest(
                f"`{where}.{field}` is {shown(value)}; it must be {must_be}.",
                param=f"{where}.{field}",
            )
    return cleaned


def _part_texts(parts: list[Any], where: str) -> Iterable[str]:
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text" or len(part) != 2:
            raise InvalidRequest(
                f"`{where}[{index}]` is {shown(part)}; only parts "
                '{"type": "text", "text": "..."} are supported.',
                param=f"{where}[{index}]",
            )
        yield text

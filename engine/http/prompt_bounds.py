"""Refuses prompts that no context holds before they are validated and rendered.

Only what is certain is refused here: a message, a part of a message and a call of a tool have at
least one token each, and no token has more characters than the longest of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from protocol.errors import ContextLengthExceeded

MIN_ITEMS_LIMIT = 1024  # so many are rendered quickly, whatever the context
MIN_CHARS_LIMIT = 1 << 22  # so are these, and tokenizing stops at twice the context
_COMPOSED_CHARS = (
    4  # characters that Unicode normalization may make one of: three, in Hangul
)
_LISTS = ("messages", "input", "tools")
_PARTS = ("content", "tool_calls")


def check_num_items(members: dict[str, Any], max_model_len: int) -> None:
    """Looks at the decoded members of a body, none of which is validated yet: how many messages,
    parts of messages, calls and tools there are. Quick enough for the event loop, so that the
    members of a body that is refused do not wait for a thread.

    Raises:
        ContextLengthExceeded: names the field with too many items.
    """
    if _is_truncated(members):
        return
    max_items = _max_items(max_model_len)
    for name in _LISTS:
        items = members.get(name)
        if not isinstance(items, list):
            continue
        num_items = len(items)
        if num_items <= max_items:
            num_items += sum(map(_num_parts, items))
        if num_items > max_items:
            what = "messages, parts and calls" if name != "tools" else "tools"
            _refuse(name, f"{num_items} {what}", max_items, max_model_len)


def check_num_chars(
    members: dict[str, Any], max_model_len: int, longest_token_chars: int
) -> None:
    """The same of the characters of each prompt, unless the client asks for truncation.

    Raises:
        ContextLengthExceeded: names the field with too many characters.
    """
    if _is_truncated(members):
        return
    max_chars = max(
        _COMPOSED_CHARS * longest_token_chars * max_model_len, MIN_CHARS_LIMIT
    )
    for name, num_chars in _lengths(members, _max_items(max_model_len)):
        if num_chars > max_chars:
            _refuse(name, f"{num_chars} characters", max_chars, max_model_len)


def _is_truncated(members: dict[str, Any]) -> bool:
    """Whether the client asks for a prompt that is too long to be cut, not refused."""
    return (
        members.get("truncate_prompt_tokens") is not None
        or members.get("truncation") == "auto"
    )


def _max_items(max_model_len: int) -> int:
    return max(max_model_len, MIN_ITEMS_LIMIT)


def _refuse(field: str, size: str, limit: int, max_model_len: int) -> None:
    raise ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens and `{field}` is too long: "
        f"it has {size}, at most {limit} are taken. Send less.",
        param=field,
    )


def _num_parts(item: Any) -> int:
    """Parts of the content of a message, beyond the first of each kind, and calls."""
    if not isinstance(item, dict):
        return 0
    lists = [item[name] for name in _PARTS if isinstance(item.get(name), list)]
    return sum(max(len(parts) - 1, 0) for parts in lists)


def _lengths(members: dict[str, Any], max_items: int) -> Iterator[tuple[str, int]]:
    """Characters of each prompt, by the name of its field."""
    prompts = members.get("prompt")
    prompts = prompts if isinstance(prompts, list) else [prompts]
    for prompt in prompts[
        :max_items
    ]:  # validation refuses fewer; longer lists are token ids
        if isinstance(prompt, str):
            yield "prompt", len(prompt)
    for name in ("messages", "input"):
        yield name, sum(map(len, _texts(members.get(name))))


def _texts(value: Any) -> Iterator[str]:
    """The texts of messages and of the parts of their contents."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            for name in ("content", "text"):
                if item.get(name):
                    yield from _texts(item[name])

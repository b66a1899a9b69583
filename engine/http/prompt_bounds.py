"""Refuses prompts that cannot fit the context before they are validated and rendered.

It refuses only what is certain: a message, a part of a message and a call of a tool
have at least one token each, and no token has more characters than the longest of the
vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from protocol.errors import ContextLengthExceeded

# So many items and characters are always accepted, whatever the context: they are
# rendered quickly, and tokenizing stops at twice the context.
MIN_ITEMS_LIMIT = 1024
MIN_CHARS_LIMIT = 1 << 22
# Unicode normalization may compose so many characters to one: three, in Hangul.
_COMPOSED_CHARS = 4
_LISTS = ("messages", "input", "tools")
_PARTS = ("content", "tool_calls")


def check_num_items(members: dict[str, Any], max_model_len: int) -> None:
    """Check how many messages, parts of messages, calls and tools a body has.

    The members are decoded, but not validated. The check is quick enough for the event
    loop, so that a body that is refused does not wait for a thread.

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
            unit = "messages, parts and calls" if name != "tools" else "tools"
            _refuse(name, f"{num_items} {unit}", max_items, max_model_len)


def check_num_chars(
    members: dict[str, Any], max_model_len: int, longest_token_chars: int
) -> None:
    """Check how many characters each prompt has, unless the client requests truncation.

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
    """Whether the client wants a prompt that is too long to be cut, not refused."""
    return (
        members.get("truncate_prompt_tokens") is not None
        or members.get("truncation") == "auto"
    )


def _max_items(max_model_len: int) -> int:
    return max(max_model_len, MIN_ITEMS_LIMIT)


def _refuse(field: str, size: str, limit: int, max_model_len: int) -> None:
    raise ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens and `{field}` "
        f"is too long: it has {size}, at most {limit} are taken. Send less.",
        param=field,
    )


def _num_parts(item: Any) -> int:
    """Return a message's calls and parts of content, except the first of each."""
    if not isinstance(item, dict):
        return 0
    lists = [item[name] for name in _PARTS if isinstance(item.get(name), list)]
    return sum(max(len(parts) - 1, 0) for parts in lists)


def _lengths(members: dict[str, Any], max_items: int) -> Iterator[tuple[str, int]]:
    """Yield the field and the characters of each prompt."""
    prompts = members.get("prompt")
    prompts = prompts if isinstance(prompts, list) else [prompts]
    # Validation accepts fewer prompts. A longer list has token ids.
    for prompt in prompts[:max_items]:
        if isinstance(prompt, str):
            yield "prompt", len(prompt)
    for name in ("messages", "input"):
        yield name, sum(map(len, _texts(members.get(name))))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of messages and of the parts of their contents."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            for name in ("content", "text"):
                if item.get(name):
                    yield from _texts(item[name])

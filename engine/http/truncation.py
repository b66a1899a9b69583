"""Truncates prompts to fit the context, and texts to a number of tokens. Pure, no I/O.

`truncate_prompt_tokens` keeps the last tokens of a prompt. `truncation: auto` of
/v1/responses drops a conversation's oldest messages instead. The prefill server and the
decode server of a request truncate in the same way, because the result depends only on
the request and the model.
"""

from collections.abc import Awaitable, Callable, Sequence

from protocol.openai.chat import Message

# `last_tokens` encodes only the end of a text: _CHARS_PER_TOKEN characters for each
# requested token, and at least MIN_PART_CHARS. If that part has too few tokens, a part
# of _GROWTH times the size is encoded. `first_tokens` uses the text's beginning in the
# same way.
_CHARS_PER_TOKEN = 16
MIN_PART_CHARS = 2048
_GROWTH = 4
# If only a part of a text is encoded, the tokens near the cut may differ from those of
# the complete text. So the part must have at least this many more tokens than are
# returned.
_MARGIN_TOKENS = 64
_INSTRUCTIONS = ("system", "developer")

Encode = Callable[[str], list[int]]


def last_tokens(text: str, limit: int, encode: Encode) -> list[int]:
    """Return at most `limit` last tokens of `text`, without encoding the whole text.

    The result begins with the tokens that `encode` puts before every text, such as BOS.
    """
    size = max(MIN_PART_CHARS, _CHARS_PER_TOKEN * limit)
    ids = encode(text[-size:])
    while size < len(text) and len(ids) < limit + _MARGIN_TOKENS:
        size *= _GROWTH
        ids = encode(text[-size:])
    if len(ids) <= limit:
        return ids
    prefix = encode("")
    if len(prefix) < limit and ids[: len(prefix)] == prefix:
        num_last = limit - len(prefix)
        return [*prefix, *ids[len(ids) - num_last :]]
    return ids[-limit:]


def first_tokens(text: str, limit: int, encode: Encode) -> list[int]:
    """Return the first `limit` tokens of `text`, without encoding the whole text."""
    size = max(MIN_PART_CHARS, _CHARS_PER_TOKEN * limit)
    ids = encode(text[:size])
    while size < len(text) and len(ids) < limit + _MARGIN_TOKENS:
        size *= _GROWTH
        ids = encode(text[:size])
    return ids[:limit]


def possible_starts(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """Return the number of leading instructions, and the possible starts.

    Truncation keeps the leading instructions (system and developer messages), and all
    messages from a start on. The first message after the instructions and all later
    user messages are possible starts. The last turn alone may be too long, so assistant
    messages after the last user message are also possible starts. A tool message after
    a dropped message is never a start: a tool's result is not kept without its call.

    Returns:
        The number of instructions, and the possible starts as ascending indices.
    """
    num_instructions = 0
    while (
        num_instructions < len(messages) - 1
        and messages[num_instructions].role in _INSTRUCTIONS
    ):
        num_instructions += 1
    later = range(num_instructions + 1, len(messages))
    starts = [num_instructions]
    starts += [index for index in later if messages[index].role == "user"]
    after_last_user = range(starts[-1] + 1, len(messages))
    starts += [
        index for index in after_last_user if messages[index].role == "assistant"
    ]
    return num_instructions, starts


async def first_that_fits(
    starts: Sequence[int], fits: Callable[[int], Awaitable[bool]]
) -> int:
    """Return the first of `starts` that fits, or the last start if none fits.

    Uses binary search: later starts have fewer messages, so if one fits, all later fit.

    Args:
        starts: indices of messages, in ascending order.
        fits: returns whether the messages from an index on fit.
    """
    if await fits(starts[0]):
        return starts[0]
    begin = 1
    end = len(starts) - 1  # if no earlier start fits, the last is returned unchecked
    while begin < end:
        middle = (begin + end) // 2
        if await fits(starts[middle]):
            end = middle
        else:
            begin = middle + 1
    return starts[end]

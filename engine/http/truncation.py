"""Truncates prompts to fit the context, and texts to a number of tokens. Pure, no I/O.

`truncate_prompt_tokens` keeps the last tokens of a prompt. `truncation: auto` of
/v1/responses drops a conversation's oldest messages instead. The prefill server and the
decode server of a request truncate in the same way, because the result depends only on
the request and the model.
"""

from collections.abc import Awaitable, Callable, Sequence

from protocol.openai.chat import Message

# `last_tokens` encodes this many of the last characters of a text for each requested
# token, but at least MIN_PART_CHARS. If these have too few tokens, it encodes _GROWTH
# times as many characters. `first_tokens` does the same with the first characters.
_CHARS_PER_TOKEN = 16
MIN_PART_CHARS = 2048
_GROWTH = 4
# If only a part of a text is encoded, the tokens where it was cut may differ from those
# in the complete text. So at least this number of tokens are encoded and not returned.
_MARGIN_TOKENS = 64
_INSTRUCTIONS = ("system", "developer")

Encode = Callable[[str], list[int]]


def last_tokens(text: str, limit: int, encode: Encode) -> list[int]:
    """Return the last tokens of `text`, at most `limit`, without encoding all of it.

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
    """Return the first `limit` tokens of `text`, without encoding all of it."""
    size = max(MIN_PART_CHARS, _CHARS_PER_TOKEN * limit)
    ids = encode(text[:size])
    while size < len(text) and len(ids) < limit + _MARGIN_TOKENS:
        size *= _GROWTH
        ids = encode(text[:size])
    return ids[:limit]


def possible_starts(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """Return how many instructions come first, and where the kept messages may start.

    Instructions (system and developer messages) are always kept. After them, the kept
    messages may start at the first message, or at any later message of the user. If
    even the last message of the user and all messages after it are too long, the kept
    messages may start at an assistant's message that follows it. So a tool's result is
    never kept without its call.

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

    Uses binary search, because later starts have fewer messages.

    Args:
        starts: indices of messages, in ascending order.
        fits: returns whether the messages from an index on fit.
    """
    if await fits(starts[0]):
        return starts[0]
    begin = 1
    end = len(starts) - 1  # the last start is returned without a trial
    while begin < end:
        middle = (begin + end) // 2
        if await fits(starts[middle]):
            end = middle
        else:
            begin = middle + 1
    return starts[end]

"""Truncates prompts to fit. Pure, so that both servers of a request truncate alike.

`truncate_prompt_tokens` keeps the last tokens of a prompt. `truncation: auto` of
/v1/responses drops a conversation's oldest messages instead.
"""

from collections.abc import Awaitable, Callable, Sequence

from protocol.openai.chat import Message

MIN_TAIL_CHARS = 2048
# The end of a text that is encoded has so many characters per token, and _GROWTH times
# as many if that was too short.
_CHARS_PER_TOKEN = 16
_GROWTH = 4
# Tokens after a cut, where the text may be split in another way than in the whole text.
_MARGIN_TOKENS = 64
_INSTRUCTIONS = ("system", "developer")

Encode = Callable[[str], list[int]]


def last_tokens(text: str, limit: int, encode: Encode) -> list[int]:
    """Return the last `limit` tokens of `text`.

    They include the tokens that `encode` puts before every text. Only the end of a long
    text is encoded.
    """
    size = max(MIN_TAIL_CHARS, _CHARS_PER_TOKEN * limit)
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


def possible_starts(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """Return how many instructions stay first, and where the other messages may begin.

    The others begin where they do now, or with a later user's message. Only if the last
    user's message and all that follows it is too long, they begin with a later
    assistant's message. So no result of a tool is left without its call.
    """
    num_instructions = 0
    while (
        num_instructions < len(messages) - 1
        and messages[num_instructions].role in _INSTRUCTIONS
    ):
        num_instructions += 1
    later = range(num_instructions + 1, len(messages))
    starts = [num_instructions]
    starts += [at for at in later if messages[at].role == "user"]
    after_last = range(starts[-1] + 1, len(messages))
    starts += [at for at in after_last if messages[at].role == "assistant"]
    return num_instructions, starts


async def first_that_fits(
    starts: Sequence[int], fits: Callable[[int], Awaitable[bool]]
) -> int:
    """Return the first of `starts` that fits, or the last one if none does.

    Args:
        fits: whether the messages from a start on fit; later starts have fewer
            messages.
    """
    if await fits(starts[0]):
        return starts[0]
    begin = 1
    end = len(starts) - 1  # taken without a trial
    while begin < end:
        middle = (begin + end) // 2
        if await fits(starts[middle]):
            end = middle
        else:
            begin = middle + 1
    return starts[end]

"""Prompts that are cut to fit. Pure, so that both servers of a request cut its prompt alike.

`truncate_prompt_tokens` keeps the last tokens of a prompt. `truncation: auto` of /v1/responses
drops a conversation's oldest messages instead.
"""

from collections.abc import Awaitable, Callable, Sequence

from protocol.openai.chat import Message

MIN_TAIL_CHARS = 2048
_CHARS_PER_TOKEN = (
    16  # what a text is expected to have at most; more are taken if that is too few
)
_GROWTH = 4
_MARGIN_TOKENS = (
    64  # behind a cut, where a text may be split into other tokens than in the whole
)
_INSTRUCTIONS = ("system", "developer")

Encode = Callable[[str], list[int]]


def last_tokens(text: str, limit: int, encode: Encode) -> list[int]:
    """The last `limit` tokens of `text`, behind those that `encode` puts before every text, which
    count. Of a long text only the end is encoded."""
    size = max(MIN_TAIL_CHARS, _CHARS_PER_TOKEN * limit)
    ids = encode(text[-size:])
    while size < len(text) and len(ids) < limit + _MARGIN_TOKENS:
        size *= _GROWTH
        ids = encode(text[-size:])
    if len(ids) <= limit:
        return ids
    before = encode("")
    if len(before) < limit and ids[: len(before)] == before:
        return [*before, *ids[len(ids) - (limit - len(before)) :]]
    return ids[-limit:]


def possible_starts(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """How many instructions stay at the beginning of `messages`, and where the rest may begin.

    The rest begins where it does now, or with a later user's message. Only if the last of these and
    all that follows it is too long, it begins with a later assistant's message. So no result of a
    tool is left without its call.
    """
    num_kept = 0
    while num_kept < len(messages) - 1 and messages[num_kept].role in _INSTRUCTIONS:
        num_kept += 1
    later = range(num_kept + 1, len(messages))
    starts = [num_kept, *(at for at in later if messages[at].role == "user")]
    after = range(starts[-1] + 1, len(messages))
    return num_kept, starts + [at for at in after if messages[at].role == "assistant"]


async def first_that_fits(
    starts: Sequence[int], fits: Callable[[int], Awaitable[bool]]
) -> int:
    """The first of `starts` that fits, or the last one if none does.

    Args:
        fits: whether what begins there fits; what begins later is shorter.
    """
    if await fits(starts[0]):
        return starts[0]
    begin = 1
    end = len(starts) - 1  # is taken without being tried
    while begin < end:
        middle = (begin + end) // 2
        if await fits(starts[middle]):
            end = middle
        else:
            begin = middle + 1
    return starts[end]

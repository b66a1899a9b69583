"""Who of those that wait is served next: answers that go on from another server, as their clients
have waited already; then the more urgent, of equals a much shorter prompt before a long one, else
who came first. A sequence lets others go first `MAX_OVERTAKEN` times at most; short prompts
together for no longer than it would have kept them waiting.
"""

from collections import deque
from itertools import islice

from engine.core.sequence import Sequence

MAX_OVERTAKEN = 64
LONG_TOKENS = 1024  # of a prompt that lets others pass
_SHORTER = 4  # times, that these are
_LOOKED_AT = 64  # of those that wait, in each step


def enqueue(waiting: deque[Sequence], sequence: Sequence) -> None:
    at = len(waiting)
    while at:
        before = waiting[at - 1]
        counts = _overtakes(sequence, before)
        if not counts or before.num_overtaken + counts > MAX_OVERTAKEN:
            break
        before.num_overtaken += counts
        at -= 1
    waiting.insert(at, sequence)


def _overtakes(later: Sequence, before: Sequence) -> int:
    """As how many of MAX_OVERTAKEN it counts that the later one goes first; 0: it does not."""
    urgency, own = ((not s.request.known, s.request.priority) for s in (later, before))
    if urgency != own:
        return int(urgency < own)
    if not is_much_shorter(later, len(before.token_ids)) or before.remote is not None:
        return 0
    return -(-MAX_OVERTAKEN * len(later.token_ids) // len(before.token_ids))


def is_much_shorter(sequence: Sequence, tokens: int) -> bool:
    """Than a prompt of so many tokens."""
    is_short = len(sequence.token_ids) * _SHORTER <= tokens >= LONG_TOKENS
    return is_short and sequence.remote is None


def short_ones(waiting: deque[Sequence], under_way: int, budget: int) -> list[Sequence]:
    """Who shall be computed in the next step of so many tokens beside prompts that have `under_way`
    left, and would take all of it: the first that wait, if much shorter, for half of it at most."""
    found: list[Sequence] = []
    left = budget // 2
    for sequence in islice(waiting, _LOOKED_AT if under_way > budget - left else 0):
        left -= len(sequence.token_ids)
        is_one = not sequence.children and sequence.awaited is None
        if left < 0 or not (is_one and is_much_shorter(sequence, under_way)):
            break
        found.append(sequence)
    return found

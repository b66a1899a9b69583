"""Who of those that wait is served next: answers that go on from another server, as their clients
have waited already; then the more urgent, of equals a much shorter prompt before a long one, else
by keys in equal shares, else who came first. A sequence lets others go first `MAX_OVERTAKEN` times
at most; short prompts together for no longer than it would have kept them waiting.
"""

from collections import Counter, deque
from itertools import islice

from engine.core.sequence import Sequence

MAX_OVERTAKEN = 64
LONG_TOKENS = 1024  # of a prompt that lets others pass
_SHORTER = 4  # times, that these are
# A token of a prompt whose logprobs are wanted counts as so many: all of the vocabulary is computed
# and sorted at each, which on small models takes longer than the model itself.
SCORED_WEIGHT = 4
_LOOKED_AT = 64  # of those that wait, in each step


def enqueue(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Puts a sequence where its turn is."""
    turns, own_turn = _turns(waiting, sequence)
    at = len(waiting)
    while at:
        before = waiting[at - 1]
        counts = _overtakes(sequence, before)
        if not counts and _is_owed(sequence, before):
            counts = int(own_turn < turns[at - 1])
        if not counts or before.num_overtaken + counts > MAX_OVERTAKEN:
            break
        before.num_overtaken += counts
        at -= 1
    waiting.insert(at, sequence)


def _turns(waiting: deque[Sequence], sequence: Sequence) -> tuple[list[int], int]:
    """How much work of its own key each of `waiting` completes when it is served, and how much
    `sequence` would behind them. Served in this order, keys get equal shares."""
    completed = Counter[str]()
    turns = []
    for each in waiting:
        completed[each.request.share] += work_of(each, len(each.token_ids))
        turns.append(completed[each.request.share])
    own_work = work_of(sequence, len(sequence.token_ids))
    return turns, completed[sequence.request.share] + own_work


def _is_owed(later: Sequence, before: Sequence) -> bool:
    """Whether these two share the engine by keys: equally urgent ones of different keys."""
    urgency, own = (_urgency(each) for each in (later, before))
    return urgency == own and later.request.share != before.request.share


def _urgency(sequence: Sequence) -> tuple[bool, int]:
    return not sequence.request.known, sequence.request.priority


def work_of(sequence: Sequence, num_tokens: int) -> int:
    """What it takes to compute so many of its tokens, in tokens of a usual prompt."""
    return num_tokens * (SCORED_WEIGHT if sequence.is_scoring else 1)


def _overtakes(later: Sequence, before: Sequence) -> int:
    """As how many of MAX_OVERTAKEN it counts that the later one goes first; 0: it does not."""
    urgency, own = (_urgency(each) for each in (later, before))
    if urgency != own:
        return int(urgency < own)
    own_work, work = (work_of(each, len(each.token_ids)) for each in (later, before))
    if not is_much_shorter(later, work) or before.remote is not None:
        return 0
    return -(-MAX_OVERTAKEN * own_work // work)


def is_much_shorter(sequence: Sequence, tokens: int) -> bool:
    """Whether it takes much less work than a usual prompt of so many tokens."""
    work = work_of(sequence, len(sequence.token_ids))
    is_short = work * _SHORTER <= tokens >= LONG_TOKENS
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

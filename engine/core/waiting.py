"""The order of the waiting queue.

1. Requests that continue on this server after a failover or migration come first,
   because their clients have waited already.
2. More urgent requests (a smaller `priority`) precede less urgent ones.
3. Among equally urgent requests, a much shorter prompt precedes a long one.
4. Requests of different API keys are served in turn, in equal shares of work.
5. Otherwise, requests are served in order of arrival.

A request is overtaken at most `MAX_OVERTAKEN` times. If a short prompt overtakes a long
prompt, this may count as more than 1: MAX_OVERTAKEN x (work of the short prompt) /
(work of the long prompt). The short prompts that overtake a long prompt therefore take
at most as much work, in total, as the long prompt.

A preempted sequence does not follow these rules: the scheduler puts it at the head of
the queue, and no request overtakes it.
"""

from collections import Counter, deque
from itertools import islice

from engine.core.sequence import Sequence

MAX_OVERTAKEN = 64
LONG_PROMPT_TOKENS = 1024  # shortest prompt that much shorter prompts may overtake
_SHORTER_FACTOR = 4  # a much shorter prompt is at least this many times shorter
# A prompt token with logprobs counts as this many prompt tokens without logprobs. The
# logits of the whole vocabulary are computed and sorted for each such token. With small
# models, this takes longer than the model itself.
SCORED_WEIGHT = 4
_MAX_SHORT_PROMPTS = 64  # at most this many waiting prompts are checked in each step


def enqueue(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Inserts a sequence into the queue according to the rules of this module. Adds to
    `num_overtaken` of the queued sequences that the new sequence overtakes."""
    shares, share = _completed_shares(waiting, sequence)
    index = len(waiting)
    while index:
        earlier = waiting[index - 1]
        cost = _overtaking_cost(sequence, earlier)
        if not cost and _competes_by_key(sequence, earlier):
            cost = int(share < shares[index - 1])
        if not cost or earlier.num_overtaken + cost > MAX_OVERTAKEN:
            break
        earlier.num_overtaken += cost
        index -= 1
    waiting.insert(index, sequence)


def _completed_shares(
    waiting: deque[Sequence], sequence: Sequence
) -> tuple[list[int], int]:
    """Returns, for each request, the total work of the waiting requests of the same API
    key up to and including this request.

    The first result has one value for each request of `waiting`. The second result is
    the value of `sequence` at the end of the queue. If requests are served in ascending
    order of these values, all keys get equal shares of work.
    """
    completed = Counter[str]()
    shares = []
    for queued in waiting:
        key = queued.request.share
        completed[key] += work_of(queued, len(queued.token_ids))
        shares.append(completed[key])
    work = work_of(sequence, len(sequence.token_ids))
    return shares, completed[sequence.request.share] + work


def _competes_by_key(later: Sequence, earlier: Sequence) -> bool:
    """Whether two sequences are equally urgent and have different API keys."""
    has_same_key = later.request.share == earlier.request.share
    return _urgency(later) == _urgency(earlier) and not has_same_key


def _urgency(sequence: Sequence) -> tuple[bool, int]:
    """Returns a sort key, which is smaller for more urgent sequences."""
    return not sequence.request.resumed_choices, sequence.request.priority


def work_of(sequence: Sequence, num_tokens: int) -> int:
    """Returns the work to compute `num_tokens` tokens of a sequence, as a number of
    prompt tokens without logprobs."""
    return num_tokens * (SCORED_WEIGHT if sequence.is_scoring else 1)


def _overtaking_cost(later: Sequence, earlier: Sequence) -> int:
    """Returns the amount to add to `earlier.num_overtaken` if `later` overtakes
    `earlier`; 0 if `later` must not overtake. Does not consider API keys.
    """
    later_urgency = _urgency(later)
    earlier_urgency = _urgency(earlier)
    if later_urgency != earlier_urgency:
        return int(later_urgency < earlier_urgency)
    later_work = work_of(later, len(later.token_ids))
    earlier_work = work_of(earlier, len(earlier.token_ids))
    if not is_much_shorter(later, earlier_work) or earlier.pull is not None:
        return 0
    return -(-MAX_OVERTAKEN * later_work // earlier_work)


def is_much_shorter(sequence: Sequence, num_tokens: int) -> bool:
    """Whether a sequence takes much less work than a long prompt of `num_tokens` tokens
    without logprobs. False if a prompt of `num_tokens` tokens is not long, or if the
    sequence has a pull."""
    work = work_of(sequence, len(sequence.token_ids))
    is_short = work * _SHORTER_FACTOR <= num_tokens
    is_long_prompt = num_tokens >= LONG_PROMPT_TOKENS
    return is_short and is_long_prompt and sequence.pull is None


def select_short_prompts(
    waiting: deque[Sequence], prefill_tokens: int, budget: int
) -> list[Sequence]:
    """Returns the waiting prompts that the next step computes before running prompts.

    The returned prompts are the first ones of the queue. Each takes much less work than
    the running prompts take together, and all take at most half of the step.

    Args:
        prefill_tokens: the remaining work of all running prompts.
        budget: tokens of the step.
    """
    num_left = budget // 2
    if prefill_tokens <= budget - num_left:
        return []  # the running prompts leave half of the step free anyway
    selected: list[Sequence] = []
    for sequence in islice(waiting, _MAX_SHORT_PROMPTS):
        num_left -= len(sequence.token_ids)
        is_single = not sequence.choices.children and sequence.awaited_prefix is None
        is_short = is_single and is_much_shorter(sequence, prefill_tokens)
        if num_left < 0 or not is_short:
            break
        selected.append(sequence)
    return selected

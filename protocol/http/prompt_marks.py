"""Estimates which tokens of waiting prompts are computed once for several of them: no I/O.

A prompt has marks at fixed positions. The key of a mark is a hash of all tokens before it, so two
prompts with the same key have the same beginning. The tokens between two marks are a span:

    marks      64     128    192           the first prompt pays for three spans,
    prompt 1   |------|------|---          the second one for its last span only,
    prompt 2   |------|------|===          as it differs from the first there

Of the waiting prompts that have a span, one pays for it: it is expected to compute the span, and
the others to find it in the prefix cache. Nobody pays for a span that was computed recently, as the
prefix cache should still hold it. This process does not see the cache, so all of this is an
estimate; a wrong one changes how long the queue may get, never an answer.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPAN_TOKENS = 64  # between marks in the first 4,096 tokens of a prompt
_SPANS_PER_SIZE = (
    64  # spans get twice as long where so many of them precede; bounds the marks
)


class Mark(NamedTuple):
    """A position in a prompt.

    Attributes:
        key: hash of all tokens before it, salted for this process.
        num_tokens: tokens since the mark before it.
    """

    key: int
    num_tokens: int


def marks_of(token_ids: Sequence[int], cache_salt: bytes = b"") -> list[Mark]:
    """The marks of a prompt: 64 in its first 4,096 tokens, then 32 each time its length doubles.

    Args:
        cache_salt: prompts of different salts share no KV, so they have no mark in common.
    """
    ids = array("q", token_ids)
    marks: list[Mark] = []
    key = hash(cache_salt)
    start = 0
    size = SPAN_TOKENS
    while start + size <= len(ids):
        key = hash((key, ids[start : start + size].tobytes()))
        marks.append(Mark(key, size))
        start += size
        if start >= _SPANS_PER_SIZE * size:
            size *= 2
    return marks


@dataclass(eq=False, slots=True)
class WaitingPrompt:
    """A prompt whose first token has not come.

    Attributes:
        num_tokens: tokens that this server computes or pulls for it if nothing is shared.
        min_tokens: tokens that it counts as at least.
        is_shareable: False if it is computed in full whatever the prefix cache holds.
        num_shared: tokens of it that others pay for, or that were computed recently.
    """

    priority: int
    num_tokens: int
    min_tokens: int
    marks: Sequence[Mark] = ()
    is_shareable: bool = True
    num_shared: int = 0

    @property
    def num_counted(self) -> int:
        """Tokens that it counts as in the queue."""
        shared = self.num_shared if self.is_shareable else 0
        return max(self.num_tokens - shared, self.min_tokens)


class SharedPrefixes:
    """The spans of all waiting prompts, and of recently computed ones.

    Args:
        on_change: called with a prompt and the change of its `num_counted`.

    Attributes:
        capacity_tokens: tokens that the prefix cache can hold; 0 until the engine has reported it.
    """

    def __init__(self, on_change: Callable[[WaitingPrompt, int], None]) -> None:
        self.capacity_tokens = 0
        self._on_change = on_change
        self._waiting: dict[
            int, dict[WaitingPrompt, None]
        ] = {}  # by key, the oldest first
        self._payers: dict[int, WaitingPrompt] = {}
        self._computed = OrderedDict[
            int, int
        ]()  # tokens of spans by key, least recently used first
        self._num_computed = 0  # tokens in `_computed`

    def __len__(self) -> int:
        """How many spans are known."""
        return len(self._waiting.keys() | self._computed.keys())

    def add(self, prompt: WaitingPrompt) -> None:
        """Counts a new prompt. A more urgent one pays for what a less urgent one paid for."""
        for key, num_tokens in prompt.marks:
            self._waiting.setdefault(key, {})[prompt] = None
            if key in self._computed:
                prompt.num_shared += num_tokens
                continue
            payer = self._payers.get(key)
            if payer is not None and payer.priority <= prompt.priority:
                prompt.num_shared += num_tokens
                continue
            self._payers[key] = prompt
            if payer is not None:
                self._share(payer, num_tokens)
        self._on_change(prompt, prompt.num_counted)

    def remove(self, prompt: WaitingPrompt, *, is_computed: bool) -> None:
        """A prompt waits no longer. Unless it is computed, the oldest of those that share a span
        with it pays for that."""
        self._on_change(prompt, -prompt.num_counted)
        for key, num_tokens in prompt.marks:
            waiting = self._waiting[key]
            del waiting[prompt]
            if not waiting:
                del self._waiting[key]
            is_payer = self._payers.get(key) is prompt
            if is_payer:
                del self._payers[key]
            if is_computed:
                self._remember(key, num_tokens)
            elif is_payer:
                self._charge_oldest(key, num_tokens)
        if is_computed:
            for key, _ in reversed(
                prompt.marks
            ):  # the beginning of a prompt is forgotten last
                self._computed.move_to_end(key)
            self._forget_excess()

    def _remember(self, key: int, num_tokens: int) -> None:
        payer = self._payers.pop(key, None)
        if payer is not None:
            self._share(payer, num_tokens)
        if key not in self._computed:
            self._computed[key] = num_tokens
            self._num_computed += num_tokens

    def _forget_excess(self) -> None:
        while self._num_computed > self.capacity_tokens:
            key, num_tokens = self._computed.popitem(last=False)
            self._num_computed -= num_tokens
            self._charge_oldest(key, num_tokens)

    def _charge_oldest(self, key: int, num_tokens: int) -> None:
        payer = next(iter(self._waiting.get(key, ())), None)
        if payer is not None:
            self._payers[key] = payer
            self._share(payer, -num_tokens)

    def _share(self, prompt: WaitingPrompt, num_tokens: int) -> None:
        before = prompt.num_counted
        prompt.num_shared += num_tokens
        self._on_change(prompt, prompt.num_counted - before)

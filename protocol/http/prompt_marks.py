"""Estimates which tokens several waiting prompts share. The engine computes shared
tokens only once. This module does no I/O.

A prompt has marks at fixed positions. The key of a mark is a hash of all tokens before
the mark, so two prompts with a common key have the same beginning. The tokens before a
mark, back to the previous mark, are the mark's span:

    marks         64     128    192        prompt 1 pays for all its tokens;
    prompt 1   ---|------|------|---       prompt 2 pays only for the tokens
    prompt 2   ---|------|------|===       after their last common mark

If several waiting prompts contain a span, one of the prompts pays for the span: its
count of tokens includes the span. The engine is expected to compute the span for this
prompt, and to find the span in the prefix cache for the other prompts. No prompt pays
for a span that was computed recently, because the prefix cache should still hold the
span. This process cannot see the prefix cache, so all counts are estimates. A wrong
estimate changes which requests are refused, but not the text of an answer.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPAN_TOKENS = 64  # tokens between two marks in the first 4,096 tokens of a prompt
# Spans become longer along a prompt, which bounds the number of marks. The length of
# spans doubles whenever the position reaches this multiple of the current length.
_DOUBLING_RATIO = 64


class Mark(NamedTuple):
    """A position in a prompt.

    Attributes:
        key: Hash of the cache salt and of all tokens before the mark. Different
            processes compute different hashes.
        num_tokens: Tokens since the previous mark, or since the prompt's beginning.
    """

    key: int
    num_tokens: int


def marks_of(token_ids: Sequence[int], cache_salt: bytes = b"") -> list[Mark]:
    """Returns the marks of a prompt.

    The first 4,096 tokens of a prompt have 64 marks. Beyond them, each doubling of the
    length adds 32 marks.

    Args:
        cache_salt: Prompts with different salts share no KV, so they share no marks.
    """
    ids = array("q", token_ids)
    marks: list[Mark] = []
    key = hash(cache_salt)
    start = 0
    span_tokens = SPAN_TOKENS
    while start + span_tokens <= len(ids):
        key = hash((key, ids[start : start + span_tokens].tobytes()))
        marks.append(Mark(key, span_tokens))
        start += span_tokens
        if start >= _DOUBLING_RATIO * span_tokens:
            span_tokens *= 2
    return marks


@dataclass(eq=False, slots=True)
class WaitingPrompt:
    """A prompt that waits for its first output token.

    Attributes:
        num_tokens: Number of tokens that this server must compute or pull for the
            prompt if it shares no tokens with other prompts; 0 if another server is
            computing the prompt.
        min_tokens: Minimum number of tokens that the prompt counts as.
        is_shareable: False if the engine computes the complete prompt even if a part is
            cached.
        num_shared: Number of the prompt's tokens that other prompts pay for, or that
            were computed recently.
    """

    priority: int
    num_tokens: int
    min_tokens: int
    marks: Sequence[Mark] = ()
    is_shareable: bool = True
    num_shared: int = 0

    @property
    def num_counted(self) -> int:
        """Number of tokens that the prompt counts as in the queue."""
        shared = self.num_shared if self.is_shareable else 0
        return max(self.num_tokens - shared, self.min_tokens)


class SharedPrefixes:
    """The spans of all waiting prompts and of recently computed prompts.

    Args:
        on_change: Called with a prompt and the change of its `num_counted`.

    Attributes:
        capacity_tokens: Tokens that the prefix cache can hold; 0 until the engine has
            reported it.
    """

    def __init__(self, on_change: Callable[[WaitingPrompt, int], None]) -> None:
        self.capacity_tokens = 0
        self._on_change = on_change
        # The waiting prompts with a span, in order of arrival, by the span's key.
        self._waiting: dict[int, dict[WaitingPrompt, None]] = {}
        # The prompt that pays for a span, by the span's key.
        self._payers: dict[int, WaitingPrompt] = {}
        # Length of the computed spans by key, the least recently used span first.
        self._computed = OrderedDict[int, int]()
        self._num_computed_tokens = 0  # sum of the lengths in `_computed`

    def __len__(self) -> int:
        """Returns the number of tracked spans."""
        return len(self._waiting.keys() | self._computed.keys())

    def add(self, prompt: WaitingPrompt) -> None:
        """Adds a prompt. It pays for its spans that are not computed, and for which no
        equally or more urgent prompt pays.
        """
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
        """Removes a prompt that no longer waits.

        For each span that the prompt paid for, the oldest waiting prompt with this span
        now pays, unless the span was computed.
        """
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
            # The prefix cache evicts the beginning of a prompt last.
            for key, _ in reversed(prompt.marks):
                self._computed.move_to_end(key)
            self._forget_excess()

    def _remember(self, key: int, num_tokens: int) -> None:
        """Marks a span as computed, so that no prompt pays for the span."""
        payer = self._payers.pop(key, None)
        if payer is not None:
            self._share(payer, num_tokens)
        if key not in self._computed:
            self._computed[key] = num_tokens
            self._num_computed_tokens += num_tokens

    def _forget_excess(self) -> None:
        """Forgets the least recently used spans beyond the capacity of the cache."""
        while self._num_computed_tokens > self.capacity_tokens:
            key, num_tokens = self._computed.popitem(last=False)
            self._num_computed_tokens -= num_tokens
            self._charge_oldest(key, num_tokens)

    def _charge_oldest(self, key: int, num_tokens: int) -> None:
        """Makes the oldest waiting prompt with a span, if any, pay for the span."""
        payer = next(iter(self._waiting.get(key, ())), None)
        if payer is not None:
            self._payers[key] = payer
            self._share(payer, -num_tokens)

    def _share(self, prompt: WaitingPrompt, num_tokens: int) -> None:
        """Adds `num_tokens`, which may be negative, to the prompt's shared tokens."""
        before = prompt.num_counted
        prompt.num_shared += num_tokens
        self._on_change(prompt, prompt.num_counted - before)

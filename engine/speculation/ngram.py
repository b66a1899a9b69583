"""Drafters that copy: they find an earlier occurrence of a sequence's last tokens, and
propose the tokens that follow it.

NgramDrafter searches in the sequence itself, its prompt and its outputs (prompt lookup,
Saxena 2023). PredictionDrafter searches in the text that the client expects
(`prediction` of the OpenAI API). Neither needs weights.

A longer match is a better guess: in edits of source files, the next token is right in
46 % of the matches of three tokens, in 69 % of those of eight, and in 95 % of those of
eleven. So at most as many tokens are proposed as the match has. This limit halves the
number of rejected tokens, and costs 1 % more steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequenceable
from typing import Final, Generic, TypeVar

from engine.core.sequence import Phase, Sequence
from engine.speculation.ngram_index import (
    MAX_MATCH_TOKENS,
    NGRAM_TOKENS,
    Match,
    NgramHistory,
    SortedNgrams,
    last_key,
    longest_match,
)

# A call of `propose` begins no new index after it has indexed this many tokens. So the
# call takes 5 ms at most.
MAX_INDEXED_PER_CALL: Final = 32_768
# Maximum number of outputs that are indexed by a dictionary. With more outputs, all
# tokens are sorted again. An entry of the sorted array takes 8 bytes, and an entry of
# the dictionary about 200 bytes.
MAX_UNSORTED_TOKENS: Final = 8_192
# Until an output matches the prediction, the beginning of the prediction is proposed
# after each of the first outputs, up to this many. Before the predicted text, an answer
# may have a few words or a code fence.
MAX_LEAD_OUTPUTS: Final = 16


_Index = TypeVar("_Index", NgramHistory, SortedNgrams)


class _IndexTable(Generic[_Index]):
    """The indexes of sequences.

    The indexes of finished sequences are dropped when an index is added, and when a
    call has fewer sequences than there are indexes. So there are never more indexes
    than sequences that ran at the same time, and few indexes outlive their sequences.
    """

    def __init__(self) -> None:
        self._by_sequence: dict[Sequence, _Index] = {}
        self._num_indexed = 0  # tokens that the current call has indexed

    def __len__(self) -> int:
        return len(self._by_sequence)

    def start_call(self, num_sequences: int) -> None:
        self._num_indexed = 0
        if len(self._by_sequence) > num_sequences:
            self._drop_finished()

    def _drop_finished(self) -> None:
        self._by_sequence = {
            sequence: index
            for sequence, index in self._by_sequence.items()
            if sequence.phase is not Phase.FINISHED
        }

    def may_index(self, num_tokens: int) -> bool:
        """Whether the current call may make an index of `num_tokens` tokens. If so,
        counts these tokens."""
        if self._num_indexed >= MAX_INDEXED_PER_CALL:
            return False
        self._num_indexed += num_tokens
        return True

    def get(self, sequence: Sequence) -> _Index | None:
        return self._by_sequence.get(sequence)

    def put(self, sequence: Sequence, index: _Index) -> None:
        if sequence not in self._by_sequence:
            self._drop_finished()
        self._by_sequence[sequence] = index


class _CopyingDrafter(ABC, Generic[_Index]):
    """Proposes the tokens that follow a match. Keeps an index for each sequence."""

    name: str
    uses_device = False

    def __init__(self) -> None:
        self._indexes: _IndexTable[_Index] = _IndexTable()

    def propose(
        self, sequences: Sequenceable[Sequence], limits: Sequenceable[int]
    ) -> list[list[int]]:
        self._indexes.start_call(len(sequences))
        return [
            self._propose(sequence, limit)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        match = self._find(sequence) if limit > 0 else None
        return [] if match is None else self._copy(sequence, match, limit)

    @abstractmethod
    def _find(self, sequence: Sequence) -> Match | None:
        """Returns the match after which tokens are copied, or None."""

    @abstractmethod
    def _copy(self, sequence: Sequence, match: Match, limit: int) -> list[int]:
        """Returns at most `limit` tokens that follow a match."""


class NgramDrafter(_CopyingDrafter[NgramHistory]):
    """Proposes the tokens after the longest earlier match of the end of a sequence;
    after the latest of equally long matches."""

    name = "ngram"

    def _find(self, sequence: Sequence) -> Match | None:
        tokens = sequence.token_ids
        # The last token is not indexed, so that the search does not find the end of the
        # sequence itself.
        end = len(tokens) - 1
        history = self._indexes.get(sequence)
        if (
            history is None
            or not history.is_of(tokens, end)
            or history.num_unsorted >= MAX_UNSORTED_TOKENS
        ):
            if not self._indexes.may_index(end):
                return None
            history = NgramHistory(tokens, end)
            self._indexes.put(sequence, history)
        history.extend(tokens, end)
        return history.find(tokens)

    def _copy(self, sequence: Sequence, match: Match, limit: int) -> list[int]:
        limit = min(limit, match.num_tokens)
        copied = sequence.token_ids[match.end : match.end + limit]
        # Fewer than `limit` tokens follow an occurrence only if it overlaps the end of
        # the sequence. The text then repeats these tokens, and so does the proposal.
        num_repetitions = -(-limit // len(copied))
        return (copied * num_repetitions)[:limit]


class PredictionDrafter(_CopyingDrafter[SortedNgrams]):
    """Proposes the tokens that follow the last outputs in the prediction of the
    request."""

    name = "prediction"

    def _find(self, sequence: Sequence) -> Match | None:
        """Returns the occurrence of the last outputs in the prediction. None if there
        is none, or if no token of the prediction is left."""
        prediction = sequence.request.prediction
        if not prediction:
            return None
        ngrams = self._indexes.get(sequence) or self._add_index(sequence, prediction)
        if ngrams is None:
            return None
        tokens = sequence.token_ids
        outputs = tokens[max(sequence.first_output, len(tokens) - MAX_MATCH_TOKENS) :]
        ends = ngrams.ends(last_key(outputs, len(outputs)))
        match = longest_match(prediction, ends, outputs)
        if match is None and sequence.num_outputs <= MAX_LEAD_OUTPUTS:
            match = _match_beginning(prediction, outputs)
        if match is None or match.end == len(prediction):
            return None
        return match

    def _add_index(
        self, sequence: Sequence, prediction: list[int]
    ) -> SortedNgrams | None:
        """Adds and returns the index of a sequence, which all choices of a request
        share. Returns None if this call may not index more tokens."""
        indexes = (self._indexes.get(choice) for choice in sequence.choices)
        ngrams = next((index for index in indexes if index is not None), None)
        if ngrams is None:
            if not self._indexes.may_index(len(prediction)):
                return None
            ngrams = SortedNgrams(prediction, len(prediction))
        self._indexes.put(sequence, ngrams)
        return ngrams

    def _copy(self, sequence: Sequence, match: Match, limit: int) -> list[int]:
        # After a short match, still propose as many tokens as the next search needs.
        limit = min(limit, max(match.num_tokens, NGRAM_TOKENS))
        return sequence.request.prediction[match.end : match.end + limit]


def _match_beginning(prediction: list[int], outputs: list[int]) -> Match | None:
    """Returns the match of the last outputs with the first tokens of the prediction, of
    fewer than NGRAM_TOKENS tokens. If the outputs do not contain the first token of the
    prediction yet, returns a match of 0 tokens. Otherwise returns None."""
    for num_tokens in range(NGRAM_TOKENS - 1, 0, -1):
        if outputs[-num_tokens:] == prediction[:num_tokens]:
            return Match(num_tokens, num_tokens)
    if prediction[0] in outputs:
        return None
    return Match(0, 0)

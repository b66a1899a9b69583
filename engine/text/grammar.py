"""Computes masks of the tokens that may be sampled, for outputs that follow a grammar.

    request -> GrammarCompiler (threads, a cache) -> GrammarState of a sequence
            -> masks of a step

A GrammarState depends only on the output tokens of its sequence (the outputs), and
catches up with outputs that it has not consumed yet. So preemption, recomputation and a
first token that the prefill server sampled need no special treatment. Rank 0 computes
the masks in threads while the step's forward pass runs (core/core_grammar.py).

A sequence that follows a grammar ends with one of these finish reasons:
- "stop" as soon as no text can follow, even if no end token was sampled.
- "length" at max_tokens, whether the text is complete or not.
- the error GrammarFailed, if the text is incomplete and no token of the vocabulary can
  continue it, or if the matcher reports an error.

An end token may be sampled only if the text is complete. A stop token of the client may
be sampled only if the grammar allows this token. Stop tokens are banned before
min_tokens. If no other token can follow, the sequence ends with "stop" earlier.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.sampling.token_masks import WORD_BITS, Int32s, bits_of, is_set
from engine.text.grammar_compile import (
    build_vocabulary,
    compiling_threads,
    make_matcher,
)
from engine.text.schema.errors import GrammarError, reworded
from engine.text.tokenizer import NO_TEMPLATE, Tokenizer, TokenizerNotFound
from protocol.errors import GrammarFailed
from protocol.messages import AddRequest, Grammar

logger = logging.getLogger("baton.engine")

_MAX_CACHED_BYTES = 256 * 2**20
# Slow grammars arrive one at a time (grammar_check.py). So with two threads, a slow
# grammar does not delay fast grammars.
_NUM_COMPILING_THREADS = 2
_ID_BYTES = 64  # bytes that a token id takes in a tuple
# CPU seconds. If the latest mask of a grammar took longer, no step waits for the
# grammar's masks.
_SLOW_MASK_S = 0.01


class Ending(NamedTuple):
    """The end of a sequence, with an error if the output is incomplete."""

    error: GrammarFailed | None = None


COMPLETE = Ending()


class CompiledGrammar:
    """The state that all sequences with the same grammar share.

    Args:
        grammar: the grammar in the request.
        matcher: a matcher at the grammar's beginning; None if every text matches.
        num_words: W, the number of words in a mask.
        create_matcher: returns a new matcher at the grammar's beginning.

    Attributes:
        first_mask: int32 [W], the mask before any output. None if the matcher is in
            error or cannot continue; each GrammarState then handles this itself.
        mask_s: CPU seconds that the latest mask of this grammar took. Consuming a token
            takes no longer than computing the mask before the token, which tries all
            tokens.
        banned: tokens that must not be sampled after certain outputs. The key is the
            latest outputs.
        prefix_lengths: the lengths of the keys of `banned`, except 0.
        allowed: int32 [W], the mask of `Grammar.allowed` without the tokens that are
            banned at every position. None: all tokens.
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher | None,
        num_words: int,
        create_matcher: Callable[[], LLMatcher],
    ) -> None:
        self.matcher = matcher
        self.create_matcher = create_matcher
        self.num_words = num_words
        self.banned: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in grammar.banned:
            self.banned.setdefault(tuple(prefix), []).append(last)
        self.prefix_lengths = {len(prefix) for prefix in self.banned} - {0}
        self.allowed = bits_of(grammar.allowed, num_words) if grammar.allowed else None
        if always_banned := self.banned.get(()):
            unbanned = ~bits_of(always_banned, num_words)
            self.allowed = unbanned if self.allowed is None else self.allowed & unbanned
        self.mask_s = 0.0
        row = np.full(num_words, -1, dtype=np.int32)
        if matcher is None:
            self.first_mask: Int32s | None = row
            return
        matcher = matcher.deep_copy()
        self.mask_s = _fill(matcher, row)
        can_continue = not (matcher.is_error() or matcher.is_stopped())
        self.first_mask = row if can_continue else None


def _fill(matcher: LLMatcher, row: Int32s) -> float:
    """Write the matcher's mask to `row`, int32 [W]; return the CPU seconds it took."""
    start_s = time.thread_time()
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return time.thread_time() - start_s


class GrammarState:
    """The position of one sequence in its grammar.

    Not thread-safe: only one thread at a time may use a state, see `is_busy`.

    Args:
        grammar: the grammar that the sequence follows.
        request: the sequence's request. An end token may be sampled only if it is in
            the request's `stop_token_ids`.
        end_ids: the model's end tokens.

    Attributes:
        ending: how the sequence ends; None while it may continue.
        row: int32 [W], the mask for the next token. Valid when the work started by
            `begin_mask` is done. W is the grammar's `num_words`.
        work: the latest work on this state in another thread.
    """

    def __init__(
        self, grammar: CompiledGrammar, request: AddRequest, end_ids: Sequence[int]
    ) -> None:
        self.ending: Ending | None = None
        self.row = np.full(grammar.num_words, -1, dtype=np.int32)
        # The proposals of the latest `begin_mask`, and one mask after each prefix of
        # the proposals.
        self._proposals: tuple[int, ...] = ()
        self._proposal_rows: list[Int32s] = []
        self.work: Future[None] | None = None
        self._grammar = grammar
        self._initial_matcher = grammar.matcher
        self._matcher = self._copy_initial_matcher()
        # The arguments of the latest call of `consume` or `begin_mask`: the sequence's
        # tokens, and the position of the first output among them.
        self._token_ids: Sequence[int] = ()
        self._first_output = 0
        # All copies of a matcher share one lexer, which has a limited number of states.
        # If the shared lexer is full, `_replace_matcher` creates a private lexer.
        self._has_private_lexer = False
        # The latest outputs, as many as the longest key in the grammar's `banned` has.
        self._recent_outputs: list[int] = []
        self._num_consumed = 0
        # The number of consumed outputs when `row` was last filled; -1 if `row` has
        # never been filled.
        self._num_outputs_at_fill = -1
        self._min_tokens = request.sampling.min_tokens
        self._stop_ids = request.stop_token_ids
        self._banned_end_ids = [i for i in end_ids if i not in request.stop_token_ids]

    @property
    def is_busy(self) -> bool:
        """Whether another thread is using the state, so that the caller must wait."""
        return self.work is not None and not self.work.done()

    @property
    def is_slow(self) -> bool:
        """Whether the grammar's masks are too slow for a step to wait for them.

        If so, another thread also consumes the outputs, so that the engine core need
        not wait for `consume`.
        """
        return self._grammar.mask_s > _SLOW_MASK_S

    def consume(self, token_ids: Sequence[int], first_output: int) -> Ending | None:
        """Consume the sequence's new outputs.

        Do not call this if one of these outputs has ended the sequence.

        Args:
            token_ids: all tokens of the sequence.
            first_output: the position of the first output in `token_ids`.

        Returns:
            `ending`: how the sequence ends after the outputs; None if it may continue.
        """
        self._advance(self._update_outputs(token_ids, first_output), fill=False)
        return self.ending

    def begin_mask(
        self,
        token_ids: Sequence[int],
        first_output: int,
        threads: ThreadPoolExecutor,
        proposals: tuple[int, ...] = (),
    ) -> None:
        """Start to consume the outputs and compute `row` in another thread.

        Does nothing if the row is up to date and there are no proposals. If no token
        can be sampled, the thread sets `ending`, and `row` then allows every token.

        Args:
            proposals: tokens that may follow the outputs. The thread also computes the
                masks after them; see `rows_after`.
        """
        outputs = self._update_outputs(token_ids, first_output)
        self._proposals = proposals
        self._proposal_rows = []
        if proposals:
            self.work = threads.submit(self._fill_rows, outputs, proposals)
        elif outputs or self._num_outputs_at_fill != self._num_consumed:
            self.work = threads.submit(self._advance, outputs, fill=True)

    def rows_after(self, proposals: tuple[int, ...]) -> list[Int32s]:
        """Return one mask, int32 [W], after each prefix of `proposals`.

        Call this when the work of `begin_mask` is done. The list ends before the first
        proposal that is not allowed or ends the output, and where the grammar becomes
        slow. It is empty if the latest `begin_mask` had different proposals.
        """
        return self._proposal_rows if proposals == self._proposals else []

    def _copy_initial_matcher(self) -> LLMatcher | None:
        """Return a new matcher at the grammar's beginning; None if there is no matcher.

        The matcher is copied, not reset, because LLMatcher.reset would keep errors.
        """
        if self._initial_matcher is None:
            return None
        return self._initial_matcher.deep_copy()

    def _update_outputs(self, token_ids: Sequence[int], first_output: int) -> list[int]:
        """Store the arguments, and return the outputs that are not consumed yet.

        If the sequence has fewer outputs than were consumed, the state is reset to the
        grammar's beginning.
        """
        self._token_ids = token_ids
        self._first_output = first_output
        if len(token_ids) - first_output < self._num_consumed:
            # The first output was discarded, for example after a failed pull of KV.
            self._matcher = self._copy_initial_matcher()
            self._recent_outputs = []
            self._num_consumed = 0
            self._num_outputs_at_fill = -1
            self.ending = None
        return list(token_ids[first_output + self._num_consumed :])

    def _advance(self, outputs: list[int], *, fill: bool) -> None:
        """Consume outputs, and write the next mask to `row` if `fill` is true.

        Sets `ending` if the sequence cannot continue.
        """
        try:
            if outputs and self.ending is None:
                if self._matcher is not None:
                    self._matcher.consume_tokens(outputs)
                self._num_consumed += len(outputs)
                if lengths := self._grammar.prefix_lengths:
                    self._recent_outputs = (self._recent_outputs + outputs)[
                        -max(lengths) :
                    ]
                self.ending = self._find_ending()
            is_filled = self._num_outputs_at_fill == self._num_consumed
            if fill and self.ending is None and not is_filled:
                self.ending = self._fill_row()
        # An internal error of the matcher ends only this request.
        except Exception as error:
            logger.exception(
                "The grammar matcher failed; one request ends with an error.",
                exc_info=error,
            )
            self.ending = self._failure("internal error of the server; see its log")
        if fill:
            if self.ending is not None:
                self.row.fill(-1)
            self._num_outputs_at_fill = self._num_consumed

    def _fill_rows(self, outputs: list[int], proposals: tuple[int, ...]) -> None:
        """Consume outputs. Write the next mask to `row`, and the masks after proposals
        to `_proposal_rows`. Stops once the grammar is slow, because the caller's time
        limit allows for only one mask."""
        self._advance(outputs, fill=True)
        state = self._copy()
        state._token_ids = token_ids = list(self._token_ids)
        for token_id in proposals:
            is_last = self.is_slow or state.ending is not None
            if is_last or not is_set(state.row, token_id):
                break
            token_ids.append(token_id)
            state._advance([token_id], fill=True)
            if state.ending is None:
                self._proposal_rows.append(state.row.copy())

    def _copy(self) -> "GrammarState":
        """Return a state that can advance without changing this one."""
        state = copy(self)
        state.row = self.row.copy()
        if self._matcher is not None:
            state._matcher = self._matcher.deep_copy()
        return state

    def _fill_row(self) -> Ending | None:
        """Write the mask to `row`; return the ending if the mask allows no token."""
        if not self._is_lexer_full:
            self._compute_mask()
        if self._is_lexer_full:
            self._replace_matcher()
        if ending := self._find_ending():
            return ending
        banned = list[int]()
        for length in self._grammar.prefix_lengths:
            banned += self._grammar.banned.get(
                tuple(self._recent_outputs[-length:]), ()
            )
        if self._matcher is not None:
            banned += self._banned_end_ids
            if self._num_consumed < self._min_tokens:
                banned += self._stop_ids
        if self._grammar.allowed is not None:
            self.row &= self._grammar.allowed
        for token_id in banned:
            if token_id < len(self.row) * WORD_BITS:
                bit = np.uint32(1 << token_id % WORD_BITS).view(np.int32)
                self.row[token_id // WORD_BITS] &= ~bit
        if self.row.any():
            return None
        return self._end("no token of the vocabulary fits; use a simpler grammar")

    def _compute_mask(self) -> None:
        """Write the matcher's mask to `row`. `_fill_row` applies the request's bans."""
        matcher = self._matcher
        first_mask = self._grammar.first_mask
        if first_mask is not None and (matcher is None or self._num_consumed == 0):
            self.row[:] = first_mask
        elif matcher is not None:
            self._grammar.mask_s = _fill(matcher, self.row)

    @property
    def _is_lexer_full(self) -> bool:
        """Whether the matcher's lexer is shared and has reached its limit of states.

        A private lexer that is full counts as an error of the grammar instead.
        """
        if self._matcher is None or self._has_private_lexer:
            return False
        if not self._matcher.is_error():
            return False
        return "lexer error: too many" in self._matcher.get_error()

    def _replace_matcher(self) -> None:
        """Continue with a new matcher and an empty lexer, and compute the mask."""
        self._matcher = self._grammar.create_matcher()
        self._has_private_lexer = True
        if self._grammar.matcher is self._initial_matcher:
            # Sequences that start later will share another empty lexer.
            self._grammar.matcher = self._grammar.create_matcher()
        first = self._first_output
        consumed = list(self._token_ids[first : first + self._num_consumed])
        self._matcher.consume_tokens(consumed)
        self._compute_mask()

    def _find_ending(self) -> Ending | None:
        """Return the ending if the matcher has an error or no text can follow."""
        if self._matcher is None or self._is_lexer_full:
            return None  # `_fill_row` replaces a matcher with a full lexer
        if self._matcher.is_error():
            return self._failure(reworded(self._matcher.get_error()))
        if self._matcher.is_stopped():
            return self._end("no text can follow; use a simpler grammar")
        return None

    def _end(self, reason: str) -> Ending:
        """Return COMPLETE, or an error if the output is incomplete or empty."""
        is_accepting = self._matcher is not None and self._matcher.is_accepting()
        if is_accepting and self._num_consumed > 0:
            return COMPLETE
        return self._failure(reason)

    def _failure(self, reason: str) -> Ending:
        return Ending(
            GrammarFailed(
                f"after {self._num_consumed} tokens the output cannot continue as the "
                f"request's grammar requires: {reason}"
            )
        )


class GrammarCompiler:
    """Compiles grammars in threads. Only the thread of the engine core may call it.

    Args:
        model_dir: the directory with the tokenizer.
        vocab_size: the number of the model's logits.
        on_compiled: called from another thread whenever the compilation of a grammar
            has ended, even with an error.
    """

    def __init__(
        self, model_dir: str | Path, vocab_size: int, on_compiled: Callable[[], None]
    ) -> None:
        self._model_dir = model_dir
        self.vocab_size = vocab_size
        self.on_compiled = on_compiled
        # W, the number of words in a mask. The tokenizer may have more tokens than the
        # model has logits.
        self._num_words = 0
        self._end_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[Grammar, tuple[Future[CompiledGrammar], int]] = (
            OrderedDict()
        )
        self._compiling = compiling_threads("grammar-compiler", _NUM_COMPILING_THREADS)
        # Loading a large vocabulary takes a second. The loading starts here, so that
        # the first request need not wait for it.
        self._tokenizer = self._compiling.submit(self._load)

    def _load(self) -> LLTokenizer:
        tokenizer = Tokenizer(self._model_dir, NO_TEMPLATE)
        num_tokens = max(self.vocab_size, tokenizer.vocab_size)
        self._end_ids = tokenizer.eos_ids
        self._num_words = -(-num_tokens // WORD_BITS)
        return build_vocabulary(tokenizer, num_tokens)

    def compile(self, grammar: Grammar, nbytes: int = 0) -> Future[CompiledGrammar]:
        """Return the compiled grammar as a future.

        Starts to compile a grammar that is not in the cache. Callers must keep the
        future while they wait, because the cache may drop the future before the grammar
        is compiled.

        Args:
            nbytes: the memory of the compiled grammar in bytes; 0 if unknown.
        """
        nbytes = max(nbytes, len(grammar.text))
        nbytes += self.vocab_size // 4  # `first_mask` and `allowed`
        nbytes += _ID_BYTES * (len(grammar.allowed) + sum(map(len, grammar.banned)))
        future, nbytes = self._compiled.pop(grammar, (None, nbytes))
        if future is None:
            future = self._compiling.submit(self._compile, grammar)
            future.add_done_callback(lambda _: self.on_compiled())
        self._compiled[grammar] = (future, nbytes)
        while sum(size for _, size in self._compiled.values()) > _MAX_CACHED_BYTES:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        tokenizer = self._tokenizer.result()
        matcher = None if grammar.kind == "any" else make_matcher(tokenizer, grammar)
        submit = partial(self._compiling.submit, make_matcher, tokenizer, grammar)
        return CompiledGrammar(
            grammar, matcher, self._num_words, lambda: submit().result()
        )

    def new_state(
        self, request: AddRequest, compiled: Future[CompiledGrammar] | None = None
    ) -> GrammarState:
        """Return a state at the beginning of the request's grammar.

        Waits until the grammar is compiled.

        Args:
            compiled: the future of the compiled grammar, if the caller has it.

        Raises:
            GrammarFailed: the grammar cannot be used with this model.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        try:
            compiled_grammar = (compiled or self.compile(grammar)).result()
        except (GrammarError, TokenizerNotFound) as error:
            raise GrammarFailed(
                f"the request's grammar cannot be used: {error}"
            ) from None
        except Exception as error:
            logger.exception(
                "A grammar could not be compiled; one request ends with an error.",
                exc_info=error,
            )
            raise GrammarFailed(
                "the request's grammar cannot be used: internal error of the server; "
                "see its log"
            ) from None
        return GrammarState(compiled_grammar, request, self._end_ids)

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)

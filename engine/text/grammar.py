"""Outputs that must match a grammar, as masks of the tokens that may be drawn.

    request -> GrammarCompiler (threads, a cache) -> GrammarState of a sequence
            -> masks of a step

A state is a function of the sequence's outputs: it catches up with whatever outputs the
sequence has. So preemption, recompute and a first token drawn on the prefill server
need no special treatment. Rank 0 makes the masks in threads while the step's forward
pass runs (core/core_grammar.py).

A sequence under a grammar ends with:
- "stop" as soon as no more text can follow, without an end token. An end token may be
  drawn only where the text is complete. A stop token of the client may be drawn only
  where the grammar allows it.
- "length" at max_tokens, whether the text is complete or not. min_tokens bars the stop
  tokens; where nothing else can follow, the sequence still ends with "stop".
- GrammarFailed where an incomplete text cannot continue in this vocabulary, or where
  the matcher gave up.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from engine.text.grammar_compile import compiling_threads, make_matcher, vocabulary_of
from engine.text.schema.errors import GrammarError, reworded
from engine.text.tokenizer import NO_TEMPLATE, Tokenizer, TokenizerNotFound
from protocol.errors import GrammarFailed
from protocol.messages import AddRequest, Grammar

logger = logging.getLogger("baton.engine")

Int32s = npt.NDArray[np.int32]

_MAX_CACHED_BYTES = 256 * 2**20
_NUM_COMPILING = 2  # one slow grammar, which come one at a time, holds up no other
_BITS = 32
_ID_BYTES = 64  # memory of a token id in a tuple
# Seconds of a core. A grammar whose latest mask took longer is slow: no step waits for
# it.
_SLOW_S = 0.01


class Ending(NamedTuple):
    """The end of a sequence that draws no further token: complete, or with an error."""

    error: GrammarFailed | None = None


COMPLETE = Ending()


class CompiledGrammar:
    """The state that all sequences under a grammar share.

    Args:
        grammar: the grammar as the request has it.
        matcher: a matcher at the grammar's beginning; None where any text matches.
        num_words: W, the words of a mask.
        make: makes another such matcher.

    Attributes:
        first_mask: int32 [W], the mask before any output; None where the matcher is in
            error or stopped, so that each state finds out.
        mask_s: seconds of a core that the latest mask took. Consuming a token costs no
            more than the mask that allowed it, which tries all tokens.
        banned: the tokens that may not follow, by the tokens before them.
        sizes: how many outputs the keys of `banned` have, without 0.
        allowed: int32 [W], the tokens that may ever be drawn; None: all.
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher | None,
        num_words: int,
        make: Callable[[], LLMatcher],
    ) -> None:
        self.matcher = matcher
        self.make = make
        self.num_words = num_words
        self.banned: dict[tuple[int, ...], list[int]] = {}
        for *before, last in grammar.banned:
            self.banned.setdefault(tuple(before), []).append(last)
        self.sizes = {len(before) for before in self.banned} - {0}
        self.allowed = _bits_of(grammar.allowed, num_words) if grammar.allowed else None
        if always_banned := self.banned.get(()):
            others = ~_bits_of(always_banned, num_words)
            self.allowed = others if self.allowed is None else self.allowed & others
        self.mask_s = 0.0
        row = np.full(num_words, -1, dtype=np.int32)
        if matcher is None:
            self.first_mask: Int32s | None = row
            return
        matcher = matcher.deep_copy()
        self.mask_s = _fill(matcher, row)
        can_continue = not (matcher.is_error() or matcher.is_stopped())
        self.first_mask = row if can_continue else None


def _bits_of(token_ids: Sequence[int], num_words: int) -> Int32s:
    """Return int32 [W] with the bits of these tokens set."""
    bits = np.zeros(num_words * _BITS, dtype=np.bool_)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _fill(matcher: LLMatcher, row: Int32s) -> float:
    """Write a mask to `row`; return the seconds of a core that it took."""
    start_s = time.thread_time()
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return time.thread_time() - start_s


class GrammarState:
    """The position of one sequence in its grammar. One thread works on it at a time.

    Args:
        grammar: the grammar that the sequence follows.
        request: the sequence's request. Of the end tokens, only its stop tokens may be
            drawn.
        end_ids: the model's end tokens.

    Attributes:
        ending: how the sequence ends, once that is certain.
        row: int32 [W], the mask, once it is filled.
        work: the work of another thread on this state.
    """

    def __init__(
        self, grammar: CompiledGrammar, request: AddRequest, end_ids: Sequence[int]
    ) -> None:
        self.ending: Ending | None = None
        self.row = np.full(grammar.num_words, -1, dtype=np.int32)
        self.work: Future[None] | None = None
        self._grammar = grammar
        self._initial_matcher = grammar.matcher
        self._matcher = self._copy_initial_matcher()
        # The sequence's tokens at the latest call, and the position of its first
        # output.
        self._token_ids: Sequence[int] = ()
        self._first_output = 0
        # All copies of a matcher share one lexer, which may be full.
        self._has_private_lexer = False
        self._recent: list[int] = []  # the latest outputs that bans look at
        self._num_consumed = 0
        self._num_filled_at = -1  # the number of outputs that `row` is for
        self._min_tokens = request.sampling.min_tokens
        self._stop_ids = request.stop_token_ids
        self._barred_end_ids = [i for i in end_ids if i not in request.stop_token_ids]

    @property
    def is_busy(self) -> bool:
        """Whether another thread works on the state, so that no other may."""
        return self.work is not None and not self.work.done()

    @property
    def is_slow(self) -> bool:
        """Whether masks take so long that no step waits for them.

        Other threads then also consume the outputs.
        """
        return self._grammar.mask_s > _SLOW_S

    def follow(self, token_ids: Sequence[int], first_output: int) -> Ending | None:
        """Catch up with a sequence's outputs, none of which ended the sequence.

        Returns:
            `ending`: how the sequence ends after them; None when it may continue.
        """
        self._advance(self._new_outputs(token_ids, first_output), fill=False)
        return self.ending

    def begin(
        self, token_ids: Sequence[int], first_output: int, threads: ThreadPoolExecutor
    ) -> None:
        """Have another thread follow the outputs and write the mask to `row`.

        Does nothing where the row is up to date. Where no token can be drawn, the
        thread sets `ending`, and `row` allows every token.
        """
        outputs = self._new_outputs(token_ids, first_output)
        if outputs or self._num_filled_at != self._num_consumed:
            self.work = threads.submit(self._advance, outputs, fill=True)

    def _copy_initial_matcher(self) -> LLMatcher | None:
        """Return a matcher at the beginning; LLMatcher.reset keeps errors."""
        if self._initial_matcher is None:
            return None
        return self._initial_matcher.deep_copy()

    def _new_outputs(self, token_ids: Sequence[int], first_output: int) -> list[int]:
        self._token_ids = token_ids
        self._first_output = first_output
        if len(token_ids) - first_output < self._num_consumed:
            # A first token was taken back, so the state starts again.
            self._matcher = self._copy_initial_matcher()
            self._recent = []
            self._num_consumed = 0
            self._num_filled_at = -1
            self.ending = None
        return list(token_ids[first_output + self._num_consumed :])

    def _advance(self, outputs: list[int], *, fill: bool) -> None:
        try:
            if outputs and self.ending is None:
                if self._matcher is not None:
                    self._matcher.consume_tokens(outputs)
                self._num_consumed += len(outputs)
                if sizes := self._grammar.sizes:
                    self._recent = (self._recent + outputs)[-max(sizes) :]
                self.ending = self._find_ending()
            is_filled = self._num_filled_at == self._num_consumed
            if fill and self.ending is None and not is_filled:
                self.ending = self._fill_row()
        # A mistake of the matcher itself ends one request, not all.
        except Exception as error:
            logger.exception("a grammar's matcher failed", exc_info=error)
            self.ending = self._failure("a fault of the server; see its log")
        if fill:
            if self.ending is not None:
                self.row.fill(-1)
            self._num_filled_at = self._num_consumed

    def _fill_row(self) -> Ending | None:
        """Write the mask to `row`; return the ending where no token is left."""
        if not self._is_lexer_full:
            self._compute_mask()
        if self._is_lexer_full:
            self._replace_matcher()
        if ending := self._find_ending():
            return ending
        barred = list[int]()
        for size in self._grammar.sizes:
            barred += self._grammar.banned.get(tuple(self._recent[-size:]), ())
        if self._matcher is not None:
            barred += self._barred_end_ids
            if self._num_consumed < self._min_tokens:
                barred += self._stop_ids
        if self._grammar.allowed is not None:
            self.row &= self._grammar.allowed
        for token_id in barred:
            if token_id < len(self.row) * _BITS:
                bit = np.uint32(1 << token_id % _BITS).view(np.int32)
                self.row[token_id // _BITS] &= ~bit
        if self.row.any():
            return None
        return self._end("no token fits; use a simpler one")

    def _compute_mask(self) -> None:
        matcher = self._matcher
        first_mask = self._grammar.first_mask
        if first_mask is not None and (matcher is None or self._num_consumed == 0):
            self.row[:] = first_mask
        elif matcher is not None:
            self._grammar.mask_s = _fill(matcher, self.row)

    @property
    def _is_lexer_full(self) -> bool:
        """Whether other sequences filled the shared lexer, unlike a private one."""
        if self._matcher is None or self._has_private_lexer:
            return False
        if not self._matcher.is_error():
            return False
        return "lexer error: too many" in self._matcher.get_error()

    def _replace_matcher(self) -> None:
        """Continue with a new matcher, and compute its mask."""
        self._matcher = self._grammar.make()
        self._has_private_lexer = True
        if self._grammar.matcher is self._initial_matcher:
            # Sequences that start later get an empty lexer, too.
            self._grammar.matcher = self._grammar.make()
        first = self._first_output
        consumed = list(self._token_ids[first : first + self._num_consumed])
        self._matcher.consume_tokens(consumed)
        self._compute_mask()

    def _find_ending(self) -> Ending | None:
        """Return the ending where the matcher reports that nothing can follow."""
        if self._matcher is None or self._is_lexer_full:
            return None  # the next mask decides
        if self._matcher.is_error():
            return self._failure(reworded(self._matcher.get_error()))
        if self._matcher.is_stopped():
            return self._end("nothing can follow; use a simpler one")
        return None

    def _end(self, reason: str) -> Ending:
        """Return COMPLETE, or an error where the output is incomplete or empty."""
        is_accepting = self._matcher is not None and self._matcher.is_accepting()
        if is_accepting and self._num_consumed > 0:
            return COMPLETE
        return self._failure(reason)

    def _failure(self, reason: str) -> Ending:
        return Ending(
            GrammarFailed(
                f"after {self._num_consumed} tokens the output cannot continue as the "
                f"request's grammar demands: {reason}"
            )
        )


def step_masks(states: Sequence[GrammarState | None], vocab_size: int) -> Int32s:
    """Return the masks of a step's rows: int32 [R, ceil(V / 32)].

    Bit t % 32 of word t // 32 is set where token t may be drawn. Rows of None, and of
    states that another thread works on, allow every token.
    """
    num_words = -(-vocab_size // _BITS)  # the states' rows may have more
    bits = np.full((len(states), num_words), -1, dtype=np.int32)
    for at, state in enumerate(states):
        if state is not None and not state.is_busy:
            bits[at] = state.row[:num_words]
    return bits


class GrammarCompiler:
    """Makes grammar states. Only the thread of the engine core calls it.

    Args:
        model_dir: the directory with the tokenizer.
        vocab_size: the size of the model's logits.
        on_compiled: called from another thread when a requested grammar is compiled.
    """

    def __init__(
        self, model_dir: str | Path, vocab_size: int, on_compiled: Callable[[], None]
    ) -> None:
        self._model_dir = model_dir
        self.vocab_size = vocab_size
        self.on_compiled = on_compiled
        # W of the tokenizer's masks, which may be wider than the model's.
        self._num_words = 0
        self._end_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[Grammar, tuple[Future[CompiledGrammar], int]] = (
            OrderedDict()
        )
        self._compiling = compiling_threads("grammar-compiler", _NUM_COMPILING)
        # The load starts now: it takes a second for a large vocabulary, and no request
        # waits for it yet.
        self._tokenizer = self._compiling.submit(self._load)

    def _load(self) -> LLTokenizer:
        tokenizer = Tokenizer(self._model_dir, NO_TEMPLATE)
        num_tokens = max(self.vocab_size, tokenizer.vocab_size)
        self._end_ids = tokenizer.eos_ids
        self._num_words = -(-num_tokens // _BITS)
        return vocabulary_of(tokenizer, num_tokens)

    def compiled(self, grammar: Grammar, nbytes: int = 0) -> Future[CompiledGrammar]:
        """Return the compiled grammar, which may be in progress.

        Callers keep the future while they wait: more grammars may be in progress than
        the cache holds.

        Args:
            nbytes: the memory of the compiled grammar, if it is more than its text.
        """
        nbytes = max(nbytes, len(grammar.text))
        nbytes += self.vocab_size // 4  # two masks
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

    def state(
        self, request: AddRequest, compiled: Future[CompiledGrammar] | None = None
    ) -> GrammarState:
        """Return a state at the beginning of the request's grammar.

        Waits until the grammar is compiled.

        Args:
            compiled: the grammar, where the caller has it.

        Raises:
            GrammarFailed: the grammar cannot be used with this model.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        try:
            compiled_grammar = (compiled or self.compiled(grammar)).result()
        except (GrammarError, TokenizerNotFound) as error:
            raise GrammarFailed(
                f"the request's grammar cannot be used: {error}"
            ) from None
        except Exception as error:
            logger.exception("a grammar could not be compiled", exc_info=error)
            raise GrammarFailed(
                "the request's grammar cannot be used: a fault of the server; see its "
                "log"
            ) from None
        return GrammarState(compiled_grammar, request, self._end_ids)

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)

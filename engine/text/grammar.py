"""Outputs that must match a grammar: compiled once, followed by each sequence, as token masks.

    request -> GrammarCompiler (threads, a cache) -> GrammarState of a sequence -> masks of a step

A state is a function of the sequence's outputs, so preemption, recompute and a first token drawn
on the prefill server change nothing: it catches up with whatever outputs the sequence has. Rank 0
makes the masks, in threads, while the step's forward pass runs (core/core_grammar.py).

How a sequence ends under a grammar:
- "stop" as soon as no more text can follow, without drawing an end token; an end token may be drawn
  only where the text is complete, a client's own stop token only where the grammar allows it.
- "length" at max_tokens, complete or not. min_tokens bars the stop tokens as ever; where nothing
  else could follow, the sequence ends with "stop" all the same.
- GrammarFailed where an incomplete text cannot go on in this vocabulary, or the matcher gave up.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Sequenceable
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
_NUM_COMPILING = (
    2  # as one takes long, others do not wait: slow ones come one at a time
)
_BITS = 32
_ID_BYTES = 64  # of memory, in a tuple
_SLOW_S = (
    0.01  # of a core: above it a grammar's latest mask makes all its sequences sit out
)


class Ending(NamedTuple):
    """A sequence that is to draw no further token: complete, or with an error."""

    error: GrammarFailed | None = None


COMPLETE = Ending()


class CompiledGrammar:
    """What all sequences under a grammar share.

    Args:
        grammar: what it was.
        matcher: at the beginning; None where any text matches.
        num_words: W of a mask.
        make: another such matcher.

    Attributes:
        first_mask: [W], before any output; None where that is for each state to find out.
        mask_s: of a core, that the latest mask took. Taking in a token costs no more than the mask
            that allowed it, which tries all of them.
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher | None,
        num_words: int,
        make: Callable[[], LLMatcher],
    ) -> None:
        self.matcher, self.make = matcher, make
        self.num_words = num_words
        self.banned: dict[
            tuple[int, ...], list[int]
        ] = {}  # tokens by those before them
        for *before, last in grammar.banned:
            self.banned.setdefault(tuple(before), []).append(last)
        self.sizes = {len(before) for before in self.banned} - {
            0
        }  # outputs that bans look back
        self.allowed = _bits_of(grammar.allowed, num_words) if grammar.allowed else None
        if always := self.banned.get(()):
            others = ~_bits_of(always, num_words)
            self.allowed = others if self.allowed is None else self.allowed & others
        self.mask_s = 0.0
        row = np.full(num_words, -1, dtype=np.int32)
        if matcher is None:
            self.first_mask: Int32s | None = row
            return
        matcher = matcher.deep_copy()
        self.mask_s = _fill(matcher, row)
        can_go_on = not (matcher.is_error() or matcher.is_stopped())
        self.first_mask = row if can_go_on else None


def _bits_of(token_ids: Sequenceable[int], num_words: int) -> Int32s:
    """[W], with these tokens' bits set."""
    bits = np.zeros(num_words * _BITS, dtype=np.bool_)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _fill(matcher: LLMatcher, row: Int32s) -> float:
    """Writes a mask; the seconds of a core that it took."""
    began_s = time.thread_time()
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return time.thread_time() - began_s


class GrammarState:
    """Where one sequence is in its grammar. One thread works on it at a time.

    Args:
        grammar: what it follows.
        request: the sequence's; of the end tokens only its stop tokens may be drawn.
        end_ids: the model's end tokens.
    """

    def __init__(
        self, grammar: CompiledGrammar, request: AddRequest, end_ids: Sequenceable[int]
    ) -> None:
        self.ending: Ending | None = None
        self.row = np.full(
            grammar.num_words, -1, dtype=np.int32
        )  # the mask, once it is filled
        self.work: Future[None] | None = None  # of another thread, on this state
        self._grammar = grammar
        self._begin = grammar.matcher
        self._matcher = self._begin and self._begin.deep_copy()
        self._told: tuple[Sequenceable[int], int] = (
            (),
            0,
        )  # tokens, of which the first output
        self._has_own = (
            False  # a lexer: all copies of a matcher share one, which may be full
        )
        self._recent: list[int] = []  # the latest outputs, as far as bans look back
        self._num_consumed = 0
        self._num_filled_at = -1  # outputs that `row` is for
        self._min_tokens = request.sampling.min_tokens
        self._stop_ids = request.stop_token_ids
        self._silent_ids = [i for i in end_ids if i not in request.stop_token_ids]

    @property
    def is_busy(self) -> bool:
        """Whether another thread works on it, and no one else may."""
        return self.work is not None and not self.work.done()

    @property
    def is_slow(self) -> bool:
        """Whether no step waits for its mask, and to follow an output is other threads' work."""
        return self._grammar.mask_s > _SLOW_S

    def follow(self, token_ids: Sequenceable[int], first_output: int) -> Ending | None:
        """Catches up with a sequence's outputs, none of which was to end it.

        Returns:
            `ending`: how the sequence ends after them, or None when it may go on.
        """
        self._advance(self._news(token_ids, first_output), fill=False)
        return self.ending

    def begin(
        self,
        token_ids: Sequenceable[int],
        first_output: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        """Has another thread follow the outputs and write the allowed tokens' bits to `row`, unless
        that is done. Where nothing can be drawn, it sets `ending`, and `row` allows everything."""
        news = self._news(token_ids, first_output)
        if news or self._num_filled_at != self._num_consumed:
            self.work = threads.submit(self._advance, news, fill=True)

    def _news(self, token_ids: Sequenceable[int], first_output: int) -> list[int]:
        self._told = token_ids, first_output
        if (
            len(token_ids) - first_output < self._num_consumed
        ):  # a first token was taken back
            self._matcher = (
                self._begin and self._begin.deep_copy()
            )  # reset mends no failed one
            self._recent = []
            self._num_consumed, self._num_filled_at, self.ending = 0, -1, None
        return list(token_ids[first_output + self._num_consumed :])

    def _advance(self, news: list[int], *, fill: bool) -> None:
        try:
            if news and self.ending is None:
                if self._matcher is not None:
                    self._matcher.consume_tokens(news)
                self._num_consumed += len(news)
                if sizes := self._grammar.sizes:
                    self._recent = (self._recent + news)[-max(sizes) :]
                self.ending = self._look()
            if (
                fill
                and self.ending is None
                and self._num_filled_at != self._num_consumed
            ):
                self.ending = self._allow()
        except (
            Exception
        ) as error:  # the matcher's own mistake ends one request, not all
            logger.exception("a grammar's matcher failed", exc_info=error)
            self.ending = self._failed("a fault of the server; see its log")
        if fill:
            if self.ending is not None:
                self.row.fill(-1)
            self._num_filled_at = self._num_consumed

    def _allow(self) -> Ending | None:
        if not self._is_spent:
            self._compute()
        if self._is_spent:
            self._renew()
        if ending := self._look():
            return ending
        barred = list[int]()
        for size in self._grammar.sizes:
            barred += self._grammar.banned.get(tuple(self._recent[-size:]), ())
        if self._matcher is not None:
            barred += self._silent_ids
            barred += self._stop_ids if self._num_consumed < self._min_tokens else []
        if self._grammar.allowed is not None:
            self.row &= self._grammar.allowed
        for token_id in barred:
            if token_id < len(self.row) * _BITS:
                bit = np.uint32(1 << token_id % _BITS).view(np.int32)
                self.row[token_id // _BITS] &= ~bit
        return None if self.row.any() else self._end("no token fits; use a simpler one")

    def _compute(self) -> None:
        matcher, first = self._matcher, self._grammar.first_mask
        if first is not None and (matcher is None or self._num_consumed == 0):
            self.row[:] = first
        elif matcher is not None:
            self._grammar.mask_s = _fill(matcher, self.row)

    @property
    def _is_spent(self) -> bool:
        """Whether a lexer of its own may go on where others have filled this one."""
        if self._matcher is None or self._has_own or not self._matcher.is_error():
            return False
        return "lexer error: too many" in self._matcher.get_error()

    def _renew(self) -> None:
        token_ids, first = self._told
        self._matcher, self._has_own = self._grammar.make(), True
        if self._grammar.matcher is self._begin:  # for those that come
            self._grammar.matcher = self._grammar.make()
        self._matcher.consume_tokens(
            list(token_ids[first : first + self._num_consumed])
        )
        self._compute()

    def _look(self) -> Ending | None:
        """Whether the matcher itself says that nothing can follow."""
        if self._matcher is None or self._is_spent:  # then the next mask tells
            return None
        if self._matcher.is_error():
            return self._failed(reworded(self._matcher.get_error()))
        return (
            self._end("nothing can follow; use a simpler one")
            if self._matcher.is_stopped()
            else None
        )

    def _end(self, reason: str) -> Ending:
        """An error for an output that was to have text, or a request that was to have an output."""
        can_end = self._matcher is not None and self._matcher.is_accepting()
        can_end = can_end and self._num_consumed > 0
        return COMPLETE if can_end else self._failed(reason)

    def _failed(self, reason: str) -> Ending:
        return Ending(
            GrammarFailed(
                f"after {self._num_consumed} tokens the output cannot go on as the request's "
                f"grammar demands: {reason}"
            )
        )


def step_masks(states: Sequenceable[GrammarState | None], vocab_size: int) -> Int32s:
    """int32 [R, ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t may be drawn. Rows
    of None, and of states that another thread works on, allow everything."""
    num_words = -(-vocab_size // _BITS)  # the states' rows may have more
    bits = np.full((len(states), num_words), -1, dtype=np.int32)
    for at, state in enumerate(states):
        if state is not None and not state.is_busy:
            bits[at] = state.row[:num_words]
    return bits


class GrammarCompiler:
    """Makes states. All but the work itself is for one thread, the engine core's.

    Args:
        model_dir: has the tokenizer.
        vocab_size: of the model's logits.
        on_compiled: called from another thread when a grammar that was asked for is there.
    """

    def __init__(
        self, model_dir: str | Path, vocab_size: int, on_compiled: Callable[[], None]
    ) -> None:
        self._model_dir = model_dir
        self.vocab_size = vocab_size
        self.on_compiled = on_compiled
        self._num_words = (
            0  # W: of the tokenizer's masks, which may be wider than the model's
        )
        self._end_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[Grammar, tuple[Future[CompiledGrammar], int]] = (
            OrderedDict()
        )
        self._compiling = compiling_threads("grammar-compiler", _NUM_COMPILING)
        # At once: it takes about a second for a large vocabulary, and nobody waits for it yet.
        self._tokenizer = self._compiling.submit(self._load)

    def _load(self) -> LLTokenizer:
        tokenizer = Tokenizer(self._model_dir, NO_TEMPLATE)
        num_tokens = max(self.vocab_size, tokenizer.vocab_size)
        self._end_ids = tokenizer.eos_ids
        self._num_words = -(-num_tokens // _BITS)
        return vocabulary_of(tokenizer, num_tokens)

    def compiled(self, grammar: Grammar, nbytes: int = 0) -> Future[CompiledGrammar]:
        """The grammar, perhaps still on its way. Who waits for it keeps it: there may be more that
        wait than the cache holds.

        Args:
            nbytes: what it takes, as far as its text does not tell.
        """
        nbytes = max(nbytes, len(grammar.text)) + self.vocab_size // 4  # of two masks
        nbytes += _ID_BYTES * (len(grammar.allowed) + sum(map(len, grammar.banned)))
        future, nbytes = self._compiled.pop(grammar, (None, nbytes))
        if future is None:
            future = self._compiling.submit(self._compile, grammar)
            future.add_done_callback(lambda _: self.on_compiled())
        self._compiled[grammar] = future, nbytes
        while sum(kept for _, kept in self._compiled.values()) > _MAX_CACHED_BYTES:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        tokenizer = self._tokenizer.result()
        matcher = None if grammar.kind == "any" else make_matcher(tokenizer, grammar)
        make = partial(self._compiling.submit, make_matcher, tokenizer, grammar)
        return CompiledGrammar(
            grammar, matcher, self._num_words, lambda: make().result()
        )

    def state(
        self, request: AddRequest, compiled: Future[CompiledGrammar] | None = None
    ) -> GrammarState:
        """A state at the beginning of the request's grammar; waits where it is not compiled.

        Args:
            compiled: the grammar, where the caller has it.

        Raises:
            GrammarFailed: the grammar cannot be used with this model.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        try:
            found = (compiled or self.compiled(grammar)).result()
        except (GrammarError, TokenizerNotFound) as error:
            raise GrammarFailed(
                f"the request's grammar cannot be used: {error}"
            ) from None
        except Exception as error:
            logger.exception("a grammar could not be compiled", exc_info=error)
            raise GrammarFailed(
                "the request's grammar cannot be used: a fault of the server; see its log"
            ) from None
        return GrammarState(found, request, self._end_ids)

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)

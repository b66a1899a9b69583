"""Outputs that must match a grammar: compiled once, followed by each sequence, as token masks.

    request -> GrammarCompiler (threads, a cache) -> GrammarState of a sequence -> StepMasks

A state is a function of the sequence's outputs, so preemption, recompute and a first token drawn
on the prefill server change nothing: it catches up with whatever outputs the sequence has. Rank 0
makes the masks, in a thread, while the step's forward pass runs. A step waits for its masks for so
much of that thread's work and no more. Rows whose mask is not there by then are late: they sit the
step out, and draw the same token in a later one.

How a sequence ends under a grammar:
- "stop" as soon as no more text can follow, without drawing an end token; an end token may be drawn
  only where the text is complete, a client's own stop token only where the grammar allows it.
- "length" at max_tokens, complete or not. min_tokens bars the stop tokens as ever; where nothing
  else could follow, the sequence ends with "stop" all the same.
- GrammarFailed where an incomplete text cannot go on in this vocabulary, or the matcher gave up, or
  its masks go on to take too long.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Sequenceable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from engine.text.grammar_compile import GrammarError, compiling_threads, make_matcher
from engine.text.tokenizer import Tokenizer
from protocol.errors import GrammarFailed
from protocol.messages import AddRequest, Grammar

logger = logging.getLogger("baton.engine")

Int32s = npt.NDArray[np.int32]

_MAX_CACHED_BYTES = 256 * 2**20
_NUM_COMPILING = 2  # as one takes long, others do not wait: slow ones come one at a time
_BITS = 32

_BUDGET_S = 0.02  # of a core: what a step waits for
_SLOW_S = 0.01  # of a core: above it a grammar's latest mask makes all its sequences sit out
_LONG_S = 0.1  # of a core: too long for a mask, but for a few
_MAX_LONG = 8  # of them in a row
_MAX_WAIT_S = 0.5  # where the thread itself waits, for a core or for other steps' late rows
_MIN_WAIT_S = 0.001
_MASK_THREADS = 4  # that late rows can hold up before the masks of a step are


class Ending(NamedTuple):
    """A sequence that is to draw no further token: complete, or with an error."""

    error: GrammarFailed | None = None


COMPLETE = Ending()


class CompiledGrammar:
    """What all sequences under a grammar share.

    Args:
        matcher: at the beginning.
        num_words: W of a mask.

    Attributes:
        first_mask: [W], before any output; None where that is for each state to find out.
        mask_s: of a core, that the latest mask took. Taking in a token costs no more than the mask
            that allowed it, which tries all of them.
    """

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self.matcher = matcher
        self.num_words = num_words
        matcher, row = matcher.deep_copy(), np.empty(num_words, dtype=np.int32)
        self.mask_s = _fill(matcher, row)
        can_go_on = not (matcher.is_error() or matcher.is_stopped())
        self.first_mask: Int32s | None = row if can_go_on else None


def _fill(matcher: LLMatcher, row: Int32s) -> float:
    """Writes a mask; the seconds of a core that it took."""
    began_s = time.thread_time()
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return time.thread_time() - began_s


class GrammarState:
    """Where one sequence is in its grammar. One thread works on it at a time.

    Args:
        grammar: what it follows.
        end_ids: the model's end tokens.
        stop_ids: token ids that end the request; of the end tokens only these may be drawn.
        min_tokens: outputs before which no stop token may be drawn.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        *,
        end_ids: Sequenceable[int],
        stop_ids: Sequenceable[int],
        min_tokens: int = 0,
    ) -> None:
        self.ending: Ending | None = None
        self.row = np.full(grammar.num_words, -1, dtype=np.int32)  # the mask, once it is filled
        self.work: Future[None] | None = None  # of another thread, which is late with it
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._num_consumed = 0
        self._num_filled_at = -1  # outputs that `row` is for
        self._num_long = 0  # masks in a row that took so
        self._min_tokens = min_tokens
        self._stop_ids = list(stop_ids)
        self._silent_ids = [i for i in end_ids if i not in stop_ids]

    @property
    def is_busy(self) -> bool:
        """Whether another thread works on it, and no one else may."""
        return self.work is not None and not self.work.done()

    @property
    def is_slow(self) -> bool:
        """Whether to follow an output, too, is work for another thread."""
        return self._grammar.mask_s > _SLOW_S

    def follow(self, token_ids: Sequenceable[int], first_output: int) -> Ending | None:
        """Catches up with a sequence's outputs, none of which was to end it.

        Returns:
            `ending`: how the sequence ends after them, or None when it may go on.
        """
        if len(token_ids) - first_output < self._num_consumed:  # a first token was taken back
            self._matcher.reset()
            self._num_consumed, self._num_filled_at, self.ending = 0, -1, None
        news = list(token_ids[first_output + self._num_consumed :])
        if news and self.ending is None:
            self.ending = self._safely(lambda: self._consume(news))
        return self.ending

    def fill(self) -> None:
        """Writes the allowed tokens' bits to `row`. Where nothing can be drawn, that sets `ending`,
        and `row` allows everything."""
        if self._num_filled_at == self._num_consumed:
            return
        if self.ending is None:
            self.ending = self._safely(lambda: self._allow(self.row))
        if self.ending is not None:
            self.row.fill(-1)
        self._num_filled_at = self._num_consumed

    def _safely(self, work: Callable[[], Ending | None]) -> Ending | None:
        """The matcher's own mistake ends one request, not all."""
        try:
            return work()
        except Exception as error:
            logger.exception("a grammar's matcher failed", exc_info=error)
            return self._failed(f"its matcher failed: {error}")

    def _consume(self, token_ids: list[int]) -> Ending | None:
        self._matcher.consume_tokens(token_ids)
        self._num_consumed += len(token_ids)
        return self._look()

    def _allow(self, row: Int32s) -> Ending | None:
        self._compute(row)
        return self._look() or self._restrict(row)

    def _compute(self, row: Int32s) -> None:
        if self._num_consumed == 0 and self._grammar.first_mask is not None:
            row[:] = self._grammar.first_mask
            return
        self._grammar.mask_s = _fill(self._matcher, row)
        self._num_long = self._num_long + 1 if self._grammar.mask_s > _LONG_S else 0

    def _restrict(self, row: Int32s) -> Ending | None:
        _clear(row, self._silent_ids)
        if self._num_consumed < self._min_tokens:
            _clear(row, self._stop_ids)
        return None if row.any() else self._end("no token fits")

    def _look(self) -> Ending | None:
        """Whether the matcher itself says that nothing can follow."""
        if self._num_long >= _MAX_LONG:
            return self._failed(
                f"what may follow takes more than {_LONG_S:g} s, each time, to find"
            )
        if self._matcher.is_error():
            return self._failed(self._matcher.get_error().partition("\n")[0])
        if not self._matcher.is_stopped():
            return None
        return self._end(self._matcher.stop_reason())

    def _end(self, reason: str) -> Ending:
        """An error for an output that was to have text, or a request that was to have an output."""
        can_end = self._matcher.is_accepting() and self._num_consumed > 0
        return COMPLETE if can_end else self._failed(reason)

    def _failed(self, reason: str) -> Ending:
        return Ending(
            GrammarFailed(
                f"after {self._num_consumed} tokens the output cannot go on as the request's "
                f"grammar demands ({reason}); use a simpler one"
            )
        )


def _clear(row: Int32s, token_ids: Sequenceable[int]) -> None:
    for token_id in token_ids:
        if token_id < len(row) * _BITS:
            row[token_id // _BITS] &= np.int32(~np.uint32(1 << token_id % _BITS).view(np.int32))


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
        self.num_words = 0  # W: of the tokenizer's masks, which may be wider than the model's
        self._end_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[Grammar, tuple[Future[CompiledGrammar], int]] = OrderedDict()
        self._compiling = compiling_threads("grammar-compiler", _NUM_COMPILING)
        # At once: it takes about a second for a large vocabulary, and nobody waits for it yet.
        self._tokenizer = self._compiling.submit(self._load)

    def _load(self) -> LLTokenizer:
        tokenizer = Tokenizer(self._model_dir)
        num_tokens = max(self.vocab_size, tokenizer.vocab_size)
        self._end_ids = tokenizer.eos_ids
        self.num_words = -(-num_tokens // _BITS)
        end_ids = list(tokenizer.eos_ids) or None
        return LLTokenizer(tokenizer.to_json(), n_vocab=num_tokens, eos_token=end_ids)

    def compiled(self, grammar: Grammar, nbytes: int = 0) -> Future[CompiledGrammar]:
        """The grammar, perhaps still on its way. Who waits for it keeps it: there may be more that
        wait than the cache holds.

        Args:
            nbytes: what it takes, as far as its text does not tell.
        """
        future, nbytes = self._compiled.pop(grammar, (None, max(nbytes, len(grammar.text))))
        if future is None:
            future = self._compiling.submit(self._compile, grammar)
            future.add_done_callback(lambda _: self.on_compiled())
        self._compiled[grammar] = future, nbytes
        while sum(kept for _, kept in self._compiled.values()) > _MAX_CACHED_BYTES:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        matcher = make_matcher(self._tokenizer.result(), grammar)
        return CompiledGrammar(matcher, self.num_words)

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
        except Exception as error:
            if not isinstance(error, GrammarError):
                logger.exception("a grammar could not be compiled", exc_info=error)
            raise GrammarFailed(f"the request's grammar cannot be used: {error}") from None
        return GrammarState(
            found,
            end_ids=self._end_ids,
            stop_ids=request.stop_token_ids,
            min_tokens=request.sampling.min_tokens,
        )

    def close(self) -> None:
        """Ends the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)


class MaskThreads:
    """Fill the masks of steps: a late row holds up the thread that works on it, and the next step
    has another. Rows known to be slow have a thread of their own."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="grammar-masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="grammar-slow")

    def begin(
        self, states: Sequenceable[GrammarState | None], num_words: int, vocab_size: int
    ) -> "StepMasks":
        """Begins to fill the masks of a step's rows; a None may draw anything."""
        return StepMasks(states, num_words, vocab_size, self._quick)

    def advance(
        self, state: GrammarState, token_ids: list[int], num_prompt_tokens: int, *, fill: bool
    ) -> Future[None]:
        """Has a slow state follow a sequence's outputs, and its next mask filled."""

        def work() -> None:
            if state.follow(token_ids, num_prompt_tokens) is None and fill:
                state.fill()

        return self._slow.submit(work)


class StepMasks:
    """The masks of one step's R rows.

    Args:
        states: [R], None where anything may be drawn; those that another thread works on are late.
        num_words: W of the states' masks.
        vocab_size: of the logits, perhaps of fewer tokens than the masks.

    Attributes:
        late: rows without a mask, once there is a result.
    """

    def __init__(
        self,
        states: Sequenceable[GrammarState | None],
        num_words: int,
        vocab_size: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.late: set[int] = set()
        self._states = list(states)
        self._num_words = -(-vocab_size // _BITS)
        self._width = max(num_words, self._num_words)  # none is known before there is a state
        self._todo = [s for s in self._states if s is not None and not s.is_busy]
        self._lock = threading.Lock()
        self._num_begun = self._num_filled = 0
        self._is_over = False
        self._clock: tuple[int, float] | None = None  # of the filling thread, and its beginning
        self._work = threads.submit(self._fill)

    def _fill(self) -> None:
        """The thread's part."""
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._clock = clock, time.clock_gettime(clock)
        for state in self._todo:
            with self._lock:
                if self._is_over:
                    return
                self._num_begun += 1
            state.fill()
            self._num_filled += 1

    def result(self, budget_s: float = _BUDGET_S) -> Int32s:
        """int32 [R, ceil(V / 32)], waited for so long: bit t % 32 of word t // 32 is set where
        token t may be drawn. Late rows, and those of None, allow everything."""
        self._wait(budget_s)
        with self._lock:
            self._is_over = True
            num_filled, num_begun = self._num_filled, self._num_begun
        if num_begun > num_filled:
            self._todo[num_filled].work = self._work
        else:
            self._work.cancel()
        ready = set(self._todo[:num_filled])
        bits = np.full((len(self._states), self._width), -1, dtype=np.int32)
        for at, state in enumerate(self._states):
            if state in ready:
                bits[at, : len(state.row)] = state.row
            elif state is not None:
                self.late.add(at)
        return np.ascontiguousarray(bits[:, : self._num_words])

    def _wait(self, budget_s: float) -> None:
        until_s = time.monotonic() + max(budget_s, _MAX_WAIT_S)
        while (left_s := min(budget_s - self._used_s(), until_s - time.monotonic())) > 0:
            wait_for([self._work], min(max(left_s, _MIN_WAIT_S), _MAX_WAIT_S))
            if self._work.done():
                return self._work.result()

    def _used_s(self) -> float:
        """Of a core, by the filling thread."""
        if self._clock is None or self._work.done():
            return 0.0
        clock, began_s = self._clock
        return time.clock_gettime(clock) - began_s

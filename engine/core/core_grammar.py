"""Which sequences of an engine wait for their grammar, or sit out steps until it is known what they
may draw next. For the engine core's thread.

    compiling   not queued before their grammar is there
    sitting     in a batch until they were late: another thread works on their state meanwhile

A step waits for its masks for so long and no more. Rows whose mask is not there by then are late:
they sit out until it is, and draw the same token in a later step.
"""

import time
from collections.abc import Sequence as Sequenceable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from engine.core.scheduler import Scheduled
from engine.core.sequence import Phase, Sequence
from engine.text.grammar import GrammarCompiler, GrammarState, Int32s, step_masks
from protocol.errors import GrammarFailed

_BUDGET_S = 0.05  # that a step waits for its masks
_MASK_THREADS = 4  # that late rows can hold up before the masks of a step are


class CoreGrammars:
    """Those of one core.

    Args:
        compiler: None: no request may have a grammar.
        timeout_s: that a sequence sits out at once, at most.
    """

    def __init__(self, compiler: GrammarCompiler | None = None, timeout_s: float = 2.0) -> None:
        self.compiler = compiler
        self.compiling: dict[Sequence, Future[Any]] = {}
        self.sitting: dict[Sequence, tuple[Future[None], float]] = {}  # and until when
        self.timeout_s = timeout_s
        self._quick = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="grammar-masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="grammar-slow")

    def prepare(self, sequence: Sequence) -> bool:
        """Gives a sequence its place in its grammar, if it has one; False while that takes another
        thread's work.

        Raises:
            GrammarFailed: it cannot be.
        """
        grammar = sequence.request.sampling.grammar
        if grammar is None:
            return True
        if self.compiler is None:
            raise GrammarFailed("this engine follows no grammars")
        work = self.compiling.get(sequence)
        if work is None and sequence.grammar is None:
            work = self.compiler.compiled(grammar, sequence.request.grammar_bytes)
        if work is not None and not work.done():
            self.compiling[sequence] = work
            return False
        self.compiling.pop(sequence, None)
        for choice in sequence.choices if sequence.grammar is None else ():
            state = choice.grammar = self.compiler.state(sequence.request, work)
            if state.is_slow and choice.num_outputs:  # they came with it; the last is done last
                self.compiling[sequence] = self._advance(choice, fill=False)
        return sequence not in self.compiling

    def begin_masks(self, scheduled: Sequenceable[Scheduled]) -> None:
        """Begins to fill the masks of a step."""
        for state in _states(scheduled):
            if state is not None and not state.is_busy:
                state.work = self._quick.submit(state.fill)

    def masks(
        self, scheduled: Sequenceable[Scheduled], *, however_late: bool = False
    ) -> tuple[Int32s, set[Sequence]]:
        """The masks of a step, see `step_masks`, and its sequences that draw nothing, as one of
        theirs is late. These sit out until another thread is done with it."""
        assert self.compiler is not None, "prepare lets no sequence with a grammar through"
        states = _states(scheduled)
        works = [state.work for state in states if state is not None and state.work is not None]
        wait_for(works, None if however_late else _BUDGET_S)
        late = set()
        for item in scheduled:
            for choice in item.draws:
                work = choice.grammar and choice.grammar.work
                if work and not work.done():
                    late.add(item.sequence)  # its children go on with it
                    self._sit_out(item.sequence, work)
        return step_masks(states, self.compiler.vocab_size), late

    def is_slow(self, sequence: Sequence, max_model_len: int) -> bool:
        """Whether a sequence sits out, as it takes long to find out whether its last token ended
        it, and what may follow."""
        state = sequence.grammar
        if state is None or not state.is_slow:
            return False
        if sequence.token_ids[-1] in sequence.request.stop_token_ids:
            return False
        goes_on = (
            sequence.num_outputs < sequence.request.max_tokens
            and len(sequence.token_ids) < max_model_len
        )
        self._sit_out(sequence, self._advance(sequence, fill=goes_on))
        return True

    def _advance(self, sequence: Sequence, *, fill: bool) -> Future[None]:
        """Has a slow state follow a sequence's outputs, and its next mask filled."""
        state, token_ids = sequence.grammar, list(sequence.token_ids)
        assert state is not None

        def work() -> None:
            if state.follow(token_ids, sequence.num_prompt_tokens) is None and fill:
                state.fill()

        state.work = self._slow.submit(work)
        return state.work

    def _sit_out(self, sequence: Sequence, work: Future[None]) -> None:
        assert self.compiler is not None
        if sequence not in self.sitting:
            self.sitting[sequence] = work, time.monotonic() + self.timeout_s
            sequence.sits_out = True
            wake = self.compiler.on_compiled
            work.add_done_callback(lambda _: wake())

    def returning(self) -> list[tuple[Sequence, GrammarFailed | None]]:
        """Those that sat out and are to go on, or to end with an error."""
        now_s = time.monotonic()
        found: list[tuple[Sequence, GrammarFailed | None]] = []
        for sequence, (work, until_s) in list(self.sitting.items()):
            has_gone = sequence.phase is Phase.FINISHED
            if not (has_gone or work.done() or now_s >= until_s):
                continue
            self.forget(sequence)
            if has_gone or sequence.has_ended:  # or it goes on for its children
                continue
            if not work.done():
                error: GrammarFailed | None = GrammarFailed(
                    f"after {sequence.num_outputs} tokens it took more than {self.timeout_s:g} s "
                    "(--grammar-timeout-s) to find out what may follow by the request's grammar; "
                    "use one that is less ambiguous, or fewer choices"
                )
            else:
                ending = sequence.grammar and sequence.grammar.ending
                error = ending.error if ending else None
            found.append((sequence, error))
        return found

    def forget(self, sequence: Sequence) -> None:
        self.compiling.pop(sequence, None)
        if self.sitting.pop(sequence, None) is not None:
            sequence.sits_out = False


def _states(scheduled: Sequenceable[Scheduled]) -> list[GrammarState | None]:
    return [choice.grammar for item in scheduled for choice in item.draws]

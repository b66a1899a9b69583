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
from engine.text.grammar import GrammarCompiler, Int32s, step_masks
from protocol.errors import GrammarFailed

_BUDGET_S = 0.05  # that a step waits for its masks
_MASK_THREADS = 4  # that late rows can hold up before the masks of a step are


class CoreGrammars:
    """Those of one core.

    Args:
        timeout_s: that a sequence sits out at once, at most.
    """

    def __init__(self, compiler: GrammarCompiler, timeout_s: float) -> None:
        self.compiler = compiler
        self.compiling: dict[Sequence, Future[Any]] = {}
        self.sitting: dict[Sequence, tuple[Future[None], float]] = {}  # and until when
        self.timeout_s = timeout_s
        self._quick = ThreadPoolExecutor(
            _MASK_THREADS, thread_name_prefix="grammar-masks"
        )
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
        work = self.compiling.get(sequence)
        if work is None and sequence.grammar is None:
            work = self.compiler.compiled(grammar, sequence.request.grammar_bytes)
        if work is not None and not work.done():
            self.compiling[sequence] = work
            return False
        self.compiling.pop(sequence, None)
        for choice in sequence.choices if sequence.grammar is None else ():
            choice.grammar = self.compiler.state(sequence.request, work)
        return True

    def begin_masks(self, scheduled: Sequenceable[Scheduled]) -> None:
        """Begins to fill the masks of a step."""
        for choice in (choice for item in scheduled for choice in item.draws):
            state = choice.grammar
            if state is not None and not state.is_busy:
                threads = self._slow if state.is_slow else self._quick
                state.begin(choice.token_ids, choice.first_output, threads)

    def masks(
        self, scheduled: Sequenceable[Scheduled], *, however_late: bool = False
    ) -> tuple[Int32s, set[Sequence]]:
        """The masks of a step, see `step_masks`, and its sequences that draw nothing, as one of
        theirs is late. These sit out until another thread is done with it."""
        states = [choice.grammar for item in scheduled for choice in item.draws]
        owners = [item.sequence for item in scheduled for _ in item.draws]
        begun = [
            (owner, state, state.work)
            for owner, state in zip(owners, states, strict=True)
            if state is not None and state.work is not None
        ]
        awaited = [
            work for _, state, work in begun if however_late or not state.is_slow
        ]
        wait_for(awaited, None if however_late else _BUDGET_S)
        late = set()
        for owner, _, work in begun:
            if not work.done():
                late.add(owner)  # its children go on with it
                self._sit_out(owner, work)
        return step_masks(states, self.compiler.vocab_size), late

    def _sit_out(self, sequence: Sequence, work: Future[None]) -> None:
        if sequence not in self.sitting:
            self.sitting[sequence] = work, time.monotonic() + self.timeout_s
            sequence.sits_out = True
            wake = self.compiler.on_compiled
            work.add_done_callback(lambda _: wake())

    def overdue(self) -> list[tuple[Sequence, GrammarFailed]]:
        """Those that sat out for too long, with their errors. Whose masks are there go on."""
        found = []
        for sequence, (work, until_s) in list(self.sitting.items()):
            has_gone = sequence.phase is Phase.FINISHED
            if not (has_gone or work.done() or time.monotonic() >= until_s):
                continue
            self.forget(sequence)
            if not (
                has_gone or work.done() or sequence.has_ended
            ):  # or it is for its children
                error = GrammarFailed(
                    f"after {sequence.num_outputs} tokens it took more than {self.timeout_s:g} s "
                    "(--grammar-timeout-s) to find out what may follow by the request's grammar; "
                    "use one that is less ambiguous, or fewer choices"
                )
                found.append((sequence, error))
        return found

    def forget(self, sequence: Sequence) -> None:
        self.compiling.pop(sequence, None)
        if self.sitting.pop(sequence, None) is not None:
            sequence.sits_out = False

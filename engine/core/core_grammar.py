"""Lets other threads compile the grammars of the engine core's sequences and compute
their masks. The methods of this module run on the core's thread.

Two dictionaries contain the sequences that wait for other threads:

    compiling      the sequence is queued once its grammar is compiled
    awaiting_mask  the sequence is running, but skips steps until its mask is ready

A step waits for its masks for a limited time. If a draw's mask is not ready in time,
the draw is skipped, and a later step draws the token.
"""

import time
from collections.abc import Sequence as Sequenceable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from engine.core.plan import Scheduled
from engine.core.sequence import Phase, Sequence
from engine.sampling.token_masks import Int32s, step_masks
from engine.text.grammar import GrammarCompiler
from protocol.errors import GrammarFailed

_MAX_MASK_WAIT_S = 0.05  # longest time that a step waits for its masks
# The computation of a mask that was not ready in time continues to occupy a thread. The
# masks of the next step are delayed only if all of these threads are occupied.
_MASK_THREADS = 4


class CoreGrammars:
    """The grammars of one core's sequences.

    Args:
        timeout_s: longest time that a sequence waits for one mask.

    Attributes:
        compiling: for each sequence that waits for its grammar, the compilation.
        awaiting_mask: for each sequence that waits for a mask, a tuple: the choice that
            draws with the mask, the computation of the mask, and the monotonic time at
            which the sequence fails if the mask is still not ready.
    """

    def __init__(self, compiler: GrammarCompiler, timeout_s: float) -> None:
        self.compiler = compiler
        self.compiling: dict[Sequence, Future[Any]] = {}
        self.awaiting_mask: dict[Sequence, tuple[Sequence, Future[None], float]] = {}
        self.timeout_s = timeout_s
        self._quick = ThreadPoolExecutor(
            _MASK_THREADS, thread_name_prefix="grammar-masks"
        )
        # Slow grammars share one thread, so that they do not occupy the other threads.
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="grammar-slow")

    def prepare(self, sequence: Sequence) -> bool:
        """Gives a sequence its grammar state, if its request has a grammar. Returns
        False while another thread compiles the grammar.

        Raises:
            GrammarFailed: the grammar cannot be compiled.
        """
        grammar = sequence.request.sampling.grammar
        if grammar is None:
            return True
        work = self.compiling.get(sequence)
        if work is None and sequence.sampling.grammar is None:
            work = self.compiler.compile(grammar, sequence.request.grammar_bytes)
        if work is not None and not work.done():
            self.compiling[sequence] = work
            return False
        self.compiling.pop(sequence, None)
        if sequence.sampling.grammar is None:
            for choice in sequence.choices:
                choice.sampling.grammar = self.compiler.new_state(
                    sequence.request, work
                )
        return True

    def begin_masks(self, scheduled: Sequenceable[Scheduled]) -> None:
        """Starts to compute the masks of a step on other threads."""
        for item in scheduled:
            for choice in dict.fromkeys(item.draws):
                state = choice.sampling.grammar
                if state is not None and not state.is_busy:
                    threads = self._slow if state.is_slow else self._quick
                    state.begin_mask(
                        choice.token_ids, choice.first_output, threads, item.proposals
                    )

    def wait_for_masks(
        self, scheduled: Sequenceable[Scheduled], *, wait_for_all: bool = False
    ) -> tuple[Int32s, set[Sequence]]:
        """Waits for the masks of a step, at most _MAX_MASK_WAIT_S. Does not wait for
        the masks of slow grammars.

        Returns the masks (see `step_masks`), and the sequences with a mask that is not
        ready. These sequences are skipped in this step, and in later steps until their
        masks are ready.

        Args:
            wait_for_all: wait until all masks are ready, however long it takes.
        """
        # Tuples of a scheduled sequence, a choice that draws from it, and the
        # computation of this choice's mask.
        begun: list[tuple[Sequence, Sequence, Future[None]]] = []
        awaited: list[Future[None]] = []
        for item in scheduled:
            for choice in item.draws:
                state = choice.sampling.grammar
                if state is None or state.work is None:
                    continue
                begun.append((item.sequence, choice, state.work))
                if wait_for_all or not state.is_slow:
                    awaited.append(state.work)
        wait_for(awaited, None if wait_for_all else _MAX_MASK_WAIT_S)
        skipped = set()
        for sequence, choice, work in begun:
            if not work.done():
                skipped.add(sequence)  # its children's draws are skipped as well
                self._await_mask(sequence, choice, work)
        rows = [row for item in scheduled for row in _mask_rows(item)]
        return step_masks(rows, self.compiler.vocab_size), skipped

    def _await_mask(
        self, sequence: Sequence, choice: Sequence, work: Future[None]
    ) -> None:
        if sequence in self.awaiting_mask:
            return
        deadline_s = time.monotonic() + self.timeout_s
        self.awaiting_mask[sequence] = (choice, work, deadline_s)
        sequence.sampling.awaits_mask = True
        wake = self.compiler.on_compiled
        work.add_done_callback(lambda _: wake())

    def take_overdue(self) -> list[tuple[Sequence, GrammarFailed]]:
        """Returns the sequences that have waited too long for a mask, with their
        errors. Lets the sequences with ready masks take part in steps again.
        """
        overdue = []
        for sequence, (choice, work, deadline_s) in list(self.awaiting_mask.items()):
            is_finished = sequence.phase is Phase.FINISHED
            is_timed_out = time.monotonic() >= deadline_s
            if not (is_finished or work.done() or is_timed_out):
                continue
            self.forget(sequence)
            # A choice that has ended, but still prefills for its children, needs no
            # mask.
            has_ended = choice.choice_state.has_ended
            if not (is_finished or work.done() or has_ended):
                error = GrammarFailed(
                    f"after {sequence.num_outputs} tokens it took more than "
                    f"{self.timeout_s:g} s (--grammar-timeout-s) to find out which "
                    "tokens the request's grammar allows; use a less ambiguous "
                    "grammar, or fewer choices"
                )
                overdue.append((sequence, error))
        return overdue

    def forget(self, sequence: Sequence) -> None:
        """Stops waiting for the grammar and the mask of a sequence."""
        self.compiling.pop(sequence, None)
        if self.awaiting_mask.pop(sequence, None) is not None:
            sequence.sampling.awaits_mask = False


def _mask_rows(item: Scheduled) -> list[Int32s | None]:
    """The mask of each draw of a scheduled sequence. None allows every token.

    A draw has None in three cases: its choice has no grammar; another thread still uses
    the grammar state (`wait_for_masks` then skips the sequence); or the draw follows a
    proposal without a mask, so that the drawn token is dropped (`num_masked_draws`).
    """
    rows: list[Int32s | None] = []
    for choice in dict.fromkeys(item.draws):
        state = choice.sampling.grammar
        if state is None or state.is_busy:
            rows.append(None)
        else:
            rows += [state.row, *state.rows_after(item.proposals)]
    return rows + [None] * (len(item.draws) - len(rows))


def num_masked_draws(sequence: Sequence, proposals: tuple[int, ...]) -> int:
    """Returns the number of draws of a verification that used a mask of the sequence's
    grammar. Without a grammar, all draws count.

    The first proposal that the grammar forbids, or that ends the output, ends the
    computation of masks. So does a mask that took too long.
    """
    state = sequence.sampling.grammar
    return 1 + len(proposals if state is None else state.rows_after(proposals))

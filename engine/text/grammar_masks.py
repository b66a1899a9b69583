"""The masks of a step's rows, filled by another thread while the step computes its logits.

A step waits for its masks for so much of that thread's work and no more. Rows whose mask is not
there by then are late: they sit the step out, and draw the same token in a later one.
"""

import threading
import time
from collections.abc import Sequence as Sequenceable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import numpy as np
import numpy.typing as npt

from engine.text.grammar import BITS, BUDGET_S, GrammarState

Int32s = npt.NDArray[np.int32]

_MAX_WAIT_S = 0.5  # where the thread itself waits, for a core or for another step's late row
_MIN_WAIT_S = 0.001
_MAX_THREADS = 4


class MaskThreads:
    """One thread fills the masks of steps. One that is held up by a late row ends with it, and the
    next step gets another, up to so many. Rows known to be slow have a thread of their own."""

    def __init__(self) -> None:
        self._quick = _thread("grammar-masks")
        self._slow = _thread("grammar-slow")
        self._held_up: list[Future[None]] = []

    def begin(
        self, states: Sequenceable[GrammarState | None], num_words: int, vocab_size: int
    ) -> "StepMasks":
        """Begins to fill the masks of a step's rows; a None may draw anything."""
        self._held_up = [work for work in self._held_up if not work.done()]
        return StepMasks(states, num_words, vocab_size, self)

    def submit(self, work: "StepMasks") -> Future[None]:
        return self._quick.submit(work.fill)

    def advance(
        self, state: GrammarState, token_ids: list[int], num_prompt_tokens: int, *, fill: bool
    ) -> Future[None]:
        """Has a slow state follow a sequence's outputs, and its next mask filled."""

        def work() -> None:
            if state.follow(token_ids, num_prompt_tokens) is None and fill:
                state.fill()

        return self._slow.submit(work)

    def is_held_up(self, work: Future[None]) -> None:
        """A late row keeps the thread."""
        self._held_up.append(work)
        if len(self._held_up) < _MAX_THREADS:
            self._quick.shutdown(wait=False)
            self._quick = _thread("grammar-masks")


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=name)


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
        threads: MaskThreads,
    ) -> None:
        self.late: set[int] = set()
        self._states = list(states)
        self._num_words = -(-vocab_size // BITS)
        self._width = max(num_words, self._num_words)  # none is known before there is a state
        self._todo = [s for s in self._states if s is not None and not s.is_busy]
        self._lock = threading.Lock()
        self._num_begun = self._num_filled = 0
        self._is_over = False
        self._clock: tuple[int, float] | None = None  # of the filling thread, and its beginning
        self._threads = threads
        self._work = threads.submit(self)

    def fill(self) -> None:
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

    def result(self, budget_s: float = BUDGET_S) -> Int32s:
        """int32 [R, ceil(V / 32)], waited for so long: bit t % 32 of word t // 32 is set where
        token t may be drawn. Late rows, and those of None, allow everything."""
        self._wait(budget_s)
        with self._lock:
            self._is_over = True
            num_filled, num_begun = self._num_filled, self._num_begun
        if num_begun > num_filled:
            self._todo[num_filled].work = self._work
            self._threads.is_held_up(self._work)
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
        try:
            return time.clock_gettime(clock) - began_s
        except OSError:  # it has ended just now
            return 0.0

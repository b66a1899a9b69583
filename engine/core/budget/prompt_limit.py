"""Limits the prompt tokens of the next step, so that decoding sequences ("streams")
are not delayed too long.

If `--itl-target-s` sets the target duration of steps, waiting prompts do not change it.
Without this option, the target depends on the server (StepTarget), and waiting prompts
allow a step to exceed it. The allowed excess is the sum of the times that the prompts
in the queue have waited, divided by the number of streams. The delays of all streams
therefore add up to at most the time that the prompts have waited.
"""

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequenceable
from itertools import islice
from typing import Final

from engine.core.budget.prefill_budget import UNMEASURED, PrefillBudget
from engine.core.budget.step_target import StepTarget
from engine.core.budget.step_times import StepTimes
from engine.core.plan import Scheduled, load_of
from engine.core.sequence import Sequence

# A server counts as the decode server of a prefill/decode pair for this long after its
# last request with a prompt that a prefill server computed.
_PAIR_MEMORY_S: Final = 60.0
# The waiting times of at most this many queued prompts are added up. More prompts would
# slow down planning, and this many already allow the largest steps.
_MAX_COUNTED_PROMPTS: Final = 256


class PromptLimit:
    """Limits the prompt tokens of steps that also decode.

    Args:
        target: target duration of steps that decode; None: steps are not limited.
        max_tokens: largest number of tokens of a step.
        times: measured durations of steps; None if they were not measured.

    Attributes:
        budget: calculates how many prompt tokens meet the target; None without a
            target.
    """

    def __init__(
        self,
        target: StepTarget | None,
        max_tokens: int,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._clock = clock
        self._last_pair_request_s = -math.inf
        self.budget: PrefillBudget | None = None
        if target is not None:
            times = times or UNMEASURED
            self.budget = PrefillBudget(times, target.seconds, max_tokens)

    def on_queued(self, sequence: Sequence) -> None:
        """Records that a sequence begins to wait, and whether a prefill server has
        computed its prompt."""
        sequence.queued_s = self._clock()
        request = sequence.request
        # A request that resumes here after a failover or migration may also refer to
        # remote KV, but this does not mean that a prefill server computed the prompt.
        if request.remote is not None and not request.resumed_choices:
            self._last_pair_request_s = sequence.queued_s

    @property
    def is_active(self) -> bool:
        """Whether steps are limited now."""
        if self._target is None:
            return False
        if not self._target.only_in_pair:
            return True
        return self._clock() <= self._last_pair_request_s + _PAIR_MEMORY_S

    def prompt_tokens(
        self,
        streams: Sequenceable[Scheduled],
        prefilling: Sequenceable[Sequence],
        waiting: Iterable[Sequence],
    ) -> int:
        """Prompt tokens that the next step may have. Called only while `is_active`.

        Args:
            streams: the part of the step that decodes.
            prefilling: running prompts.
            waiting: prompts that a larger step would compute earlier.
        """
        assert self._target is not None
        assert self.budget is not None
        load = load_of(streams)
        prompt_start = 0
        if prefilling:
            prompt_start = prefilling[0].num_computed + prefilling[0].num_launched
        extra_s = 0.0
        if not self._target.is_explicit:
            extra_s = self._waited_s(waiting) / max(load.streams, 1)
        return self.budget.prompt_tokens(
            load.streams, load.context_tokens, prompt_start, extra_s
        )

    def _waited_s(self, waiting: Iterable[Sequence]) -> float:
        """The sum of the waiting times of the first queued prompts. Prompts with KV
        that will be pulled do not count, because a larger step would not help them."""
        now_s = self._clock()
        return sum(
            now_s - sequence.queued_s
            for sequence in islice(waiting, _MAX_COUNTED_PROMPTS)
            if sequence.pull is None
        )

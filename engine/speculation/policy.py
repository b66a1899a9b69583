"""Decides how many proposed tokens a step verifies.

For each number of streams, the policy measures the durations of steps with and without
proposals. It chooses the number of proposals with the most expected tokens per second.
A sequence with k proposals and acceptance rate a has 1 + a + ... + a^k expected tokens.

Expectations may be wrong: acceptance changes, and durations are noisy. An account for
each number of streams therefore bounds what speculation can lose (`_Batch.credit`).
While an account is overdrawn, nothing is proposed. While speculation does not pay off,
the account pays for probes: occasional proposals that show when speculation pays off
again.

This module reads no clock. All decisions depend only on the recorded steps.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from engine.speculation.batch_times import NUMBERS, BatchTimes, Floats, Ints, rounded_up

# The smallest expected gain for which tokens are proposed, as a share of the tokens per
# second. A smaller gain is not worth the uncertainty of the measurements.
MIN_GAIN: Final = 0.03
# The share of the time in decode steps that speculation may lose: half of the 2 % that
# users are promised. The other half is for errors of the measured durations.
MAX_LOSS: Final = 0.01
# The initial credit of an account, in steps without proposals. It suffices for one
# proposal for a single stream, which may double the duration of a step.
START_CREDIT_STEPS: Final = 1.0
# The largest credit, in steps without proposals: the credit that MAX_LOSS adds in 1,000
# steps. The limit keeps earlier gains from paying for a long loss.
MAX_CREDIT_STEPS: Final = 1_000 * MAX_LOSS
# One of this many steps may be an experiment. While speculation does not pay off, the
# experiment is a probe, so that an improvement of the drafter is noticed after few
# steps. While speculation pays off, the experiment has the largest possible number of
# proposals if that number was not measured yet, because it may take less time than
# expected.
PROBE_INTERVAL: Final = 8
# Proposals per sequence in a probe. More proposals would show little while the first
# ones are rejected.
PROBE_PROPOSALS: Final = 4
# The share of the credit that a probe may cost. A probe that costs more than expected
# should not overdraw the account.
_PROBE_SHARE: Final = 0.5
# The acceptance rate of a drafter whose proposals were never verified: neither good nor
# bad, so that the first outcomes decide.
_INITIAL_RATE: Final = 0.5
# The first value of a rate counts as this many outcomes. So the first recorded outcome
# changes the rate by at most a fifth.
_PRIOR_OUTCOMES: Final = 4


class AcceptanceRate:
    """The estimated probability that a proposal is accepted if all proposals before it
    in the same step are accepted.

    Args:
        value: the rate before the first outcome, such as the average of the drafter.
        window: about how many of the latest outcomes count.
    """

    def __init__(self, value: float = _INITIAL_RATE, *, window: int = 32) -> None:
        self.value = value
        self._window = window
        self._num_outcomes = _PRIOR_OUTCOMES

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """Records a verification. Proposals after the first rejected one have no
        outcome."""
        for _ in range(num_accepted):
            self._add(1.0)
        if num_accepted < num_proposed:
            self._add(0.0)

    def _add(self, outcome: float) -> None:
        self._num_outcomes = min(self._num_outcomes + 1, self._window)
        self.value += (outcome - self.value) / self._num_outcomes


class SpeculationPolicy:
    """Chooses the number of proposals for each sequence, and learns from finished
    steps."""

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}  # by rounded number of streams
        self._num_steps = 0
        self._num_measured_steps = 0  # steps without prompts
        self._last_speculation = -PROBE_INTERVAL  # the last step with proposals

    def limits(
        self, rates: Sequence[float], lengths: Sequence[int], num_streams: int
    ) -> list[int]:
        """Returns how many tokens to verify for each sequence with proposals.

        Changes nothing, so it may be called several times for a step.

        Args:
            rates: the acceptance rates of the sequences.
            lengths: for each sequence, how many tokens are proposed or may be proposed.
            num_streams: the number of sequences that decode in the step.
        """
        nothing = [0] * len(lengths)
        batch = self._batch_with_credit(num_streams)
        if batch is None or not any(lengths):
            return nothing
        gains, sequences = _sorted_gains(rates, lengths)
        index = self._best_index(batch.times, 1 + np.cumsum(gains) / num_streams)
        if index is None:
            return self._probe(batch, lengths) if self._may_probe else nothing
        estimates = batch.times.estimates
        if self._num_steps % PROBE_INTERVAL == 0:
            max_proposals = min(len(gains), batch.times.max_proposals)
            largest = len(_numbers_up_to(max_proposals)) - 1
            if not estimates.is_measured[largest]:
                index = largest
        cost = float(estimates.largest[index]) - 1
        if not estimates.is_measured[index] and cost > batch.credit:
            return nothing
        chosen = sequences[: NUMBERS[index]]
        counts: list[int] = np.bincount(chosen, minlength=len(lengths)).tolist()
        return counts

    def may_propose(
        self, rates: Sequence[float], max_lengths: Sequence[int], num_streams: int
    ) -> bool:
        """Whether `limits` may allow any proposals. If False, searching for proposals
        would be a waste of time. Changes nothing.

        Args:
            rates: the acceptance rates of the sequences.
            max_lengths: the largest number of tokens to propose for each sequence.
            num_streams: the number of sequences that decode in the step.
        """
        batch = self._batch_with_credit(num_streams)
        if batch is None or not any(max_lengths):
            return False
        if self._may_probe:
            return True
        # If no number of proposals pays off with these lengths, none pays off with
        # shorter ones.
        gains, _ = _sorted_gains(rates, max_lengths)
        tokens = 1 + np.cumsum(gains) / num_streams
        return self._best_index(batch.times, tokens) is not None

    def record_step(
        self,
        num_streams: int,
        num_rows: int,
        num_tokens: int,
        seconds: float | None,
        *,
        is_delayed: bool = False,
    ) -> None:
        """Records a finished step.

        Args:
            num_streams: the number of sequences that decode in the step.
            num_rows: the number of streams plus the number of proposals.
            num_tokens: the tokens that the streams have drawn and kept.
            seconds: the duration of the step, including the time to propose. None if
                the step also computed prompts. The time of its proposals is then
                estimated from other steps.
            is_delayed: whether speculation delayed the launch of the step. The time by
                which the step exceeds a plain step (one without proposals) then counts
                as lost, even if nothing was proposed.
        """
        if num_streams == 0:
            self._num_steps += 1
            return
        size = rounded_up(num_streams)
        batch = self._batches.setdefault(size, _Batch(num_streams))
        num_proposals = num_rows - num_streams
        # Neither a step with proposals nor the step after it is launched ahead. So the
        # step after it is not measured as a plain step. Instead, the time by which it
        # exceeds a plain step counts as lost.
        follows_speculation = self._last_speculation == self._num_steps - 1
        if num_proposals:
            self._last_speculation = self._num_steps
        if num_proposals or follows_speculation or is_delayed:
            batch.account(
                num_proposals,
                num_tokens / num_streams,
                seconds,
                self._num_measured_steps,
            )
        elif seconds is not None:
            batch.times.add_plain(seconds, self._num_measured_steps)
        batch.add_credit(MAX_LOSS)
        self._num_steps += 1
        self._num_measured_steps += seconds is not None

    def _batch_with_credit(self, num_streams: int) -> "_Batch | None":
        """The measurements for a number of streams. None if the next step must have no
        proposals, because a plain step must be measured, or because too much time was
        lost."""
        batch = self._batches.get(rounded_up(num_streams))
        if batch is None or batch.credit < 0:
            return None
        if batch.times.needs_plain_step(self._num_measured_steps):
            return None
        return batch

    @property
    def _may_probe(self) -> bool:
        """Whether the next step may be a probe: none of the last PROBE_INTERVAL steps
        had proposals."""
        return self._num_steps - self._last_speculation >= PROBE_INTERVAL

    def _best_index(self, times: BatchTimes, tokens: Floats) -> int | None:
        """Returns the index in NUMBERS of the number of proposals with the most tokens
        per second. None if no number gains at least MIN_GAIN over steps without
        proposals.

        Args:
            tokens: the expected tokens of a stream in a step with 1, 2, ... proposals.
        """
        numbers = _numbers_up_to(len(tokens))
        tokens = tokens[numbers - 1]
        estimates = times.estimates
        is_gain = tokens >= (1 + MIN_GAIN) * estimates.expected[: len(numbers)]
        if not is_gain.any():
            return None
        speeds = np.where(is_gain, tokens / estimates.optimistic[: len(numbers)], 0)
        # A promising number that is much larger than all measured numbers is approached
        # in several steps, which measure smaller numbers.
        largest = len(_numbers_up_to(times.max_proposals)) - 1
        return min(int(np.argmax(speeds)), largest)

    def _probe(self, batch: "_Batch", lengths: Sequence[int]) -> list[int]:
        """Returns the limits of a probe: proposals for as many sequences as the credit
        allows. Each probe starts with a different sequence."""
        limits = [0] * len(lengths)
        num_probed = sum(min(length, PROBE_PROPOSALS) for length in lengths)
        numbers = _numbers_up_to(min(num_probed, batch.times.max_proposals))
        costs = batch.times.estimates.largest[: len(numbers)] - 1
        is_affordable = costs <= _PROBE_SHARE * batch.credit
        num_left = int(np.max(numbers, where=is_affordable, initial=0))
        start = self._num_steps // PROBE_INTERVAL
        for offset in range(len(lengths)):
            index = (start + offset) % len(lengths)
            limits[index] = min(lengths[index], PROBE_PROPOSALS, num_left)
            num_left -= limits[index]
        return limits


class _Batch:
    """The steps with one rounded number of streams.

    Attributes:
        times: the durations of these steps.
        credit: the time that speculation may still lose, in steps without proposals.
            Each step adds MAX_LOSS. A step with proposals also adds the time that its
            tokens would have taken without proposals, minus its own duration. Nothing
            is proposed while the credit is negative. So in any n steps, speculation
            loses at most MAX_CREDIT_STEPS + MAX_LOSS * n, plus the loss of one step.
    """

    def __init__(self, num_streams: int) -> None:
        self.times = BatchTimes(num_streams)
        self.credit = START_CREDIT_STEPS

    def account(
        self,
        num_proposals: int,
        tokens_per_stream: float,
        seconds: float | None,
        step: int,
    ) -> None:
        """Adds the gain or loss of a step to the credit. The step had proposals, or
        speculation delayed it.

        Args:
            seconds: the duration of the step; None if the step also computed prompts.
        """
        plain_s = self.times.plain_s
        if plain_s is None:
            return
        if seconds is None:
            slowdown = self.times.expected_slowdown(num_proposals)
        else:
            slowdown = self.times.add_slowdown(num_proposals, seconds / plain_s, step)
        self.add_credit(tokens_per_stream - slowdown)

    def add_credit(self, num_steps: float) -> None:
        self.credit = min(self.credit + num_steps, MAX_CREDIT_STEPS)


def _numbers_up_to(maximum: int) -> Ints:
    """Returns the elements of NUMBERS that are at most `maximum`, ascending."""
    return NUMBERS[: np.searchsorted(NUMBERS, maximum, side="right")]


def _sorted_gains(
    rates: Sequence[float], lengths: Sequence[int]
) -> tuple[Floats, Ints]:
    """Returns the expected number of tokens that each proposal adds, descending, and
    the index of the sequence of each proposal."""
    powers = np.arange(1, max(lengths) + 1)
    gains = np.power.outer(np.array(rates), powers)
    is_proposed = powers <= np.array(lengths)[:, np.newaxis]
    sequences, _ = np.nonzero(is_proposed)
    gains = gains[is_proposed]
    order = np.argsort(-gains, kind="stable")
    return gains[order], sequences[order]

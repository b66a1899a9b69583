"""Sets the proposals of decoding sequences, and counts the accepted ones.

Before each plan, drafters propose tokens, and the policy limits how many of them are
verified. From the results of verifications, the policy learns how often proposals are
accepted, and how long steps with proposals take.

The step after a verification is planned only when the verification has ended, because
only its result shows how many tokens each sequence keeps. Steps without proposals are
launched ahead as usual.
"""

import logging
from collections import Counter
from collections.abc import Sequence as Sequenceable

from engine.core.batch import PendingStep, StepInput
from engine.core.plan import Scheduled
from engine.core.sequence import Sequence
from engine.core.tables import SchedulerLimits
from engine.speculation.dormancy import Dormancy
from engine.speculation.drafter import Drafter, KVDrafter, StateReadingDrafter
from engine.speculation.policy import AcceptanceRate, SpeculationPolicy
from protocol.metrics import EngineHistogram, stat_key
from protocol.settings.speculation import MAX_PROPOSALS

logger = logging.getLogger("baton.engine")

_AVERAGE_WINDOW = 256  # latest outcomes that count in a drafter's average rate


class Speculator:
    """The drafters of one engine core.

    Args:
        limits: the limits of steps and sequences.
        drafters: the drafters, in order of preference. The proposals for a sequence
            come from the first drafter that has any.
        max_proposals: largest number of proposals for one sequence in one step.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        drafters: Sequenceable[Drafter] = (),
        max_proposals: int = MAX_PROPOSALS,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self._limits = limits
        self._drafters = list(drafters)
        self._readers = [d for d in drafters if isinstance(d, StateReadingDrafter)]
        self._dormancy = Dormancy()  # shared by all of self._readers
        self._max_proposals = max_proposals
        self._policy = policy or SpeculationPolicy()
        self._averages = {
            drafter.name: AcceptanceRate(window=_AVERAGE_WINDOW) for drafter in drafters
        }
        self._num_proposed = Counter({drafter.name: 0 for drafter in drafters})
        self._num_accepted = Counter({drafter.name: 0 for drafter in drafters})
        self._accepted_lengths = EngineHistogram("baton_speculative_accepted_length")
        self._num_accepted_in_step = 0
        self._has_delayed = False

    def needs_results(self, running: Sequenceable[Sequence]) -> bool:
        """Whether the results of launched steps must be known before the next plan.
        True if a verification has not ended, or if a drafter may have proposals that
        follow the awaited tokens."""
        if not self._drafters:
            return False
        decoding = [s for s in running if s.is_decoding and s.num_awaited]
        needs_results = any(sequence.is_verifying for sequence in running) or any(
            self._may_propose(drafter, decoding) for drafter in self._awake_drafters()
        )
        self._has_delayed |= needs_results
        return needs_results

    def _awake_drafters(self) -> list[Drafter]:
        sleepers = self._readers if self._dormancy.is_asleep else []
        return [drafter for drafter in self._drafters if drafter not in sleepers]

    def take_delay(self) -> bool:
        """Whether speculation delays the launch of the next step: the launch had to
        wait for the results of the previous step, or for a drafter on the device.
        Resets the value, so that the next call returns False."""
        has_delayed = self._has_delayed
        self._has_delayed = False
        return has_delayed

    def _may_propose(self, drafter: Drafter, decoding: list[Sequence]) -> bool:
        """Whether a drafter may have proposals for sequences in an unfinished step. For
        a drafter that uses the device, only the policy decides, because such a drafter
        cannot propose before the awaited tokens are known."""
        max_lengths = [self._num_that_fit(sequence) for sequence in decoding]
        if drafter.uses_device:
            rates = [self._rate(sequence, drafter.name).value for sequence in decoding]
            return any(self._policy.limits(rates, max_lengths, len(decoding)))
        return any(self._proposals_of(drafter, decoding, max_lengths, len(decoding)))

    def propose(self, running: Sequenceable[Sequence]) -> None:
        """Sets the proposals of all running sequences, for the next step."""
        if not self._drafters:
            return
        num_decoding = 0
        candidates = []
        for sequence in running:
            sequence.speculation.proposals = ()
            if not sequence.is_decoding:
                continue
            num_decoding += 1
            if sequence.speculation.is_paused:
                sequence.speculation.is_paused = False
            elif not sequence.num_launched:
                candidates.append(sequence)
        proposals = self._proposals(candidates, num_decoding)
        # The buffers of the ranks have a limited number of rows for proposals. And the
        # token limit of a step must leave one token for each decoding sequence.
        num_left = min(
            self._limits.max_proposals,
            self._limits.max_num_batched_tokens - num_decoding,
        )
        for sequence, tokens in zip(candidates, proposals, strict=True):
            sequence.speculation.proposals = tuple(tokens[: max(num_left, 0)])
            num_left -= len(sequence.speculation.proposals)

    def _proposals(
        self, sequences: list[Sequence], num_streams: int
    ) -> list[list[int]]:
        """Returns the tokens to verify for each sequence."""
        proposals: list[list[int]] = [[] for _ in sequences]
        max_lengths = [self._num_that_fit(sequence) for sequence in sequences]
        for drafter in self._awake_drafters():
            open_indices = [
                index
                for index, num in enumerate(max_lengths)
                if num and not proposals[index]
            ]
            if not open_indices:
                break
            for index, tokens in zip(
                open_indices,
                self._proposals_of(
                    drafter,
                    [sequences[index] for index in open_indices],
                    [max_lengths[index] for index in open_indices],
                    num_streams,
                ),
                strict=True,
            ):
                if tokens:
                    proposals[index] = tokens
                    sequences[index].speculation.drafter = drafter.name
        return proposals

    def _proposals_of(
        self,
        drafter: Drafter,
        sequences: list[Sequence],
        max_lengths: list[int],
        num_streams: int,
    ) -> list[list[int]]:
        """Returns the proposals of one drafter, as many as the policy allows. Turns off
        the drafter if it raises an exception."""
        rates = [self._rate(sequence, drafter.name).value for sequence in sequences]
        try:
            if drafter.uses_device:
                limits = self._policy.limits(rates, max_lengths, num_streams)
                if not any(limits):
                    return [[] for _ in sequences]
                self._has_delayed = True
                return drafter.propose(sequences, limits)
            if not self._policy.may_propose(rates, max_lengths, num_streams):
                return [[] for _ in sequences]
            proposals = drafter.propose(sequences, max_lengths)
        except Exception:
            self._turn_off(drafter)
            return [[] for _ in sequences]
        lengths = [len(tokens) for tokens in proposals]
        limits = self._policy.limits(rates, lengths, num_streams)
        return [tokens[:limit] for tokens, limit in zip(proposals, limits, strict=True)]

    def _turn_off(self, drafter: Drafter) -> None:
        """Stops using a drafter. Called in the handler of an exception that the drafter
        raised."""
        logger.exception(
            "The drafter %r failed. It is not used any more; requests continue "
            "without its proposals.",
            drafter.name,
        )
        self._drafters = [other for other in self._drafters if other is not drafter]
        self._readers = [other for other in self._readers if other is not drafter]

    def prepare(self, scheduled: Sequenceable[Scheduled], step: StepInput) -> StepInput:
        """Returns `step`, extended to also store the hidden states that drafters
        need."""
        for drafter in list(self._readers):
            try:
                step = drafter.prepare(
                    scheduled, step, only_prompts=self._dormancy.is_asleep
                )
            except Exception:
                self._turn_off(drafter)
        return step

    def follow(self) -> list[PendingStep]:
        """Launches and returns the steps of drafters that directly follow a prepared
        step."""
        launched: list[PendingStep] = []
        for drafter in list(self._readers):
            try:
                launched += drafter.follow()
            except Exception:
                self._turn_off(drafter)
        return launched

    # -- draft KV of other engines --------------------------------------------------

    def num_drafted(self, token_ids: Sequenceable[int], table: list[int]) -> int:
        """The number of tokens at the beginning of `token_ids` that have draft KV in
        the blocks of a block table of the engine."""
        for drafter in self._drafters:
            if isinstance(drafter, KVDrafter):
                return drafter.drafted_blocks.num_drafted(token_ids, table)
        return 0

    @property
    def catch_up_token_s(self) -> float | None:
        """See KVDrafter.catch_up_token_s. None if there is no drafter with KV."""
        for drafter in self._drafters:
            if isinstance(drafter, KVDrafter):
                return drafter.catch_up_token_s
        return None

    def begin_pull(self, table: list[int], start: int) -> None:
        """Drops the records of draft KV in the blocks of a table, from the block of
        token `start` on. Must be called before draft KV of other tokens may be written
        to these blocks."""
        for drafter in self._drafters:
            if isinstance(drafter, KVDrafter):
                drafter.drafted_blocks.begin_pull(table, start)

    def finish_pull(
        self, token_ids: Sequenceable[int], table: list[int], start: int, stop: int
    ) -> None:
        """Records that the draft KV of tokens [start, stop) was pulled to the blocks of
        a table."""
        for drafter in self._drafters:
            if isinstance(drafter, KVDrafter):
                drafter.drafted_blocks.finish_pull(token_ids, table, start, stop)

    def _num_that_fit(self, sequence: Sequence) -> int:
        """The largest number of proposals that may be verified for a sequence. One
        token is drawn in addition to the proposals."""
        grammar = sequence.sampling.grammar
        if sequence.choices.children or (grammar is not None and grammar.is_slow):
            return 0
        num_tokens = len(sequence.token_ids) + sequence.num_awaited
        num_outputs = sequence.num_outputs + sequence.num_awaited
        num_left = min(
            sequence.request.max_tokens - num_outputs,
            self._limits.max_model_len - num_tokens,
        )
        return max(0, min(num_left - 1, self._max_proposals))

    def _rate(self, sequence: Sequence, drafter: str) -> AcceptanceRate:
        """The acceptance rate of a drafter for a sequence. It begins with the drafter's
        average rate."""
        rates = sequence.speculation.rates
        if drafter not in rates:
            rates[drafter] = AcceptanceRate(self._averages[drafter].value)
        return rates[drafter]

    def record(
        self, sequence: Sequence, proposals: Sequenceable[int], num_accepted: int
    ) -> None:
        """Counts the result of a verification."""
        state = sequence.speculation
        state.record(len(proposals), num_accepted)
        self._rate(sequence, state.drafter).record(len(proposals), num_accepted)
        self._averages[state.drafter].record(len(proposals), num_accepted)
        self._num_proposed[state.drafter] += len(proposals)
        self._num_accepted[state.drafter] += num_accepted
        self._accepted_lengths.observe(num_accepted)
        self._num_accepted_in_step += num_accepted

    def record_step(
        self,
        scheduled: Sequenceable[Scheduled],
        cycle_s: float,
        *,
        is_delayed: bool = False,
    ) -> None:
        """Records a finished step. Called after `record` for all verifications of the
        step.

        Args:
            scheduled: the tokens that the step computed.
            cycle_s: seconds from the end of the previous step to the end of this step.
            is_delayed: the result of `take_delay` before the step was launched.
        """
        num_accepted = self._num_accepted_in_step
        self._num_accepted_in_step = 0
        if not self._drafters:
            return
        decoding = [item for item in scheduled if not item.is_prompt]
        has_prompts = len(decoding) < len(scheduled)
        if decoding and self._readers:
            readers = [drafter.name for drafter in self._readers]
            has_proposals = any(
                item.proposals and item.sequence.speculation.drafter in readers
                for item in decoding
            )
            self._dormancy.record_step(has_proposals=has_proposals)
        self._policy.record_step(
            num_streams=len(decoding),
            num_rows=sum(item.num_tokens for item in decoding),
            num_tokens=len(decoding) + num_accepted,
            seconds=None if has_prompts else cycle_s,
            is_delayed=is_delayed,
        )

    def stats(self) -> dict[str, float]:
        """Values by metric series (protocol.metrics)."""
        values = self._accepted_lengths.values()
        for name, num_proposed in self._num_proposed.items():
            proposed = stat_key("baton_speculative_proposed_tokens", drafter=name)
            accepted = stat_key("baton_speculative_accepted_tokens", drafter=name)
            values[proposed] = float(num_proposed)
            values[accepted] = float(self._num_accepted[name])
        return values

"""Values that the speculator passes to the policy, and effects of verifications."""

import random
from collections.abc import Sequence

import pytest

from engine.core.sequence import Sequence as EngineSequence
from engine.speculation.batch_times import MIN_PLAIN_STEPS
from engine.speculation.policy import SpeculationPolicy
from tests.rigs.drafters import RandomDrafter, VerifyEverything
from tests.rigs.shadow import add, expected_output, make_core, run_until_idle


class RecordingPolicy(VerifyEverything):
    """Verifies all proposals, and records the rates that the speculator passes."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def limits(
        self, rates: Sequence[float], lengths: Sequence[int], num_streams: int
    ) -> list[int]:
        self.rates += rates
        return list(lengths)


@pytest.mark.parametrize(("share_right", "low", "high"), [(1, 0.9, 1), (0, 0, 0.1)])
def test_rate_of_a_sequence_begins_with_the_average_of_its_drafter(
    share_right, low, high
):
    policy = RecordingPolicy()
    drafter = RandomDrafter(share_right, random.Random(1))
    core, _, _ = make_core(drafters=[drafter], policy=policy)
    run_until_idle(core, add("a", [1, 2, 3], 60))
    assert policy.rates[0] == 0.5
    policy.rates.clear()
    run_until_idle(core, add("b", [3, 2, 1], 10))
    assert low <= policy.rates[0] <= high


def test_each_drafter_has_its_own_rate():
    """The first drafter is wrong, and often proposes nothing."""
    policy = RecordingPolicy()
    bad = RandomDrafter(0.0, random.Random(1), name="bad")
    good = RandomDrafter(1.0, random.Random(2), name="good")
    core, _, _ = make_core(drafters=[bad, good], policy=policy)
    run_until_idle(core, add("a", [1, 2, 3], 200))
    assert min(policy.rates[-30:]) < 0.1
    assert max(policy.rates[-30:]) > 0.8


class _Fickle:
    """Proposes only while the engine awaits the newest token. When this token is known,
    no proposal is left to verify."""

    name = "fickle"
    uses_device = False

    def propose(self, sequences, limits):
        return [
            [7] * limit if s.num_awaited else []
            for s, limit in zip(sequences, limits, strict=True)
        ]


class _Silent:
    name = "silent"
    uses_device = False

    def propose(self, sequences, limits):
        return [[] for _ in sequences]


def test_drafters_do_not_search_while_the_policy_allows_no_proposal(depth):
    drafter = RandomDrafter(1.0, random.Random(3))
    calls: list[int] = []
    propose = drafter.propose

    def counted_propose(
        sequences: Sequence[EngineSequence], limits: Sequence[int]
    ) -> list[list[int]]:
        calls.append(len(sequences))
        return propose(sequences, limits)

    drafter.propose = counted_propose  # type: ignore[method-assign]
    policy = SpeculationPolicy()
    core, executor, out = make_core(depth=depth, drafters=[drafter], policy=policy)
    # The request ends when the policy has measured enough steps without proposals.
    run_until_idle(core, add("a", [3, 1, 4], 1 + MIN_PLAIN_STEPS))
    assert out.tokens("a") == expected_output([3, 1, 4], 1 + MIN_PLAIN_STEPS)
    assert not calls
    assert not depth or executor.num_steps_ahead == executor.num_steps - 1


class _Recording(VerifyEverything):
    """Records which steps were delayed by waiting for a drafter."""

    def __init__(self) -> None:
        super().__init__()
        self.delays: list[bool] = []

    def record_step(self, *args, is_delayed=False, **kwargs):
        self.delays.append(is_delayed)
        super().record_step(*args, is_delayed=is_delayed, **kwargs)


@pytest.mark.parametrize(
    ("drafter", "is_delayed"), [(_Fickle(), True), (_Silent(), False)]
)
def test_steps_that_waited_for_a_drafter_are_no_measurement_of_plain_steps(
    drafter, is_delayed
):
    policy = _Recording()
    core, executor, out = make_core(depth=1, drafters=[drafter], policy=policy)
    prompt = [3, 1, 4]
    run_until_idle(core, add("a", prompt, 12))
    assert out.tokens("a") == expected_output(prompt, 12)
    assert any(policy.delays) == is_delayed
    # The last step is never delayed, because no proposal fits before its token.
    assert executor.num_steps_ahead == executor.num_steps - 1 - sum(policy.delays)

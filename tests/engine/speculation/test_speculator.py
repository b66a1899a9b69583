"""What the speculator tells the policy, and what it learns from verifications."""

import random
from collections.abc import Sequence

import pytest

from engine.speculation.policy import SpeculationPolicy
from tests.rigs.drafters import RandomDrafter
from tests.rigs.shadow import add, make_core, run_until_idle


class RecordingPolicy(SpeculationPolicy):
    """Verifies everything, and keeps the rates that it got."""

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

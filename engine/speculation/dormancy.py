"""Decides when a drafter that reads hidden states sleeps.

While such a drafter is awake, it computes draft KV of every token of the decoding
streams, even if its proposals do not pay off and are only occasional probes. That would
cost more than the loss that users are promised (policy.py). The drafter therefore
sleeps while its proposals do not pay off: it computes draft KV of prompts only, and
proposes nothing. After it wakes, its context consists of the tokens that already have
draft KV and of all later tokens.
"""

from typing import Final

# Numbers of decode steps for which a drafter stays awake and asleep. A drafter that
# costs 9 % loses 1 % if it is awake for a ninth of the time. While the drafter is
# awake, one of 8 steps may be a probe, which gives the policy 32 probes.
AWAKE_STEPS: Final = 256
ASLEEP_STEPS: Final = 2_048
# If fewer than this share of steps have proposals, the proposals are only probes. While
# proposals pay off, nearly all steps have some.
_MIN_SHARE: Final = 0.25


class Dormancy:
    """Counts decode steps, and switches between awake and asleep.

    Attributes:
        is_asleep: whether the drafter sleeps.
    """

    def __init__(self) -> None:
        self.is_asleep = False
        self._num_steps = 0
        self._num_used = 0

    def record_step(self, *, has_proposals: bool) -> None:
        """Records a decode step, and whether the drafter had proposals for it."""
        self._num_steps += 1
        self._num_used += has_proposals
        if self._num_steps < (ASLEEP_STEPS if self.is_asleep else AWAKE_STEPS):
            return
        is_used = self._num_used >= _MIN_SHARE * self._num_steps
        self.is_asleep = not (self.is_asleep or is_used)
        self._num_steps = 0
        self._num_used = 0

"""Decides when a drafter that reads hidden states computes draft KV of the streams
that decode.

Such a drafter computes draft KV of every token of a stream, also while its proposals do
not pay and only a few probes are made. That would cost more than users are promised
(policy.py). So it sleeps then: it computes draft KV of prompts only, and proposes
nothing. When it wakes, its context is what has draft KV, and the tokens from then on.
"""

from typing import Final

# Decode steps. Awake for a ninth of the time, a drafter that costs 9 % loses 1 %. While
# awake, one of 8 steps may be a probe, so the policy sees 32 of them.
AWAKE_STEPS: Final = 256
ASLEEP_STEPS: Final = 2_048
# If fewer than this share of steps have proposals, the proposals are only probes. While
# proposals pay, nearly all steps have some.
_MIN_SHARE: Final = 0.25


class Dormancy:
    """Counts decode steps.

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

"""The target for the duration of steps with streams, as options and role decide it."""

from typing import NamedTuple


class StepTarget(NamedTuple):
    """How long a step with streams should take.

    Attributes:
        is_explicit: whether `--itl-target-s` sets the target.
        only_in_pair: whether the target applies only while prefill servers compute
            prompts for this server.
    """

    seconds: float
    is_explicit: bool = False
    only_in_pair: bool = False

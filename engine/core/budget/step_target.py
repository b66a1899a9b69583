"""The target duration of steps that decode, which the options and the role decide."""

from typing import NamedTuple


class StepTarget(NamedTuple):
    """How long a step with decoding sequences should take at most.

    Attributes:
        is_explicit: whether `--itl-target-s` sets the target.
        only_in_pair: whether the target applies only while prefill servers compute
            prompts for this server.
    """

    seconds: float
    is_explicit: bool = False
    only_in_pair: bool = False

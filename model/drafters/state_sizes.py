"""Sizes of the table in which each rank stores hidden states for a drafter.

This file does not import torch. The engine on rank 0 decides which row of the table
belongs to which row of a step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateTableSizes:
    """Numbers of rows in the three parts of the table, in the order of the parts.

    Attributes:
        num_slots: rows for states of the target that later steps need.
        max_outputs: rows for the outputs of the drafter's latest step, one for each
            token that the step draws.
        max_tokens: rows for the states of the target's latest step, one for each token
            of that step.
    """

    num_slots: int
    max_outputs: int
    max_tokens: int

    @property
    def first_output(self) -> int:
        return self.num_slots

    @property
    def first_token(self) -> int:
        return self.num_slots + self.max_outputs

    @property
    def num_rows(self) -> int:
        return self.first_token + self.max_tokens

"""The table of hidden states that each rank has for a drafter.

This file does not import torch. The engine on rank 0 decides which row of the table
belongs to which row of a step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateTableSizes:
    """The rows of the table, in this order.

    Attributes:
        num_slots: states of the target that later steps need.
        max_outputs: the outputs of the latest step of the drafter, by draw.
        max_tokens: the states of the latest step of the target, by token.
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

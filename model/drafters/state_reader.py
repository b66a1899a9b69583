"""An adapter that gives a drafter the interface of a model.

The drafter reads hidden states. The adapter gets the states of a step's rows from a
table on this rank; see StateTableSizes.
"""

import torch
from torch import Tensor

from attention.base import AttentionBackend
from model.attention_layers import AttentionQueries, AttentionSpec
from model.decoder import StateCapture
from model.drafters.draft_model import DraftModel
from model.drafters.state_sizes import StateTableSizes
from model.parallel import Parallel


class StateReader:
    """Implements decoder.StepModel with a drafter.

    `load` gathers the states of a step in a buffer with a fixed address, from which the
    step reads them. So the step can be captured as a CUDA graph.
    """

    def __init__(
        self,
        draft: DraftModel,
        sizes: StateTableSizes,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.draft = draft
        self.sizes = sizes
        width = draft.config.hidden_size
        # Zeros, so that no step reads uninitialized memory.
        self._table = torch.zeros(sizes.num_rows, width, dtype=dtype, device=device)
        self._inputs = torch.zeros(sizes.max_tokens, width, dtype=dtype, device=device)

    @property
    def parallel(self) -> Parallel:
        return self.draft.parallel

    @property
    def attention_spec(self) -> AttentionSpec:
        return self.draft.attention_spec

    def store(self, captured: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Stores the states of the target's latest step in the table.

        Args:
            captured: [T, ...], see StateCapture.
            rows, slots: int64 [N]. Row rows[i] is also copied to slot slots[i], where
                it stays for later steps.
        """
        states = self.draft.combine(captured)
        first = self.sizes.first_token
        self._table[first : first + len(states)] = states
        self._table.index_copy_(0, slots, states[rows])

    def load(self, table_rows: Tensor) -> None:
        """Gathers the states of the next step.

        Args:
            table_rows: int64 [T], the row of the table for each row of the step.
        """
        out = self._inputs[: len(table_rows)]
        torch.index_select(self._table, 0, table_rows, out=out)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
        capture: StateCapture | None = None,
    ) -> Tensor:
        states = self._inputs[: len(token_ids)]
        return self.draft.forward(token_ids, states, positions, attention, rows)

    def attention_queries(
        self,
        token_ids: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
        capture: StateCapture | None = None,
    ) -> AttentionQueries:
        states = self._inputs[: len(token_ids)]
        return self.draft.attention_queries(
            token_ids, states, positions, backend_rotates, rows
        )

    def new_capture(
        self, layers: tuple[int, ...], num_tokens: int
    ) -> StateCapture | None:
        """Returns None, because no drafter reads the states of another drafter."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of `hidden`, the rows that draw a token. Stores these rows
        in the table, as states for the next step."""
        first = self.sizes.first_output
        self._table[first : first + len(hidden)] = hidden
        return self.draft.raw_logits(hidden)

"""The interface of drafters that read hidden states of their target.

The target is the model for which a drafter proposes tokens. The row of position p has
two inputs: the token of position p + 1, and a state that represents the tokens up to p.
The row's output predicts the token of position p + 2. The row has the rotary embedding,
the KV slot and the context length of position p.

To propose several tokens, the output of a row is used as the state of the next row:

    states = draft.combine(captured)        # from StateCapture, rows of position p
    states = draft.forward(tokens of p + 1, states, positions p, attention)
    proposals = draft.raw_logits(states).argmax(-1)       # of position p + 2
    states = draft.forward(proposals, states, positions p + 1, attention)
"""

from abc import ABC, abstractmethod

from torch import Tensor

from attention.base import AttentionBackend
from model.attention_layers import AttentionQueries, AttentionSpec
from model.config import ModelConfig
from model.decoder_layer import DecoderLayer, attention_spec, run_queries
from model.parallel import Parallel


class DraftModel(ABC):
    """One rank's part of a drafter.

    The class is for inference only: the caller must be in torch.inference_mode.

    Attributes:
        config: a config that describes the drafter's layer as a model. The drafter's KV
            cache has `config.num_layers` layers with `config.kv_components`,
            `config.kv_heads_total` and `config.kv_dim`.
        target_layers: the `layers` of the StateCapture that the target must fill.
    """

    def __init__(
        self,
        config: ModelConfig,
        target_layers: tuple[int, ...],
        layer: DecoderLayer,
        parallel: Parallel,
    ) -> None:
        self.config = config
        self.target_layers = target_layers
        self.parallel = parallel
        self._layer = layer

    @property
    def attention_spec(self) -> AttentionSpec:
        """The properties that this rank's attention backend must have."""
        return attention_spec(self.config, self.parallel, [self._layer])

    @abstractmethod
    def combine(self, captured: Tensor) -> Tensor:
        """Computes the drafter's states [T, hidden] from captured states of the target.

        Args:
            captured: [T, len(target_layers) * hidden of the target], see StateCapture.
        """

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Runs one step, writing its KV through `attention`.

        Args:
            token_ids: int64 [T], the token after each row's position.
            states: [T, hidden], from `combine`, or the output of `forward` for the
                preceding position.
            positions: int64 [T].
            attention: a backend that is planned for this step.
            rows: int64 [R], the rows to return; None: all.

        Returns:
            [T, hidden] or [R, hidden], equal on every rank. The result is the input of
            `raw_logits`, and the `states` argument for the following positions.
        """
        queries = self.attention_queries(
            token_ids, states, positions, attention.applies_rope, rows
        )
        return run_queries(queries, attention)

    @abstractmethod
    def attention_queries(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
    ) -> AttentionQueries:
        """Runs `forward` as a generator; see CausalLM.attention_queries."""

    @abstractmethod
    def raw_logits(self, states: Tensor) -> Tensor:
        """Returns the logits [S, vocab] of states [S, hidden] that `forward` returned.

        The vocabulary is that of the target. The logits are complete on every rank, and
        in the data type of the computation. The logit of a token that the drafter
        cannot propose is -inf.
        """

"""EAGLE-3 (arXiv 2503.01840): a drafter with a checkpoint of its own.

The drafter reads the hidden states after three layers of its target, and a projection
combines these states. Its single layer takes token embeddings and states, concatenated.
Its vocabulary may be smaller than the target's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from model.attention_layers import AttentionQueries, HeadAttention, Step
from model.decoder import CausalLM
from model.decoder_layer import DecoderLayer, load_ropes
from model.drafters.draft_model import DraftModel
from model.drafters.eagle3_config import Eagle3Config
from model.errors import ModelLoadError
from model.files.safetensors_files import StoredTensor
from model.layers import Linear, load_norm
from model.quantization.stored import map_tensor
from model.vocabulary import Embedding, Head, load_share
from model.weights import WeightLoader

# Name of the tensor that maps the drafter's tokens to the target's. An element is the
# difference of the two ids.
_TOKEN_MAP = "d2t"
_LAYER = "midlayer"


class Eagle3Model(DraftModel):
    """An EAGLE-3 drafter.

    Args:
        tensors: the tensors of the drafter's files, as `eagle3_tensors` returns them;
            empty for dummy weights.
    """

    def __init__(
        self,
        loader: WeightLoader,
        config: Eagle3Config,
        target: CausalLM,
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        model = config.model
        parallel = target.parallel
        size = model.hidden_size
        self._ropes = load_ropes(loader, model)
        layer = DecoderLayer(
            loader,
            model,
            0,
            parallel,
            self._ropes,
            prefix=_LAYER,
            attention_inputs=2 * size,
        )
        super().__init__(model, config.target_layers, layer, parallel)
        self._norms_residual = config.norms_residual
        self._state_norm = load_norm(loader, f"{_LAYER}.hidden_norm", size, model)
        self._target_norm = None
        if config.norms_target_states:
            self._target_norm = load_norm(
                loader, "input_norm", config.captured_size, model
            )
        projection = loader.matrix("fc.weight", (size, config.captured_size))
        self._projection = Linear(projection, pack=loader.pack)
        self._norm = load_norm(loader, "norm", size, model)
        self._embedding = target.embedding
        if "embed_tokens.weight" in tensors:
            table_shape = (model.vocab_size, size)
            weight = load_share(loader, "embed_tokens.weight", table_shape, parallel)
            if not torch.equal(weight, target.embedding.weight):
                self._embedding = Embedding(weight, parallel)
        head_shape = (config.draft_vocab_size, size)
        weight = load_share(loader, "lm_head.weight", head_shape, parallel)
        self._head = Head(weight, config.draft_vocab_size, parallel, pack=loader.pack)
        self._target_ids = _load_target_ids(config, tensors)
        if self._target_ids is not None:
            self._target_ids = self._target_ids.to(loader.device)

    def combine(self, captured: Tensor) -> Tensor:
        if self._target_norm is not None:
            captured = self._target_norm(captured)
        return self._projection(captured)

    def attention_queries(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
    ) -> AttentionQueries:
        layer = self._layer
        assert isinstance(layer.attention, HeadAttention) and layer.norm is not None
        angles = tuple(rope.angles(positions) for rope in self._ropes)
        normed_states = self._state_norm(states)
        embedded = layer.norm(self._embedding(token_ids))
        inputs = torch.cat((embedded, normed_states), dim=-1)
        # Attention adds its output to the residual in place, so `states` is copied.
        residual = normed_states if self._norms_residual else states.clone()
        step = Step(angles, backend_rotates, rows)
        hidden = yield from layer.attention(residual, None, step, inputs)
        return layer.feed_forward(hidden, layer.mlp_norm)

    def raw_logits(self, states: Tensor) -> Tensor:
        logits = self._head(states, self._norm)
        if self._target_ids is None:
            return logits
        complete = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        return complete.index_copy_(1, self._target_ids, logits)


def _load_target_ids(
    config: Eagle3Config, tensors: Mapping[str, StoredTensor]
) -> Tensor | None:
    """Returns the target's id of each token of the drafter, int64, on the CPU.

    Returns None if both have the same tokens. With dummy weights, a smaller vocabulary
    of the drafter consists of the target's first tokens.

    Raises:
        ModelLoadError: an id is not a token of the target, or occurs twice.
    """
    vocab_size = config.model.vocab_size
    if config.draft_vocab_size == vocab_size and _TOKEN_MAP not in tensors:
        return None
    ids = torch.arange(config.draft_vocab_size)
    if _TOKEN_MAP in tensors:
        ids = ids + map_tensor(_TOKEN_MAP, tensors[_TOKEN_MAP]).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelLoadError(
            f"{_TOKEN_MAP} maps to tokens {int(ids.min())} to {int(ids.max())}, "
            f"but the model has {vocab_size} tokens"
        )
    if len(set(ids.tolist())) < len(ids):
        raise ModelLoadError(f"{_TOKEN_MAP} maps two tokens to the same token")
    return ids

"""Multi-token prediction (MTP): a layer that ships with a model and drafts for it.

DeepSeek-V3's report (arXiv 2412.19437) describes the layer, but leaves two details
open. Serving systems have settled these details by measuring the acceptance of drafts.
The target's states are read after the target's final norm. The states that the MTP
layer produces for its next row are read after the MTP layer's output norm.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from model.attention_layers import AttentionQueries, Step
from model.decoder import CausalLM
from model.decoder_layer import DecoderLayer, load_ropes
from model.drafters.draft_model import DraftModel
from model.drafters.mtp_weights import MTPNames, mtp_config
from model.files.safetensors_files import StoredTensor, has_equal_content
from model.layers import Linear, load_norm
from model.vocabulary import Embedding, load_share, make_head
from model.weights import WeightLoader

_EMBEDDINGS: Final = ("model.embed_tokens.weight",)
# The files of a model with a tied head may have no head; its embedding is used instead.
_HEADS: Final = ("lm_head.weight", *_EMBEDDINGS)


class MTPModel(DraftModel):
    """An MTP layer, with the embedding and the head of its model.

    Args:
        names: see `mtp_names`.
        tensors: the tensors of the model's files; empty for dummy weights.
    """

    def __init__(
        self,
        loader: WeightLoader,
        names: MTPNames,
        target: CausalLM,
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        config = mtp_config(target.config)
        parallel = target.parallel
        self._ropes = load_ropes(loader, config)
        layer = DecoderLayer(
            loader, config, 0, parallel, self._ropes, prefix=names.layer
        )
        super().__init__(config, (target.config.num_layers,), layer, parallel)
        size = config.hidden_size
        self._target_norm = target.norm
        self._token_norm = load_norm(loader, names.token_norm, size, config)
        self._state_norm = load_norm(loader, names.state_norm, size, config)
        projection = loader.matrix(f"{names.projection}.weight", (size, 2 * size))
        self._projection = Linear(projection, pack=loader.pack)
        self._norm = load_norm(loader, names.norm, size, config)
        shape = (config.vocab_size, size)
        self._embedding = target.embedding
        if _has_own_table(tensors, names.embedding, _EMBEDDINGS):
            weight = load_share(loader, f"{names.embedding}.weight", shape, parallel)
            self._embedding = Embedding(weight, parallel, config.embedding_scale)
        self._head = target.head
        if _has_own_table(tensors, names.head, _HEADS):
            weight = load_share(loader, f"{names.head}.weight", shape, parallel)
            self._head = make_head(loader, weight, config, parallel)

    def combine(self, captured: Tensor) -> Tensor:
        return self._target_norm(captured)

    def attention_queries(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
    ) -> AttentionQueries:
        angles = tuple(rope.angles(positions) for rope in self._ropes)
        embedded = self._token_norm(self._embedding(token_ids))
        inputs = torch.cat((embedded, self._state_norm(states)), dim=-1)
        hidden = self._projection(inputs)
        step = Step(angles, backend_rotates, rows)
        hidden = yield from self._layer(hidden, step)
        return self._norm(hidden)

    def raw_logits(self, states: Tensor) -> Tensor:
        return self._head(states, None)


def _has_own_table(
    tensors: Mapping[str, StoredTensor], name: str | None, model_tables: Sequence[str]
) -> bool:
    """Returns whether the MTP layer's embedding or head differs from the model's.

    Returns False if the files hold no separate matrix for the MTP layer.

    Args:
        name: name of the MTP layer's matrix, without ".weight"; None: the files have no
            such matrix.
        model_tables: possible names of the model's matrix. The first name that the
            files contain is used.
    """
    embedding_table = tensors.get(f"{name}.weight")
    if embedding_table is None:
        return False
    stored_tables = [tensors[table] for table in model_tables if table in tensors]
    return not stored_tables or not has_equal_content(embedding_table, stored_tables[0])

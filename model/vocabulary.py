"""The embedding and the head of a model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.layers import Columns, Linear, RMSNorm
from model.parallel import Parallel
from model.weights import WeightLoader


class Vocabulary:
    """The embedding and the head of one rank.

    Ranks split the rows of the vocabulary, which is padded to equal shares.
    """

    def __init__(
        self, loader: WeightLoader, config: ModelConfig, parallel: Parallel
    ) -> None:
        self._parallel = parallel
        self._size = config.vocab_size
        # The scale is rounded to the model's data type, as in the training of the
        # models.
        self._scale = torch.tensor(config.embedding_scale).to(loader.dtype).item()
        self._divisor = config.logit_divisor
        self._cap = config.logit_cap
        self._share = -(-config.vocab_size // parallel.size)
        self._start = min(parallel.rank * self._share, config.vocab_size)
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = self._load(loader, "model.embed_tokens.weight", shape)
        head = self._embedding
        # A stored head counts even if the config says that it is tied, since it may
        # differ.
        if not config.tie_embeddings or loader.has("lm_head.weight"):
            stored_head = self._load(loader, "lm_head.weight", shape)
            if not torch.equal(stored_head, self._embedding):
                head = stored_head
        # Packing copies the head even if it shares its weight with the embedding,
        # because the embedding needs rows in their own order.
        self._head = Columns([Linear(head)], pack=loader.pack)

    def _load(self, loader: WeightLoader, name: str, shape: tuple[int, int]) -> Tensor:
        rows = range(self._start, min(self._start + self._share, self._size))
        weight = loader.load(name, shape, rows=rows)
        missing = self._share - len(rows)
        return F.pad(weight, (0, 0, 0, missing)) if missing else weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings [T, hidden] of int64 [T], a new tensor."""
        if self._parallel.size == 1:
            rows = F.embedding(token_ids, self._embedding)
        else:
            local = token_ids - self._start
            foreign = (local < 0) | (local >= self._share)
            rows = F.embedding(local.masked_fill_(foreign, 0), self._embedding)
            rows = self._parallel.all_reduce(rows.masked_fill_(foreign[:, None], 0))
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def logits(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """Norms hidden [S, hidden] and returns [S, vocab], complete on every rank.

        The logits may be in 16 bits.
        """
        (share,) = self._head(hidden, norm)
        logits = self._parallel.all_gather_last_dim(share)[:, : self._size]
        if self._divisor != 1.0:
            logits = logits / self._divisor
        if self._cap:
            logits = logits.div(self._cap).tanh_().mul_(self._cap)
        return logits

"""The embedding and the head of a model.

Ranks split the rows of the two matrices. The vocabulary is padded so that all ranks
have the same number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.layers import Columns, Linear, RMSNorm
from model.parallel import Parallel
from model.weights import WeightLoader


def load_share(
    loader: WeightLoader, name: str, shape: tuple[int, int], parallel: Parallel
) -> Tensor:
    """Loads this rank's rows of a matrix with one row for each token.

    Args:
        shape: the shape of the complete matrix.

    Returns:
        [share, columns], padded with rows of zeros.
    """
    share = _share(shape[0], parallel)
    start = min(parallel.rank * share, shape[0])
    rows = range(start, min(start + share, shape[0]))
    weight = loader.load(name, shape, rows=rows)
    missing = share - len(rows)
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def _share(vocab_size: int, parallel: Parallel) -> int:
    return -(-vocab_size // parallel.size)


class Embedding:
    """The embedding of one rank.

    Args:
        weight: the result of `load_share`.
        scale: factor of the embeddings. It is rounded to the data type of the weight,
            as in the training of the models.
    """

    def __init__(self, weight: Tensor, parallel: Parallel, scale: float = 1.0) -> None:
        self.weight = weight
        self._parallel = parallel
        self._start = parallel.rank * len(weight)
        self._scale = torch.tensor(scale).to(weight.dtype).item()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings of the tokens, a new tensor [T, hidden].

        Args:
            token_ids: int64 [T].
        """
        if self._parallel.size == 1:
            rows = F.embedding(token_ids, self.weight)
        else:
            local = token_ids - self._start
            foreign = (local < 0) | (local >= len(self.weight))
            rows = F.embedding(local.masked_fill_(foreign, 0), self.weight)
            rows = self._parallel.all_reduce(rows.masked_fill_(foreign[:, None], 0))
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


class Head:
    """The head of one rank, which computes logits.

    Args:
        weight: the result of `load_share`.
        vocab_size: number of tokens, without padding.
        pack: see Linear.
        divisor: divisor of the logits.
        cap: logits become tanh(logit / cap) * cap; 0: no cap.
    """

    def __init__(
        self,
        weight: Tensor,
        vocab_size: int,
        parallel: Parallel,
        *,
        pack: bool,
        divisor: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        # Packing copies the weight even if the embedding shares it, because the
        # embedding needs complete rows in the original order.
        self._columns = Columns([Linear(weight)], pack=pack)
        self._size = vocab_size
        self._parallel = parallel
        self._divisor = divisor
        self._cap = cap

    def __call__(self, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """Applies `norm`, if any, to `hidden` [S, hidden] and computes logits.

        Returns:
            [S, vocab], complete on every rank, in the data type of the computation.
        """
        (share,) = self._columns(hidden, norm)
        logits = self._parallel.all_gather_last_dim(share)[:, : self._size]
        if self._divisor != 1.0:
            logits = logits / self._divisor
        if self._cap:
            logits = logits.div(self._cap).tanh_().mul_(self._cap)
        return logits


def load_vocabulary(
    loader: WeightLoader, config: ModelConfig, parallel: Parallel
) -> tuple[Embedding, Head]:
    """Loads the embedding and the head of a model."""
    shape = (config.vocab_size, config.hidden_size)
    embedding = load_share(loader, "model.embed_tokens.weight", shape, parallel)
    head = embedding
    # If the files have a head, it is compared with the embedding even if the config
    # declares the head as tied, because the two may differ.
    if not config.tie_embeddings or loader.has("lm_head.weight"):
        stored_head = load_share(loader, "lm_head.weight", shape, parallel)
        if not torch.equal(stored_head, embedding):
            head = stored_head
    return (
        Embedding(embedding, parallel, config.embedding_scale),
        make_head(loader, head, config, parallel),
    )


def make_head(
    loader: WeightLoader, weight: Tensor, config: ModelConfig, parallel: Parallel
) -> Head:
    """Returns the head with this weight, and with the model's divisor and cap."""
    return Head(
        weight,
        config.vocab_size,
        parallel,
        pack=loader.pack,
        divisor=config.logit_divisor,
        cap=config.logit_cap,
    )

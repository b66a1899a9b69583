"""Logprobs of prompt tokens: a few rows of logits at a time, never [tokens, vocabulary] at once."""

from itertools import islice

import torch

from engine.core.batch import ScoredRows
from engine.core.logits_processing import to_device
from engine.sampling.sampler import Logprobs
from model.decoder import CausalLM
from protocol.messages import TokenLogprobs

# Enough for the matmul to run at full speed, and few enough that the allocator keeps their logits
# from chunk to chunk: what it gives back costs page faults.
_CHUNK_ROWS = 64


class PendingScores:
    """What a launched step finds out about prompt tokens."""

    def __init__(self, wanted: list[ScoredRows], chunks: list[Logprobs]) -> None:
        self._wanted = wanted
        self._chunks = chunks

    def result(self) -> list[list[TokenLogprobs]]:
        """Of each of `wanted`. To be asked for once the device has finished the step."""
        counts = iter([w.num_top for w in self._wanted for _ in w.targets])
        rows = (
            row
            for chunk in self._chunks
            for row in chunk.rows(list(islice(counts, len(chunk.chosen))))
        )
        return [list(islice(rows, len(w.targets))) for w in self._wanted]


def score(model: CausalLM, hidden: torch.Tensor, wanted: list[ScoredRows]) -> PendingScores:
    """Log-probabilities, of the unmodified distribution, of the tokens that `wanted` names. Every
    rank of a model takes part. On a GPU nothing is waited for.

    Args:
        hidden: [T, hidden] of a step.
    """
    if not wanted:
        return PendingScores([], [])
    rows = torch.cat([torch.arange(w.first_row, w.first_row + len(w.targets)) for w in wanted])
    targets = torch.tensor([target for w in wanted for target in w.targets])
    rows, targets = (to_device(ids, hidden.device) for ids in (rows, targets))
    num_top = max(w.num_top for w in wanted)
    chunks = []
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        logprobs = model.logits(hidden[rows[chunk]]).log_softmax(-1)  # logsumexp takes longer
        logprobs = logprobs.nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
        top, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]))
        chosen = logprobs.gather(1, targets[chunk, None])[:, 0]
        chunks.append(Logprobs(chosen, top_ids, top).on_host())
    return PendingScores(wanted, chunks)

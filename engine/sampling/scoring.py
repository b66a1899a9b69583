"""Logprobs of prompt tokens: a few rows of logits at a time, never [tokens, vocabulary] at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.core.batch import ScoredRows
from engine.core.logits_processing import to_device
from model.base import CausalLM
from protocol.messages import TokenLogprobs

# Enough for the matmul to run at full speed, and few enough that the allocator keeps their logits
# from chunk to chunk: what it gives back costs page faults.
_CHUNK_ROWS = 64
_PIECE = 128  # values of a row that are compared before the rest, see _largest


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Of some rows, on their way to the host."""

    logprobs: torch.Tensor  # float32 [rows], of the targets
    top_ids: torch.Tensor | None  # int64 [rows, k]
    top_logprobs: torch.Tensor | None  # float32 [rows, k]

    def rows(self) -> Iterator[TokenLogprobs]:
        chosen = self.logprobs.tolist()
        if self.top_ids is None or self.top_logprobs is None:
            return (TokenLogprobs(logprob) for logprob in chosen)
        pairs = zip(chosen, self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return (TokenLogprobs(*row) for row in pairs)


class PendingScores:
    """What a launched step finds out about prompt tokens."""

    def __init__(self, wanted: list[ScoredRows], chunks: list[_Chunk]) -> None:
        self._wanted = wanted
        self._chunks = chunks

    def result(self) -> list[list[TokenLogprobs]]:
        """Of each of `wanted`. To be asked for once the device has finished the step."""
        found = [row for chunk in self._chunks for row in chunk.rows()]
        scores, at = [], 0
        for w in self._wanted:
            mine = found[at : at + len(w.targets)]
            k = w.num_top
            if mine and len(mine[0].top_ids) > k:
                mine = [TokenLogprobs(s.logprob, s.top_ids[:k], s.top_logprobs[:k]) for s in mine]
            scores.append(mine)
            at += len(w.targets)
        return scores


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
        chunks.append(_score_chunk(model.logits(hidden[rows[chunk]]), targets[chunk], num_top))
    return PendingScores(wanted, chunks)


def _score_chunk(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> _Chunk:
    logprobs = logits.log_softmax(-1)  # one fused pass on the CPU; logsumexp takes four
    chosen = _numbers(logprobs.gather(1, targets[:, None])[:, 0])
    if num_top == 0:
        return _Chunk(chosen, None, None)
    top, ids = _largest(logprobs, min(num_top, logprobs.shape[1]))
    return _Chunk(chosen, ids.to("cpu", non_blocking=True), _numbers(top))


def _largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk of [rows, V]. For few of many, one pass over the values finds the k pieces of the row
    with the largest maxima, which hold them, and only those are looked through."""
    num_pieces, rest = divmod(values.shape[1], _PIECE)
    if 8 * k > num_pieces:
        return values.topk(k)
    pieces = values[:, : num_pieces * _PIECE].view(-1, num_pieces, _PIECE)
    best = pieces.amax(-1).topk(k).indices  # [rows, k]
    ids = best[:, :, None] * _PIECE + torch.arange(_PIECE, device=values.device)
    tail = torch.arange(num_pieces * _PIECE, values.shape[1], device=values.device)
    ids = torch.cat((ids.flatten(1), tail.expand(len(values), rest)), 1)
    top, at = values.gather(1, ids).topk(k)
    return top, ids.gather(1, at)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """On the host, perhaps later. As sampling has it, a NaN counts as -inf."""
    lowest = float("-inf")
    return values.nan_to_num(nan=lowest, neginf=lowest).to("cpu", non_blocking=True)

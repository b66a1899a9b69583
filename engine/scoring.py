"""Logprobs of prompt tokens: a few rows of logits at a time, never [tokens, vocabulary] at once."""

import torch

from engine.batch import ScoredRows
from model.base import CausalLM
from protocol.messages import TokenLogprobs

# Enough for the matmul to run at full speed. At 49,152 tokens 13 MB of logits, which the allocator
# keeps from chunk to chunk; 25 MB it gives back, and page faults then cost 60 us a row.
_CHUNK_ROWS = 64
_PIECE = 128  # values of a row that are compared before the rest, see _largest


def score(
    model: CausalLM, hidden: torch.Tensor, wanted: list[ScoredRows]
) -> list[list[TokenLogprobs]]:
    """Log-probabilities, of the unmodified distribution, of the tokens that `wanted` names. Every
    rank of a model takes part.

    Args:
        hidden: [T, hidden] of a step.
    """
    if not wanted:
        return []
    rows = torch.cat([torch.arange(w.first_row, w.first_row + len(w.targets)) for w in wanted])
    targets = torch.tensor([target for w in wanted for target in w.targets])
    rows, targets = rows.to(hidden.device), targets.to(hidden.device)
    num_top = max(w.num_top for w in wanted)
    found: list[TokenLogprobs] = []
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        found += _score_chunk(model.logits(hidden[rows[chunk]]), targets[chunk], num_top)
    scores, at = [], 0
    for w in wanted:
        mine = found[at : at + len(w.targets)]
        if w.num_top < num_top:
            k = w.num_top
            mine = [TokenLogprobs(s.logprob, s.top_ids[:k], s.top_logprobs[:k]) for s in mine]
        scores.append(mine)
        at += len(w.targets)
    return scores


def _score_chunk(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(-1)  # one fused pass on the CPU; logsumexp takes four
    chosen = _numbers(logprobs.gather(1, targets[:, None])[:, 0])
    if num_top == 0:
        return [TokenLogprobs(logprob) for logprob in chosen]
    top, ids = _largest(logprobs, min(num_top, logprobs.shape[1]))
    rows = zip(chosen, ids.tolist(), _numbers(top), strict=True)
    return [TokenLogprobs(*row) for row in rows]


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


def _numbers(values: torch.Tensor) -> list:  # type: ignore[type-arg]
    """As sampling has it, a NaN counts as -inf."""
    return values.nan_to_num(nan=float("-inf"), neginf=float("-inf")).tolist()

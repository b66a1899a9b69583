"""Draws the next token of every sequence of a step, and scores the tokens of prompts.

A row with temperature 0 takes the largest logit (the lowest id among equals). Another
row takes

    argmax over the allowed tokens of  logit / temperature + Gumbel noise,

which draws from softmax(logit / temperature) over them. The noise is counter-based (see
counter_rng.py): a row's token depends on its own logits and parameters, never on its
neighbours.

The allowed tokens are determined in this order, after the temperature is applied:
  top_k  the k largest logits;
  top_p  the fewest largest whose probabilities, renormalised over the above, reach p;
         at least one;
  min_p  those whose probability is at least min_p times the largest one's.
A token equal to the smallest allowed one is allowed too. The set is therefore a
function of the values, not of the order in which a sort leaves equal ones. top_k and
top_p have vLLM's semantics; min_p is applied last, as in transformers. Bias, penalties
and masks come before (engine/core/logits_processing.py).

NaN counts as -inf, and +inf takes all the probability. A row with only NaN and -inf
draws token 0 with certainty: its model failed, and the other rows must not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from engine.core.batch import Int64s, ScoredRows
from engine.core.logits_processing import Shaping, to_device
from engine.sampling.counter_rng import gumbel, gumbel_of_vocabulary, row_keys
from engine.sampling.sampling_batch import SamplingBatch
from model.decoder import CausalLM
from protocol.messages import SamplingParams, TokenLogprobs

_MIN_TEMPERATURE = 1e-30  # float32 would round a smaller one to 0
_MIN_CANDIDATES = 128
_CANDIDATE_GROWTH = 16
# Rows of one chunk. The matmul reaches full speed with these. The allocator retains the
# logits of so few rows from chunk to chunk; memory that it returns costs page faults.
_SCORED_ROWS = 64


class Logprobs(NamedTuple):
    """Logprobs of one token in each of S rows, and of the k most likely tokens."""

    chosen: torch.Tensor  # float32 [S]
    top_ids: torch.Tensor  # int64 [S, k], most likely first
    top: torch.Tensor  # float32 [S, k]
    ranks: torch.Tensor  # int64 [S], number of tokens that are at least as likely

    def on_host(self) -> "Logprobs":
        """Copies to the host. On a GPU the copy may complete later."""
        return Logprobs(*(column.to("cpu", non_blocking=True) for column in self))

    def rows(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """One entry for each row, with counts[i] of the most likely tokens in row i."""
        columns = [column.tolist() for column in self]
        return [
            TokenLogprobs(chosen, top_ids[:k], top[:k], rank)
            for chosen, top_ids, top, rank, k in zip(*columns, counts, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class SampledTokens:
    token_ids: torch.Tensor  # int64 [S]
    logprobs: Logprobs | None = None  # None if no row requests them


def is_greedy(params: Sequence[SamplingParams]) -> bool:
    """Whether `greedy` suffices for all rows: no temperature, and no logprobs."""
    return all(p.temperature <= 0 and p.num_logprobs is None for p in params)


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """What `sample` draws at temperature 0, int64 [S], in `out` if given. It uploads
    nothing."""
    if logits.device.type == "cuda":
        return _draw_on_gpu(logits, None, out)
    numbers = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return torch.argmax(numbers, -1, out=out)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, shaping: Shaping | None = None
) -> SampledTokens:
    """Draws a token per row, and counts it in `shaping`.

    Args:
        logits: float32 [S, V], unmodified; not written to.
        batch: S rows on the same device.
        shaping: changes to the logits before the draw. Logprobs are those of the logits
            as given.
    """
    assert logits.dtype == torch.float32 and logits.shape[0] == len(batch.temperature)
    on_gpu = logits.device.type == "cuda"
    if on_gpu and shaping is None and batch.max_logprobs is None:
        return SampledTokens(_draw_on_gpu(logits, batch))
    logits, largest, token_ids = _without_non_numbers(logits)
    unshaped = logits
    if shaping is not None:
        logits = shaping.apply(logits)
        largest, token_ids = logits.max(-1)
    if on_gpu:
        token_ids = _draw_on_gpu(logits, batch)
    else:
        _draw_on_cpu(logits, largest, token_ids, batch)
    if shaping is not None:
        shaping.count_drawn(token_ids)
    if batch.max_logprobs is None:
        return SampledTokens(token_ids)
    total = unshaped.logsumexp(-1, keepdim=True)
    return SampledTokens(
        token_ids, _logprobs(unshaped, total, token_ids, batch.max_logprobs)
    )


def _draw_on_gpu(
    logits: torch.Tensor, batch: SamplingBatch | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    from engine.sampling import sample_kernels

    return sample_kernels.draw(logits, batch, out)


def _draw_on_cpu(
    logits: torch.Tensor,
    largest: torch.Tensor,
    token_ids: torch.Tensor,
    batch: SamplingBatch,
) -> None:
    """Replaces the entries of `token_ids` in rows with a temperature."""
    for rows, is_free in ((batch.free_rows, True), (batch.restricted_rows, False)):
        if rows is None:
            continue
        # Differences to the largest logit, so that a tiny temperature cannot overflow.
        scaled = logits[rows] - largest[rows, None]
        scaled.div_(batch.temperature[rows, None].clamp(min=_MIN_TEMPERATURE))
        keys = row_keys(batch.seed[rows], batch.choice[rows], batch.position[rows])
        if is_free:
            token_ids[rows] = scaled.add_(
                gumbel_of_vocabulary(keys, scaled.shape[1])
            ).argmax(-1)
            continue
        values, ids, threshold = _candidates(scaled, rows, batch)
        scores = (values + gumbel(keys, ids)).masked_fill_(
            values < threshold, float("-inf")
        )
        token_ids[rows] = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)


def _without_non_numbers(
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes logits without NaN and +inf and with a finite maximum, as the module
    documentation specifies. Returns them, the maxima, and the positions of these."""
    largest, token_ids = logits.max(-1)
    # A maximum is NaN if any logit is. On a GPU this test costs more than cleaning.
    if logits.device.type == "cpu" and bool(largest.isfinite().all()):
        return logits, largest, token_ids
    logits = logits.masked_fill(logits.isnan(), float("-inf"))
    is_sure = logits.isposinf().any(-1, keepdim=True)
    only_sure = torch.where(logits.isposinf(), 0.0, float("-inf"))
    logits = torch.where(is_sure, only_sure, logits)
    largest, token_ids = logits.max(-1)
    is_empty = largest.isneginf()
    logits[:, 0] = torch.where(is_empty, 0.0, logits[:, 0])
    largest = torch.where(is_empty, 0.0, largest)
    return logits, largest, token_ids


def _candidates(
    scaled: torch.Tensor, rows: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest values [R, n], descending, their ids, and the smallest allowed value
    [R, 1].

    n is large enough to include all allowed tokens, with those equal to the smallest.
    """
    limits = [x[rows, None] for x in (batch.top_k, batch.top_p, batch.min_p)]
    mass = None  # total mass of all tokens, for rows that only top_p restricts
    if batch.has_bare_top_p:
        mass = scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    vocab_size = scaled.shape[1]
    num = min(max(batch.max_top_k + 1, _MIN_CANDIDATES), vocab_size)
    while True:
        values, ids = scaled.topk(num)
        threshold = _smallest_allowed(values, mass, *limits)
        if num == vocab_size or bool((values[:, -1:] < threshold).all()):
            return values, ids, threshold
        num = min(num * _CANDIDATE_GROWTH, vocab_size)


def _smallest_allowed(
    values: torch.Tensor,
    mass_of_all: torch.Tensor | None,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """[R, 1] the value of the smallest allowed token, among `values` [R, n]."""
    no_limit = torch.full_like(values[:, :1], float("-inf"))
    kth = values.gather(1, (top_k - 1).clamp(0, values.shape[1] - 1))
    by_top_k = torch.where(top_k > 0, kth, no_limit)
    # In float64, because the order of summation must not decide whether a sum reaches
    # top_p.
    mass = values.exp().double().masked_fill(values < by_top_k, 0.0)
    total = mass.sum(-1, keepdim=True)
    if mass_of_all is not None:
        total = torch.where(top_k > 0, total, mass_of_all)
    mass_before = mass.cumsum(-1) - mass
    last = (mass_before < top_p * total).sum(-1, keepdim=True).clamp(min=1) - 1
    by_top_p = torch.where(top_p < 1, values.gather(1, last), no_limit)
    by_min_p = min_p.log()  # the largest value is 0; log(0) is -inf
    return by_top_k.maximum(by_top_p).maximum(by_min_p)


def _logprobs(
    logits: torch.Tensor,
    total: torch.Tensor | float,
    token_ids: torch.Tensor,
    num_top: int,
) -> Logprobs:
    """Logprobs for logits [S, V] whose probabilities add up to exp(`total`)."""
    chosen = logits.gather(1, token_ids[:, None])
    top, top_ids = logits.topk(min(num_top, logits.shape[1]))
    ranks = _ranks(logits, chosen, top)
    return Logprobs((chosen - total).squeeze(1), top_ids, top - total, ranks)


def _ranks(
    logits: torch.Tensor, chosen: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """How many logits of each row [S, V] are at least `chosen` [S, 1].

    On a CPU, counting over a whole row takes as long as computing it. Only those rows
    are counted whose token is not above the last of the `top` ones [S, k]. A GPU would
    have to wait to learn which rows these are.
    """
    if logits.device.type != "cpu":
        return (logits >= chosen).sum(-1)
    is_larger = top >= chosen
    ranks = is_larger.sum(-1)
    needs_count = is_larger.all(-1)  # true for all rows if k is 0
    # Views of single rows, because copies would cost page faults.
    values = logits.numpy()
    thresholds = chosen.numpy()
    for row in needs_count.nonzero().squeeze(1).tolist():
        ranks[row] = int(np.count_nonzero(values[row] >= thresholds[row]))
    return ranks


class LastSampledTokens:
    """The tokens of the last step, in a buffer with a fixed address from which the next
    step reads them.

    A step's token id t is looked up at index ~t. For t = -1 - r this is index r, which
    holds the token that row r drew. For the id of a token it is a negative index, at
    which the buffer has that id.

    Args:
        size: most draws of a step.
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device) -> None:
        descending_ids = torch.arange(vocab_size - 1, -1, -1, device=device)
        self._by_complement = torch.cat(
            (descending_ids.new_zeros(size), descending_ids)
        )
        self.token_ids = self._by_complement[:size]
        self._num_stored = 0

    def store(self, drawn: torch.Tensor) -> None:
        """Takes over the draws of the step launched last, int64 [R]."""
        self._num_stored = min(len(drawn), len(self.token_ids))
        # A captured graph draws directly into the buffer.
        if drawn.data_ptr() != self.token_ids.data_ptr():
            self.token_ids[: self._num_stored] = drawn[: self._num_stored]

    def complements(self, token_ids: Int64s) -> Int64s:
        """The indices for `resolve` of a step's token ids, where -1 - r stands for what
        row r drew."""
        max_row = ~int(token_ids.min())
        max_token = int(token_ids.max())
        vocab_size = len(self._by_complement) - len(self.token_ids)
        assert max_row < max(self._num_stored, 1), (
            f"the draw of row {max_row} was not stored"
        )
        assert max_token < vocab_size, f"no token has the id {max_token}"
        return ~token_ids

    def resolve(self, complements: torch.Tensor) -> torch.Tensor:
        """The token ids of a step, int64 [T], from their complements."""
        return self._by_complement[complements]


# -- logprobs of prompt tokens ---------------------------------------------------------


class PendingScores:
    """The logprobs of prompt tokens that a launched step computes."""

    def __init__(self, requests: list[ScoredRows], chunks: list[Logprobs]) -> None:
        self._requests = requests
        self._chunks = chunks

    def result(self) -> list[list[TokenLogprobs]]:
        """One list for each request. Called once the device has finished the step."""
        counts = iter(
            [request.num_top for request in self._requests for _ in request.targets]
        )
        rows: list[TokenLogprobs] = []
        for chunk in self._chunks:
            rows += chunk.rows(list(islice(counts, len(chunk.chosen))))
        remaining = iter(rows)
        return [
            list(islice(remaining, len(request.targets))) for request in self._requests
        ]


def score(
    model: CausalLM, hidden: torch.Tensor, requests: list[ScoredRows]
) -> PendingScores:
    """Computes logprobs, of the unmodified distribution, of the requested tokens.

    Every rank of a model takes part. On a GPU this does not wait for the device.

    Args:
        hidden: [T, hidden] of a step.
    """
    if not requests:
        return PendingScores([], [])
    host_rows = torch.cat(
        [torch.arange(r.first_row, r.first_row + len(r.targets)) for r in requests]
    )
    host_targets = torch.tensor([target for r in requests for target in r.targets])
    rows = to_device(host_rows, hidden.device)
    targets = to_device(host_targets, hidden.device)
    num_top = max(request.num_top for request in requests)
    chunks = []
    for start in range(0, len(rows), _SCORED_ROWS):
        chunk = slice(start, start + _SCORED_ROWS)
        # log_softmax, because logsumexp takes longer.
        logprobs = model.logits(hidden[rows[chunk]]).log_softmax(-1)
        logprobs = logprobs.nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
        chunks.append(_logprobs(logprobs, 0.0, targets[chunk], num_top).on_host())
    return PendingScores(requests, chunks)

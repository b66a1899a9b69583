"""Draws the next token of every sequence of a step, and scores the tokens of prompts.

A row with temperature 0 takes the token with the largest logit. If several tokens have
this logit, the row takes the lowest token id. A row with a higher temperature takes

    argmax over the allowed tokens of  logit / temperature + Gumbel noise,

which draws from softmax(logit / temperature) over the allowed tokens. The noise is
counter-based (see counter_rng.py), so a row's token depends only on the row's own
logits and parameters, never on other rows.

Three parameters limit the allowed tokens, in this order, after the temperature:
  top_k  allows the tokens with the k largest logits;
  top_p  allows the smallest set of the likeliest tokens with a total probability of at
         least p, and at least one token. Probabilities are renormalized over the tokens
         that top_k allows;
  min_p  allows tokens with at least min_p times the probability of the likeliest token.
All tokens with the same logit as the least likely allowed token are allowed too. So the
allowed tokens never depend on how a sort orders equal logits. top_k and top_p have
vLLM's semantics; min_p is applied last, as in transformers. Bias, penalties and masks
change the logits earlier (engine/core/logits_processing.py).

NaN counts as -inf. Tokens with a logit of +inf share all the probability. A row with
only NaN and -inf always draws token 0. In this case the model failed for the row, but
the other rows must not fail.
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
from model.decoder import StepModel
from protocol.messages import SamplingParams, TokenLogprobs

_MIN_TEMPERATURE = 1e-30  # float32 would round a much smaller temperature to 0
# Initial number of candidates, which are the likeliest tokens of a row. On a CPU,
# top_k, top_p and min_p are applied only to the candidates. The number is multiplied by
# _CANDIDATE_GROWTH until the candidates include all allowed tokens.
_MIN_CANDIDATES = 128
_CANDIDATE_GROWTH = 16
# Prompt tokens are scored in chunks of this many rows, which suffice for the full speed
# of the matmul. The memory allocator reuses the memory of a small chunk's logits for
# the next chunk. It would return the memory of larger logits to the operating system,
# and allocating new memory costs page faults.
_SCORED_ROWS = 64


class Logprobs(NamedTuple):
    """For each of S rows, the logprobs of one chosen token and of the k most likely
    tokens."""

    chosen: torch.Tensor  # float32 [S]
    top_ids: torch.Tensor  # int64 [S, k], most likely first
    top: torch.Tensor  # float32 [S, k]
    # int64 [S], the number of tokens that are at least as likely as the chosen token.
    ranks: torch.Tensor

    def on_host(self) -> "Logprobs":
        """Returns a copy on the host. A copy from a GPU is complete only once the
        device has finished the step.
        """
        return Logprobs(*(column.to("cpu", non_blocking=True) for column in self))

    def rows(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Returns one entry for each row. Entry i has the counts[i] most likely
        tokens."""
        columns = [column.tolist() for column in self]
        return [
            TokenLogprobs(chosen, top_ids[:k], top[:k], rank)
            for chosen, top_ids, top, rank, k in zip(*columns, counts, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The tokens that a step draws, on the device or on the host."""

    token_ids: torch.Tensor  # int64 [S]
    logprobs: Logprobs | None = None  # None if no row requests logprobs


def is_greedy(params: Sequence[SamplingParams]) -> bool:
    """Whether all rows have temperature 0 and none requests logprobs."""
    return all(p.temperature <= 0 and p.num_logprobs is None for p in params)


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the tokens that `sample` draws at temperature 0, int64 [S]. If `out` is
    given, the tokens are stored there. This function needs no SamplingBatch, so nothing
    is copied to the device.
    """
    if logits.device.type == "cuda":
        return _draw_on_gpu(logits, None, out)
    numbers = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return torch.argmax(numbers, -1, out=out)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, shaping: Shaping | None = None
) -> SampledTokens:
    """Draws one token for each row. If `shaping` is given, it counts the drawn tokens.

    Args:
        logits: float32 [S, V], as the model computed them. This function does not write
            to them.
        batch: the sampling parameters of the S rows, on the same device.
        shaping: changes to the logits before the draw. The returned logprobs are those
            of the unchanged logits.
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
    log_total = unshaped.logsumexp(-1, keepdim=True)
    return SampledTokens(
        token_ids, _logprobs(unshaped, log_total, token_ids, batch.max_logprobs)
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
    """Draws a token for each row with a temperature above 0, into `token_ids`.

    Args:
        logits: float32 [S, V], with a finite maximum in each row.
        largest: float32 [S], the maxima.
        token_ids: int64 [S].
    """
    for rows, is_free in ((batch.free_rows, True), (batch.restricted_rows, False)):
        if rows is None:
            continue
        # The largest logit is subtracted before the division, so that a tiny
        # temperature cannot cause an overflow to +inf.
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
    """Replaces NaN and infinities in logits [S, V], as the module docstring specifies.

    Returns logits with a finite maximum in each row, the maxima [S], and the token ids
    of the maxima [S].
    """
    largest, token_ids = logits.max(-1)
    # A maximum is NaN if any logit of its row is NaN. The maxima are tested only on a
    # CPU: on a GPU, the test takes longer than replacing the values.
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
    """Returns the n largest values of each row [R, n], descending, their token ids
    [R, n], and the smallest allowed value of each row [R, 1].

    n is large enough to include all allowed tokens.

    Args:
        scaled: float32 [R, V], logits minus their maximum, divided by the temperature.
        rows: int64 [R], the indices of these rows in `batch`.
    """
    limits = [x[rows, None] for x in (batch.top_k, batch.top_p, batch.min_p)]
    mass = None  # sums of the exponentials of all values; used for rows without top_k
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
    """Returns the smallest allowed value of each row, [R, 1].

    Args:
        values: the n largest values of each row, descending, [R, n].
        mass_of_all: sums of the exponentials of all values of each row, [R, 1]. Needed
            for rows with top_p and without top_k.
        top_k, top_p, min_p: [R, 1].
    """
    no_limit = torch.full_like(values[:, :1], float("-inf"))
    kth = values.gather(1, (top_k - 1).clamp(0, values.shape[1] - 1))
    by_top_k = torch.where(top_k > 0, kth, no_limit)
    # The sums are float64, because the order of summation must not decide whether a sum
    # reaches top_p.
    mass = values.exp().double().masked_fill(values < by_top_k, 0.0)
    total = mass.sum(-1, keepdim=True)
    if mass_of_all is not None:
        total = torch.where(top_k > 0, total, mass_of_all)
    mass_before = mass.cumsum(-1) - mass
    last = (mass_before < top_p * total).sum(-1, keepdim=True).clamp(min=1) - 1
    by_top_p = torch.where(top_p < 1, values.gather(1, last), no_limit)
    by_min_p = min_p.log()  # relative to the largest value, which is 0
    return by_top_k.maximum(by_top_p).maximum(by_min_p)


def _logprobs(
    logits: torch.Tensor,
    log_total: torch.Tensor | float,
    token_ids: torch.Tensor,
    num_top: int,
) -> Logprobs:
    """Returns the logprobs of `token_ids` [S] and of the `num_top` likeliest tokens.

    Args:
        logits: float32 [S, V].
        log_total: [S, 1], the logarithm of the sum of each row's exponentials; 0 if
            `logits` are logprobs already.
    """
    chosen = logits.gather(1, token_ids[:, None])
    top, top_ids = logits.topk(min(num_top, logits.shape[1]))
    ranks = _ranks(logits, chosen, top)
    return Logprobs((chosen - log_total).squeeze(1), top_ids, top - log_total, ranks)


def _ranks(
    logits: torch.Tensor, chosen: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """Returns how many logits of each row [S, V] are at least `chosen` [S, 1].

    On a CPU, counting over a complete row takes as long as computing its logprobs. So a
    row is counted only if all its `top` logits [S, k] are at least `chosen`. On a GPU,
    all rows are counted, because finding the rows that need a count would make the host
    wait.
    """
    if logits.device.type != "cpu":
        return (logits >= chosen).sum(-1)
    is_larger = top >= chosen
    ranks = is_larger.sum(-1)
    needs_count = is_larger.all(-1)  # true for all rows if k is 0
    # The loop reads views of single rows, because copies would cost page faults.
    values = logits.numpy()
    thresholds = chosen.numpy()
    for row in needs_count.nonzero().squeeze(1).tolist():
        ranks[row] = int(np.count_nonzero(values[row] >= thresholds[row]))
    return ranks


class LastSampledTokens:
    """The tokens that the last step drew. The next step reads them from a buffer with a
    fixed address.

    A step's token id t is looked up at index ~t (its complement). If t is -1 - r, the
    index is r, and the entry at r is the token that row r drew. If t is the id of a
    token, the index is negative and counts from the end of the buffer. The entry at
    this index is t itself.

    Args:
        size: maximum number of draws in a step.

    Attributes:
        token_ids: int64 [size], the drawn tokens.
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device) -> None:
        descending_ids = torch.arange(vocab_size - 1, -1, -1, device=device)
        self._by_complement = torch.cat(
            (descending_ids.new_zeros(size), descending_ids)
        )
        self.token_ids = self._by_complement[:size]
        self._num_stored = 0

    def store(self, drawn: torch.Tensor) -> None:
        """Stores the tokens that the last launched step draws, int64 [R]."""
        self._num_stored = min(len(drawn), len(self.token_ids))
        # Nothing is copied if a captured graph has drawn directly into the buffer.
        if drawn.data_ptr() != self.token_ids.data_ptr():
            self.token_ids[: self._num_stored] = drawn[: self._num_stored]

    def complements(self, token_ids: Int64s) -> Int64s:
        """Returns the complements of a step's token ids, for `resolve`. A token id of
        -1 - r stands for the token that row r drew."""
        max_row = ~int(token_ids.min())
        max_token = int(token_ids.max())
        vocab_size = len(self._by_complement) - len(self.token_ids)
        assert max_row < max(self._num_stored, 1), (
            f"the draw of row {max_row} was not stored"
        )
        assert max_token < vocab_size, f"no token has the id {max_token}"
        return ~token_ids

    def resolve(self, complements: torch.Tensor) -> torch.Tensor:
        """Returns the token ids of a step, int64 [T], from their complements."""
        return self._by_complement[complements]


# -- logprobs of prompt tokens ---------------------------------------------------------


class PendingScores:
    """The logprobs of prompt tokens that a launched step computes.

    Args:
        requests: the requested tokens.
        chunks: logprobs of all requested tokens in order. Their copies to the host may
            still be incomplete.
    """

    def __init__(self, requests: list[ScoredRows], chunks: list[Logprobs]) -> None:
        self._requests = requests
        self._chunks = chunks

    def result(self) -> list[list[TokenLogprobs]]:
        """Returns the logprobs of each request's tokens, one list per request. Must be
        called only after the device has finished the step."""
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
    model: StepModel, hidden: torch.Tensor, requests: list[ScoredRows]
) -> PendingScores:
    """Computes the logprobs of the requested prompt tokens, without bias, penalties and
    masks.

    All ranks of the model must call this function. On a GPU, the host does not wait for
    the device.

    Args:
        hidden: hidden states of a step, [T, hidden].
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
        # log_softmax takes less time than subtracting logsumexp.
        logprobs = model.logits(hidden[rows[chunk]]).log_softmax(-1)
        logprobs = logprobs.nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
        chunks.append(_logprobs(logprobs, 0.0, targets[chunk], num_top).on_host())
    return PendingScores(requests, chunks)

"""Fits the times of an engine to measured steps and prompts.

All terms of a fit are times, so no coefficient may be negative. A fit minimizes the
squares of relative errors, so that a long step does not outweigh many short steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MIN_TOKEN_S = 1e-9
# Each of n tasks that share a device takes n times as long, and a little longer because
# the tasks share caches. A slowdown above n times this factor is due to other programs.
_MAX_OVERHEAD = 1.25


class DecodeSample(NamedTuple):
    """The mean duration of steps without prompts.

    Attributes:
        context_tokens: tokens of KV of all streams together.
    """

    streams: int
    context_tokens: float
    seconds: float


class PromptSample(NamedTuple):
    """The time to the first token of a prompt on an idle server."""

    tokens: int
    seconds: float


class DecodeFit(NamedTuple):
    """The terms of a step's time (s): per step, per stream, per token of KV."""

    step_s: float
    sequence_s: float
    held_token_s: float


class PromptFit(NamedTuple):
    """The terms of a prompt's time (s): per request, per token, per pair of tokens."""

    request_s: float
    token_s: float
    pair_s: float


class DeliveryFit(NamedTuple):
    """Processor seconds to deliver the tokens of a step: per step, and per token."""

    step_s: float
    token_s: float


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeFit:
    """Fit the time of steps without prompts."""
    rows = [(1.0, sample.streams, sample.context_tokens) for sample in samples]
    return DecodeFit(*_fit(rows, [sample.seconds for sample in samples]))


def fit_prompts(
    samples: Sequence[PromptSample], step_s: float, step_tokens: int
) -> PromptFit:
    """Fit the time of prompts.

    Args:
        step_s: fixed time of each step.
        step_tokens: maximum prompt tokens of a step. A longer prompt takes several
            steps.
    """
    rows = []
    seconds = []
    for sample in samples:
        num_steps = -(-sample.tokens // step_tokens)
        rows.append((1.0, sample.tokens, sample.tokens**2 / 2))
        seconds.append(max(sample.seconds - num_steps * step_s, 0.1 * sample.seconds))
    fit = PromptFit(*_fit(rows, seconds))
    if not fit.token_s:
        # Every token takes time, so a coefficient of 0 means that the samples are too
        # few or too noisy for three terms. Fit two terms instead.
        request_s, token_s = _fit([row[:2] for row in rows], seconds)
        fit = PromptFit(request_s, max(token_s, _MIN_TOKEN_S), 0.0)
    return fit


def fit_deliveries(samples: Sequence[tuple[int, float]]) -> DeliveryFit:
    """Fit the processor time to deliver the tokens of a step.

    Args:
        samples: pairs of the number of tokens in a step, and the seconds.
    """
    rows = [(1.0, tokens) for tokens, _ in samples]
    return DeliveryFit(*_fit(rows, [max(seconds, 1e-6) for _, seconds in samples]))


def fit_slowdowns(seconds: Sequence[float], work_s: float) -> tuple[float, ...]:
    """Return the factors by which 1, 2, .. concurrent tasks slow each other down.

    Args:
        seconds: durations of a task while 1, 2, .. servers run such tasks all the time.
        work_s: processor time that a task needs outside of its engine; 0 if this work
            does not slow the engines down. A server that runs tasks all the time counts
            as 1 to 2 concurrent tasks, depending on the share of this work.
    """
    factors: list[float] = []
    for value in seconds:
        lowest = factors[-1] if factors else 1.0
        factors.append(max(value / seconds[0], lowest))
    num_servers = len(factors)
    max_tasks = num_servers
    if work_s:
        # A server has at most two concurrent tasks: one of its engine, and one of its
        # frontend.
        max_tasks = 2 * num_servers
        tasks_per_server = 1 + min(work_s / seconds[0], 1.0)
        counts = [tasks_per_server * (index + 1) for index in range(num_servers)]
        middle = (num_servers - 1) // 2
        slope = (factors[-1] - factors[middle]) / max(counts[-1] - counts[middle], 1.0)
        counts.append(max_tasks + 1.0)
        factors.append(factors[-1] + slope * (counts[-1] - counts[-2]))
        factors = list(np.interp(range(1, max_tasks + 1), counts, factors))
    limits = [1.0, *(_MAX_OVERHEAD * count for count in range(2, max_tasks + 1))]
    return tuple(
        round(float(min(factor, limit)), 4)
        for factor, limit in zip(factors, limits, strict=True)
    )


def fit_mixed_slowdowns(seconds: Sequence[float], alone_s: float) -> tuple[float, ...]:
    """Return the slowdown of a task by 0, 1, 2, .. concurrent tasks of another kind.

    The factors have no upper limit: a device may give most of its time to one kind.

    Args:
        seconds: durations of the task while 1, 2, .. servers do the other kind of work.
        alone_s: duration of the task while the other servers are idle.
    """
    factors = [1.0]
    for value in seconds:
        factors.append(max(round(value / alone_s, 4), factors[-1]))
    return tuple(factors)


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients that minimize the squares of the relative errors.

    No coefficient is negative: the term with the most negative coefficient is left out,
    and the fit is repeated. The coefficient of a term that is left out is 0.
    """
    weights = 1 / np.asarray(seconds, dtype=np.float64)
    matrix = np.asarray(rows, dtype=np.float64) * weights[:, None]
    scales = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    target = np.ones(len(rows))
    terms = list(range(matrix.shape[1]))
    while True:
        scaled = matrix[:, terms] / scales[terms]
        coefficients = np.linalg.lstsq(scaled, target, rcond=None)[0]
        if coefficients.min() >= 0 or len(terms) == 1:
            break
        del terms[int(coefficients.argmin())]
    result = [0.0] * matrix.shape[1]
    for term, coefficient in zip(terms, coefficients / scales[terms], strict=True):
        result[term] = max(float(coefficient), 0.0)
    return result

"""Collects what the engine core sends to the HTTP process: token deltas in order, and
totals for metrics."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from engine.core.sequence import Sequence
from protocol.errors import BatonError
from protocol.messages import ErrorInfo, KVUsage, Outputs, TokenDelta, TokenLogprobs
from protocol.metrics import ENGINE_TOTALS
from protocol.process.output import num_dropped_lines

# An engine with requests is silent for about this time at most, to show that it is
# alive.
MAX_SILENCE_S: Final = 1.0
_REPORT_INTERVAL_S: Final = 0.25
_PREFIX_TOTALS: Final = ("prefix_cache_query_tokens", "prefix_cache_hit_tokens")


@dataclass(frozen=True)
class Draw:
    """What a step drew for a choice, or how the choice ended without a token.

    Attributes:
        reason: why the choice ends with this token; None if it continues.
        error: the error that ends the whole request.
    """

    sequence: Sequence
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    reason: str | None = None
    error: BatonError | None = None


class OutputProcessor:
    """Collects outputs until `take` returns them."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._compiled: list[str] = []

    def take(self) -> Outputs | None:
        """Returns what was collected since the last call, or None."""
        if not (self._deltas or self._compiled):
            return None
        outputs = Outputs(self._deltas, self._compiled)
        self._deltas = []
        self._compiled = []
        return outputs

    def add_compiled(self, sequence: Sequence) -> None:
        """Reports that the grammar of a sequence is compiled, if it has one."""
        if sequence.request.sampling.grammar is not None:
            self._compiled.append(sequence.request_id)

    def add_remote_results(self, sequence: Sequence) -> None:
        """Adds the results of another server that were not added before: the prompt's
        logprobs and the first token of every choice. The client receives these results
        before the KV has been pulled.
        """
        if not sequence.is_scoring:
            self.add_prompt_logprobs(sequence)
        for choice in sequence.choices:
            token = choice.sampling.take_unsent_first_token()
            if token is not None and not choice.choice_state.has_ended:
                self.add_token(Draw(choice, token.id, token.logprobs))

    def add_prompt_logprobs(self, sequence: Sequence) -> None:
        """Adds the prompt logprobs that were computed since the last call."""
        logprobs = sequence.prompt_logprobs
        if logprobs is None or sequence.choice_state.has_ended:
            return
        unsent = logprobs.take_unsent()
        if unsent:
            self._deltas.append(
                TokenDelta(request_id=sequence.request_id, prompt_logprobs=unsent)
            )

    def add_token(self, draw: Draw, params: dict[str, Any] | None = None) -> None:
        """Adds a choice's next token, its end, or both.

        Args:
            params: kv_transfer_params of the response.
        """
        sequence = draw.sequence
        token_ids = [] if draw.token_id is None else [draw.token_id]
        logprobs: list[TokenLogprobs] | None = None
        if draw.logprobs is not None:
            if sequence.request.sampling.num_logprobs is not None:
                logprobs = [draw.logprobs]
        usage: KVUsage | None = None
        if draw.reason or sequence.num_outputs == 1:
            usage = sequence.accounting.usage(sequence.request.remote)
        times = None
        if draw.reason is not None:
            times = sequence.choices.parent.times
        self._deltas.append(
            TokenDelta(
                request_id=sequence.request_id,
                choice=sequence.choice,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=draw.reason,
                usage=usage,
                times=times,
                kv_transfer_params=params,
            )
        )

    def add_error(self, sequence: Sequence, error: BatonError) -> None:
        """Adds the error that ends a request with all its choices."""
        info = ErrorInfo.from_error(error)
        self._deltas.append(TokenDelta(request_id=sequence.request_id, error=info))


class CoreStats:
    """Counts the totals of the engine core, by metric series (protocol.metrics).

    Args:
        rank_stats: returns the values that rank 0 measures outside of the core.
    """

    def __init__(self, rank_stats: Callable[[], dict[str, float]] = dict) -> None:
        names = (*ENGINE_TOTALS, *_PREFIX_TOTALS)
        self._totals = dict.fromkeys((f"baton_{name}" for name in names), 0.0)
        self._rank_stats = rank_stats
        self._reported: dict[str, float] = {}
        self._due_s = 0.0

    def count_step(
        self, num_tokens: int, num_prompt_tokens: int, seconds: float
    ) -> None:
        self._totals["baton_engine_steps"] += 1
        self._totals["baton_engine_step_tokens"] += num_tokens
        self._totals["baton_engine_step_prompt_tokens"] += num_prompt_tokens
        self._totals["baton_engine_step_seconds"] += seconds
        if num_prompt_tokens:
            self._totals["baton_engine_mixed_steps"] += 1
            self._totals["baton_engine_mixed_step_tokens"] += num_tokens
            self._totals["baton_engine_mixed_step_seconds"] += seconds

    def count_admission(self, sequence: Sequence) -> None:
        """Counts the prompt tokens of an admitted sequence and its hits in the prefix
        cache. Records the time of the sequence's first admission.
        """
        if sequence.times.admitted is None:
            sequence.times.admitted = time.monotonic()
        hits = min(sequence.num_computed, sequence.num_prompt_tokens)
        self._totals["baton_prefix_cache_query_tokens"] += sequence.num_prompt_tokens
        self._totals["baton_prefix_cache_hit_tokens"] += hits

    def totals(self) -> dict[str, float]:
        return {
            **self._totals,
            **self._rank_stats(),
            "baton_engine_log_lines_dropped": float(num_dropped_lines()),
        }

    def take_due_report(
        self, collect: Callable[[], dict[str, float]], *, is_idle: bool
    ) -> dict[str, float] | None:
        """Returns the values to report now, or None if no report is due.

        An idle engine reports changes immediately. An engine with requests reports
        changes once per _REPORT_INTERVAL_S, and unchanged values MAX_SILENCE_S later.

        Args:
            collect: returns the current values.
        """
        now_s = time.monotonic()
        if not is_idle and now_s < self._due_s:
            return None
        values = collect()
        if values == self._reported:
            if is_idle or now_s < self._due_s + MAX_SILENCE_S:
                return None
        self._reported = values
        self._due_s = now_s + _REPORT_INTERVAL_S
        return values

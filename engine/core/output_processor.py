"""What goes to the HTTP process: deltas in the order in which things happened, and totals."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from engine.core.sequence import Sequence
from engine.worker.kernel_watch import KERNELS
from protocol.errors import BatonError
from protocol.messages import ErrorInfo, Outputs, TokenDelta, TokenLogprobs
from protocol.metrics import ENGINE_TOTALS
from protocol.process.output import num_dropped_lines

SILENT_S: Final = (
    1.0  # after which an engine with requests speaks, if only to show that it lives
)
_INTERVAL_S: Final = 0.25
_PREFIX_TOTALS: Final = ("prefix_cache_query_tokens", "prefix_cache_hit_tokens")


@dataclass(frozen=True)
class Draw:
    """What a step drew for a choice, or how that ended without."""

    sequence: Sequence
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    reason: str | None = None  # why the choice ends with it, None: it goes on
    error: BatonError | None = None  # what the whole request ends with


class OutputProcessor:
    """Collects; `take` empties it."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._compiled: list[str] = []

    def take(self) -> Outputs | None:
        """What was collected, if anything."""
        if not (self._deltas or self._compiled):
            return None
        taken = Outputs(self._deltas, self._compiled)
        self._deltas = []
        self._compiled = []
        return taken

    def compiled(self, sequence: Sequence) -> None:
        """The grammar of a sequence is there, if it has one: it is queued."""
        if sequence.request.sampling.grammar is not None:
            self._compiled.append(sequence.request_id)

    def found_elsewhere(self, sequence: Sequence) -> None:
        """What the prefill server found, once, before any KV has moved: the prompt's logprobs and
        the first token of every choice."""
        if not sequence.is_scoring:
            self.prompt_logprobs(sequence)
        for choice in sequence.choices:
            first, choice.first_token = choice.first_token, None
            if first is not None and not choice.has_ended:
                self.token(Draw(choice, first.id, first.logprobs))

    def prompt_logprobs(self, sequence: Sequence) -> None:
        """Those that became known since the last call."""
        known = sequence.prompt_logprobs
        if (
            known is None
            or sequence.has_ended
            or sequence.num_prompt_logprobs_sent == len(known)
        ):
            return
        news = known[sequence.num_prompt_logprobs_sent :]
        sequence.num_prompt_logprobs_sent = len(known)
        self._deltas.append(
            TokenDelta(request_id=sequence.request_id, prompt_logprobs=news)
        )

    def token(self, draw: Draw, params: dict[str, Any] | None = None) -> None:
        """A choice's next token, its end, or both; `params` are the answer's kv_transfer_params."""
        sequence, logprobs = draw.sequence, draw.logprobs
        if sequence.request.sampling.num_logprobs is None:
            logprobs = None
        self._deltas.append(
            TokenDelta(
                request_id=sequence.request_id,
                choice=sequence.choice,
                token_ids=[] if draw.token_id is None else [draw.token_id],
                logprobs=None if logprobs is None else [logprobs],
                finish_reason=draw.reason,
                usage=sequence.usage()
                if draw.reason or sequence.num_outputs == 1
                else None,
                times=None if draw.reason is None else sequence.choices[0].times,
                kv_transfer_params=params,
            )
        )

    def error(self, sequence: Sequence, error: BatonError) -> None:
        """The end of the request, whatever its choices."""
        info = ErrorInfo.of(error)
        self._deltas.append(TokenDelta(request_id=sequence.request_id, error=info))


class CoreStats:
    """Totals by series (protocol.metrics)."""

    def __init__(self) -> None:
        names = (*ENGINE_TOTALS, *_PREFIX_TOTALS)
        self._totals = dict.fromkeys((f"baton_{name}" for name in names), 0.0)
        self._told: dict[str, float] = {}
        self._due_s = 0.0

    def step_ended(
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

    def admitted(self, sequence: Sequence) -> None:
        """Its blocks are there, and what the prefix cache had of them is known."""
        if sequence.times.admitted is None:
            sequence.times.admitted = time.monotonic()
        hits = min(sequence.num_computed, sequence.num_prompt_tokens)
        self._totals["baton_prefix_cache_query_tokens"] += sequence.num_prompt_tokens
        self._totals["baton_prefix_cache_hit_tokens"] += hits

    def totals(self) -> dict[str, float]:
        return {
            **self._totals,
            "baton_kernels_loaded_late": float(KERNELS.num_after),
            "baton_engine_log_lines_dropped": float(num_dropped_lines()),
        }

    def news(
        self, collect: Callable[[], dict[str, float]], *, is_idle: bool
    ) -> dict[str, float] | None:
        """What is to be told now, if anything: a change, of which an idle engine tells at once,
        or the same again after a silence."""
        now_s = time.monotonic()
        if not is_idle and now_s < self._due_s:
            return None
        values = collect()
        if values == self._told and (is_idle or now_s < self._due_s + SILENT_S):
            return None
        self._told, self._due_s = values, now_s + _INTERVAL_S
        return values

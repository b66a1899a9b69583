"""Deltas of a round on their way to the HTTP process, in the order in which things happened."""

from dataclasses import dataclass
from typing import Any

from engine.core.sequence import Sequence
from protocol.errors import BatonError
from protocol.messages import ErrorInfo, TokenDelta, TokenLogprobs


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

    def take(self) -> list[TokenDelta]:
        taken, self._deltas = self._deltas, []
        return taken

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
        if known is None or sequence.has_ended or sequence.num_prompt_logprobs_sent == len(known):
            return
        news = known[sequence.num_prompt_logprobs_sent :]
        sequence.num_prompt_logprobs_sent = len(known)
        self._deltas.append(TokenDelta(request_id=sequence.request_id, prompt_logprobs=news))

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
                usage=None if draw.reason is None else sequence.usage(),
                kv_transfer_params=params,
            )
        )

    def error(self, sequence: Sequence, error: BatonError) -> None:
        """The end of the request, whatever its choices."""
        info = ErrorInfo.of(error)
        self._deltas.append(TokenDelta(request_id=sequence.request_id, error=info))

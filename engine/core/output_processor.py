"""Collects the outputs that the engine core sends to the HTTP process: token deltas in
order, and reports of compiled grammars."""

from dataclasses import dataclass
from typing import Any

from engine.core.sequence import Sequence
from protocol.errors import BatonError
from protocol.messages import ErrorInfo, KVUsage, Outputs, TokenDelta, TokenLogprobs


@dataclass(frozen=True)
class Draw:
    """A token that a step drew for a choice, or the end of the choice without a token.

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
        """Returns the outputs collected since the last call; None if there are none."""
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
        num_accepted = 0
        num_rejected = 0
        if draw.reason is not None:
            times = sequence.choices.parent.times
            num_accepted = sequence.speculation.num_accepted
            num_rejected = sequence.speculation.num_rejected
        self._deltas.append(
            TokenDelta(
                request_id=sequence.request_id,
                choice=sequence.choice,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=draw.reason,
                usage=usage,
                times=times,
                accepted_tokens=num_accepted,
                rejected_tokens=num_rejected,
                kv_transfer_params=params,
            )
        )

    def add_error(self, sequence: Sequence, error: BatonError) -> None:
        """Adds the error that ends all choices of a request."""
        info = ErrorInfo.from_error(error)
        self._deltas.append(TokenDelta(request_id=sequence.request_id, error=info))

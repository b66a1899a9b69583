"""Logprobs of the tokens of one prompt, computed and sent part by part."""

from collections.abc import Iterable

from protocol.messages import TokenLogprobs


class PromptLogprobs:
    """The logprobs computed so far, in order of the prompt's tokens.

    Choice 0 of a request has this object if logprobs of the prompt were requested. The
    first token follows from no other, so its entry is None. What was sent is never
    computed again, because clients would receive it twice. The engine core adds
    logprobs, and the output processor takes them.

    Args:
        num_tokens: tokens of the prompt.
        values: the logprobs of all tokens, if another server has computed them.
    """

    def __init__(
        self, num_tokens: int, values: Iterable[TokenLogprobs | None] | None = None
    ) -> None:
        self.values: list[TokenLogprobs | None] = list(values or [None])
        self._num_tokens = num_tokens
        self._num_sent = 0

    @property
    def is_complete(self) -> bool:
        return len(self.values) >= self._num_tokens

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Adds the logprobs of the next tokens."""
        self.values += logprobs

    def take_unsent(self) -> list[TokenLogprobs | None]:
        """Returns the logprobs that were added since the last call."""
        unsent = self.values[self._num_sent :]
        self._num_sent = len(self.values)
        return unsent

    def discard_unsent(self) -> None:
        """Discards the logprobs of another server, unless the client has them."""
        if not self._num_sent:
            self.values = [None]

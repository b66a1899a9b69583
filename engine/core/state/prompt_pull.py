"""The KV of a prompt that is to come from another engine."""

from msgspec.structs import replace

from protocol.messages import AddRequest, FirstToken, RemotePrefill, ResumedChoice


class PromptPull:
    """Where the KV of a prompt, or of a looked-up prefix of it, is, and how much of it
    is pulled.

    Only choice 0 of a request has one, and only until the KV has been pulled or given
    up. A sequence with a pull is not computed; its new blocks become RECEIVING. The
    pull is made with the sequence, or by the borrower when a lookup has found a prefix.
    The borrower changes it and gives it up. The scheduler removes it when the KV has
    arrived, or when the sequence is recomputed in the same blocks.

    The lengths below depend on the tokens that the sequence has, because the outputs
    that another server has drawn may have KV there too.

    Attributes:
        remote: the reference. That of an offer has no lease before `begin`, and no
            first tokens before `seal`.
    """

    def __init__(self, remote: RemotePrefill, request: AddRequest) -> None:
        self.remote = remote
        self._num_prompt_tokens = len(request.token_ids)
        self._resumed_choices = request.resumed_choices or [ResumedChoice()]

    @property
    def is_offer(self) -> bool:
        """Whether the other engine had yet to compute the prompt when it was named."""
        return self.remote.transfer_id is not None

    def begin(self, lease_id: str) -> None:
        """Takes over the lease of an offer, which has its first blocks."""
        self.remote = replace(self.remote, lease_id=lease_id)

    def seal(self, first_tokens: list[FirstToken]) -> None:
        """Takes over the usable first tokens of an offer, once its prompt is complete."""
        self.remote = replace(self.remote, first_tokens=first_tokens)

    def num_to_receive(self, num_tokens: int) -> int:
        """How many tokens need not be computed after the pull: as many as the other
        engine has.

        The last token is computed here if a token is drawn from its logits. That is the
        last prompt token if no first token came with the reference, or the last output
        that another server has drawn.

        Args:
            num_tokens: tokens of the sequence, prompt and outputs.
        """
        draws_first_token = not all(
            self.remote.first_tokens or resumed.token_ids or resumed.has_ended
            for resumed in self._resumed_choices
        )
        num_usable = max(self._num_prompt_tokens - draws_first_token, num_tokens - 1)
        return min(self.remote.num_tokens, num_usable)

    def num_to_pull(self, num_tokens: int) -> int:
        """How many tokens of KV are pulled into a sequence of `num_tokens`.

        For an offer this is the whole prompt, because it is not yet known which server
        draws the first token.
        """
        if self.is_offer:
            return self._num_prompt_tokens
        return self.num_to_receive(num_tokens)

    def num_to_hold(self, num_tokens: int) -> int:
        """How many tokens need blocks before the pull into a sequence of `num_tokens`."""
        return max(self._num_prompt_tokens, self.num_to_receive(num_tokens))

"""The KV of a prompt that is to come from another engine."""

from msgspec.structs import replace

from protocol.ipc.kv_store import STORE_PREFIX
from protocol.messages import AddRequest, FirstToken, RemotePrefill, ResumedChoice


class PromptPull:
    """The location of a prompt's KV (or of a prefix that a lookup found), and how many
    of its tokens are pulled.

    Only choice 0 of a request has this object, and only until the KV has been pulled or
    the pull is given up. A sequence with a pull is not computed; its new blocks become
    RECEIVING. This object is made with the sequence, or by the borrower when a lookup
    has found a prefix. The borrower changes this object, and removes it if the pull is
    given up. The scheduler removes it when the KV has arrived, or when the sequence is
    recomputed in the same blocks.

    The methods that return lengths depend on the tokens of the sequence. After a
    migration, the other engine may also have KV of outputs that it has drawn.

    Attributes:
        remote: the reference to the KV. The reference of an offer has no lease before
            `begin`, and no first tokens before `seal`.
        pull_id: names this pull in orders and events. Another pull of the same request
            has another name.
        has_draft_kv: whether the pull that has begun also brings draft KV.
    """

    def __init__(
        self, remote: RemotePrefill, request: AddRequest, pull_id: str
    ) -> None:
        self.remote = remote
        self.pull_id = pull_id
        self.has_draft_kv = False
        self._num_prompt_tokens = len(request.token_ids)
        self._resumed_choices = request.resumed_choices or [ResumedChoice()]

    @property
    def is_offer(self) -> bool:
        """Whether the reference was made before the other engine computed the
        prompt."""
        return self.remote.transfer_id is not None

    @property
    def is_from_store(self) -> bool:
        """Whether the KV comes from a KV store, which never waits for an engine."""
        return self.remote.engine_id.startswith(STORE_PREFIX)

    def begin(self, lease_id: str) -> None:
        """Records the lease of an offer. The other engine grants the lease once the
        first blocks of the prompt are computed."""
        self.remote = replace(self.remote, lease_id=lease_id)

    def seal(self, first_tokens: list[FirstToken], drafted_tokens: int) -> None:
        """Records the usable first tokens of an offer, once the other engine has
        computed the prompt. The list is empty if no first token is usable."""
        self.remote = replace(
            self.remote, first_tokens=first_tokens, drafted_tokens=drafted_tokens
        )

    def num_to_receive(self, num_tokens: int) -> int:
        """Returns how many tokens need not be computed after the pull.

        These are the tokens that have KV on the other engine, except a last token that
        is computed here because the next token is drawn from its logits. That last
        token is the last prompt token if no first token came with the reference, else
        the last output that another server has drawn.

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
        """Returns for how many tokens KV is pulled, if the sequence has `num_tokens`
        tokens.

        For an offer these are all prompt tokens, because it is not yet known which
        server draws the first token.
        """
        if self.is_offer:
            return self._num_prompt_tokens
        return self.num_to_receive(num_tokens)

    def num_to_hold(self, num_tokens: int) -> int:
        """Returns how many tokens must have blocks before the pull starts, if the
        sequence has `num_tokens` tokens."""
        return max(self._num_prompt_tokens, self.num_to_receive(num_tokens))

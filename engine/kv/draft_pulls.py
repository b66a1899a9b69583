"""Decides which pulls also bring the KV of this engine's drafter.

A drafter that reads hidden states can compute draft KV only after a step of the
engine's model has computed these states. So its draft KV is pulled if the peer has it.
A draft model can compute its own KV of a pulled prompt on this engine. So the KV of a
draft model is pulled only if the pull is expected to take less time.
"""

from engine.core.connector import CoreServices
from engine.core.sequence import Sequence
from engine.kv.rates import Rates
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import key_of


class DraftPulls:
    """Pulls draft KV together with the KV of prompts.

    Args:
        coordinator: reports which peers have the same drafter.
        rates: measured speeds of the links to peers.
    """

    def __init__(self, coordinator: PullCoordinator, rates: Rates) -> None:
        self._coordinator = coordinator
        self._rates = rates

    def bind(self, core: CoreServices) -> None:
        self._core = core

    def begin(self, sequence: Sequence, start: int) -> None:
        """Decides whether a pull also brings draft KV. Called before the pull begins.

        Args:
            start: the first token to pull.
        """
        pull = sequence.pull
        assert pull is not None
        # The number of tokens with draft KV is not known before the end of an offer.
        may_have_draft_kv = pull.is_offer or pull.remote.drafted_tokens > start
        token_s = self._core.speculator.catch_up_token_s
        pull.has_draft_kv = (
            token_s is not None
            and may_have_draft_kv
            and self._coordinator.shares_draft_kv(pull.remote)
            and self._rates.is_draft_pull_quicker(key_of(pull.remote), token_s)
        )
        if pull.has_draft_kv:
            self._core.speculator.begin_pull(sequence.block_ids, start)

    def finish(self, sequence: Sequence) -> None:
        """Records which blocks have draft KV, after a pull that succeeded."""
        pull = sequence.pull
        if pull is None or not pull.has_draft_kv:
            return
        num_pulled = pull.num_to_pull(len(sequence.token_ids))
        self._core.speculator.finish_pull(
            sequence.token_ids,
            sequence.block_ids,
            sequence.num_computed,
            min(pull.remote.drafted_tokens, num_pulled),
        )

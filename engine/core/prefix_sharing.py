"""Decides which cached blocks a sequence starts from, and whether it waits for a
running sequence that computes the same prefix. Publishes and pins computed blocks.
"""

from collections.abc import Iterable

from engine.core.sequence import Phase, Sequence
from engine.core.tables import BlockTables, SchedulerLimits
from kvcache.prefix import PrefixIndex

# A sequence waits for a shared prefix of at least this many tokens, or of at least half
# of the tokens that the sequence would otherwise have to compute.
_MIN_SHARED_TOKENS = 256


class PrefixSharing:
    """Looks up and publishes prefixes in the prefix index, for one scheduler.

    Args:
        prefix: the prefix index; None if caching is off.
    """

    def __init__(
        self, limits: SchedulerLimits, tables: BlockTables, prefix: PrefixIndex | None
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._prefix = prefix

    def match(self, sequence: Sequence) -> list[int]:
        """Returns the table of cached blocks that a sequence can start from.

        The last token of the sequence is always computed, because its logits are
        needed. If logprobs of prompt tokens are missing, the tokens before these prompt
        tokens are computed as well.
        """
        if self._prefix is None:
            return []
        max_tokens = len(sequence.token_ids) - 1
        if sequence.pull is not None:
            max_tokens = min(max_tokens, sequence.num_to_admit)
        elif sequence.choices.children:
            # The children draw their first tokens from the logits of the last prompt
            # token.
            max_tokens = min(max_tokens, sequence.num_prompt_tokens - 1)
        logprobs = sequence.prompt_logprobs
        if logprobs is not None and not logprobs.is_complete:
            max_tokens = len(logprobs.values) - 1
        return self._prefix.match(
            sequence.token_ids,
            max_tokens=max_tokens,
            min_resume_tokens=self._tables.resume_limit(
                sequence, len(sequence.token_ids)
            ),
            cursor=sequence.prefix_cursor,
            salt=sequence.request.cache_salt,
        )

    def publish(self, sequence: Sequence, num_before: int) -> None:
        """Adds the blocks that became full to the prefix index (invariant I4 of
        docs/design.md). Sets the pins of the request once its prompt has KV.

        Args:
            num_before: number of tokens that had KV before the step or pull.
        """
        if self._prefix is None:
            return
        num_full = sequence.num_computed // self._limits.block_size
        if num_full != num_before // self._limits.block_size:
            self._prefix.publish(
                sequence.token_ids,
                self._tables.publishable(sequence, num_full),
                cursor=sequence.prefix_cursor,
                salt=sequence.request.cache_salt,
            )
        is_complete = sequence.num_computed >= sequence.num_prompt_tokens
        if is_complete and not sequence.has_pinned:
            self._pin(self._prefix, sequence)

    def _pin(self, prefix: PrefixIndex, sequence: Sequence) -> None:
        request = sequence.request
        for retention in request.retention:
            prefix.pin(
                sequence.token_ids,
                min(retention.num_tokens, sequence.num_prompt_tokens),
                retention.seconds,
                owner=request.share,
                cursor=sequence.prefix_cursor,
                salt=request.cache_salt,
            )
        sequence.has_pinned = True

    def should_wait(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a sequence should wait until a running sequence has computed a large
        prefix that both share. The waiting sequence then finds the prefix in the prefix
        index. Stores the running sequence and the end of the shared prefix (a token
        index) in `sequence.awaited_prefix`."""
        if self._prefix is None or sequence.pull is not None or sequence.is_scoring:
            return False
        if sequence.awaited_prefix is not None:
            # This code runs for each plan, so it must not compare all tokens again.
            producer, stop = sequence.awaited_prefix
            if producer.phase is Phase.RUNNING and producer.num_computed < stop:
                return True
            sequence.awaited_prefix = None
        producers = [s for s in running if s.num_computed < s.num_prompt_tokens]
        if not producers:
            return False
        start = self._tables.num_tokens(self.match(sequence))
        num_uncached = len(sequence.token_ids) - start
        min_shared = min(_MIN_SHARED_TOKENS, num_uncached // 2)
        for producer in producers:
            num_shared = self._num_shared(sequence, producer, start)
            if num_shared and num_shared >= min_shared:
                sequence.awaited_prefix = (producer, start + num_shared)
                return True
        return False

    def _num_shared(self, sequence: Sequence, producer: Sequence, start: int) -> int:
        """Returns the number of tokens, from `start` on, in full blocks that are equal
        in both sequences; 0 if the tokens before `start` or the salts differ."""
        if sequence.request.cache_salt != producer.request.cache_salt:
            return 0
        size = self._limits.block_size
        tokens = sequence.token_ids
        producer_tokens = producer.token_ids
        stop = start
        last_start = min(len(tokens) - 1, producer.num_prompt_tokens) - size
        while stop <= last_start:
            if tokens[stop : stop + size] != producer_tokens[stop : stop + size]:
                break
            stop += size
        if stop == start or tokens[:start] != producer_tokens[:start]:
            return 0
        return stop - start

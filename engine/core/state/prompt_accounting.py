"""Where the KV of a prompt came from, for the usage that clients and metrics see."""

from dataclasses import dataclass, replace

from protocol.messages import KVUsage, RemotePrefill


@dataclass(slots=True)
class PromptAccounting:
    """Prompt tokens of one choice by the source of their KV.

    Invariant: the three counts add up to `num_prompt_tokens` once the KV of the prompt
    is complete. A preemption changes no count of a complete prompt. The scheduler makes
    all changes.

    Attributes:
        num_skipped: tokens found in the prefix cache at admission.
        num_transferred: tokens that were pulled from another engine.
        num_computed_here: tokens computed by this engine.
        was_admitted: whether the sequence ever had blocks, also before a preemption.
    """

    num_prompt_tokens: int
    num_skipped: int = 0
    num_transferred: int = 0
    num_computed_here: int = 0
    was_admitted: bool = False

    def copy(self) -> "PromptAccounting":
        """The accounting of a choice that forks off this one."""
        return replace(self)

    def count_admission(self, num_cached: int) -> None:
        """Accounts for the cache hits of an admission.

        A sequence is admitted again after a preemption. Hits of the first admission
        that are lost by then count as computed here. Hits that are found only at a
        later admission also count as computed here, because this engine computed their
        blocks. Once the prompt is complete, admissions change no count.

        Args:
            num_cached: tokens of the sequence that the prefix cache has.
        """
        hits = min(num_cached, self.num_prompt_tokens)
        was_counted = self.num_transferred or self.num_computed_here
        if not self.was_admitted:
            self.num_skipped = hits
        elif not (was_counted or self.num_skipped == self.num_prompt_tokens):
            self.num_skipped = min(self.num_skipped, hits)
            if hits == self.num_prompt_tokens:
                self.num_computed_here = hits - self.num_skipped
        self.was_admitted = True

    def count_pull(self, num_cached: int, num_received: int) -> None:
        """Accounts for a successful pull.

        Args:
            num_cached: tokens of the sequence that had KV here before the pull.
            num_received: tokens of the sequence that have KV here after the pull.
        """
        num_prompt_tokens = self.num_prompt_tokens
        num_before = min(num_cached, num_prompt_tokens)
        self.num_transferred = min(num_received, num_prompt_tokens) - num_before

    def count_completion(self) -> None:
        """Accounts for the prompt once a step has computed the last of its tokens."""
        num_reused = self.num_skipped + self.num_transferred
        self.num_computed_here = self.num_prompt_tokens - num_reused

    def usage(self, remote: RemotePrefill | None) -> KVUsage:
        """The counts as clients see them.

        With a prefill server, the cached tokens are those that its prefix cache had at
        the beginning of the prompt, except tokens that were computed again here, at the
        end of the prompt.

        Args:
            remote: the reference to the prompt's KV that came with the request, or
                None.
        """
        cached_tokens = self.num_skipped + self.num_transferred
        prefill_counts: dict[str, int] = {}
        if remote is not None and remote.transfer_id is None:
            cached_tokens = min(
                remote.cached_tokens, self.num_prompt_tokens - self.num_computed_here
            )
            prefill_counts["prefill_transferred"] = remote.transferred_tokens
            # A request that has migrated also has KV of its outputs.
            num_tokens = min(remote.num_tokens, self.num_prompt_tokens)
            prefill_counts["prefill_recomputed"] = num_tokens - remote.cached_tokens
            prefill_counts["prefill_skipped"] = (
                remote.cached_tokens - remote.transferred_tokens
            )
        return KVUsage(
            transferred=self.num_transferred,
            recomputed=self.num_computed_here,
            skipped=self.num_skipped,
            cached_tokens=cached_tokens,
            **prefill_counts,
        )

"""What to do when a prompt's KV cannot be pulled."""

from dataclasses import dataclass

from protocol.errors import BatonError


@dataclass(frozen=True)
class FailurePolicy:
    """`recompute`: the decode server computes the prompt itself. `fail`: the client gets the error.

    Either way the client never receives text from the bytes that failed.
    """

    name: str

    def recomputes(self, error: BatonError) -> bool:
        return self.name == "recompute"

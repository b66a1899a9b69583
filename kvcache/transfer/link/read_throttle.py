"""READs leave the engine's batch its memory bandwidth: a bound on their rate while it computes."""

from collections.abc import Callable

# Beside a batch, of READs between GPUs. What they write takes from the batch's memory bandwidth, in
# proportion: on an H200 250 GB/s made a step 5.7 % longer, 120 GB/s 2.6 % and 110 GB/s 1.9 %. At 90
# GB/s it was no less, and pulls took a fifth longer.
PACED_BYTES_PER_S = 110e9
# Of READs into staging memory, out of which a kernel then places them: that reads and writes them
# once more. At 95 GB/s it made a step 7 % longer.
PACED_STAGED_BYTES_PER_S = 33e9
_PACED_POST_BYTES = 64 << 20


class Throttle:
    """Lets READs go on at a bounded rate while the engine computes.

    Args:
        busy: whether it does.
        max_bytes: of a post while it does not.
        bytes_per_s: of READs into their place.
        staged_bytes_per_s: of READs into staging memory.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        max_bytes: int,
        bytes_per_s: float = PACED_BYTES_PER_S,
        staged_bytes_per_s: float = PACED_STAGED_BYTES_PER_S,
    ) -> None:
        self._busy = busy
        self._max_bytes = max_bytes
        self._bytes_per_s = bytes_per_s
        self._staged_bytes_per_s = staged_bytes_per_s
        self._due_s = float("-inf")

    def post_bytes(self) -> int:
        """What the next post may read."""
        return min(_PACED_POST_BYTES, self._max_bytes) if self._busy() else self._max_bytes

    def admits(self, now: float) -> bool:
        """Whether the next post may go out."""
        return now >= self._due_s

    def posted(self, nbytes: int, now: float, *, staged: bool = False) -> None:
        """A post went out, `staged` or into its place."""
        if self._busy():
            rate = self._staged_bytes_per_s if staged else self._bytes_per_s
            self._due_s = max(self._due_s, now) + nbytes / rate

"""What moving bytes costs, so that the planner can choose between ways of moving them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Constants of one link, calibrated at first contact or configured."""

    per_descriptor_s: float
    bytes_per_s: float
    reformat_bytes_per_s: float
    copying_threads: int = 1  # that share the work of a staged transfer, where READs are copies

    def __post_init__(self) -> None:
        for name in ("per_descriptor_s", "bytes_per_s", "reformat_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; use a number above 0")

    def read_s(self, descriptors: int, nbytes: int) -> float:
        """Seconds to read `nbytes` in `descriptors` pieces."""
        return descriptors * self.per_descriptor_s + nbytes / self.bytes_per_s

    def reformat_s(self, nbytes: int) -> float:
        """Seconds to place `nbytes` out of staging memory."""
        return nbytes / self.reformat_bytes_per_s

    def staged_s(self, read_s: float, place_s: float, chunks: int) -> float:
        """Seconds of a staged transfer whose parts take so long alone."""
        if self.copying_threads > 1:
            return (read_s + place_s) * (1 + 1 / chunks) / self.copying_threads
        # Reading and placing overlap, but for the first chunk's read or the last one's placing.
        return max(read_s, place_s) + min(read_s, place_s) / chunks


COPYING_THREADS = 2  # see lanes.py
DEFAULT_COSTS = {
    "cpu": CostModel(3e-6, 8e9, 8e9, COPYING_THREADS),
    "cuda": CostModel(6e-6, 300e9, 700e9),
}

"""What moving bytes costs, so that the planner can choose between ways of moving them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Constants of one link, calibrated at first contact or configured."""

    per_descriptor_s: float
    bytes_per_s: float
    reformat_bytes_per_s: float
    overlaps: bool = True  # chunks are read while others are placed: not where READs are copies

    def __post_init__(self) -> None:
        for name in ("per_descriptor_s", "bytes_per_s", "reformat_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; use a number above 0")

    def __str__(self) -> str:
        read, place = self.bytes_per_s / 1e9, self.reformat_bytes_per_s / 1e9
        microseconds = self.per_descriptor_s * 1e6
        return f"{microseconds:.2f} us per descriptor, {read:.2f} GB/s, reformat {place:.2f} GB/s"

    @classmethod
    def configured(cls, numbers: Sequence[float], device: str) -> "CostModel | None":
        """From us per descriptor, GB/s of reading and GB/s of placing; None where there are none.

        Args:
            device: "cpu" or "cuda".
        """
        if not numbers:
            return None
        per_descriptor_us, read, place = numbers
        overlaps = DEFAULT_COSTS[device].overlaps
        return cls(per_descriptor_us * 1e-6, read * 1e9, place * 1e9, overlaps)

    def read_s(self, descriptors: int, nbytes: int) -> float:
        """Seconds to read `nbytes` in `descriptors` pieces."""
        return descriptors * self.per_descriptor_s + nbytes / self.bytes_per_s

    def reformat_s(self, nbytes: int) -> float:
        """Seconds to place `nbytes` out of staging memory."""
        return nbytes / self.reformat_bytes_per_s

    def staged_s(self, read_s: float, place_s: float, chunks: int, last_share: float) -> float:
        """Seconds of a staged transfer whose parts take so long alone.

        Args:
            last_share: of the last chunk in all bytes.
        """
        if not self.overlaps:
            return read_s + place_s
        # Reading and placing overlap, but for the first chunk's read or the last one's placing.
        return max(read_s + place_s * last_share, place_s + read_s / chunks)


DEFAULT_COSTS = {
    "cpu": CostModel(3e-6, 8e9, 8e9, overlaps=False),
    "cuda": CostModel(6e-6, 300e9, 1.2e12),
}

"""What moving bytes costs, so that the planner can choose between ways of moving them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Constants of one link, calibrated at first contact or configured."""

    per_descriptor_s: float
    bytes_per_s: float
    reformat_bytes_per_s: float

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


DEFAULT_COSTS = {
    "cpu": CostModel(5e-6, 4e9, 8e9),
    "cuda": CostModel(6e-6, 300e9, 700e9),
}

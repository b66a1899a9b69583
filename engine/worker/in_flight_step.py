"""A step that a rank has launched, and the tokens that the next one takes from the device."""

from collections.abc import Callable

import torch

from engine.core.batch import Int32s, StepOutput
from engine.sampling.sampler import SampledTokens
from engine.sampling.scoring import PendingScores
from protocol.messages import SamplingParams


class LaunchedStep:
    """See batch.PendingStep. Copies what was drawn to the host without waiting for it.

    Args:
        drawn: None where nothing is, or not yet.
        params: of each draw.
        draw: draws the tokens of a masked step.
    """

    def __init__(
        self,
        drawn: SampledTokens | None,
        params: list[SamplingParams],
        device: torch.device,
        scores: PendingScores,
        draw: Callable[[Int32s], SampledTokens] | None = None,
    ) -> None:
        self._params = params
        self._device = device
        self._scores = scores
        self._draw = draw
        self._drawn: SampledTokens | None = None
        self._finished: torch.cuda.Event | None = None
        if draw is None:
            self._take(drawn)

    def draw(self, masks: Int32s) -> None:
        assert self._draw is not None, "the step has no masks"
        self._take(self._draw(masks))
        self._draw = None

    def _take(self, drawn: SampledTokens | None) -> None:
        if drawn is not None:
            self._drawn = SampledTokens(
                drawn.token_ids.to("cpu", non_blocking=True),
                drawn.logprobs and drawn.logprobs.on_host(),
            )
        if self._device.type == "cuda":
            self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            self._finished.record(torch.cuda.current_stream(self._device))

    def has_ended(self) -> bool:
        """Whether the device has; any thread may ask. On a CPU a launched step has ended."""
        if self._device.type != "cuda":
            return True
        return self._finished is not None and bool(self._finished.query())  # type: ignore[no-untyped-call, unused-ignore]

    def result(self) -> StepOutput:
        assert self._draw is None, "the tokens of a masked step are to be drawn first"
        if self._finished is not None:
            self._finished.synchronize()
        scores = self._scores.result()
        if self._drawn is None:
            return StepOutput([], [], scores)
        token_ids: list[int] = self._drawn.token_ids.tolist()
        if self._drawn.logprobs is None:
            return StepOutput(token_ids, [None] * len(token_ids), scores)
        counts = [params.num_logprobs for params in self._params]
        found = self._drawn.logprobs.rows([k or 0 for k in counts])
        wanted = [None if k is None else row for row, k in zip(found, counts, strict=True)]
        return StepOutput(token_ids, wanted, scores)


class LastSampledTokens:
    """The tokens of the last step, where the next one finds them: a buffer that stays in place.

    Args:
        size: most draws of a step that the next one may refer to.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._num_kept = 0

    def keep(self, drawn: torch.Tensor) -> None:
        """Takes the draws of the step launched last, int64 [R]."""
        self._num_kept = min(len(drawn), len(self.token_ids))
        if drawn.data_ptr() != self.token_ids.data_ptr():  # else they were drawn into it
            self.token_ids[: self._num_kept] = drawn[: self._num_kept]

    def check(self, smallest: int) -> bool:
        """Whether a step refers to draws, given the smallest of its token ids."""
        assert -1 - smallest < max(self._num_kept, 1), f"no draw of row {-1 - smallest} was kept"
        return smallest < 0

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] with every -1 - r replaced by what row r drew."""
        drawn = self.token_ids[(-1 - token_ids).clamp_(min=0)]
        return torch.where(token_ids < 0, drawn, token_ids)

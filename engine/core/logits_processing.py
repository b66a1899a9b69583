"""What changes a row's logits before its token is drawn, in this order:

    logit_bias   is added to the logits of its tokens;
    repetition   divides positive logits of tokens that prompt or outputs hold, multiplies negative
                 ones (CTRL, as in transformers and vLLM);
    frequency    is subtracted once for each time a token was drawn, presence once if it was at all
                 (the OpenAI API's definition: outputs only);
    min_tokens   bans the stop tokens until so many tokens are drawn;
    masks        forbid what a grammar does not allow.

Logprobs are those of the logits before all this. A ban gives way where a grammar allows nothing
else. Rank 0's `ShapeBook` gives each sequence that needs it a state row; what does not change
(prompt, bias, penalties) travels to the ranks once, with the row's first step. Each rank's
`LogitShaper` counts drawn tokens on its device, as they are drawn.
"""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.core.sequence import Phase, Sequence
from protocol.messages import SamplingParams

NO_ROW = -1
_LOWEST = -1e30  # of a token that is allowed
_BANNED = -3e30


def to_device(
    values: Any, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """On a GPU without waiting for what it still computes; on a CPU an array keeps its memory."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class SamplingRow(msgspec.Struct, frozen=True, array_like=True):
    """What a state row starts from; it replaces whatever the row held."""

    row: int
    prompt_ids: list[int]  # empty unless penalties ask for them, like output_ids
    output_ids: list[int]
    penalties: tuple[float, float, float] | None  # presence, frequency, repetition
    bias: dict[int, float]
    stop_token_ids: list[int]


class StepShapes(msgspec.Struct, frozen=True, array_like=True):
    """The shaping of a step's R draws."""

    rows: list[int]  # [R] state rows, NO_ROW: none
    bans: list[bool]  # [R] whether the row's stop tokens are banned
    setups: list[SamplingRow]


class ShapeBook:
    """Which sequence owns which state row. Rows of sequences that do not run are taken back, and
    what was drawn without the row's knowledge makes it start anew, so nobody has to tell it."""

    def __init__(self) -> None:
        # By sequence, with the position of the token that the row's state is ready to draw.
        self._rows: dict[Sequence, tuple[int, int]] = {}
        self._free: list[int] = []

    def plan(
        self, drawing: Sequenceable[Sequence], positions: Sequenceable[int]
    ) -> StepShapes | None:
        """The shaping of a step, None where no row needs any.

        Args:
            drawing: the sequence of each draw.
            positions: of the token to be drawn, in its sequence.
        """
        for sequence in [s for s in self._rows if s.phase is not Phase.RUNNING]:
            self._free.append(self._rows.pop(sequence)[0])
        draws = list(zip(drawing, positions, strict=True))
        bans = [_bans(*draw) for draw in draws]
        samplings = [sequence.request.sampling for sequence in drawing]
        needs = [
            ban or bool(sampling.logit_bias) or _penalties(sampling) is not None
            for ban, sampling in zip(bans, samplings, strict=True)
        ]
        if not any(needs):
            return None
        setups: list[SamplingRow] = []
        rows = [
            self._row(*draw, setups) if need else NO_ROW
            for draw, need in zip(draws, needs, strict=True)
        ]
        return StepShapes(rows, bans, setups)

    def _row(self, sequence: Sequence, position: int, setups: list[SamplingRow]) -> int:
        row, ready = self._rows.get(sequence, (NO_ROW, NO_ROW))
        if row == NO_ROW:
            row = self._free.pop() if self._free else len(self._rows)
        if ready != position:
            setups.append(_setup(sequence, row))
        self._rows[sequence] = row, position + 1
        return row


def _bans(sequence: Sequence, position: int) -> bool:
    request = sequence.request
    num_outputs = position - sequence.num_prompt_tokens
    return num_outputs < request.sampling.min_tokens and bool(request.stop_token_ids)


def _penalties(sampling: SamplingParams) -> tuple[float, float, float] | None:
    """Presence, frequency, repetition; None where they change nothing."""
    found = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    return None if found == (0.0, 0.0, 1.0) else found


def _setup(sequence: Sequence, row: int) -> SamplingRow:
    request, penalties = sequence.request, _penalties(sequence.request.sampling)
    return SamplingRow(
        row=row,
        prompt_ids=request.token_ids if penalties else [],
        output_ids=sequence.token_ids[sequence.first_output :] if penalties else [],
        penalties=penalties,
        bias=request.sampling.logit_bias,
        stop_token_ids=request.stop_token_ids
        if request.sampling.min_tokens > 0
        else [],
    )


class LogitShaper:
    """The state rows of one rank.

    `seen` [rows, V] int32 holds twice the number of times that a token was drawn, plus one if the
    prompt has it. Rows with penalties alone are ever written: on a CPU others take no memory.
    """

    def __init__(
        self, vocab_size: int, num_rows: int, device: str | torch.device = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.seen = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._rows: dict[int, SamplingRow] = {}
        # Tokens and values of their biases: of many, no step may go through each.
        self._biases: dict[
            int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
        ] = {}

    def prepare(self, shapes: StepShapes | None) -> "Shaping | None":
        """Takes in a step's setups and uploads what its draws need; None if they need nothing."""
        if shapes is None:
            return None
        for setup in shapes.setups:
            self._rows[setup.row] = setup
            values = np.fromiter(setup.bias.values(), np.float32)
            self._biases[setup.row] = np.fromiter(setup.bias, np.int64), values
            if setup.penalties is not None:
                self._see(setup)
        rows = [
            (at, row, self._rows[row])
            for at, row in enumerate(shapes.rows)
            if row != NO_ROW
        ]
        biases = [
            (at * self.vocab_size, *self._biases[row]) for at, row, s in rows if s.bias
        ]
        penalised = [
            (at, row) for at, row, setup in rows if setup.penalties is not None
        ]
        penalties = [self._rows[row].penalties for _, row in penalised]
        banned = [
            (at * self.vocab_size, setup) for at, _, setup in rows if shapes.bans[at]
        ]
        return Shaping(
            seen=self.seen,
            penalised=self._to_device(penalised),
            penalties=self._to_device(penalties, torch.float32),
            bias_at=self._to_device(_joined([start + ids for start, ids, _ in biases])),
            bias=self._to_device(
                _joined([values for *_, values in biases]), torch.float32
            ),
            bans_at=self._to_device(
                [
                    start + i
                    for start, s in banned
                    for i in s.stop_token_ids
                    if i < self.vocab_size
                ]
            ),
        )

    def masked(
        self, shaping: "Shaping | None", masks: npt.NDArray[np.int32]
    ) -> "Shaping":
        """`shaping` with masks, which are uploaded.

        Args:
            masks: int32 [R, ceil(V / 32)], bit t % 32 of word t // 32 set where token t is allowed.
        """
        return replace(shaping or Shaping(self.seen), allowed=self._unpack(masks))

    def _see(self, setup: SamplingRow) -> None:
        row = self.seen[setup.row].zero_()
        if (prompt := self._to_device(setup.prompt_ids)) is not None:
            row.index_fill_(0, prompt, 1)
        if (outputs := self._to_device(setup.output_ids)) is not None:
            row.index_add_(0, outputs, torch.full_like(outputs, 2, dtype=torch.int32))

    def _unpack(self, masks: npt.NDArray[np.int32]) -> torch.Tensor:
        """bool [R, V]"""
        if self.device.type == "cpu":
            octets = np.ascontiguousarray(masks).astype("<i4").view(np.uint8)
            bits = np.unpackbits(
                octets, axis=1, count=self.vocab_size, bitorder="little"
            )
            return torch.from_numpy(bits.view(np.bool_))
        words = to_device(masks.copy(), self.device, torch.int32)
        shifts = torch.arange(32, dtype=torch.int32, device=self.device)
        bits_set = (words[:, :, None] >> shifts) & 1
        return bits_set.view(len(words), -1)[:, : self.vocab_size].bool()

    def _to_device(
        self,
        values: Sequenceable[object] | npt.NDArray[Any],
        dtype: torch.dtype = torch.int64,
    ) -> torch.Tensor | None:
        """None where there is nothing."""
        return to_device(values, self.device, dtype) if len(values) else None


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)


@dataclass(frozen=True, eq=False)
class Shaping:
    """One step's shaping, on the device."""

    seen: torch.Tensor  # see LogitShaper
    penalised: torch.Tensor | None = None  # int64 [P, 2]: row of the step, state row
    penalties: torch.Tensor | None = (
        None  # float32 [P, 3]: presence, frequency, repetition
    )
    bias_at: torch.Tensor | None = None  # int64 [n], into the flattened logits
    bias: torch.Tensor | None = None  # float32 [n]
    bans_at: torch.Tensor | None = None  # int64 [m], into the flattened logits
    allowed: torch.Tensor | None = None  # bool [R, V]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """A shaped copy of logits, float32 [R, V] without NaN and +inf; a maximum is finite."""
        shaped = logits.clone()
        flat = shaped.view(-1)
        if self.bias_at is not None and self.bias is not None:
            flat.index_add_(0, self.bias_at, self.bias)
        if self.penalised is not None and self.penalties is not None:
            rows, states = self.penalised.unbind(1)
            presence, frequency, repetition = (
                p[:, None] for p in self.penalties.unbind(1)
            )
            seen, given = self.seen[states], shaped[rows]
            repeated = torch.where(given > 0, given / repetition, given * repetition)
            counts = seen >> 1
            penalty = frequency * counts + presence * (counts > 0)
            shaped[rows] = torch.where(seen > 0, repeated, given) - penalty
        if self.bans_at is not None or self.allowed is not None:
            shaped.clamp_(min=_LOWEST)
        if self.bans_at is not None:
            flat.index_fill_(
                0, self.bans_at, _BANNED
            )  # assigning a number would wait on a GPU
        if self.allowed is not None:
            shaped.masked_fill_(~self.allowed, float("-inf"))
        return shaped

    def drew(self, token_ids: torch.Tensor) -> None:
        """Counts the drawn tokens, int64 [R]."""
        if self.penalised is not None:
            rows, states = self.penalised.unbind(1)
            twice = torch.full_like(states, 2, dtype=torch.int32)
            self.seen.index_put_((states, token_ids[rows]), twice, accumulate=True)

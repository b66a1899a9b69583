"""Changes to a row's logits before its token is drawn, in this order:

    logit_bias   is added to the logits of its tokens;
    repetition   divides positive logits of tokens that prompt or outputs contain, and
                 multiplies negative ones (CTRL, as in transformers and vLLM);
    frequency    is subtracted once for each time a token was drawn, presence once if it
                 was drawn at all (the OpenAI API's definition: outputs only);
    min_tokens   bans the stop tokens until this many tokens are drawn;
    masks        forbid the tokens that a grammar does not allow.

Reported logprobs are those of the logits before these changes. If a grammar allows only
banned tokens, one of them is drawn nevertheless.

On rank 0, `RowAllocator` assigns a state row to each sequence that needs one. The data
that does not change (prompt, bias, penalties) is sent to the ranks once, with the first
step that uses the row. The `LogitShaper` of each rank counts drawn tokens on its
device.

A step that verifies proposals draws several times with one state row. For each draw,
the proposals before it count as if they had been drawn. The device counts only the
first drawn token, because the host decides later which of the other drawn tokens the
sequence keeps. The next step sends the kept tokens to the device (UncountedTokens).
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
# Banned tokens have lower logits than allowed tokens, but higher logits than tokens
# that a mask forbids. If a grammar allows only banned tokens, one of these is drawn.
_MIN_ALLOWED_LOGIT = -1e30
_BANNED_LOGIT = -3e30


def to_device(
    values: Any, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copies values to a device. The host does not wait for a copy to a GPU. On a CPU,
    an array that already has `dtype` is not copied: the tensor uses its memory."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class SamplingRow(msgspec.Struct, frozen=True, array_like=True):
    """The initial state of a state row. It replaces the row's previous state."""

    row: int
    prompt_ids: list[int]  # empty without penalties
    output_ids: list[int]  # empty without penalties
    penalties: tuple[float, float, float] | None  # presence, frequency, repetition
    bias: dict[int, float]
    stop_token_ids: list[int]


class UncountedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a sequence kept after a verification, and that are not yet counted in
    its state row."""

    row: int
    token_ids: list[int]


class LogitChanges(msgspec.Struct, frozen=True, array_like=True):
    """The changes to the logits of a step's R draws, as sent to the ranks.

    Attributes:
        rows: [R] state rows; NO_ROW for a draw without changes.
        bans: [R] whether the draw's stop tokens are banned.
        setups: the state rows to initialize before the draws.
        uncounted: the tokens to count before the draws.
        proposed: by index of a draw, the proposals before it, which count as drawn. Has
            no entry for the first draw of a verification, and for ordinary draws.
    """

    rows: list[int]
    bans: list[bool]
    setups: list[SamplingRow]
    uncounted: list[UncountedTokens] = []
    proposed: dict[int, list[int]] = {}


class RowAllocator:
    """Assigns state rows to sequences.

    The row of a sequence that no longer runs is reused. If a draw is repeated, for
    example because its mask was not ready, the row is set up again.
    """

    def __init__(self) -> None:
        # The row of each sequence, and the position of the draw for which the row's
        # state is valid.
        self._rows: dict[Sequence, tuple[int, int]] = {}
        self._free: list[int] = []

    def plan(
        self,
        drawing: Sequenceable[Sequence],
        positions: Sequenceable[int],
        proposed: Sequenceable[tuple[int, ...]] = (),
    ) -> LogitChanges | None:
        """Assigns rows to the draws of a step. Returns the changes to the logits, or
        None if no draw needs any.

        Args:
            drawing: the sequence of each draw.
            positions: for each draw, the index that its token gets in the sequence.
            proposed: for each draw, the proposals before its token; empty if the step
                verifies no proposals.
        """
        for sequence in [s for s in self._rows if s.phase is not Phase.RUNNING]:
            self._free.append(self._rows.pop(sequence)[0])
        bans = [
            _bans_stop_tokens(sequence, position)
            for sequence, position in zip(drawing, positions, strict=True)
        ]
        needs_row = [
            is_banned or _changes_logits(sequence.request.sampling)
            for is_banned, sequence in zip(bans, drawing, strict=True)
        ]
        if not any(needs_row):
            return None
        changes = LogitChanges(
            rows=[NO_ROW] * len(bans), bans=bans, setups=[], uncounted=[], proposed={}
        )
        for draw, (sequence, position) in enumerate(
            zip(drawing, positions, strict=True)
        ):
            if not needs_row[draw]:
                continue
            if proposed and proposed[draw]:
                changes.rows[draw] = self._rows[sequence][0]
                changes.proposed[draw] = list(proposed[draw])
            else:
                changes.rows[draw] = self._row(sequence, position, changes)
        return changes

    def _row(self, sequence: Sequence, position: int, changes: LogitChanges) -> int:
        """Returns the state row for the draw of a sequence at `position`. Adds to
        `changes` what makes the row valid for this draw. After the draw, the row is
        valid for the next position."""
        row, next_position = self._rows.get(sequence, (NO_ROW, NO_ROW))
        if row == NO_ROW:
            row = self._free.pop() if self._free else len(self._rows)
        if not 0 <= next_position <= position:
            changes.setups.append(_setup(sequence, row))
        elif next_position < position:
            uncounted = sequence.token_ids[next_position:position]
            changes.uncounted.append(UncountedTokens(row, uncounted))
        self._rows[sequence] = (row, position + 1)
        return row


def _bans_stop_tokens(sequence: Sequence, position: int) -> bool:
    request = sequence.request
    num_outputs = position - sequence.num_prompt_tokens
    return num_outputs < request.sampling.min_tokens and bool(request.stop_token_ids)


def _changes_logits(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or _penalties(sampling) is not None


def _penalties(sampling: SamplingParams) -> tuple[float, float, float] | None:
    """Presence, frequency and repetition penalty; None if they change nothing."""
    penalties = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    return None if penalties == (0.0, 0.0, 1.0) else penalties


def _setup(sequence: Sequence, row: int) -> SamplingRow:
    request = sequence.request
    penalties = _penalties(request.sampling)
    prompt_ids: list[int] = []
    output_ids: list[int] = []
    if penalties:
        prompt_ids = request.token_ids
        output_ids = sequence.token_ids[sequence.first_output :]
    has_min_tokens = request.sampling.min_tokens > 0
    return SamplingRow(
        row=row,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        penalties=penalties,
        bias=request.sampling.logit_bias,
        stop_token_ids=request.stop_token_ids if has_min_tokens else [],
    )


class LogitShaper:
    """The state rows of one rank.

    `seen` [rows, V] int32 contains twice the number of times that a token was drawn,
    plus one if the prompt contains the token. Only rows with penalties are ever
    written. On a CPU, rows without penalties therefore take no memory.
    """

    def __init__(
        self, vocab_size: int, num_rows: int, device: str | torch.device = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.seen = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._setups: dict[int, SamplingRow] = {}  # by row
        # Tokens and values of the biases, by row. They are arrays, because iterating
        # over the biases of a request, which may be many, would delay each step.
        self._biases: dict[
            int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
        ] = {}

    def prepare(self, changes: LogitChanges | None) -> "Shaping | None":
        """Applies the setups and uncounted tokens of a step, and copies the changes of
        its draws to the device. Returns None if there are no changes."""
        if changes is None:
            return None
        for setup in changes.setups:
            self._set_up(setup)
        for uncounted in changes.uncounted:
            if self._setups[uncounted.row].penalties is not None:
                self._count_outputs(uncounted.row, uncounted.token_ids)
        penalised: list[tuple[int, int]] = []
        penalties: list[tuple[float, float, float]] = []
        counted: list[tuple[int, int]] = []
        proposed: list[tuple[int, int]] = []
        bias_indices: list[npt.NDArray[np.int64]] = []
        bias_values: list[npt.NDArray[np.float32]] = []
        ban_indices: list[int] = []
        for draw, row in enumerate(changes.rows):
            if row == NO_ROW:
                continue
            setup = self._setups[row]
            start = draw * self.vocab_size  # in the flattened logits
            if setup.bias:
                ids, values = self._biases[row]
                bias_indices.append(start + ids)
                bias_values.append(values)
            if setup.penalties is not None:
                tokens = changes.proposed.get(draw)
                if tokens is None:
                    counted.append((draw, row))
                else:
                    proposed += [(len(penalised), token_id) for token_id in tokens]
                penalised.append((draw, row))
                penalties.append(setup.penalties)
            if changes.bans[draw]:
                for token_id in setup.stop_token_ids:
                    if token_id < self.vocab_size:
                        ban_indices.append(start + token_id)
        return Shaping(
            seen=self.seen,
            penalised=self._to_device(penalised),
            penalties=self._to_device(penalties, torch.float32),
            counted=self._to_device(counted),
            proposed=self._to_device(proposed),
            bias_indices=self._to_device(_concatenate(bias_indices)),
            bias=self._to_device(_concatenate(bias_values), torch.float32),
            ban_indices=self._to_device(ban_indices),
        )

    def masked(
        self, shaping: "Shaping | None", masks: npt.NDArray[np.int32]
    ) -> "Shaping":
        """Copies masks to the device. Returns a copy of `shaping` that includes them.

        Args:
            masks: int32 [R, ceil(V / 32)]; bit t % 32 of word t // 32 is set where
                token t is allowed.
        """
        return replace(shaping or Shaping(self.seen), allowed=self._unpack(masks))

    def _set_up(self, setup: SamplingRow) -> None:
        self._setups[setup.row] = setup
        ids = np.fromiter(setup.bias, np.int64)
        values = np.fromiter(setup.bias.values(), np.float32)
        self._biases[setup.row] = (ids, values)
        if setup.penalties is not None:
            self._count_initial_tokens(setup)

    def _count_initial_tokens(self, setup: SamplingRow) -> None:
        row = self.seen[setup.row].zero_()
        if (prompt := self._to_device(setup.prompt_ids)) is not None:
            row.index_fill_(0, prompt, 1)
        self._count_outputs(setup.row, setup.output_ids)

    def _count_outputs(self, row: int, token_ids: list[int]) -> None:
        if (outputs := self._to_device(token_ids)) is not None:
            twice = torch.full_like(outputs, 2, dtype=torch.int32)
            self.seen[row].index_add_(0, outputs, twice)

    def _unpack(self, masks: npt.NDArray[np.int32]) -> torch.Tensor:
        """Returns masks as bool [R, V] on the device."""
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
        """Copies values to the device. Returns None if there are no values."""
        return to_device(values, self.device, dtype) if len(values) else None


def _concatenate(parts: Sequenceable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)


@dataclass(frozen=True, eq=False)
class Shaping:
    """The changes to one step's logits, on the device.

    Attributes:
        seen: the counts of tokens; see LogitShaper.
        penalised: int64 [P, 2]: for each draw with penalties, its index and state row.
        penalties: float32 [P, 3]: presence, frequency, repetition.
        counted: int64 [C, 2]: the rows of `penalised` for the draws with tokens that
            `count_drawn` counts.
        proposed: int64 [n, 2]: for each proposal that counts as drawn in one draw, the
            index of this draw in `penalised`, and the token.
        bias_indices: int64 [n], into the flattened logits.
        bias: float32 [n], added to the logits at `bias_indices`.
        ban_indices: int64 [m], into the flattened logits.
        allowed: bool [R, V], the tokens that the grammars allow. None: all tokens.
    """

    seen: torch.Tensor
    penalised: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    counted: torch.Tensor | None = None
    proposed: torch.Tensor | None = None
    bias_indices: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    ban_indices: torch.Tensor | None = None
    allowed: torch.Tensor | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns a changed copy of the logits.

        Args:
            logits: float32 [R, V], without NaN and +inf, with a finite maximum in each
                row.
        """
        shaped = logits.clone()
        flat = shaped.view(-1)
        if self.bias_indices is not None and self.bias is not None:
            flat.index_add_(0, self.bias_indices, self.bias)
        if self.penalised is not None and self.penalties is not None:
            rows, states = self.penalised.unbind(1)
            presence, frequency, repetition = (
                column[:, None] for column in self.penalties.unbind(1)
            )
            seen = self.seen[states]
            if self.proposed is not None:
                seen.index_put_(
                    tuple(self.proposed.unbind(1)),
                    torch.full_like(self.proposed[:, 0], 2, dtype=torch.int32),
                    accumulate=True,
                )
            before = shaped[rows]
            repeated = torch.where(before > 0, before / repetition, before * repetition)
            counts = seen >> 1
            penalty = frequency * counts + presence * (counts > 0)
            shaped[rows] = torch.where(seen > 0, repeated, before) - penalty
        if self.ban_indices is not None or self.allowed is not None:
            shaped.clamp_(min=_MIN_ALLOWED_LOGIT)
        if self.ban_indices is not None:
            # index_fill_ is used because assigning a number would wait for the GPU.
            flat.index_fill_(0, self.ban_indices, _BANNED_LOGIT)
        if self.allowed is not None:
            shaped.masked_fill_(~self.allowed, float("-inf"))
        return shaped

    def count_drawn(self, token_ids: torch.Tensor) -> None:
        """Counts the drawn tokens, int64 [R], for the penalties of later draws."""
        if self.counted is not None:
            rows, states = self.counted.unbind(1)
            twice = torch.full_like(states, 2, dtype=torch.int32)
            self.seen.index_put_((states, token_ids[rows]), twice, accumulate=True)

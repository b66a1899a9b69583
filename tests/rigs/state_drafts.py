"""MTP layers and EAGLE-3 drafters that compute each proposal from a complete sequence.

`CheckedDrafter` compares the proposals of an engine's drafter with theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.sequence import Sequence as EngineSequence
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from engine.speculation.states.state_drafter import StateDrafter
from model.decoder import CausalLM
from model.drafters.draft_model import DraftModel
from model.drafters.load import load_eagle3, load_mtp
from protocol.messages import SamplingParams
from tests.make_drafters import KINDS, ensure_drafter
from tests.make_models import ensure_model
from tests.model.dense import DenseAttention
from tests.model.random_models import load

GREEDY = SamplingParams(temperature=0.0)


def load_pair(kind: str) -> tuple[CausalLM, DraftModel]:
    """Load a target and its trained drafter (KINDS of make_drafters.py)."""
    target_kind, style = KINDS[kind]
    folder = ensure_drafter(kind)
    if style == "eagle3":
        target = load(ensure_model(target_kind))
        return target, load_eagle3(target, folder, dtype=torch.float32)
    target = load(folder)
    return target, load_mtp(target, folder, dtype=torch.float32)


def engine_options(kind: str, max_proposals: int) -> tuple[Any, str]:
    """Return the target's directory and the value of --speculate for an engine."""
    target_kind, style = KINDS[kind]
    folder = ensure_drafter(kind)
    if style == "eagle3":
        return ensure_model(target_kind), f"eagle3:{folder}:{max_proposals}"
    return folder, f"mtp:{max_proposals}"


class LoneDrafter:
    """A target and its drafter, without an engine."""

    def __init__(self, kind: str) -> None:
        self._target, self._draft = load_pair(kind)

    @torch.inference_mode()
    def proposals(
        self,
        token_ids: Sequence[int],
        count: int,
        sampling: SamplingParams = GREEDY,
        context: Sequence[int] | None = None,
        other_inputs: dict[int, int] | None = None,
    ) -> list[int]:
        """Return the next `count` tokens after `token_ids`.

        Args:
            context: the positions that the drafter sees; None: all.
            other_inputs: maps a position to the token that the drafter reads at that
                position. At all others, it reads the token of the next position.
        """
        inputs = [*token_ids[1:]]
        for position, token in (other_inputs or {}).items():
            inputs[position] = token
        positions = torch.arange(len(inputs))
        if context is not None:
            positions = torch.tensor(context)
        states = self._states(token_ids)[positions]
        attention = DenseAttention(self._draft.attention_spec)
        ids = torch.tensor(inputs)[positions]
        proposals: list[int] = []
        for index in range(count):
            states = self._draft.forward(ids, states, positions, attention)
            logits = self._draft.raw_logits(states[-1:])
            batch = SamplingBatch.from_params(
                [sampling], [len(token_ids) + index], torch.device("cpu")
            )
            proposals.append(int(sample(logits, batch).token_ids))
            ids = torch.tensor(proposals[-1:])
            positions = positions[-1:] + 1
            states = states[-1:]
        return proposals

    def _states(self, token_ids: Sequence[int]) -> Tensor:
        """Return the target's states of all tokens except the last."""
        num_rows = len(token_ids) - 1
        capture = self._target.new_capture(self._draft.target_layers, num_rows)
        assert capture is not None
        self._target.forward(
            torch.tensor(token_ids[:-1]),
            torch.arange(num_rows),
            DenseAttention(self._target.attention_spec),
            capture=capture,
        )
        return self._draft.combine(capture.out)


class CheckedDrafter:
    """Compares all proposals of an engine's drafter with those of a LoneDrafter.

    Attributes:
        num_proposed: the number of compared tokens.
        num_skipped: for each comparison, how many positions the drafter did not see.
        failures: descriptions of all proposals that differ.
    """

    uses_device = True

    def __init__(self, drafter: StateDrafter, lone: LoneDrafter) -> None:
        self.name = drafter.name
        self.prepare = drafter.prepare
        self.follow = drafter.follow
        self.drafted_blocks = drafter.drafted_blocks
        self.catch_up_token_s = drafter.catch_up_token_s
        self.num_proposed = 0
        self.num_skipped: list[int] = []
        self._drafter = drafter
        self._lone = lone
        self.failures: list[str] = []

    def propose(
        self, sequences: Sequence[EngineSequence], limits: Sequence[int]
    ) -> list[list[int]]:
        proposals = self._drafter.propose(sequences, limits)
        for sequence, proposed in zip(sequences, proposals, strict=True):
            if not proposed:
                continue
            params = sequence.sampling.params
            tokens = sequence.token_ids
            context = self._context(sequence)
            expected = self._lone.proposals(tokens, len(proposed), params, context)
            if proposed != expected:
                # Do not raise. The engine would catch the error and only turn the
                # drafter off.
                self.failures.append(f"{proposed} instead of {expected} after {tokens}")
            self.num_proposed += len(proposed)
            self.num_skipped.append(len(tokens) - 1 - len(context))
        return proposals

    def _context(self, sequence: EngineSequence) -> list[int]:
        """Return the positions that the engine's drafter sees."""
        states = self._drafter._stored[sequence]
        size = self._drafter._block_size
        blocks = [range(size * index, size * (index + 1)) for index in states.context]
        first = states.drafted_from // size * size
        blocks.append(range(first, first + states.num_beginning))
        blocks.append(range(states.drafted_from, len(sequence.token_ids) - 1))
        return [position for positions in blocks for position in positions]

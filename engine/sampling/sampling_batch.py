"""The sampling parameters of one step's draws, as tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.logits_processing import to_device
from protocol.messages import SamplingParams


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """The sampling parameters of S rows. One token is drawn for each row.

    `from_params` computes `free_rows` and `restricted_rows` on the host. Finding these
    rows on the device would make the host wait for the device.

    Attributes:
        temperature, top_p, min_p: float32 [S].
        top_k: int64 [S]; 0 allows every token.
        seed: int64 [S].
        choice: int64 [S], the index of the choice in its request.
        position: int64 [S], the index that the drawn token will have in its sequence.
        max_logprobs: the largest number of top logprobs that any row requests. 0: rows
            request only the logprob of the drawn token; None: no row requests logprobs.
        free_rows: int64, indices of the rows with a temperature above 0 and without
            top_k, top_p and min_p; None if there are no such rows.
        restricted_rows: int64, indices of the rows with a temperature above 0 and with
            top_k, top_p or min_p; None if there are no such rows.
        max_top_k: the largest top_k of the restricted rows.
        has_bare_top_p: whether some row has top_p without top_k.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor
    max_logprobs: int | None
    free_rows: torch.Tensor | None
    restricted_rows: torch.Tensor | None
    max_top_k: int
    has_bare_top_p: bool

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        device: str | torch.device = "cpu",
    ) -> "SamplingBatch":
        """Makes a batch with one row for each entry of `params`.

        Args:
            positions: for each row, the index that the drawn token will have in its
                sequence.
        """
        assert len(params) == len(positions), (len(params), len(positions))
        device = torch.device(device)
        sampled = [i for i, p in enumerate(params) if p.temperature > 0]
        restricted = [i for i in sampled if _is_restricted(params[i])]
        free = [i for i in sampled if not _is_restricted(params[i])]
        num_logprobs = [p.num_logprobs for p in params if p.num_logprobs is not None]
        floats = [
            [getattr(p, name) for p in params]
            for name in ("temperature", "top_p", "min_p")
        ]
        ints = [
            [getattr(p, name) for p in params]
            for name in ("top_k", "seed", "choice_index")
        ]
        ints.append(list(positions))
        temperature, top_p, min_p = to_device(floats, device, torch.float32).unbind()
        top_k, seed, choice, position = to_device(ints, device).unbind()
        return cls(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            top_k=top_k,
            seed=seed,
            choice=choice,
            position=position,
            max_logprobs=max(num_logprobs, default=None),
            free_rows=to_device(free, device) if free else None,
            restricted_rows=to_device(restricted, device) if restricted else None,
            max_top_k=max((params[i].top_k for i in restricted), default=0),
            has_bare_top_p=any(
                params[i].top_p < 1 and not params[i].top_k for i in restricted
            ),
        )


def _is_restricted(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0

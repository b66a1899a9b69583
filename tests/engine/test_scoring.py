"""Prompt scores of many sequences in one step."""

import pytest
import torch

from engine.core.batch import ScoredRows
from engine.sampling import scoring


class _Model:
    """Its hidden states are its logits."""

    def __init__(self) -> None:
        self.most_rows = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return hidden


@pytest.mark.parametrize("num_top", [0, 3])
def test_each_sequence_gets_its_own_scores_from_bounded_chunks(num_top: int) -> None:
    hidden = torch.randn(400, 2000, generator=torch.Generator().manual_seed(0))
    wanted = [
        ScoredRows(5, list(range(150)), num_top),
        ScoredRows(200, [7], 1),
        ScoredRows(210, list(range(180)), 0),
    ]
    model = _Model()
    scores = scoring.score(model, hidden, wanted).result()  # type: ignore[arg-type]
    assert model.most_rows <= 128, "never all rows of a long prompt at once"
    expected = hidden.log_softmax(-1)
    for part, found in zip(wanted, scores, strict=True):
        rows = expected[part.first_row : part.first_row + len(part.targets)]
        chosen = rows.gather(1, torch.tensor(part.targets)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([s.logprob for s in found]), chosen)
        top = rows.topk(part.num_top)
        assert [s.top_ids for s in found] == top.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([s.top_logprobs for s in found]).reshape(top.values.shape), top.values
        )


def test_logits_that_are_no_numbers_score_as_impossible() -> None:
    hidden = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]])
    ((first, second),) = scoring.score(_Model(), hidden, [ScoredRows(0, [1, 1], 0)]).result()  # type: ignore[arg-type]
    assert first.logprob == float("-inf")
    assert second.logprob == pytest.approx(-0.6931, abs=1e-3)

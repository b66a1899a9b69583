"""The sampler draws from the right distribution, over the right set, whatever its neighbours."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import ScoredRows
from engine.sampling.sampler import greedy, sample, score
from engine.sampling.sampling_batch import SamplingBatch
from protocol.messages import SamplingParams
from tests.rigs.examples import examples

VOCAB = 50


def make_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw(
    logits: torch.Tensor, params: list[SamplingParams], positions: list[int]
) -> list[int]:
    return sample(
        logits, SamplingBatch.from_params(params, positions)
    ).token_ids.tolist()


def draw_many(logits: torch.Tensor, params: SamplingParams, num: int) -> torch.Tensor:
    """Counts of each token over `num` positions of one seed."""
    batch = SamplingBatch.from_params([params] * num, range(num))
    ids = sample(logits.expand(num, -1), batch).token_ids
    return torch.bincount(ids, minlength=logits.shape[1])


def allowed(logits: list[float], params: SamplingParams) -> set[int]:
    """The allowed set in plain Python floats, ties included, as the module states it."""
    top = max(logits)
    weights = {
        i: math.exp((x - top) / params.temperature) for i, x in enumerate(logits)
    }
    if 0 < params.top_k < len(weights):
        kth = sorted(weights.values(), reverse=True)[params.top_k - 1]
        weights = {i: w for i, w in weights.items() if w >= kth}
    if params.top_p < 1:
        total, reached, last = sum(weights.values()), 0.0, max(weights.values())
        for weight in sorted(weights.values(), reverse=True):
            if reached >= params.top_p * total:
                break
            reached, last = reached + weight, weight
        weights = {i: w for i, w in weights.items() if w >= last}
    return {i for i, w in weights.items() if w >= params.min_p * max(weights.values())}


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 5.0, 5.0]])
    assert draw(logits, [SamplingParams(temperature=0)] * 2, [0, 0]) == [1, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7),
        SamplingParams(seed=3, temperature=1.5, top_k=12),
        SamplingParams(seed=4, top_p=0.8),
        SamplingParams(seed=5, min_p=0.05),
        SamplingParams(
            seed=6, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, choice_index=3
        ),
    ],
)
def test_draws_follow_the_softmax_over_the_allowed_set(params):
    """Property: chi-square of 40,000 draws; tokens outside the set never come."""
    logits = make_logits(9)
    counts = draw_many(logits, params, 40_000)
    members = sorted(allowed(logits[0].tolist(), params))
    assert int(counts.sum()) == int(counts[members].sum())
    assert_follows(
        counts[members], (logits[0, members].double() / params.temperature).softmax(-1)
    )


def test_seeds_draw_independently():
    logits, num = make_logits(1), 20_000
    params = [SamplingParams(seed=seed) for seed in range(num)]
    batch = SamplingBatch.from_params(params, [7] * num)
    counts = torch.bincount(
        sample(logits.expand(num, -1), batch).token_ids, minlength=VOCAB
    )
    assert_follows(counts, logits[0].double().softmax(-1))


def assert_follows(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    expected = int(counts.sum()) * probabilities
    often = expected >= 5  # chi-square holds for these
    statistic = ((counts - expected) ** 2 / expected)[often].sum()
    freedom = int(often.sum()) - 1
    assert abs(float(statistic) - freedom) < 5 * math.sqrt(2 * freedom)


sampling = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 200, 1000]), top_p=st.sampled_from([1.0, 0.99, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]), seed=st.integers(0, 2**63 - 1),
    choice_index=st.integers(0, 4),
)  # fmt: skip


@examples(60)
@given(st.lists(sampling, min_size=1, max_size=6), st.integers(0, 1000), st.data())
def test_a_row_does_not_depend_on_its_neighbours(params, logits_seed, data):
    """Property: alone, in a batch, in another order, beside no numbers: the same token."""
    logits = make_logits(logits_seed, len(params), vocab=400)
    logits[: data.draw(st.integers(0, 1))] = math.nan
    positions = [i * 13 for i in range(len(params))]
    together = draw(logits, params, positions)
    order = data.draw(st.permutations(range(len(params))))
    shuffled = draw(
        logits[order], [params[i] for i in order], [positions[i] for i in order]
    )
    alone = [
        draw(logits[i : i + 1], [params[i]], [positions[i]])[0]
        for i in range(len(params))
    ]
    assert alone == together
    assert shuffled == [together[i] for i in order]


@examples(60)
@given(
    sampling.filter(lambda p: p.temperature > 0), st.integers(0, 1000), st.booleans()
)
def test_a_drawn_token_is_in_the_allowed_set(params, logits_seed, is_coarse):
    """Property: over many positions, also where many logits are equal as bfloat16 leaves them."""
    logits = make_logits(logits_seed, vocab=300)
    logits = logits.round() if is_coarse else logits
    drawn = draw_many(logits, params, 40).nonzero()[:, 0].tolist()
    assert set(drawn) <= allowed(logits[0].tolist(), params)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {0, 1, 3, 4}),  # 0 and 4 are equal: a tie at the edge stays
        ({"top_p": 0.3}, {3}),
        ({"top_p": 0.4}, {3}),  # exactly reached
        ({"top_p": 0.41}, {1, 3}),
        ({"top_k": 2, "top_p": 0.57}, {3}),  # of the 0.7 left, 3 holds 0.571
        ({"top_k": 2, "top_p": 0.58}, {1, 3}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 1.0}, {3}),
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
    ],
)
def test_allowed_sets_by_hand(limits, expected):
    logits = torch.tensor([[0.125, 0.3, 0.05, 0.4, 0.125]]).log()
    params = SamplingParams(seed=11, **limits)  # type: ignore[arg-type]
    counts = draw_many(logits, params, 2000)
    assert set(counts.nonzero().flatten().tolist()) == expected


def test_a_nucleus_wider_than_the_first_candidates():
    logits = torch.zeros(1, 5000)
    logits[0, 4000:] = -30.0
    counts = draw_many(logits, SamplingParams(seed=1, top_p=0.9), 400)
    assert int(counts[4000:].sum()) == 0
    assert int((counts > 0).sum()) > 300


def test_positions_and_choices_differ_and_repeats_do_not():
    one, other = SamplingParams(seed=5), SamplingParams(seed=5, choice_index=1)
    first, again, *rest = draw(
        torch.zeros(4, 1000), [one, one, one, other], [3, 3, 4, 3]
    )
    assert first == again and first not in rest


def test_a_tiny_temperature_is_greedy():
    logits = make_logits(3, rows=4) * 100
    drawn = draw(logits, [SamplingParams(temperature=1e-30)] * 4, [0] * 4)
    assert drawn == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("num", "shape"), [(None, None), (0, (1, 0)), (2, (1, 2))])
def test_logprobs_are_as_many_as_some_row_wants(num, shape):
    batch = SamplingBatch.from_params([SamplingParams(num_logprobs=num)], [0])
    found = sample(make_logits(0), batch).logprobs
    assert (found and found.top_ids.shape) == shape


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}]
)
def test_logits_that_are_not_numbers(limits):
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [
            [nan, 1.0, nan, -inf],
            [0.0, inf, 2.0, nan],
            [nan, nan, -inf, nan],
            [-inf, -inf, -inf, -inf],
            [-inf, -inf, 0.0, -inf],
        ]
    )
    untouched = logits.clone()
    params = [SamplingParams(seed=1, num_logprobs=2, **limits)] * 5  # type: ignore[arg-type]
    out = sample(logits, SamplingBatch.from_params(params, [0] * 5))
    assert out.token_ids.tolist() == greedy(logits).tolist() == [1, 1, 0, 0, 2]
    assert out.logprobs is not None and out.logprobs.chosen.tolist() == [0.0] * 5
    torch.testing.assert_close(logits, untouched, equal_nan=True, rtol=0, atol=0)


def test_a_batch_without_rows():
    batch = SamplingBatch.from_params([], [])
    assert sample(torch.zeros(0, VOCAB), batch).token_ids.tolist() == []


# -- logprobs of prompt tokens ---------------------------------------------------------------------


class _Model:
    """Its hidden states are its logits."""

    def __init__(self) -> None:
        self.most_rows = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return hidden


@pytest.mark.parametrize("num_top", [0, 3])
def test_each_sequence_gets_its_own_scores_from_bounded_chunks(num_top):
    hidden = torch.randn(400, 2000, generator=torch.Generator().manual_seed(0))
    wanted = [
        ScoredRows(5, list(range(150)), num_top),
        ScoredRows(200, [7], 1),
        ScoredRows(210, list(range(180)), 0),
    ]
    model = _Model()
    scores = score(model, hidden, wanted).result()  # type: ignore[arg-type]
    assert model.most_rows <= 128, "never all rows of a long prompt at once"
    expected = hidden.log_softmax(-1)
    for part, found in zip(wanted, scores, strict=True):
        rows = expected[part.first_row : part.first_row + len(part.targets)]
        chosen = rows.gather(1, torch.tensor(part.targets)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([s.logprob for s in found]), chosen)
        assert [s.rank for s in found] == (rows >= chosen[:, None]).sum(-1).tolist()
        top = rows.topk(part.num_top)
        assert [s.top_ids for s in found] == top.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([s.top_logprobs for s in found]).reshape(top.values.shape),
            top.values,
        )


def test_logits_that_are_no_numbers_score_as_impossible():
    hidden = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]])
    ((first, second),) = score(_Model(), hidden, [ScoredRows(0, [1, 1], 0)]).result()  # type: ignore[arg-type]
    assert first.logprob == float("-inf")
    assert second.logprob == pytest.approx(-0.6931, abs=1e-3)

"""The sampler draws from the right distribution over the allowed tokens. A row's token
does not depend on other rows.
"""

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


def count_draws(logits: torch.Tensor, params: SamplingParams, num: int) -> torch.Tensor:
    """Returns how often each token is drawn at `num` positions with one seed."""
    batch = SamplingBatch.from_params([params] * num, range(num))
    ids = sample(logits.expand(num, -1), batch).token_ids
    return torch.bincount(ids, minlength=logits.shape[1])


def allowed_tokens(logits: list[float], params: SamplingParams) -> set[int]:
    """Returns the allowed tokens as the docstring of sampler.py defines them, computed
    with Python's floats."""
    largest = max(logits)
    weights = {
        i: math.exp((x - largest) / params.temperature) for i, x in enumerate(logits)
    }
    if 0 < params.top_k < len(weights):
        kth = sorted(weights.values(), reverse=True)[params.top_k - 1]
        weights = {i: w for i, w in weights.items() if w >= kth}
    if params.top_p < 1:
        total = sum(weights.values())
        reached = 0.0
        smallest = max(weights.values())
        for weight in sorted(weights.values(), reverse=True):
            if reached >= params.top_p * total:
                break
            reached += weight
            smallest = weight
        weights = {i: w for i, w in weights.items() if w >= smallest}
    return {i for i, w in weights.items() if w >= params.min_p * max(weights.values())}


def test_greedy_draws_the_lowest_id_of_the_largest_logits():
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
def test_draws_follow_the_softmax_over_the_allowed_tokens(params):
    """A chi-square test of 40,000 draws. Other tokens are never drawn."""
    logits = make_logits(9)
    counts = count_draws(logits, params, 40_000)
    allowed = sorted(allowed_tokens(logits[0].tolist(), params))
    assert int(counts.sum()) == int(counts[allowed].sum())
    scaled = logits[0, allowed].double() / params.temperature
    assert_distribution(counts[allowed], scaled.softmax(-1))


def test_draws_with_different_seeds_are_independent():
    logits = make_logits(1)
    num = 20_000
    params = [SamplingParams(seed=seed) for seed in range(num)]
    batch = SamplingBatch.from_params(params, [7] * num)
    counts = torch.bincount(
        sample(logits.expand(num, -1), batch).token_ids, minlength=VOCAB
    )
    assert_distribution(counts, logits[0].double().softmax(-1))


def assert_distribution(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Asserts that the chi-square statistic is within 5 standard deviations."""
    expected = int(counts.sum()) * probabilities
    is_frequent = expected >= 5  # the chi-square distribution needs frequent tokens
    statistic = ((counts - expected) ** 2 / expected)[is_frequent].sum()
    degrees = int(is_frequent.sum()) - 1  # degrees of freedom
    assert abs(float(statistic) - degrees) < 5 * math.sqrt(2 * degrees)


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 200, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    choice_index=st.integers(0, 4),
)


@examples(60)
@given(st.lists(sampling, min_size=1, max_size=6), st.integers(0, 1000), st.data())
def test_row_does_not_depend_on_other_rows(params, logits_seed, data):
    """A row draws the same token alone, in a batch, in a shuffled batch, and in a batch
    with a row of NaN."""
    logits = make_logits(logits_seed, len(params), vocab=400)
    logits[: data.draw(st.integers(0, 1))] = math.nan
    positions = [i * 13 for i in range(len(params))]
    in_batch = draw(logits, params, positions)
    order = data.draw(st.permutations(range(len(params))))
    shuffled = draw(
        logits[order], [params[i] for i in order], [positions[i] for i in order]
    )
    separate = [
        draw(logits[i : i + 1], [params[i]], [positions[i]])[0]
        for i in range(len(params))
    ]
    assert separate == in_batch
    assert shuffled == [in_batch[i] for i in order]


@examples(60)
@given(
    sampling.filter(lambda p: p.temperature > 0), st.integers(0, 1000), st.booleans()
)
def test_drawn_token_is_allowed(params, logits_seed, is_rounded):
    """Drawn tokens are also allowed if many logits are equal, as in bfloat16."""
    logits = make_logits(logits_seed, vocab=300)
    if is_rounded:
        logits = logits.round()
    drawn = count_draws(logits, params, 40).nonzero()[:, 0].tolist()
    assert set(drawn) <= allowed_tokens(logits[0].tolist(), params)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {0, 1, 3, 4}),  # 0 and 4 are equally likely
        ({"top_p": 0.3}, {3}),
        ({"top_p": 0.4}, {3}),  # token 3 reaches top_p exactly
        ({"top_p": 0.41}, {1, 3}),
        ({"top_k": 2, "top_p": 0.57}, {3}),  # token 3 has 0.4 of 0.7, which is 0.571
        ({"top_k": 2, "top_p": 0.58}, {1, 3}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 1.0}, {3}),
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
    ],
)
def test_limits_allow_the_expected_tokens(limits, expected):
    logits = torch.tensor([[0.125, 0.3, 0.05, 0.4, 0.125]]).log()
    params = SamplingParams(seed=11, **limits)  # type: ignore[arg-type]
    counts = count_draws(logits, params, 2000)
    assert set(counts.nonzero().flatten().tolist()) == expected


def test_top_p_may_allow_more_tokens_than_the_first_candidates():
    logits = torch.zeros(1, 5000)
    logits[0, 4000:] = -30.0
    counts = count_draws(logits, SamplingParams(seed=1, top_p=0.9), 400)
    assert int(counts[4000:].sum()) == 0
    assert int((counts > 0).sum()) > 300


def test_draws_differ_by_position_and_choice_and_are_repeatable():
    choice_0 = SamplingParams(seed=5)
    choice_1 = SamplingParams(seed=5, choice_index=1)
    params = [choice_0, choice_0, choice_0, choice_1]
    drawn = draw(torch.zeros(4, 1000), params, [3, 3, 4, 3])
    assert drawn[0] == drawn[1]
    assert drawn[0] not in drawn[2:]


def test_tiny_temperature_is_greedy():
    logits = make_logits(3, rows=4) * 100
    drawn = draw(logits, [SamplingParams(temperature=1e-30)] * 4, [0] * 4)
    assert drawn == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("num", "shape"), [(None, None), (0, (1, 0)), (2, (1, 2))])
def test_number_of_logprobs_is_the_requested_one(num, shape):
    batch = SamplingBatch.from_params([SamplingParams(num_logprobs=num)], [0])
    logprobs = sample(make_logits(0), batch).logprobs
    assert (logprobs and logprobs.top_ids.shape) == shape


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}]
)
def test_nan_counts_as_minus_infinity_and_infinity_takes_all_the_probability(limits):
    nan = math.nan
    inf = math.inf
    logits = torch.tensor(
        [
            [nan, 1.0, nan, -inf],
            [0.0, inf, 2.0, nan],
            [nan, nan, -inf, nan],
            [-inf, -inf, -inf, -inf],
            [-inf, -inf, 0.0, -inf],
        ]
    )
    original = logits.clone()
    params = [SamplingParams(seed=1, num_logprobs=2, **limits)] * 5
    out = sample(logits, SamplingBatch.from_params(params, [0] * 5))
    assert out.token_ids.tolist() == greedy(logits).tolist() == [1, 1, 0, 0, 2]
    assert out.logprobs is not None and out.logprobs.chosen.tolist() == [0.0] * 5
    torch.testing.assert_close(logits, original, equal_nan=True, rtol=0, atol=0)


def test_batch_without_rows_draws_nothing():
    batch = SamplingBatch.from_params([], [])
    assert sample(torch.zeros(0, VOCAB), batch).token_ids.tolist() == []


# -- logprobs of prompt tokens ---------------------------------------------------------


class _IdentityModel:
    """A model with logits that equal its hidden states."""

    def __init__(self) -> None:
        self.max_rows = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.max_rows = max(self.max_rows, len(hidden))
        return hidden


@pytest.mark.parametrize("num_top", [0, 3])
def test_each_request_gets_the_logprobs_of_its_targets_from_bounded_chunks(num_top):
    hidden = torch.randn(400, 2000, generator=torch.Generator().manual_seed(0))
    requests = [
        ScoredRows(5, list(range(150)), num_top),
        ScoredRows(200, [7], 1),
        ScoredRows(210, list(range(180)), 0),
    ]
    model = _IdentityModel()
    results = score(model, hidden, requests).result()  # type: ignore[arg-type]
    assert model.max_rows <= 128, "never all rows of a long prompt at once"
    expected = hidden.log_softmax(-1)
    for request, scores in zip(requests, results, strict=True):
        rows = expected[request.first_row : request.first_row + len(request.targets)]
        chosen = rows.gather(1, torch.tensor(request.targets)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor([entry.logprob for entry in scores]), chosen
        )
        assert [entry.rank for entry in scores] == (rows >= chosen[:, None]).sum(
            -1
        ).tolist()
        top = rows.topk(request.num_top)
        assert [entry.top_ids for entry in scores] == top.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([entry.top_logprobs for entry in scores]).reshape(
                top.values.shape
            ),
            top.values,
        )


def test_target_with_a_nan_logit_has_the_logprob_minus_infinity():
    hidden = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]])
    ((first, second),) = score(
        _IdentityModel(), hidden, [ScoredRows(0, [1, 1], 0)]
    ).result()  # type: ignore[arg-type]
    assert first.logprob == float("-inf")
    assert second.logprob == pytest.approx(-0.6931, abs=1e-3)

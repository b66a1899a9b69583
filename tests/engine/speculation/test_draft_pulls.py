"""The draft KV of a pulled prompt is also pulled, or computed if that is quicker."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvcache.transfer.pulls.messages import key_of
from protocol.messages import RemotePrefill
from tests.make_models import ensure_model
from tests.rigs.engine_pair import RealPair
from tests.rigs.real_engine import RealEngine
from tests.rigs.shadow import add

PROMPT = [3 * index % 101 for index in range(61)]
NUM_FULL = 60  # tokens in full blocks
BLOCK_SIZE = 4


def _start_drafting(engine: RealEngine) -> list[int]:
    """Let an engine use its draft model. Return a list to which each step of the draft
    model appends its number of tokens."""
    assert engine.draft is not None
    launch = engine.executor.launch
    num_tokens: list[int] = []

    def counting_launch(step: Any) -> Any:
        if step.is_draft:
            num_tokens.append(len(step.token_ids))
        return launch(step)

    engine.executor.launch = counting_launch
    engine.use_drafter(engine.draft.make_drafter(engine.executor))
    return num_tokens


def _set_costs(engine: RealEngine, peer: Any, pull_s: float, compute_s: float) -> None:
    """Set the estimated seconds that an engine needs for the draft KV of one token."""
    engine.rates._draft_bytes_per_token = 1000
    engine.rates._link(peer).bytes_per_s = 1000 / pull_s
    (drafter,) = engine.core.speculator._drafters
    drafter._budget.token_s = compute_s


@pytest.fixture(name="pair")
def _pair() -> Any:
    """Two engines with the same draft model. P has computed the draft KV of PROMPT."""
    model = ensure_model("gqa")
    speculate = f"model:{model}:3"
    options = {"speculate": speculate, "p_speculate": speculate}
    with RealPair(model, block_size=BLOCK_SIZE, **options) as pair:
        _start_drafting(pair.p)
        name = pair.begin(pair.p, PROMPT, 8)
        pair.until(lambda: bool(pair.p.out.terminals(name)))
        yield pair


def _run(pair: Any, reference: RemotePrefill) -> Any:
    return pair.decode_only(add("r", PROMPT, 16, remote=reference))


@pytest.mark.parametrize(
    ("pull_s", "compute_s"),
    [(1e-3, 0.0), (1e-3, 2e-3), (1e-3, 0.5e-3)],
    ids=["not measured", "slower to compute", "quicker to compute"],
)
def test_draft_kv_of_a_draft_model_is_pulled_where_that_is_quicker(
    pair, pull_s, compute_s
):
    num_tokens = _start_drafting(pair.d)
    reference = pair.reference(add("r", PROMPT, 16))
    assert reference.drafted_tokens == NUM_FULL
    _set_costs(pair.d, key_of(reference), pull_s, compute_s)
    out = _run(pair, reference)
    num_computed = num_tokens[0]
    if 0 < compute_s < pull_s:
        assert num_computed > NUM_FULL
    else:
        assert num_computed <= len(PROMPT) + 1 - NUM_FULL
    (end,) = out.terminals("r")
    # The draft model equals the model, so only missing KV (NaN) causes wrong proposals.
    assert end.accepted_tokens > 3 and not end.rejected_tokens


def test_draft_kv_that_the_peer_does_not_have_is_computed(pair):
    num_tokens = _start_drafting(pair.d)
    reference = replace(pair.reference(add("r", PROMPT, 16)), drafted_tokens=0)
    out = _run(pair, reference)
    assert num_tokens[0] > NUM_FULL
    (end,) = out.terminals("r")
    assert end.accepted_tokens > 3 and not end.rejected_tokens

"""MTP layers and EAGLE-3 drafters compute the same as plain formulas, in float32.

The formulas are in `draft_reference.py`. The states of the target are compared with
the states in transformers.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attention.base import AttentionBatch
from model.decoder import CausalLM
from model.drafters.draft_model import DraftModel
from model.drafters.load import load_eagle3, load_mtp
from model.parallel import Parallel
from tests.model import draft_reference
from tests.model.dense import BLOCK_SIZE, DenseAttention, paged
from tests.model.draft_files import (
    EAGLE3_CONFIG,
    MTP_MODELS,
    make_eagle3,
    make_mtp,
    mtp_names,
)
from tests.model.draft_steps import NUM_PROPOSALS, PROMPT, captured_states, propose
from tests.model.random_models import load, make

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def mtp_folders(tmp_path_factory):
    """Directories and transformers models of MTP_MODELS."""
    folders = {}
    for kind in MTP_MODELS:
        folder = tmp_path_factory.mktemp(kind)
        folders[kind] = (folder, make_mtp(kind, folder))
    return folders


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The directory of a model of six layers, and the transformers model."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, make("LlamaForCausalLM", folder, num_hidden_layers=6)


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


def propose_by_formulas(formula, states: Tensor, first_token: int) -> list[Tensor]:
    """Does the same as `propose`, but recomputes the sequence for each proposal.

    Args:
        formula: returns the states and the logits of token ids and states.
    """
    token_ids = torch.tensor([*PROMPT[1:], first_token])
    results = []
    for _ in range(NUM_PROPOSALS):
        outputs, logits = formula(token_ids, states)
        results.append(logits if not results else logits[-1:])
        states = torch.cat((states, outputs[-1:]))
        token_ids = torch.cat((token_ids, logits[-1:].argmax(-1)))
    return results


def reference_states(reference: Any, layers: tuple[int, ...]) -> Tensor:
    """Returns the states of PROMPT in a transformers model, like a StateCapture."""
    states = reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def reference_config(reference: Any) -> dict[str, Any]:
    values = reference.config.to_dict()
    return {**values, **(values.get("rope_parameters") or {})}


@pytest.mark.parametrize("kind", MTP_MODELS)
def test_mtp_layer_equals_the_formulas(kind, mtp_folders):
    folder, reference = mtp_folders[kind]
    model = load(folder)
    draft = load_mtp(model, folder, dtype=torch.float32)
    captured, _ = captured_states(model, draft.target_layers)
    states = draft.combine(captured)
    # transformers returns the last states after the final norm.
    expected_states = reference_states(reference, (-1,))
    torch.testing.assert_close(states, expected_states, **CLOSE)
    weights = load_file(folder / "model.safetensors")
    raw = reference_config(reference)
    logits = propose(draft, states, first_token=50)
    expected = propose_by_formulas(
        lambda token_ids, states: draft_reference.mtp(
            token_ids, states, weights, mtp_names(kind), raw
        ),
        expected_states,
        first_token=50,
    )
    for actual, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(actual, other, **CLOSE)


EAGLE3_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before the residual": {"norm_before_residual": True},
    "norm before the projection": {"norm_before_fc": True},
    "embedding of its own": {"has_embedding": True},
    "narrower than its target": {
        "has_embedding": True,
        "hidden_size": 48,
        "target_hidden_size": 64,
    },
    "all tokens": {"draft_vocab_size": 131},
}


@pytest.mark.parametrize("case", EAGLE3_CASES)
def test_eagle3_equals_the_formulas(case, llama, tmp_path):
    folder, reference = llama
    weights = make_eagle3(tmp_path, **EAGLE3_CASES[case])
    model = load(folder)
    draft = load_eagle3(model, tmp_path, dtype=torch.float32)
    assert draft.target_layers == (2, 3, 3)
    captured, _ = captured_states(model, draft.target_layers)
    expected_states = reference_states(reference, (2, 3, 3))
    torch.testing.assert_close(captured, expected_states, **CLOSE)
    raw = {**EAGLE3_CONFIG, **EAGLE3_CASES[case]}
    if raw.get("norm_before_fc"):
        expected_states = draft_reference.rms_norm(
            expected_states, weights["input_norm.weight"], raw["rms_norm_eps"]
        )
    expected_states = expected_states @ weights["fc.weight"].T
    states = draft.combine(captured)
    torch.testing.assert_close(states, expected_states, **CLOSE)
    tables = load_file(folder / "model.safetensors")
    embedding = weights.get("embed_tokens.weight", tables["model.embed_tokens.weight"])
    target_ids = torch.arange(raw["draft_vocab_size"]) + weights["d2t"]

    def formula(token_ids, states):
        states, draft_logits = draft_reference.eagle3(
            token_ids, states, weights, raw, embedding
        )
        logits = torch.full((len(draft_logits), 131), float("-inf"))
        logits[:, target_ids] = draft_logits
        return states, logits

    logits = propose(draft, states, first_token=50)
    expected = propose_by_formulas(formula, expected_states, first_token=50)
    for actual, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(actual, other, **CLOSE)


def test_eagle3_leaves_the_states_of_its_caller_unchanged(llama, tmp_path):
    make_eagle3(tmp_path)
    draft = load_eagle3(load(llama[0]), tmp_path, dtype=torch.float32)
    states = torch.randn(len(PROMPT), 64)
    before = states.clone()
    propose(draft, states, first_token=50)
    assert torch.equal(states, before)


def test_captured_states_are_those_after_each_layer(llama):
    folder, reference = llama
    model = load(folder)
    plain = model.forward(
        torch.tensor(PROMPT),
        torch.arange(len(PROMPT)),
        DenseAttention(model.attention_spec),
    )
    captured, hidden = captured_states(model, (0, 5, 1, 6))
    torch.testing.assert_close(
        captured[:, :-64], reference_states(reference, (0, 5, 1)), **CLOSE
    )
    assert torch.equal(captured[:, -64:], plain) and torch.equal(hidden, plain)


@pytest.mark.parametrize("layers", [(2, 3), (3, 6)])
def test_capture_stores_all_rows_when_only_some_are_returned(layers, llama):
    model = load(llama[0])
    all_captured, all_hidden = captured_states(model, layers)
    rows = torch.tensor([7, 19])
    captured, hidden = captured_states(model, layers, rows)
    torch.testing.assert_close(captured, all_captured, **CLOSE)
    torch.testing.assert_close(hidden, all_hidden[rows], **CLOSE)


@pytest.mark.parametrize("kind", [*MTP_MODELS, "eagle3"])
def test_chunks_over_paged_kv_give_the_same_proposals(
    kind, mtp_folders, llama, tmp_path
):
    if kind == "eagle3":
        make_eagle3(tmp_path)
        model = load(llama[0])
        draft = load_eagle3(model, tmp_path, dtype=torch.float32)
    else:
        folder, _ = mtp_folders[kind]
        model = load(folder)
        draft = load_mtp(model, folder, dtype=torch.float32)
    captured, _ = captured_states(model, draft.target_layers)
    states = draft.combine(captured)
    expected = propose(draft, states, first_token=50)
    attention = paged(draft, len(PROMPT) + NUM_PROPOSALS)
    table = np.arange(1, attention.pool.layout.num_blocks, dtype=np.int32)
    token_ids = torch.tensor([*PROMPT[1:], 50])

    def step(token_ids, states, start, rows):
        stop = start + len(token_ids)
        lens = [np.array([n], np.int32) for n in (len(token_ids), stop)]
        slots = BLOCK_SIZE + np.arange(start, stop, dtype=np.int64)
        attention.plan(AttentionBatch(*lens, table[None], slots))
        positions = torch.arange(start, stop)
        return draft.forward(token_ids, states, positions, attention, rows)

    first = step(token_ids[:9], states[:9], 0, None)
    torch.testing.assert_close(draft.raw_logits(first), expected[0][:9], **CLOSE)
    last_row = torch.tensor([len(PROMPT) - 10])
    state = step(token_ids[9:], states[9:], 9, last_row)
    torch.testing.assert_close(draft.raw_logits(state), expected[0][-1:], **CLOSE)
    for index in range(1, NUM_PROPOSALS):
        proposal = draft.raw_logits(state).argmax(-1)
        state = step(proposal, state, len(PROMPT) + index - 1, None)
        torch.testing.assert_close(draft.raw_logits(state), expected[index], **CLOSE)


@pytest.mark.parametrize(("size", "ep"), [(2, 1), (2, 2)])
def test_every_rank_proposes_what_a_single_rank_proposes(
    size, ep, mtp_folders, llama, tmp_path
):
    make_eagle3(tmp_path / "eagle3")

    def observe(parallel: Parallel) -> list[Tensor]:
        results = []
        for kind in MTP_MODELS:
            if ep > 1 and kind == "qwen3":
                continue  # has no experts
            folder, _ = mtp_folders[kind]
            model = load(folder, parallel=parallel)
            results += run(model, load_mtp(model, folder, dtype=torch.float32))
        if ep == 1:
            model = load(llama[0], parallel=parallel)
            draft = load_eagle3(model, tmp_path / "eagle3", dtype=torch.float32)
            results += run(model, draft)
        return results

    def run(model: CausalLM, draft: DraftModel) -> list[Tensor]:
        captured, _ = captured_states(model, draft.target_layers)
        return propose(draft, draft.combine(captured), first_token=50)

    def run_rank(rank: int) -> list[Tensor]:
        parallel = Parallel.connect(
            rank, size, rendezvous_file=str(tmp_path / "group"), ep=ep
        )
        with torch.inference_mode():
            results = observe(parallel)
        parallel.close()
        return results

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(run_rank, range(size)))
    for index, expected in enumerate(observe(Parallel())):
        assert torch.equal(ranks[0][index], ranks[1][index])
        torch.testing.assert_close(ranks[0][index], expected, **CLOSE)

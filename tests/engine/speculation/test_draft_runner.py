"""A real draft model that runs with a real model, on one and on two ranks.

The draft model must propose the tokens that it draws alone, in float32. Sequences have
different lengths, prompts are computed in pieces, and sequences are preempted. Before
the first step, all draft KV is NaN, so reading unwritten KV changes the proposals.
"""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.speculation.draft_model import (
    DraftModelError,
    DraftModelSpec,
    check_draft_model,
    read_draft_model,
)
from engine.speculation.model_drafter import ModelDrafter
from engine.worker.drafting.load_draft import draft_kv
from engine.worker.memory import block_bytes
from engine.worker.rank import measure_pool_size
from engine.worker.runner import ModelRunner
from model.config import load_config
from protocol.messages import SamplingParams
from tests.make_models import ensure_model
from tests.rigs.draft_ranks import DraftRanks, LoneModel, draft_ranks
from tests.rigs.drafters import VerifyEverything
from tests.rigs.engines import make_config
from tests.rigs.shadow import add, make_core, run_until_idle

VOCAB = 512
MAX_LEN = 64
# A draft model of two layers with dummy weights. One layer sees all tokens. The other
# layer has a window of 9 tokens.
WINDOWED = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 1,
}


@pytest.fixture(scope="module")
def lone_draft() -> LoneModel:
    return LoneModel(ensure_model("gqa6"), block_size=8)


def _core_of(ranks: DraftRanks) -> EngineCore:
    runner = ranks.runners[0]
    core, _, _ = make_core(
        executor=ranks.executor,  # type: ignore[arg-type]
        num_blocks=runner.memory.pool.layout.num_blocks,
        block_size=runner.config.tokens_per_block,
        max_num_seqs=4,
        max_num_batched_tokens=20,
        max_model_len=MAX_LEN,
    )
    return core


def _run_mixture(ranks: DraftRanks, lone: LoneModel, **limits: Any) -> int:
    """Run random requests, and propose tokens in each round. Return the number of
    first proposals that became tokens."""
    rng = random.Random(1)
    core = _core_of(ranks)
    drafter = ModelDrafter(
        ranks.executor, dataclasses.replace(ranks.drafts[0].limits(), **limits)
    )
    prefix = [rng.randrange(VOCAB) for _ in range(25)]
    unsent = []
    for number in range(5):
        prompt = prefix[: rng.randint(0, 25)] + [number] * 3
        sampling = SamplingParams(temperature=rng.choice([0.0, 0.7]), seed=number)
        unsent.append(add(f"r{number}", prompt, rng.choice([4, 18]), sampling))
    num_accepted = 0
    guesses: dict[str, list[int]] = {}
    while unsent or not core.is_idle:
        core.round([unsent.pop()] if unsent and rng.random() < 0.4 else [])
        core.finish_steps(0)
        core.scheduler.check_integrity()
        sequences = [s for s in core.scheduler.running if s.is_decoding]
        for sequence in sequences:
            guess = guesses.pop(sequence.request_id, [])
            num_accepted += guess == sequence.token_ids[-1:]
        pools = [runner.memory.pool.tensor.clone() for runner in ranks.runners]
        proposals = drafter.propose(sequences, [rng.randint(1, 4) for _ in sequences])
        for runner, before in zip(ranks.runners, pools, strict=True):
            assert torch.equal(runner.memory.pool.tensor, before), "changed other KV"
        for sequence, proposed in zip(sequences, proposals, strict=True):
            params = sequence.sampling.params
            expected = lone.continue_by(sequence.token_ids, len(proposed), params)
            assert proposed == expected
            guesses[sequence.request_id] = proposed[:1]
    assert core.scheduler.num_preemptions
    return num_accepted


@pytest.mark.parametrize(
    ("depth", "options", "limits"),
    [
        (0, {"num_blocks": 12, "block_size": 8}, {"max_graph_rows": 4}),
        (1, {"size": 2}, {"max_step_tokens": 7}),
        pytest.param(0, {}, {}, marks=pytest.mark.slow),
        pytest.param(0, {"size": 2, "dcp": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=["rows", "two ranks ahead", "one rank", "ranks that share tokens"],
)
def test_proposals_equal_tokens_of_the_draft_model_alone(
    lone_draft, depth, options, limits, monkeypatch
) -> None:
    """With a depth of 1, each step is launched before the tokens of the previous step
    are read, as on a GPU."""
    monkeypatch.setattr(ModelRunner, "depth", depth)
    sizes = {"num_blocks": 24, "block_size": 3 // options.get("dcp", 1) or 1}
    options = {**sizes, "max_num_seqs": 4, "max_model_len": MAX_LEN, **options}
    target = ensure_model("gqa")
    with draft_ranks(target, ensure_model("gqa6"), **options) as ranks:
        assert _run_mixture(ranks, lone_draft, **limits) > 3


def test_engine_with_a_draft_model_draws_the_same_tokens() -> None:
    requests = [
        add(f"{name} {number}", list(range(number, number + 20)), 30, sampling)
        for number in range(3)
        for name, sampling in (
            ("greedy", SamplingParams(temperature=0.0)),
            ("sampled", SamplingParams(temperature=1.0, seed=number)),
        )
    ]
    outputs: list[list[list[int]]] = []
    options = {"block_size": 8, "num_blocks": 40, "max_num_seqs": 4}
    with draft_ranks(ensure_model("gqa"), ensure_model("gqa6"), **options) as ranks:
        drafter = ranks.drafts[0].make_drafter(ranks.executor)
        for drafters in ([], [drafter]):
            core, _, out = make_core(
                executor=ranks.executor,  # type: ignore[arg-type]
                block_size=8,
                num_blocks=40,
                drafters=drafters,
                policy=VerifyEverything(),
                max_num_seqs=4,
            )
            run_until_idle(core, *requests)
            outputs.append([out.tokens(request.request_id) for request in requests])
    assert outputs[0] == outputs[1]
    ends = [end for request in requests for end in out.terminals(request.request_id)]
    assert sum(end.accepted_tokens for end in ends) > 60
    assert all(end.accepted_tokens for end in ends)


def test_draft_model_with_windows_keeps_the_kv_of_all_layers(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    lone = LoneModel(tmp_path, block_size=8, load_format="dummy")
    options = {"block_size": 8, "load_format": "dummy", "max_num_seqs": 4}
    with draft_ranks(ensure_model("gqa"), tmp_path, **options) as ranks:
        core = _core_of(ranks)
        drafter = ModelDrafter(ranks.executor, ranks.drafts[0].limits())
        core.round([add("r", list(range(30)), 20)])
        (sequence,) = core.sequences.values()
        num_proposed = 0
        while not core.is_idle:
            if sequence.is_decoding:
                (proposed,) = drafter.propose([sequence], [4])
                assert proposed == lone.continue_by(sequence.token_ids, len(proposed))
                num_proposed += len(proposed)
            core.round([])
        assert num_proposed > 60


# -- checks ----------------------------------------------------------------------------


def _read(folder: Path | str, target: Path, **options: Any) -> DraftModelSpec:
    config = make_config(model_dir=str(target), **options)
    return read_draft_model(config, load_config(target), str(folder), 4)


def _copy_with(source: Path, folder: Path, **changes: Any) -> Path:
    """Copy a model's files to `folder`, with changes of its config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_draft_model_of_another_vocabulary_is_refused_by_name(tmp_path) -> None:
    target = ensure_model("gqa")
    model_config = load_config(target)
    draft = _read(ensure_model("gqa6"), target)
    check_draft_model(draft, model_config, str(target))
    other = _copy_with(ensure_model("gqa6"), tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<|im_end|>", "<|end|>"))
    message = rf"{other} has a different vocabulary from {target}: token 2 is .*im_end"
    with pytest.raises(DraftModelError, match=message):
        check_draft_model(_read(other, target), model_config, str(target))


def test_draft_model_without_tokenizer_needs_an_equal_vocabulary_size(tmp_path) -> None:
    target = ensure_model("gqa")
    model_config = load_config(target)
    other = _copy_with(ensure_model("gqa6"), tmp_path / "other")
    (other / "tokenizer.json").unlink()
    draft = _read(other, target)
    check_draft_model(draft, model_config, str(target))
    draft = draft._replace(
        model_config=dataclasses.replace(draft.model_config, vocab_size=600),
        config=draft.config.model_copy(update={"load_format": "dummy"}),
    )
    message = rf"{other} has no tokenizer.json.* 600 differs from the 512 of {target}"
    with pytest.raises(DraftModelError, match=message):
        check_draft_model(draft, model_config, str(target))


@pytest.mark.parametrize(
    ("tp", "changes", "message"),
    [
        (8, {}, r"the draft model .*: --tp 8 does not divide .*12 query heads; use 1"),
        (1, {"model_type": "x", "architectures": ["XForCausalLM"]}, "XForCausalLM"),
    ],
)
def test_draft_model_that_ranks_cannot_serve_is_refused(
    tmp_path, tp, changes, message
) -> None:
    folder = _copy_with(ensure_model("gqa6"), tmp_path / "draft", **changes)
    with pytest.raises(
        DraftModelError, match=f"--speculate model: {message}|{message}"
    ):
        _read(folder, ensure_model("gqa"), tp=tp)


def test_missing_checkpoint_is_refused_before_anything_is_downloaded() -> None:
    with pytest.raises(DraftModelError, match="some/model is not a directory"):
        _read("some/model", ensure_model("gqa"))


def test_model_that_drops_all_blocks_cannot_have_a_draft_model(tmp_path) -> None:
    changes = {"max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps({**WINDOWED, **changes}))
    with pytest.raises(DraftModelError, match=r"see only 9 tokens.*--speculate ngram"):
        _read(ensure_model("gqa6"), tmp_path)


def test_draft_model_takes_options_of_the_engine_but_not_those_of_its_model() -> None:
    config: EngineConfig = _read(
        ensure_model("gqa6"),
        ensure_model("gqa"),
        tp=2,
        dcp=2,
        role="decode",
        block_size=16,
        max_model_len=100,
        kv_cache_dtype="float8_e4m3fn",
        hf_overrides='{"rope_theta": 5}',
    ).config
    assert (config.dcp, config.tokens_per_block, config.max_model_len) == (1, 16, 100)
    assert (config.kv_dtype, config.hf_overrides) == ("float32", None)


def test_kv_of_the_draft_model_counts_in_the_size_of_the_pool() -> None:
    options = {"block_size": 16, "max_num_seqs": 4, "kv_cache_bytes": 1 << 24}
    target = ensure_model("gqa")
    with draft_ranks(target, ensure_model("gqa6"), **options) as ranks:
        runner = ranks.runners[0]
        (draft,) = ranks.drafts
        config = runner.config
        model_config = runner.model_config
        pool = draft.memory.pool
        num_scratch = 4  # one block for each of max_num_seqs sequences
        assert pool.layout.num_blocks == 30 + num_scratch
        assert draft.bytes_per_block == pool.nbytes // (30 + num_scratch)
        assert draft.scratch_bytes == num_scratch * draft.bytes_per_block
        without_draft = measure_pool_size(config, model_config, runner)
        with_draft = measure_pool_size(config, model_config, runner, draft)
        target_bytes = block_bytes(config, model_config)
        assert without_draft.num_blocks - 1 == (1 << 24) // target_bytes
        assert with_draft.num_blocks - 1 == (1 << 24) // (
            target_bytes + draft.bytes_per_block
        )


@pytest.mark.parametrize(("dcp", "is_described"), [(1, True), (2, False)])
def test_draft_kv_is_not_described_to_peers_if_ranks_share_the_tokens(
    dcp, is_described
) -> None:
    """With DCP, a block of the draft model has fewer tokens than a block of the engine.
    So no peer could read the draft KV."""
    options = {"size": 2, "dcp": dcp, "block_size": 4}
    target = ensure_model("mla")
    with draft_ranks(target, ensure_model("gqa6"), **options) as ranks:
        described = [draft_kv(draft) is not None for draft in ranks.drafts]
    assert described == [is_described] * 2

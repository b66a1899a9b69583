"""The warm-up: the captured decode steps, and the steps that run before a server is
ready.

These tests need no GPU.
"""

import logging
import os

import numpy as np
import pytest

from attention.base import AttentionBatch
from engine.core.batch import StepInput
from engine.core.stats import CoreStats
from engine.worker.cuda_graph import captured_sizes
from engine.worker.kernel_watch import KernelWatch, set_kernel_cache
from engine.worker.warm_up import WarmUpSizes, steps
from tests.rigs.rank_threads import ranks

SERVER_SIZES = WarmUpSizes(
    num_blocks=4096, block_size=64, max_len=32768, max_tokens=8192, max_seqs=256
)
ALL_SIZES = [
    SERVER_SIZES,
    WarmUpSizes(num_blocks=2, block_size=1, max_len=2, max_tokens=1, max_seqs=1),
    WarmUpSizes(num_blocks=9, block_size=16, max_len=100, max_tokens=600, max_seqs=3),
    WarmUpSizes(
        num_blocks=80, block_size=128, max_len=8192, max_tokens=2048, max_seqs=64
    ),
]


@pytest.mark.parametrize("sizes", ALL_SIZES)
def test_every_warm_up_step_is_within_the_limits(sizes):
    for step in steps(sizes):
        assert 0 < len(step.token_ids) == step.query_lens.sum() <= sizes.max_tokens
        assert 0 < len(step.query_lens) <= sizes.max_seqs
        assert step.query_lens.min() > 0 and step.context_lens.max() <= sizes.max_len
        assert (step.context_lens >= step.query_lens).all()
        # Fails if a table has fewer blocks than its context needs.
        step.attention_batch(sizes.block_size)
        assert step.block_tables.min() > 0
        assert step.block_tables.max() < sizes.num_blocks
        assert (
            step.logit_changes is None or max(step.logit_changes.rows) < sizes.max_seqs
        )
        for scored in step.scores:
            assert scored.first_row + len(scored.targets) <= len(step.token_ids)


def _kind(step: StepInput) -> tuple[bool, bool, bool, int]:
    """Returns the properties of a step on which its kernels depend: has decoding
    sequences; has prompts that are short or continue stored context; has long new
    prompts; and a class of the step's number of tokens."""
    is_decode = step.query_lens == 1
    is_new = step.query_lens == step.context_lens
    is_long = is_new & (step.query_lens >= 512)
    return (
        bool(is_decode[0]),
        bool((~is_decode & ~is_long).any()),
        bool(is_long.any()),
        int(np.searchsorted([2, 257, 1024], len(step.token_ids), side="right")),
    )


def test_random_steps_are_of_a_kind_that_the_warm_up_runs():
    kinds = {_kind(step) for step in steps(SERVER_SIZES)}
    rng = np.random.default_rng(7)
    for _ in range(2000):
        prompts = 2 ** rng.uniform(1, 12, rng.integers(0, 4))
        lens = [1] * int(rng.integers(0, 5)) + prompts.astype(int).tolist()
        if not lens:
            continue
        stored = [int(rng.integers(0, 2)) * 100 + (n == 1) for n in lens]
        step = SERVER_SIZES.step(lens, stored)
        assert _kind(step) in kinds, (lens, stored)


@pytest.mark.parametrize("dcp", [1, 2])
def test_two_ranks_run_all_warm_up_steps(dcp):
    with ranks(2, dcp=dcp) as executor:
        executor.allocate(20, 8)
        sizes = WarmUpSizes(
            num_blocks=20, block_size=8 * dcp, max_len=150, max_tokens=200, max_seqs=4
        )
        for step in steps(sizes):
            pending = executor.launch(step)
            if step.is_masked:
                words = -(-executor.runners[0].model_config.vocab_size // 32)
                pending.draw(np.full((len(step.sampling), words), -1, np.int32))
            output = pending.result()
            assert len(output.token_ids) == len(step.sampled_sequences)
            assert len(output.scores) == len(step.scores)


def test_kernel_loaded_when_the_engine_is_ready_is_logged_as_error_with_its_name(
    caplog,
):
    watch = KernelWatch()
    stats = CoreStats(lambda: {"baton_kernels_loaded_late": watch.num_late})
    with caplog.at_level(logging.WARNING):
        watch.record("expected")
        watch.is_ready = True
        assert not caplog.records
        assert stats.totals()["baton_kernels_loaded_late"] == 0
        watch.record("_forgotten")
    assert "kernel _forgotten is loaded" in caplog.text
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert stats.totals()["baton_kernels_loaded_late"] == 1


def test_kernels_are_cached_in_the_cache_folder_unless_the_user_sets_another(
    monkeypatch, tmp_path
):
    names = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "BATON_CACHE")
    for name in names:
        # Setting each name first lets monkeypatch undo what set_kernel_cache sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    set_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/.cache/baton/triton"
    assert "FLASHINFER_WORKSPACE_BASE" not in os.environ  # ~/.cache/flashinfer is used
    monkeypatch.setenv("BATON_CACHE", "/cache")
    set_kernel_cache()
    # TRITON_CACHE_DIR is set already, and is therefore not changed.
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/.cache/baton/triton"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/cache"


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8, 63, 64, 65, 256, 1000])
def test_every_decode_step_has_a_graph_with_few_padding_rows(max_seqs):
    sizes = captured_sizes(max_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == max_seqs
    for num_seqs in range(1, max_seqs + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs <= max(7, num_seqs // 4)
    assert len(sizes) < 40


def test_padding_rows_use_only_the_null_block():
    tables = np.array([[5, 6, 7], [8, 0, 0]], np.int32)
    lens = np.array([9, 3], np.int32)
    batch = AttentionBatch(np.ones(2, np.int32), lens, tables, np.array([28, 34]))
    padded = batch.padded_to(5, block_size=4)
    assert padded.num_seqs == padded.num_tokens == 5
    assert padded.context_lens.tolist() == [9, 3, 1, 1, 1]
    assert (padded.block_tables[2:] == 0).all()
    assert (padded.slot_mapping[2:] < 4).all()
    assert padded.slot_mapping[:2].tolist() == [28, 34]
    assert batch.padded_to(2, block_size=4) is batch

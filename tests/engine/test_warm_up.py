"""Before a server is ready it captures decode steps and runs every kind of step once; here, what
of that shows without a GPU."""

import logging
import os

import numpy as np
import pytest

from attention.base import AttentionBatch
from engine.core.batch import StepInput
from engine.core.output_processor import CoreStats
from engine.worker.cuda_graph import captured_sizes
from engine.worker.kernel_watch import KernelWatch, set_kernel_cache
from engine.worker.warm_up import WarmUpSizes, steps
from tests.rigs.rank_threads import ranks

SERVER = WarmUpSizes(
    num_blocks=4096, block_size=64, max_len=32768, max_tokens=8192, max_seqs=256
)
STAGES = [
    SERVER,
    WarmUpSizes(num_blocks=2, block_size=1, max_len=2, max_tokens=1, max_seqs=1),
    WarmUpSizes(num_blocks=9, block_size=16, max_len=100, max_tokens=600, max_seqs=3),
    WarmUpSizes(
        num_blocks=80, block_size=128, max_len=8192, max_tokens=2048, max_seqs=64
    ),
]


@pytest.mark.parametrize("stage", STAGES)
def test_every_step_fits_the_server(stage):
    for step in steps(stage):
        assert 0 < len(step.token_ids) == step.query_lens.sum() <= stage.max_tokens
        assert 0 < len(step.query_lens) <= stage.max_seqs
        assert step.query_lens.min() > 0 and step.context_lens.max() <= stage.max_len
        assert (step.context_lens >= step.query_lens).all()
        step.attention_batch(
            stage.block_size
        )  # the tables reach as far as the contexts
        assert (
            0 < step.block_tables.min() and step.block_tables.max() < stage.num_blocks
        )
        assert step.shapes is None or max(step.shapes.rows) < stage.max_seqs
        for scored in step.scores:
            assert scored.first_row + len(scored.targets) <= len(step.token_ids)


def _kind(step: StepInput) -> tuple[bool, bool, bool, int]:
    """What attention and products tell apart: sequences that decode, prompts whose context is
    stored, prompts that are all there is, and how many tokens."""
    decodes = step.query_lens == 1
    whole = step.query_lens == step.context_lens
    long = whole & (step.query_lens >= 512)
    return (
        bool(decodes[0]),
        bool((~decodes & ~long).any()),
        bool(long.any()),
        int(np.searchsorted([2, 257, 1024], len(step.token_ids), side="right")),
    )


def test_any_mix_of_prompts_is_of_a_kind_that_was_run():
    rehearsed = {_kind(step) for step in steps(SERVER)}
    rng = np.random.default_rng(7)
    for _ in range(2000):
        longer = 2 ** rng.uniform(1, 12, rng.integers(0, 4))
        lens = [1] * int(rng.integers(0, 5)) + longer.astype(int).tolist()
        if not lens:
            continue
        stored = [int(rng.integers(0, 2)) * 100 + (n == 1) for n in lens]
        step = SERVER.step(lens, stored)
        assert _kind(step) in rehearsed, (lens, stored)


@pytest.mark.parametrize("dcp", [1, 2])
def test_two_ranks_run_all_of_them(dcp):
    with ranks(2, dcp=dcp) as executor:
        executor.allocate(20, 8)
        stage = WarmUpSizes(
            num_blocks=20, block_size=8 * dcp, max_len=150, max_tokens=200, max_seqs=4
        )
        for step in steps(stage):
            pending = executor.launch(step)
            if step.is_masked:
                words = -(-executor.runners[0].model_config.vocab_size // 32)
                pending.draw(np.full((len(step.sampling), words), -1, np.int32))
            found = pending.result()
            assert len(found.token_ids) == len(step.sampled_sequences)
            assert len(found.scores) == len(step.scores)


def test_late_kernel_is_logged_as_error_with_its_name(caplog):
    watch = KernelWatch()
    stats = CoreStats(count_late_kernels=lambda: watch.num_late)
    with caplog.at_level(logging.WARNING):
        watch.record("expected")
        watch.is_ready = True
        assert not caplog.records
        assert stats.totals()["baton_kernels_loaded_late"] == 0
        watch.record("_forgotten")
    assert "kernel _forgotten is loaded" in caplog.text
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert stats.totals()["baton_kernels_loaded_late"] == 1


def test_kernels_are_kept_where_everything_else_is(monkeypatch, tmp_path):
    names = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "BATON_CACHE")
    for name in names:
        monkeypatch.setenv(
            name, ""
        )  # so that the end of the test takes back what is set below
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    set_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/.cache/baton/triton"
    assert "FLASHINFER_WORKSPACE_BASE" not in os.environ  # it is ~/.cache/flashinfer
    monkeypatch.setenv("BATON_CACHE", "/kept")
    set_kernel_cache()
    assert (
        os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/.cache/baton/triton"
    )  # as the user set it
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/kept"


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8, 63, 64, 65, 256, 1000])
def test_every_step_has_a_graph_that_pads_it_little(max_seqs):
    sizes = captured_sizes(max_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == max_seqs
    for num_seqs in range(1, max_seqs + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs <= max(7, num_seqs // 4)
    assert len(sizes) < 40


def test_padding_rows_touch_the_null_block_only():
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

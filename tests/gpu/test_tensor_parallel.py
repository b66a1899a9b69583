"""Two ranks on two GPUs, collectives inside the graphs, continue like one rank: each with half the
heads, or (dcp) with half the tokens."""

import multiprocessing
import os
import queue
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.worker.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from tests.gpu.test_runner import (
    MODELS,
    RESTRICTED,
    SERVED,
    assert_allowed,
    assert_same_but_for_ties,
    config_for,
    continue_masked,
    decode,
    runner_for,
)

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
NUM_STEPS = 16
TIMEOUT_S = 120.0
_DCP = (1, 2)


def _run_rank(rank: int, meetings: dict[int, str], folders: list[Path], results: Any) -> None:
    groups = {
        dcp: Parallel.connect(rank, 2, meeting=meeting, device=f"cuda:{rank}", dcp=dcp)
        for dcp, meeting in meetings.items()
    }
    runners = []
    for folder, (dcp, parallel) in product(folders, groups.items()):
        config = config_for(folder, tp=2, dcp=dcp, devices=[0, 1])
        runner = ModelRunner(config, load_config(folder), parallel)
        runner.allocate(128)
        runner.capture_graphs()
        assert runner.graphs is not None
        tokens, logits = decode(runner, NUM_STEPS)
        masked = continue_masked(runner, NUM_STEPS, RESTRICTED)
        runners.append(runner)  # leaving a group that graphs refer to blocks
        found = (tokens, logits.cpu().numpy()) if rank == 0 else ()
        results.put((folder.name, dcp, rank, found, masked))
    results.close()
    results.join_thread()
    torch.cuda.synchronize()
    os._exit(0)  # as a rank process of an engine ends


@pytest.fixture(scope="module")
def continued(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[tuple[str, int, int], Any]]:
    """What two ranks, started once for all models, continue, by model, dcp and rank: rank 0's
    tokens and logits, and the tokens of masked steps."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meetings = {dcp: str(tmp_path_factory.mktemp("group") / str(dcp)) for dcp in _DCP}
    folders = [MODELS[name] for name in SERVED]
    ranks = [
        context.Process(target=_run_rank, args=(rank, meetings, folders, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = [results.get(timeout=TIMEOUT_S) for _ in range(4 * len(SERVED))]
        yield {(name, dcp, rank): rest for name, dcp, rank, *rest in found}
    except queue.Empty:
        pytest.fail(f"no result; exit codes {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()


@pytest.mark.parametrize("dcp", _DCP)
@pytest.mark.parametrize("name", SERVED)
def test_two_ranks_continue_like_one(
    continued: dict[tuple[str, int, int], Any], name: str, dcp: int
) -> None:
    (tokens, logits), _ = continued[name, dcp, 0]
    with runner_for(MODELS[name], enforce_eager=True) as runner:
        _, expected = decode(runner, NUM_STEPS, forced=tokens)
    assert_same_but_for_ties(tokens, torch.from_numpy(logits).to(expected.device), expected)


@pytest.mark.parametrize("dcp", _DCP)
@pytest.mark.parametrize("name", SERVED)
def test_every_rank_goes_on_with_what_rank_0_draws_under_its_masks(
    continued: dict[tuple[str, int, int], Any], name: str, dcp: int
) -> None:
    drawn, theirs = (continued[name, dcp, rank][1] for rank in range(2))
    assert drawn == theirs
    assert_allowed(drawn, load_config(MODELS[name]).vocab_size)

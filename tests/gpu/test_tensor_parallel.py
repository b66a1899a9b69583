"""Two ranks on two GPUs, collectives inside the graphs, continue like one rank: each with half the
heads, or (dcp) with half the tokens, or (ep) with half the experts."""

import multiprocessing
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.worker.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from tests.gpu.test_runner import (
    BLOCKS,
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
from tests.make_models import ensure_model

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
NUM_STEPS = 16
TIMEOUT_S = 120.0
_OWN: dict[str, dict[str, int]] = {"tp": {}, "dcp": {"dcp": 2}, "ep": {"ep": 2}}
_JOBS = [(name, kind) for name in SERVED for kind in ("tp", "dcp")] + [("moe", "tp"), ("moe", "ep")]


def _folder(name: str) -> Path:
    return ensure_model(name) if name == "moe" else MODELS[name]


def _run_rank(rank: int, meetings: dict[str, str], results: Any) -> None:
    groups = {}
    for kind, file in meetings.items():
        groups[kind] = Parallel.connect(rank, 2, meeting=file, device=f"cuda:{rank}", **_OWN[kind])
    runners = []
    for name, kind in _JOBS:
        config = config_for(_folder(name), tp=2, devices=[0, 1], **_OWN[kind])
        runner = ModelRunner(config, load_config(_folder(name)), groups[kind])
        runner.allocate(BLOCKS)
        runner.capture_graphs()
        assert runner.graphs is not None
        tokens, logits = decode(runner, NUM_STEPS)
        masked = continue_masked(runner, NUM_STEPS, RESTRICTED)
        runners.append(runner)  # leaving a group that graphs refer to blocks
        found = (tokens, logits.cpu().numpy()) if rank == 0 else ()
        results.put((name, kind, rank, found, masked))
    results.close()
    results.join_thread()
    torch.cuda.synchronize()
    os._exit(0)  # as a rank process of an engine ends


@pytest.fixture(scope="module")
def continued(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[tuple[str, str, int], Any]]:
    """What two ranks, started once for all models, continue, by model, kind of group and rank:
    rank 0's tokens and logits, and the tokens of masked steps."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meetings = {kind: str(tmp_path_factory.mktemp("group") / kind) for kind in _OWN}
    for name, _ in _JOBS:
        _folder(name)  # trained here, where no rank waits for it
    ranks = [context.Process(target=_run_rank, args=(rank, meetings, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        found = [results.get(timeout=TIMEOUT_S) for _ in range(2 * len(_JOBS))]
        yield {(name, kind, rank): rest for name, kind, rank, *rest in found}
    except queue.Empty:
        pytest.fail(f"no result; exit codes {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()


@pytest.mark.parametrize(("name", "kind"), _JOBS)
def test_two_ranks_continue_like_one(continued, name, kind):
    (tokens, logits), _ = continued[name, kind, 0]
    with runner_for(_folder(name), enforce_eager=True) as runner:
        _, expected = decode(runner, NUM_STEPS, forced=tokens)
    assert_same_but_for_ties(tokens, torch.from_numpy(logits).to(expected.device), expected)


@pytest.mark.parametrize(("name", "kind"), _JOBS)
def test_every_rank_goes_on_with_what_rank_0_draws_under_its_masks(continued, name, kind):
    drawn, theirs = (continued[name, kind, rank][1] for rank in range(2))
    assert drawn == theirs
    assert_allowed(drawn, load_config(_folder(name)).vocab_size)

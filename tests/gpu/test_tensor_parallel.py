"""Two ranks on two GPUs, and four on four, collectives inside the graphs, continue like one rank:
each with its share of the heads, or (dcp) of the tokens, or (ep) of the experts."""

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
_KINDS = ("tp", "dcp", "ep")
_JOBS = [(name, kind) for name in SERVED for kind in ("tp", "dcp")] + [
    ("moe", "tp"),
    ("moe", "ep"),
]


def _folder(name: str) -> Path:
    return ensure_model(name) if name == "moe" else MODELS[name]


def _run_rank(rank: int, num: int, meetings: dict[str, str], results: Any) -> None:
    groups, runners = {}, []
    own: dict[str, dict[str, Any]] = {kind: {kind: num} for kind in _KINDS} | {"tp": {}}
    for kind, file in meetings.items():
        options = {"meeting": file, "device": f"cuda:{rank}", **own[kind]}
        groups[kind] = Parallel.connect(rank, num, **options)
    for name, kind in _JOBS:
        config = config_for(
            _folder(name), tp=num, devices=list(range(num)), **own[kind]
        )
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


@pytest.fixture(scope="module", params=[2, 4])
def continued(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str, int], Any]]:
    """What the ranks, started once for all models, continue, by model, kind of group and rank:
    rank 0's tokens and logits, and the tokens of masked steps."""
    num, context = request.param, multiprocessing.get_context("spawn")
    if torch.cuda.device_count() < num:
        pytest.skip(f"needs {num} CUDA GPUs")
    results = context.Queue()
    meetings = {kind: str(tmp_path_factory.mktemp("group") / kind) for kind in _KINDS}
    for name, _ in _JOBS:
        _folder(name)  # trained here, where no rank waits for it
    rest = num, meetings, results
    ranks = [
        context.Process(target=_run_rank, args=(rank, *rest)) for rank in range(num)
    ]
    for process in ranks:
        process.start()
    try:
        found = [results.get(timeout=TIMEOUT_S) for _ in range(num * len(_JOBS))]
        yield {(name, kind, rank): rest for name, kind, rank, *rest in found}
    except queue.Empty:
        pytest.fail(f"no result; exit codes {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()


@pytest.mark.parametrize(("name", "kind"), _JOBS)
def test_ranks_continue_like_one(continued, name, kind):
    (tokens, logits), _ = continued[name, kind, 0]
    with runner_for(_folder(name), enforce_eager=True) as runner:
        _, expected = decode(runner, NUM_STEPS, forced=tokens)
    assert_same_but_for_ties(
        tokens, torch.from_numpy(logits).to(expected.device), expected
    )


@pytest.mark.parametrize(("name", "kind"), _JOBS)
def test_every_rank_goes_on_with_what_rank_0_draws_under_its_masks(
    continued, name, kind
):
    drawn, *theirs = (
        masked for key, (_, masked) in continued.items() if key[:2] == (name, kind)
    )
    assert theirs and all(each == drawn for each in theirs)
    assert_allowed(drawn, load_config(_folder(name)).vocab_size)

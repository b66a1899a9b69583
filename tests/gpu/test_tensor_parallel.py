"""Two ranks on two GPUs, and four ranks on four GPUs, compute the same as one rank.

The ranks share the heads (tp), the tokens (dcp) or the experts (ep). The CUDA graphs
contain the collective operations.
"""

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
    MODELS,
    NUM_BLOCKS,
    RESTRICTED_SAMPLING,
    SUPPORTED_MODELS,
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
_JOBS = [
    *((name, kind) for name in SUPPORTED_MODELS for kind in ("tp", "dcp")),
    ("moe", "tp"),
    ("moe", "ep"),
]


def _folder(name: str) -> Path:
    return ensure_model(name) if name == "moe" else MODELS[name]


def _run_rank(
    rank: int, num_ranks: int, rendezvous_files: dict[str, str], results: Any
) -> None:
    groups = {}
    runners = []
    sizes: dict[str, dict[str, int]] = {
        "tp": {},
        "dcp": {"dcp": num_ranks},
        "ep": {"ep": num_ranks},
    }
    for kind, file in rendezvous_files.items():
        groups[kind] = Parallel.connect(
            rank, num_ranks, rendezvous_file=file, device=f"cuda:{rank}", **sizes[kind]
        )
    for name, kind in _JOBS:
        config = config_for(
            _folder(name), tp=num_ranks, devices=list(range(num_ranks)), **sizes[kind]
        )
        runner = ModelRunner(config, load_config(_folder(name)), groups[kind])
        runner.allocate(NUM_BLOCKS)
        runner.capture_graphs()
        assert runner.graphs is not None
        tokens, logits = decode(runner, NUM_STEPS)
        masked = continue_masked(runner, NUM_STEPS, RESTRICTED_SAMPLING)
        runners.append(runner)  # keeps the CUDA graphs until the process exits
        outputs = (tokens, logits.cpu().numpy()) if rank == 0 else ()
        results.put((name, kind, rank, outputs, masked))
    results.close()
    results.join_thread()
    torch.cuda.synchronize()
    # Exit without cleanup, as a rank process of an engine does. Destroying the process
    # groups would block while CUDA graphs refer to them.
    os._exit(0)


@pytest.fixture(scope="module", params=[2, 4])
def continued(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str, int], Any]]:
    """Results of the ranks. The ranks are started once for all models.

    A key is (model, kind of group, rank). A value has the tokens and logits of rank 0
    (nothing for other ranks), and the rank's tokens of masked steps.
    """
    num_ranks = request.param
    context = multiprocessing.get_context("spawn")
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA GPUs")
    results = context.Queue()
    rendezvous_files = {
        kind: str(tmp_path_factory.mktemp("group") / kind) for kind in _KINDS
    }
    for name, _ in _JOBS:
        # This trains the model if needed, so that the ranks need not wait for it.
        _folder(name)
    ranks = [
        context.Process(
            target=_run_rank, args=(rank, num_ranks, rendezvous_files, results)
        )
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        by_key = {}
        for _ in range(num_ranks * len(_JOBS)):
            name, kind, rank, outputs, masked = results.get(timeout=TIMEOUT_S)
            by_key[name, kind, rank] = (outputs, masked)
        yield by_key
    except queue.Empty:
        pytest.fail(f"no result; exit codes {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()


@pytest.mark.parametrize(("name", "kind"), _JOBS)
def test_ranks_compute_the_same_as_one_rank(continued, name, kind):
    (tokens, logits), _ = continued[name, kind, 0]
    with runner_for(_folder(name), enforce_eager=True) as runner:
        _, expected = decode(runner, NUM_STEPS, forced=tokens)
    logits_on_gpu = torch.from_numpy(logits).to(expected.device)
    assert_same_but_for_ties(tokens, logits_on_gpu, expected)


@pytest.mark.parametrize(("name", "kind"), _JOBS)
def test_all_ranks_continue_with_the_tokens_that_rank_0_samples_under_masks(
    continued, name, kind
):
    by_rank = [
        masked for key, (_, masked) in continued.items() if key[:2] == (name, kind)
    ]
    assert len(by_rank) > 1
    assert all(tokens == by_rank[0] for tokens in by_rank)
    assert_allowed(by_rank[0], load_config(_folder(name)).vocab_size)

"""Two ranks on two GPUs, collectives inside the graphs, continue like one rank."""

import multiprocessing
import os
import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from tests.gpu.test_runner import (
    MODELS,
    SERVED,
    assert_same_but_for_ties,
    config_for,
    decode,
    runner_for,
)

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
NUM_STEPS = 16
TIMEOUT_S = 120.0


def _run_rank(rank: int, port: int, folders: list[Path], results: Any) -> None:
    parallel = Parallel.connect(rank, 2, host="127.0.0.1", port=port, device=f"cuda:{rank}")
    runners = []
    for folder in folders:
        config = config_for(folder, tp=2, devices=[0, 1])
        runner = ModelRunner(config, load_config(folder), parallel)
        runner.allocate(128)
        runner.capture_graphs()
        assert runner.graphs is not None
        tokens, logits = decode(runner, NUM_STEPS)
        runners.append(runner)  # leaving a group that graphs refer to blocks
        if rank == 0:
            results.put((tokens, logits.cpu().numpy()))
    if rank == 0:
        results.close()
        results.join_thread()
    torch.cuda.synchronize()
    os._exit(0)  # as a rank process of an engine ends


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def continued() -> Iterator[dict[str, Any]]:
    """What two ranks, started once for all models, continue: tokens and logits by model."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = _free_port()
    folders = [MODELS[name] for name in SERVED]
    ranks = [
        context.Process(target=_run_rank, args=(rank, port, folders, results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        yield {name: results.get(timeout=TIMEOUT_S) for name in SERVED}
    except queue.Empty:
        pytest.fail(f"no result; exit codes {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()


@pytest.mark.parametrize("name", SERVED)
def test_two_ranks_continue_like_one(continued: dict[str, Any], name: str) -> None:
    tokens, logits = continued[name]
    with runner_for(MODELS[name], enforce_eager=True) as runner:
        _, expected = decode(runner, NUM_STEPS, forced=tokens)
    assert_same_but_for_ties(tokens, torch.from_numpy(logits).to(expected.device), expected)

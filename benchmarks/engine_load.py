"""Many requests through a whole engine core, without HTTP: what scheduling adds to the steps."""

import itertools
import statistics
import time
from typing import Any

import numpy as np

from engine.core.connector import KVConnector
from engine.core.core import EngineCore
from engine.core.scheduler import Scheduler, SchedulerLimits
from engine.worker.runner import ModelRunner
from kvcache.blocks import BlockAllocator
from protocol.messages import AddRequest, EngineInput, SamplingParams, TokenDelta


class _Requests:
    """The transport: hands in all requests at once and ends the core when all have ended."""

    def __init__(self, requests: list[AddRequest]) -> None:
        self._waiting: list[EngineInput] = list(requests)
        self._num_open = len(requests)
        self.sent: list[tuple[int, float]] = []  # tokens of a step, when they came

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        messages, self._waiting = self._waiting, []
        return messages, not messages and self._num_open == 0

    def wake(self) -> None:
        pass

    def send(self, deltas: list[TokenDelta]) -> None:
        self.sent.append((sum(len(delta.token_ids) for delta in deltas), time.perf_counter()))
        self._num_open -= sum(bool(delta.finish_reason or delta.error) for delta in deltas)

    def send_stats(self, values: dict[str, float]) -> None:
        pass


def serve_requests(
    runner: ModelRunner, num_requests: int, request_tokens: list[int]
) -> dict[str, Any]:
    """Time for all of `num_requests` prompts and outputs of the given lengths (tokens)."""
    prompt_tokens, output_tokens = request_tokens
    rng = np.random.default_rng(2)
    vocab_size = runner.model_config.vocab_size
    transport = _Requests(
        [
            AddRequest(
                request_id=str(index),
                token_ids=rng.integers(0, vocab_size, prompt_tokens).tolist(),
                sampling=SamplingParams(temperature=0.0),
                max_tokens=output_tokens,
            )
            for index in range(num_requests)
        ]
    )
    core = EngineCore(_scheduler(runner), runner, KVConnector(), transport)
    started_s = time.perf_counter()
    core.run()
    total_s = time.perf_counter() - started_s
    num_tokens = sum(count for count, _ in transport.sent)
    assert num_tokens == num_requests * output_tokens, num_tokens
    return {
        "requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "total_s": round(total_s, 3),
        "output_tokens_per_s": round(num_tokens / total_s),
        **_period(transport.sent),
    }


def _period(steps: list[tuple[int, float]]) -> dict[str, float]:
    """Where the largest steps followed each other: the time from one's tokens to the next one's."""
    largest = max((count for count, _ in steps), default=0)
    pairs = itertools.pairwise(steps)
    periods_s = [b[1] - a[1] for a, b in pairs if a[0] == b[0] == largest]
    if not periods_s:
        return {}
    period_ms = round(statistics.median(periods_s) * 1e3, 3)
    return {"decode_batch": largest, "decode_period_ms": period_ms}


def _scheduler(runner: ModelRunner) -> Scheduler:
    layout = runner.memory.pool.layout
    limits = SchedulerLimits(
        max_num_seqs=runner.config.max_num_seqs,
        max_num_batched_tokens=runner.config.max_num_batched_tokens,
        max_model_len=min(runner.model_config.max_position, layout.capacity_tokens),
        block_size=layout.block_size,
    )
    return Scheduler(limits, BlockAllocator(layout.num_blocks), None)

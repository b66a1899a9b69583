"""Decode steps as CUDA graphs: one per padded number of sequences, all in one memory pool.

A decode step of a small batch launches hundreds of short kernels; replaying them as one graph takes
the host's time out of the step. A graph reads its inputs from fixed buffers: token ids and
positions here, block tables in the attention backend, the tokens of the previous step in
`LastSampledTokens`, where it also leaves its own greedy draws. A step is padded to the next
captured size; the added rows read and write the null block, and their outputs are dropped.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from attention.base import AttentionBackend, AttentionBatch
from engine.core.batch import StepInput
from engine.sampling.sampler import LastSampledTokens, PendingScores, greedy
from model.decoder import CausalLM

logger = logging.getLogger("baton.engine")

# Rows whose products cuBLASLt's heuristics serve better than cuBLAS', as measured on an H200.
_LT_ROWS: Final = range(32, 193)


def captured_sizes(max_seqs: int) -> list[int]:
    """Numbers of rows that get a graph, ascending; the last one is `max_seqs`."""
    # Padding costs little beside reading weights.
    small = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32))
    return [*(n for n in (*small, *range(512, max_seqs, 64)) if n < max_seqs), max_seqs]


@contextmanager
def products_of(num_rows: int) -> Iterator[None]:
    """The library that multiplies so many rows best."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt" if num_rows in _LT_ROWS else "cublas")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@dataclass(frozen=True, eq=False)
class DecodeOutput:
    """What a step left on the device, a row for each of its sequences."""

    raw_logits: torch.Tensor  # [rows, vocab], see CausalLM.raw_logits
    greedy_ids: torch.Tensor | None  # int64 [rows] in LastSampledTokens; None: not computed yet
    scores: PendingScores = field(default_factory=lambda: PendingScores([], []))

    @property
    def logits(self) -> torch.Tensor:
        """float32 [rows, vocab]"""
        return self.raw_logits.float()


class DecodeGraphs:
    """The captured decode steps of one rank.

    Args:
        last_drawn: for `max_seqs` draws.
        max_seqs: most sequences of a step.
        max_blocks: most blocks of a sequence.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        last_drawn: LastSampledTokens,
        *,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        backend.reserve_captured(max_seqs, max_blocks)
        self._model = model
        self._backend = backend
        self._last_drawn = last_drawn
        self._block_size = block_size
        self._inputs = torch.zeros(2, max_seqs, dtype=torch.int64, device=device)
        self._token_ids, self._positions = self._inputs.unbind()
        self._sizes = captured_sizes(max_seqs)
        # With the output of all rows, which the next replay of any graph overwrites.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    def capture(self) -> None:
        """Captures every size, the largest first, so that the others fit into its memory."""
        started_s = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._backend.plan_captured(_null_batch(self._backend.num_groups), size)
            self._step(size)  # makes handles and loads kernels, which capturing cannot
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads of this process (NCCL's watchdog) may use CUDA meanwhile.
            with torch.cuda.graph(
                graph,
                pool=pool,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ):
                self._graphs[size] = graph, self._step(size)
        torch.cuda.synchronize()
        logger.info(
            "captured %d decode graphs in %.1f s", len(self._sizes), time.perf_counter() - started_s
        )

    def _step(self, num_rows: int) -> DecodeOutput:
        with products_of(num_rows):
            token_ids = self._last_drawn.fill_in(self._token_ids[:num_rows])
            hidden = self._model.forward(token_ids, self._positions[:num_rows], self._backend)
            logits = self._model.raw_logits(hidden)
            greedy_ids = self._last_drawn.token_ids[:num_rows]
            greedy_ids.copy_(greedy(logits))
        return DecodeOutput(logits, greedy_ids)

    def can_run(self, step: StepInput) -> bool:
        """Whether all its sequences decode and draw once, and are no more than the largest graph's;
        logprobs of prompt tokens need the hidden states, which a graph keeps to itself."""
        num_seqs = len(step.query_lens)
        return (
            num_seqs <= self._sizes[-1]
            and num_seqs == len(step.token_ids)
            and step.sample_rows.tolist() == list(range(num_seqs))
            and not step.scores
        )

    def run(self, step: StepInput) -> DecodeOutput:
        """Launches a step that `can_run`. The result is valid until the next call."""
        num_seqs = len(step.query_lens)
        size = self._size_for(num_seqs)
        host = torch.zeros(self._inputs.shape, dtype=torch.int64, pin_memory=True)
        host.numpy()[:, :num_seqs] = step.token_ids, step.positions
        self._inputs.copy_(host, non_blocking=True)
        self._backend.plan_captured(
            step.attention_batch(self._block_size, self._backend.num_groups), size
        )
        graph, output = self._graphs[size]
        graph.replay()
        assert output.greedy_ids is not None
        return DecodeOutput(output.raw_logits[:num_seqs], output.greedy_ids[:num_seqs])

    def replay(self, num_seqs: int) -> None:
        """Launches once more the graph that a step of `num_seqs` runs, as it was planned last."""
        self._graphs[self._size_for(num_seqs)][0].replay()

    def _size_for(self, num_seqs: int) -> int:
        return next(size for size in self._sizes if size >= num_seqs)


def _null_batch(num_groups: int) -> AttentionBatch:
    """One sequence of one token, in the null block."""
    one = np.ones(1, np.int32)
    return AttentionBatch(one, one, np.zeros((1, num_groups), np.int32), np.zeros(1, np.int64))

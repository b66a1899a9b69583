"""Runs steps as CUDA graphs, so that the device does not wait for the host.

A decode step of a small batch launches hundreds of short kernels. It is captured as one
graph for each padded number of sequences; all graphs share one memory pool. A graph
reads its inputs from fixed buffers: token ids and positions here, block tables in the
attention backend, and the tokens of the previous step in `LastSampledTokens`. It writes
its own greedy draws there too. Padding rows read and write the null block, and their
outputs are dropped.

Other steps of few tokens would also wait for the host, with an 8B model up to 19 ms.
With graphs, such a step of 128 tokens takes 6.6 ms on an H200. How attention is divided
depends on each sequence, so attention stays outside: one graph ends where a layer
queries the backend, and the next one begins with the backend's answer.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.base import AttentionBackend, AttentionBatch
from engine.core.batch import StepInput
from engine.sampling.sampler import LastSampledTokens, PendingScores, greedy
from model.attention_layers import AttentionQueries, AttentionQuery
from model.decoder import CausalLM

logger = logging.getLogger("baton.engine")

# Numbers of tokens that get graphs. Padding costs little compared to reading weights.
# With more tokens, the device takes longer than the host, so that graphs gain nothing.
_PROMPT_SIZES: Final = (16, 32, 64, 96, *range(128, 512, 64), *range(512, 769, 128))
# Numbers of rows for which cuBLASLt is faster than cuBLAS, as measured on an H200.
_CUBLASLT_ROWS: Final = range(32, 193)


def captured_sizes(max_seqs: int) -> list[int]:
    """The numbers of rows that get a graph, ascending; the last one is `max_seqs`."""
    # Padding costs little compared to reading weights.
    small = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32))
    sizes = (*small, *range(512, max_seqs, 64))
    return [*(size for size in sizes if size < max_seqs), max_seqs]


@contextmanager
def _fastest_blas(num_rows: int) -> Iterator[None]:
    """Uses the library that is fastest for matrices with `num_rows` rows."""
    previous = torch.backends.cuda.preferred_blas_library()
    library = "cublaslt" if num_rows in _CUBLASLT_ROWS else "cublas"
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(previous)


@dataclass(frozen=True, eq=False)
class DecodeOutput:
    """The results of a step on the device, with one row for each of its sequences.

    Attributes:
        raw_logits: [rows, vocab], see CausalLM.raw_logits.
        greedy_ids: int64 [rows] in LastSampledTokens; None if not computed yet.
    """

    raw_logits: torch.Tensor
    greedy_ids: torch.Tensor | None
    scores: PendingScores = field(default_factory=lambda: PendingScores([], []))

    @property
    def logits(self) -> torch.Tensor:
        """float32 [rows, vocab]"""
        return self.raw_logits.float()


class DecodeGraphs:
    """The captured decode steps of one rank.

    Args:
        last_drawn: a buffer for `max_seqs` draws.
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
        backend.reserve_graph_buffers(max_seqs, max_blocks)
        self._model = model
        self._backend = backend
        self._last_drawn = last_drawn
        self._block_size = block_size
        self._inputs = torch.zeros(2, max_seqs, dtype=torch.int64, device=device)
        self._complements, self._positions = self._inputs.unbind()
        self._sizes = captured_sizes(max_seqs)
        # Graphs, with their outputs. The next replay of any graph overwrites these.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    def capture(self) -> None:
        """Captures every size. The largest comes first, so that the others fit into its
        memory."""
        started_s = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._backend.plan_for_graph(_null_batch(self._backend.num_groups), size)
            self._step(size)  # creates handles and loads kernels; a capture cannot
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads of this process (NCCL's watchdog) may use CUDA
            # concurrently.
            with torch.cuda.graph(
                graph,
                pool=pool,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ):
                self._graphs[size] = (graph, self._step(size))
        torch.cuda.synchronize()
        logger.info(
            "captured %d decode graphs in %.1f s",
            len(self._sizes),
            time.perf_counter() - started_s,
        )

    def _step(self, num_rows: int) -> DecodeOutput:
        with _fastest_blas(num_rows):
            token_ids = self._last_drawn.resolve(self._complements[:num_rows])
            hidden = self._model.forward(
                token_ids, self._positions[:num_rows], self._backend
            )
            logits = self._model.raw_logits(hidden)
            greedy_ids = greedy(logits, self._last_drawn.token_ids[:num_rows])
        return DecodeOutput(logits, greedy_ids)

    def can_run(self, step: StepInput) -> bool:
        """Whether a graph can run this step.

        That is so if all its sequences decode and draw once, and if there are at most
        as many as in the largest graph. Logprobs of prompt tokens need the hidden
        states, which a graph does not return.
        """
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
        host.numpy()[:, :num_seqs] = (
            self._last_drawn.complements(step.token_ids),
            step.positions,
        )
        self._inputs.copy_(host, non_blocking=True)
        self._backend.plan_for_graph(
            step.attention_batch(self._block_size, self._backend.num_groups), size
        )
        graph, output = self._graphs[size]
        graph.replay()
        assert output.greedy_ids is not None
        return DecodeOutput(output.raw_logits[:num_seqs], output.greedy_ids[:num_seqs])

    def replay(self, num_seqs: int) -> None:
        """Launches again the graph that a step of `num_seqs` runs, as last planned."""
        self._graphs[self._size_for(num_seqs)][0].replay()

    def _size_for(self, num_seqs: int) -> int:
        return next(size for size in self._sizes if size >= num_seqs)


def _null_batch(num_groups: int) -> AttentionBatch:
    """A batch of one sequence with one token, in the null block."""
    one = np.ones(1, np.int32)
    tables = np.zeros((1, num_groups), np.int32)
    slots = np.zeros(1, np.int64)
    return AttentionBatch(one, one, tables, slots)


class _Piece(NamedTuple):
    """A graph, and the attention query at its end; None for the last piece."""

    graph: torch.cuda.CUDAGraph
    query: AttentionQuery | None


class PromptGraphs:
    """The captured pieces of one rank's prompt steps. Padding rows are computed, but
    their KV is not stored."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        *,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._sizes = [size for size in _PROMPT_SIZES if size <= max_tokens]
        self._inputs = torch.zeros(
            2, _PROMPT_SIZES[-1], dtype=torch.int64, device=device
        )
        # Queries and answers, by place and shape. All layers and sizes share them.
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        self._hidden: dict[int, Tensor] = {}

    def capture(self) -> None:
        """Captures every size. The largest comes first, so that the others fit into its
        memory."""
        started_s = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            with _fastest_blas(size):
                self._run_pieces(size, None)  # creates handles and loads kernels
                torch.cuda.synchronize()
                self._pieces[size] = self._run_pieces(size, pool)
        torch.cuda.synchronize()
        logger.info(
            "captured %d sizes of prompt steps, without their attention, in %.1f s",
            len(self._sizes),
            time.perf_counter() - started_s,
        )

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step that `can_run`; 0 if no size was captured."""
        return self._sizes[-1] if self._sizes else 0

    def can_run(self, num_tokens: int) -> bool:
        return num_tokens <= self.max_tokens

    def run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The model's `forward` for a planned step of [T] tokens that it `can_run`. The
        result is valid until the next call."""
        num_tokens = len(token_ids)
        size = next(size for size in self._sizes if size >= num_tokens)
        self._inputs[0, :num_tokens].copy_(token_ids)
        self._inputs[1, :num_tokens].copy_(positions)
        for graph, query in self._pieces[size]:
            graph.replay()
            if query is not None:
                answer = query.truncated(num_tokens).run_on(self._backend)
                self._buffer("answer", query.inputs[0])[:num_tokens].copy_(answer)
        return self._hidden[size][:num_tokens]

    def _run_pieces(self, size: int, pool: Any) -> list[_Piece]:
        """Captures the pieces of a step in a memory pool; without a pool, runs them."""
        token_ids, positions = self._inputs[:, :size]
        asking = self._model.attention_queries(
            token_ids, positions, self._backend.applies_rope
        )
        pieces: list[_Piece] = []
        answer = query = None
        while not pieces or query is not None:
            graph = torch.cuda.CUDAGraph()
            if pool is not None:
                # thread_local: other threads of this process may use CUDA concurrently.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            query = self._next(asking, answer, size)
            if pool is not None:
                graph.capture_end()
            pieces.append(_Piece(graph, query))
            if query is not None:
                answer = self._buffer("answer", query.inputs[0])[:size]
        return pieces

    def _next(
        self, asking: AttentionQueries, answer: Tensor | None, size: int
    ) -> AttentionQuery | None:
        try:
            query = next(asking) if answer is None else asking.send(answer)
        except StopIteration as end:
            self._hidden[size] = end.value
            return None
        inputs = tuple(
            self._buffer(place, tensor)[:size].copy_(tensor)
            for place, tensor in enumerate(query.inputs)
        )
        return query._replace(inputs=inputs)

    def _buffer(self, place: object, example: Tensor) -> Tensor:
        """The buffer for tensors with the row shape and dtype of `example`."""
        row_shape = example.shape[1:]
        key = (place, row_shape, example.dtype)
        # The largest size runs first, and before it is captured, so that no buffer is
        # created during a capture.
        if key not in self._buffers:
            self._buffers[key] = example.new_zeros(self._sizes[-1], *row_shape)
        return self._buffers[key]

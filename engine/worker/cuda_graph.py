"""Steps as CUDA graphs, which take the host's time out of them.

A decode step of a small batch launches hundreds of short kernels: it is one graph, of one padded
number of sequences, all in one memory pool. A graph reads its inputs from fixed buffers: token ids
and positions here, block tables in the attention backend, the tokens of the previous step in
`LastSampledTokens`, where it also leaves its own greedy draws. The added rows read and write the
null block, and their outputs are dropped.

Another step of few tokens waits for the host too, with an 8B model up to 19 ms; with graphs one of
128 tokens takes 6.6 ms on an H200. How its attention is divided depends on each sequence, so that
stays outside: a graph ends where a layer asks the backend, and the next one begins with the answer.
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

# Tokens that get graphs: padding costs little beside reading weights. Of more the device takes
# longer than the host.
_PROMPT_SIZES: Final = (16, 32, 64, 96, *range(128, 512, 64), *range(512, 769, 128))
# Rows whose products cuBLASLt's heuristics serve better than cuBLAS', as measured on an H200.
_LT_ROWS: Final = range(32, 193)


def captured_sizes(max_seqs: int) -> list[int]:
    """Numbers of rows that get a graph, ascending; the last one is `max_seqs`."""
    # Padding costs little beside reading weights.
    small = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32))
    return [*(n for n in (*small, *range(512, max_seqs, 64)) if n < max_seqs), max_seqs]


@contextmanager
def _products_of(num_rows: int) -> Iterator[None]:
    """The library that multiplies so many rows best."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(
        "cublaslt" if num_rows in _LT_ROWS else "cublas"
    )
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@dataclass(frozen=True, eq=False)
class DecodeOutput:
    """What a step left on the device, a row for each of its sequences."""

    raw_logits: torch.Tensor  # [rows, vocab], see CausalLM.raw_logits
    greedy_ids: (
        torch.Tensor | None
    )  # int64 [rows] in LastSampledTokens; None: not computed yet
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
        self._complements, self._positions = self._inputs.unbind()
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
            "captured %d decode graphs in %.1f s",
            len(self._sizes),
            time.perf_counter() - started_s,
        )

    def _step(self, num_rows: int) -> DecodeOutput:
        with _products_of(num_rows):
            token_ids = self._last_drawn.fill_in(self._complements[:num_rows])
            hidden = self._model.forward(
                token_ids, self._positions[:num_rows], self._backend
            )
            logits = self._model.raw_logits(hidden)
            greedy_ids = greedy(logits, self._last_drawn.token_ids[:num_rows])
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
        host.numpy()[:, :num_seqs] = (
            self._last_drawn.complements(step.token_ids),
            step.positions,
        )
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
    return AttentionBatch(
        one, one, np.zeros((1, num_groups), np.int32), np.zeros(1, np.int64)
    )


class _Piece(NamedTuple):
    graph: torch.cuda.CUDAGraph
    query: AttentionQuery | None  # that it ends with; None: the step ends


class PromptGraphs:
    """The captured pieces of one rank's steps. Rows that are added are computed, not stored."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        *,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._model, self._backend = model, backend
        self._sizes = [size for size in _PROMPT_SIZES if size <= max_tokens]
        self._inputs = torch.zeros(
            2, _PROMPT_SIZES[-1], dtype=torch.int64, device=device
        )
        # Queries and answers, which all layers and sizes share, by their place and shape.
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        self._hidden: dict[int, Tensor] = {}

    def capture(self) -> None:
        """Captures every size, the largest first, so that the others fit into its memory."""
        started_s, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            with _products_of(size):
                self._run_pieces(size, None)  # makes handles and loads kernels
                torch.cuda.synchronize()
                self._pieces[size] = self._run_pieces(size, pool)
        torch.cuda.synchronize()
        told = "captured %d sizes of steps, between their attention, in %.1f s"
        logger.info(told, len(self._sizes), time.perf_counter() - started_s)

    def takes(self, num_tokens: int) -> bool:
        return bool(self._sizes) and num_tokens <= self._sizes[-1]

    def run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """As the model's `forward`, of a planned step of [T] tokens that it `takes`. The result is
        valid until the next call."""
        num_tokens = len(token_ids)
        size = next(size for size in self._sizes if size >= num_tokens)
        for row, given in zip(self._inputs, (token_ids, positions), strict=True):
            row[:num_tokens].copy_(given)
        for graph, query in self._pieces[size]:
            graph.replay()
            if query is not None:
                answer = query.truncated(num_tokens).run_on(self._backend)
                self._buffer("answer", query.inputs[0])[:num_tokens].copy_(answer)
        return self._hidden[size][:num_tokens]

    def _run_pieces(self, size: int, pool: Any) -> list[_Piece]:
        """Captures them in a pool; without one they run."""
        token_ids, positions = self._inputs[:, :size]
        asking = self._model.attention_queries(
            token_ids, positions, self._backend.applies_rope
        )
        pieces: list[_Piece] = []
        answer = query = None
        while not pieces or query is not None:
            graph = torch.cuda.CUDAGraph()
            if pool is not None:
                # thread_local: other threads of this process may use CUDA meanwhile.
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
        given = enumerate(query.inputs)
        kept = tuple(self._buffer(place, x)[:size].copy_(x) for place, x in given)
        return query._replace(inputs=kept)

    def _buffer(self, place: object, like: Tensor) -> Tensor:
        key = place, like.shape[1:], like.dtype
        if (
            key not in self._buffers
        ):  # the largest size comes first, and runs before it is captured
            self._buffers[key] = like.new_zeros(self._sizes[-1], *like.shape[1:])
        return self._buffers[key]

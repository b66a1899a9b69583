"""Runs steps as CUDA graphs, so that the device does not wait for the host.

A decode step of a small batch launches hundreds of short kernels. Decode steps are
therefore captured, as one graph for each padded number of sequences. All graphs share
one memory pool. A graph reads its inputs from fixed buffers: token ids and positions
from buffers of `DecodeGraphs`, block tables from buffers of the attention backend, and
the tokens of the previous step from `LastSampledTokens`. The graph also writes its own
greedy draws to `LastSampledTokens`. Padding rows read and write the null block, and
their outputs are dropped.

Without graphs, small steps with prompt tokens would also wait for the host, up to 19 ms
with an 8B model. With graphs, a step of 128 prompt tokens takes 6.6 ms on an H200. The
kernels that compute attention depend on the sequences of the step, so these graphs do
not contain attention. One graph ends where a layer calls the attention backend, and the
next graph begins with the backend's output.
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
from model.decoder import StateCapture, StepModel

logger = logging.getLogger("baton.engine")

# Numbers of tokens for which prompt steps are captured. A step between two sizes is
# padded, which costs little compared to reading weights. The device takes longer to run
# a step of more than 768 tokens than the host takes to launch it, so graphs would gain
# nothing.
_PROMPT_SIZES: Final = (16, 32, 64, 96, *range(128, 512, 64), *range(512, 769, 128))
# Numbers of rows for which cuBLASLt is faster than cuBLAS, as measured on an H200.
_CUBLASLT_ROWS: Final = range(32, 193)


def captured_sizes(max_seqs: int) -> list[int]:
    """The numbers of rows for which decode steps are captured, ascending. The last
    number is `max_seqs`."""
    # A step between two sizes is padded, which costs little compared to reading
    # weights.
    small = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32))
    sizes = (*small, *range(512, max_seqs, 64))
    return [*(size for size in sizes if size < max_seqs), max_seqs]


@contextmanager
def _fastest_blas(num_rows: int) -> Iterator[None]:
    """Makes torch use the BLAS library that is fastest for matrices with `num_rows`
    rows."""
    previous = torch.backends.cuda.preferred_blas_library()
    library = "cublaslt" if num_rows in _CUBLASLT_ROWS else "cublas"
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(previous)


@dataclass(frozen=True, eq=False)
class LogitsOutput:
    """The results of a step on the device, with one row for each draw.

    Attributes:
        raw_logits: [rows, vocab], see CausalLM.raw_logits.
        greedy_ids: int64 [rows], the likeliest token of each row. In a graph, this is a
            view of LastSampledTokens.token_ids. None if not computed yet.
        scores: the logprobs of prompt tokens.
        states: the hidden states that a drafter needs, for each token of the step; see
            StateCapture. None if no drafter reads hidden states.
    """

    raw_logits: torch.Tensor
    greedy_ids: torch.Tensor | None
    scores: PendingScores = field(default_factory=lambda: PendingScores([], []))
    states: torch.Tensor | None = None

    @property
    def logits(self) -> torch.Tensor:
        """The logits as float32 [rows, vocab]."""
        return self.raw_logits.float()


class DecodeGraphs:
    """The captured decode steps of one rank.

    Args:
        last_drawn: the buffer for the drawn tokens, of at least `max_seqs` draws.
        max_seqs: largest number of sequences in a step.
        max_blocks: largest number of blocks of a sequence.
        captured_layers: the layers whose hidden states a drafter needs; see
            StateCapture.
    """

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend,
        last_drawn: LastSampledTokens,
        *,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        captured_layers: tuple[int, ...] = (),
    ) -> None:
        backend.reserve_graph_buffers(max_seqs, max_blocks)
        self._model = model
        self._backend = backend
        self._last_drawn = last_drawn
        self._block_size = block_size
        self._inputs = torch.zeros(2, max_seqs, dtype=torch.int64, device=device)
        # Token ids as bitwise complements; see LastSampledTokens.
        self._complements, self._positions = self._inputs.unbind()
        self._capture = model.new_capture(captured_layers, max_seqs)
        self._sizes = captured_sizes(max_seqs)
        # Graphs and their outputs, by number of rows, and by whether they launch the
        # kernels for runs; see `AttentionBackend.plan_for_graph`. Every replay
        # overwrites the outputs of all graphs, because the graphs share memory.
        self._graphs: dict[
            tuple[int, bool], tuple[torch.cuda.CUDAGraph, LogitsOutput]
        ] = {}
        self._has_runs = False  # whether the last step has runs

    def capture(self) -> None:
        """Captures every size. The largest comes first, so that the graphs of smaller
        sizes reuse the memory of the largest."""
        started_s = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            output = self._capture_size(size, pool)
            # A run has at least two rows.
            if size > 1 and self._backend.finds_runs:
                self._capture_size(size, pool, for_runs=output)
        torch.cuda.synchronize()
        logger.info(
            "captured %d decode graphs in %.1f s",
            len(self._graphs),
            time.perf_counter() - started_s,
        )

    def _capture_size(
        self, size: int, pool: Any, *, for_runs: LogitsOutput | None = None
    ) -> LogitsOutput:
        """Captures one graph, and returns its output.

        Args:
            for_runs: captures the graph that also launches the kernels for runs, see
                `AttentionBackend.plan_for_graph`. It writes to this output of the
                other graph, because every graph keeps the memory of its own output.
        """
        captures_runs = for_runs is not None
        self._backend.plan_for_graph(
            _null_batch(self._backend.num_groups), size, captures_runs=captures_runs
        )
        # Run once before the capture, because handles and kernels cannot be created
        # during a capture.
        self._step(size, for_runs)
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
            output = self._step(size, for_runs)
        self._graphs[size, captures_runs] = (graph, output)
        return output

    def _step(self, num_rows: int, output: LogitsOutput | None = None) -> LogitsOutput:
        """Runs a step of `num_rows` rows with the inputs in the buffers.

        Args:
            output: where to write the logits; None: to a new tensor.
        """
        with _fastest_blas(num_rows):
            token_ids = self._last_drawn.resolve(self._complements[:num_rows])
            capture = self._capture and self._capture.first_rows(num_rows)
            hidden = self._model.forward(
                token_ids, self._positions[:num_rows], self._backend, capture=capture
            )
            logits = self._model.raw_logits(hidden)
            if output is not None:
                logits = output.raw_logits.copy_(logits)
            greedy_ids = greedy(logits, self._last_drawn.token_ids[:num_rows])
        return LogitsOutput(logits, greedy_ids, states=capture and capture.out)

    def can_run(self, step: StepInput) -> bool:
        """Whether a graph can run this step.

        True if every sequence computes one token and draws once, if the largest graph
        has enough rows, and if the step computes no logprobs of prompt tokens. Such
        logprobs need the hidden states, which a graph does not return.
        """
        num_seqs = len(step.query_lens)
        return (
            num_seqs <= self._sizes[-1]
            and num_seqs == len(step.token_ids)
            and step.sampled_sequences.tolist() == list(range(num_seqs))
            and not step.scores
        )

    def run(self, step: StepInput) -> LogitsOutput:
        """Launches a step for which `can_run` is true. The result is valid until the
        next call."""
        num_seqs = len(step.query_lens)
        size = self._size_for(num_seqs)
        host = torch.zeros(self._inputs.shape, dtype=torch.int64, pin_memory=True)
        host.numpy()[:, :num_seqs] = (
            self._last_drawn.complements(step.token_ids),
            step.rotary_positions,
        )
        self._inputs.copy_(host, non_blocking=True)
        self._has_runs = self._backend.plan_for_graph(
            step.attention_batch(self._block_size, self._backend.num_groups), size
        )
        graph, output = self._graphs[size, self._has_runs]
        graph.replay()
        assert output.greedy_ids is not None
        return LogitsOutput(
            output.raw_logits[:num_seqs],
            output.greedy_ids[:num_seqs],
            states=None if output.states is None else output.states[:num_seqs],
        )

    def replay(self, num_seqs: int) -> None:
        """Launches the graph for `num_seqs` sequences again, with the inputs and the
        attention plan of the last `run`."""
        graph, _ = self._graphs[self._size_for(num_seqs), self._has_runs]
        graph.replay()

    def _size_for(self, num_seqs: int) -> int:
        return next(size for size in self._sizes if size >= num_seqs)


def _null_batch(num_groups: int) -> AttentionBatch:
    """A batch of one sequence with one token, which is stored in the null block."""
    one = np.ones(1, np.int32)
    tables = np.zeros((1, num_groups), np.int32)
    slots = np.zeros(1, np.int64)
    return AttentionBatch(one, one, tables, slots)


class _Piece(NamedTuple):
    """A part of a captured prompt step: a graph, and the attention query that follows
    it. The last piece has no query."""

    graph: torch.cuda.CUDAGraph
    query: AttentionQuery | None


class PromptGraphs:
    """The captured prompt steps of one rank, in pieces between which attention runs.

    A padded step also computes its padding rows, but does not store their KV.

    Args:
        captured_layers: the layers whose hidden states a drafter needs; see
            StateCapture.
    """

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend,
        *,
        max_tokens: int,
        device: torch.device,
        captured_layers: tuple[int, ...] = (),
    ) -> None:
        self._model = model
        self._backend = backend
        self._capture = model.new_capture(captured_layers, _PROMPT_SIZES[-1])
        self._sizes = [size for size in _PROMPT_SIZES if size <= max_tokens]
        self._inputs = torch.zeros(
            2, _PROMPT_SIZES[-1], dtype=torch.int64, device=device
        )
        # The buffers for the inputs of attention queries and for their answers. All
        # layers and sizes share these buffers.
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        # The pieces of the captured steps and their hidden states, by number of tokens.
        self._pieces: dict[int, list[_Piece]] = {}
        self._hidden: dict[int, Tensor] = {}

    def capture(self) -> None:
        """Captures every size. The largest comes first, so that the graphs of smaller
        sizes reuse the memory of the largest."""
        started_s = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            with _fastest_blas(size):
                self._run_pieces(size, None)  # creates handles, kernels and buffers
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
        """The largest number of tokens that `can_run` accepts; 0 if no size was
        captured."""
        return self._sizes[-1] if self._sizes else 0

    def can_run(self, num_tokens: int) -> bool:
        return num_tokens <= self.max_tokens

    def run(
        self, token_ids: Tensor, positions: Tensor, capture: StateCapture | None = None
    ) -> Tensor:
        """Computes the hidden states of a step, which are valid until the next call.
        The backend must have planned the step.

        Args:
            token_ids, positions: int64 [T]; `can_run` must be true for T.
            capture: where to store the hidden states that a drafter needs.
        """
        num_tokens = len(token_ids)
        size = next(size for size in self._sizes if size >= num_tokens)
        self._inputs[0, :num_tokens].copy_(token_ids)
        self._inputs[1, :num_tokens].copy_(positions)
        for graph, query in self._pieces[size]:
            graph.replay()
            if query is not None:
                answer = query.truncated(num_tokens).run_on(self._backend)
                self._buffer("answer", query.inputs[0])[:num_tokens].copy_(answer)
        if capture is not None:
            assert self._capture is not None, "the graphs capture no states"
            capture.out.copy_(self._capture.out[:num_tokens])
        return self._hidden[size][:num_tokens]

    def _run_pieces(self, size: int, pool: Any) -> list[_Piece]:
        """Captures the pieces of a step, with memory from `pool`. If `pool` is None,
        runs the pieces instead."""
        token_ids, positions = self._inputs[:, :size]
        queries = self._model.attention_queries(
            token_ids,
            positions,
            self._backend.applies_rope,
            capture=self._capture and self._capture.first_rows(size),
        )
        pieces: list[_Piece] = []
        answer = query = None
        while not pieces or query is not None:
            graph = torch.cuda.CUDAGraph()
            if pool is not None:
                # thread_local: other threads of this process may use CUDA concurrently.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            query = self._next_query(queries, answer, size)
            if pool is not None:
                graph.capture_end()
            pieces.append(_Piece(graph, query))
            if query is not None:
                answer = self._buffer("answer", query.inputs[0])[:size]
        return pieces

    def _next_query(
        self, queries: AttentionQueries, answer: Tensor | None, size: int
    ) -> AttentionQuery | None:
        """Runs the model until its next attention query, and copies the inputs of the
        query to buffers. Returns None once the model has finished; the hidden states
        are then in `_hidden[size]`.

        Args:
            answer: the answer to the previous query; None for the first query.
        """
        try:
            query = next(queries) if answer is None else queries.send(answer)
        except StopIteration as end:
            self._hidden[size] = end.value
            return None
        inputs = tuple(
            self._buffer(index, tensor)[:size].copy_(tensor)
            for index, tensor in enumerate(query.inputs)
        )
        return query._replace(inputs=inputs)

    def _buffer(self, name: int | str, example: Tensor) -> Tensor:
        """The buffer for tensors with the row shape and dtype of `example`. Creates the
        buffer at the first call.

        Args:
            name: the index of a query's input, or "answer".
        """
        row_shape = example.shape[1:]
        key = (name, row_shape, example.dtype)
        # The largest size runs first, and runs once before its capture. So no buffer is
        # created during a capture.
        if key not in self._buffers:
            self._buffers[key] = example.new_zeros(self._sizes[-1], *row_shape)
        return self._buffers[key]

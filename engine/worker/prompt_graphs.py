"""Steps of few tokens that no decode graph takes, as CUDA graphs of what is between attention.

Such a step of an 8B model waits up to 19 ms for the host, which launches ten kernels a layer; with
graphs one of 128 tokens takes 6.6 ms on an H200. How attention is divided depends on each sequence,
so it stays outside: a graph ends where a layer asks the backend, and the next one begins with the
answer.
"""

import logging
import time
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from attention.base import AttentionBackend
from engine.worker.cuda_graph import products_of
from model.attention_layers import Asking, Query
from model.decoder import CausalLM

logger = logging.getLogger("baton.engine")

# Tokens that get graphs: padding costs little beside reading weights. Of more than about 1,000 the
# device takes longer than the host.
_SIZES: Final = (16, 32, 64, 96, *range(128, 512, 64), *range(512, 1025, 128))


class _Piece(NamedTuple):
    graph: torch.cuda.CUDAGraph
    query: Query | None  # that it ends with; None: the step ends


class PromptGraphs:
    """The captured pieces of one rank's steps. Rows that are added are computed, not stored."""

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, *, max_tokens: int, device: torch.device
    ) -> None:
        self._model, self._backend = model, backend
        self._sizes = [size for size in _SIZES if size <= max_tokens]
        self._inputs = torch.zeros(2, _SIZES[-1], dtype=torch.int64, device=device)
        # Queries and answers, which all layers and sizes share, by their place and shape.
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        self._hidden: dict[int, Tensor] = {}

    def capture(self) -> None:
        """Captures every size, the largest first, so that the others fit into its memory."""
        started_s, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            with products_of(size):
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
                answer = query.first(num_tokens).answer(self._backend)
                self._buffer("answer", query.inputs[0])[:num_tokens].copy_(answer)
        return self._hidden[size][:num_tokens]

    def _run_pieces(self, size: int, pool: Any) -> list[_Piece]:
        """Captures them in a pool; without one they run."""
        token_ids, positions = self._inputs[:, :size]
        asking = self._model.asking(token_ids, positions, self._backend.rotates)
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

    def _next(self, asking: Asking, answer: Tensor | None, size: int) -> Query | None:
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
        if key not in self._buffers:  # the largest size comes first, and runs before it is captured
            self._buffers[key] = like.new_zeros(self._sizes[-1], *like.shape[1:])
        return self._buffers[key]

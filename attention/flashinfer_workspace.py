"""Computes the largest workspace that plans of FlashInfer need.

The numbers are valid for the FlashInfer version in pyproject.toml. A plan of a step
cuts contexts into pieces. The float workspace holds the partial results of the pieces
until they are merged. The int workspace holds the list of the pieces. FlashInfer raises
an error if a plan does not fit. So this module computes both sizes once, for the
largest steps of an engine. This module imports neither torch nor flashinfer.

- FlashAttention-2 divides queries into tiles of packed rows. Each query token has a
  packed row for each query head that shares its KV head. Contexts are cut only if the
  number of tiles times pieces is at most the number of thread blocks that the GPU runs
  concurrently.
- FlashAttention-3 cuts no contexts, but lists its tiles for each head.
- The kernel of multi-head latent attention (MLA) cuts contexts into at most twice as
  many pieces as the GPU has multiprocessors. Its list of pieces has a fixed size, and
  attention/support.py checks that the pieces of the largest step fit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from attention.support import LATENT_DIM, StepLimits

BLOCKS_PER_SM: Final = 2  # thread blocks; FlashInfer's planner assumes this number
# FlashInfer allocates an int workspace of this size for each wrapper. Baton replaces it
# only if a larger one is needed.
DEFAULT_INT_BYTES: Final = 8 * 2**20

_ALIGNMENT: Final = 16
_FLOAT_BYTES: Final = 4
_INT_BYTES: Final = 4
_LATENT_BYTES: Final = 2  # of an element; partial results of latents are in 16 bits
# Number of lists in the int workspace that have one entry per work item.
_FA2_LISTS: Final = 3
_FA3_LISTS: Final = 7
_FA3_TILE: Final = 128  # query tokens of the smaller of the planner's two tile sizes
_FA3_MAX_TILES_PER_HEAD: Final = 4096  # with more tiles, all heads share one list
# Query rows of one thread block; a cluster of two thread blocks computes 128.
_MLA_BLOCK_ROWS: Final = 64
_AMPERE: Final = 8  # major compute capability


class WorkspaceTooSmall(ValueError):
    """FlashInfer needs more workspace than this module computed.

    The message names the sizes and how to avoid the error.
    """


@dataclass(frozen=True)
class Gpu:
    num_sms: int  # streaming multiprocessors
    capability: int  # the major compute capability


@dataclass(frozen=True)
class Workspace:
    """Bytes of the float workspace and of the int workspace of the largest plan."""

    floats: int
    ints: int


def workspace_of(
    num_q_heads: int, num_kv_heads: int, head_dim: int, limits: StepLimits, gpu: Gpu
) -> Workspace:
    """Returns the workspace of attention over keys and values.

    Args:
        num_q_heads, num_kv_heads: Heads of one rank.
        limits: The largest steps.
    """
    group = num_q_heads // num_kv_heads
    # Work items (query tiles times pieces of contexts) of each KV head.
    max_work_items = BLOCKS_PER_SM * gpu.num_sms // num_kv_heads
    tile = _tile_rows(limits.max_tokens * group, head_dim, gpu)
    rows = max(1, -(-max_work_items * tile // group))
    output_bytes = _aligned(num_q_heads * rows * head_dim * _FLOAT_BYTES)
    lse_bytes = _aligned(num_q_heads * rows * _FLOAT_BYTES)
    return Workspace(
        floats=output_bytes + lse_bytes,
        ints=max(
            DEFAULT_INT_BYTES,
            _fa2_int_bytes(group, max_work_items, limits),
            _fa3_int_bytes(num_q_heads, limits, gpu),
        ),
    )


def latent_workspace_of(gpu: Gpu) -> Workspace:
    """Returns the workspace of attention over latents, which is equal for all steps."""
    rows = 2 * gpu.num_sms * _MLA_BLOCK_ROWS
    output_bytes = _aligned(rows * LATENT_DIM * _LATENT_BYTES)
    lse_bytes = _aligned(rows * _FLOAT_BYTES)
    return Workspace(output_bytes + lse_bytes, DEFAULT_INT_BYTES)


@contextmanager
def explain_overflow(workspace: Workspace, limits: StepLimits) -> Iterator[None]:
    """Encloses a plan and explains FlashInfer's error if the workspace is too small.

    Args:
        workspace: The workspace that was computed for `limits`.

    Raises:
        WorkspaceTooSmall: FlashInfer raised an error about its workspace.
    """
    try:
        yield
    except Exception as error:  # its class depends on how FlashInfer was built
        if "workspace buffer" not in str(error):
            raise
        raise WorkspaceTooSmall(
            f"FlashInfer's plan of a step does not fit into the computed "
            f"{workspace.floats / 2**20:.0f} MiB (and {workspace.ints / 2**20:.0f} MiB "
            f"for indices) for steps of {limits.max_seqs} sequences and "
            f"{limits.max_tokens} tokens ({error}): lower --max-num-seqs, use the "
            "FlashInfer version that pyproject.toml names, or --attention-backend torch"
        ) from error


def _tile_rows(packed_rows: int, head_dim: int, gpu: Gpu) -> int:
    """Returns the number of packed rows in one tile of FlashAttention-2.

    Args:
        packed_rows: Average packed rows of a sequence.
    """
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 16 if packed_rows <= 16 and gpu.capability >= _AMPERE else 64


def _fa2_int_bytes(group: int, max_work_items: int, limits: StepLimits) -> int:
    """Returns the int workspace of FlashAttention-2.

    Args:
        group: Query heads that share a KV head.
        max_work_items: Work items of a KV head, if contexts are cut.
    """
    max_seqs = limits.max_seqs
    max_tokens = limits.max_tokens
    # Tiles have at least 64 rows, unless sequences have at most 16 packed rows on
    # average. In that case tiles have 16 rows.
    tiles_of_tokens = -(-max_tokens * group // 64)
    tiles_of_short = max_seqs + max_seqs // 16 + 1
    tiles = max(tiles_of_tokens, tiles_of_short) + max_seqs
    listed = max(max_work_items, tiles)
    sizes = [
        *[_INT_BYTES * listed] * _FA2_LISTS,
        _INT_BYTES * (max_seqs + 1),
        _INT_BYTES * (max_tokens + 1),
        listed,
        _INT_BYTES,
        _INT_BYTES,
    ]
    return sum(map(_aligned, sizes))


def _fa3_int_bytes(num_q_heads: int, limits: StepLimits, gpu: Gpu) -> int:
    tiles = -(-limits.max_tokens // _FA3_TILE) + limits.max_seqs - 1
    listed = max(tiles, min(tiles, _FA3_MAX_TILES_PER_HEAD) * num_q_heads)
    sizes = [*[_INT_BYTES * listed] * _FA3_LISTS, _INT_BYTES * (gpu.num_sms + 1)]
    return sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

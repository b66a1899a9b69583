"""How much workspace FlashInfer's planner takes at most.

The numbers hold for the FlashInfer version in pyproject.toml. A plan of a step cuts
contexts into pieces. The partial results of the pieces lie in the float workspace until
they are merged; the list of the pieces lies in the int workspace. This module sizes
both, once, for the largest steps of an engine, because a larger plan would raise. It
imports neither torch nor flashinfer.

- FlashAttention-2 uses tiles of `tile` packed rows. There is a packed row for each
  query token and each query head of a KV head. It cuts contexts only while tiles times
  pieces are at most the thread blocks that the GPU runs concurrently.
- FlashAttention-3 cuts no contexts, but lists its tiles for each head.
- Multi-head latent attention cuts into at most twice as many pieces as the GPU has
  multiprocessors. It lists them in a buffer of fixed size; support.py checks that they
  fit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from attention.support import LATENT_DIM, StepLimits

BLOCKS_PER_SM: Final = 2  # thread blocks, as FlashInfer's planner counts them
MIN_INT_BYTES: Final = 8 * 2**20  # int workspace of a wrapper as FlashInfer creates it

_ALIGNMENT: Final = 16
_FLOAT_BYTES: Final = 4
_INT_BYTES: Final = 4
_LATENT_BYTES: Final = 2  # partial results of latents are in 16 bits
_FA2_LISTS: Final = 3
_FA3_LISTS: Final = 7
_FA3_TILE: Final = 128  # the smaller one of the planner's tiles; the other is 192
_FA3_MAX_TILES_PER_HEAD: Final = 4096  # with more tiles, all heads share one list
_MLA_TILE: Final = 64  # rows of one thread block; two may work together
_AMPERE: Final = 8


class WorkspaceTooSmall(ValueError):
    """FlashInfer needs more workspace than this module computed.

    The message says what helps.
    """


@dataclass(frozen=True)
class Gpu:
    num_sms: int
    capability: int  # major


@dataclass(frozen=True)
class Workspace:
    """Bytes that the largest plan takes."""

    floats: int
    ints: int


def workspace_of(
    num_q_heads: int, num_kv_heads: int, head_dim: int, limits: StepLimits, gpu: Gpu
) -> Workspace:
    """The workspace of attention over keys and values; heads are those of one rank."""
    group = num_q_heads // num_kv_heads
    max_works = BLOCKS_PER_SM * gpu.num_sms // num_kv_heads  # tiles times pieces
    tile = _tile(limits.max_tokens * group, head_dim, gpu)
    rows = max(1, -(-max_works * tile // group))
    output_bytes = _aligned(num_q_heads * rows * head_dim * _FLOAT_BYTES)
    lse_bytes = _aligned(num_q_heads * rows * _FLOAT_BYTES)
    return Workspace(
        floats=output_bytes + lse_bytes,
        ints=max(
            MIN_INT_BYTES,
            _fa2_int_bytes(group, max_works, limits),
            _fa3_int_bytes(num_q_heads, limits, gpu),
        ),
    )


def latent_workspace_of(gpu: Gpu) -> Workspace:
    """The workspace of attention over latents, which is the same for all steps."""
    rows = 2 * gpu.num_sms * _MLA_TILE
    output_bytes = _aligned(rows * LATENT_DIM * _LATENT_BYTES)
    lse_bytes = _aligned(rows * _FLOAT_BYTES)
    return Workspace(output_bytes + lse_bytes, MIN_INT_BYTES)


@contextmanager
def explain_overflow(workspace: Workspace, limits: StepLimits) -> Iterator[None]:
    """Encloses a plan and explains FlashInfer's error if the workspace is too small.

    Raises:
        WorkspaceTooSmall: Names the sizes and what helps.
    """
    try:
        yield
    except Exception as error:  # its class depends on how FlashInfer was built
        if "workspace buffer" not in str(error):
            raise
        raise WorkspaceTooSmall(
            f"FlashInfer's plan of a step does not fit into the computed "
            f"{workspace.floats / 2**20:.0f} MiB (and {workspace.ints / 2**20:.0f} MiB "
            f"of indices) for steps of {limits.max_seqs} sequences and "
            f"{limits.max_tokens} tokens ({error}): lower --max-num-seqs, use the "
            "FlashInfer version that pyproject.toml names, or --attention-backend torch"
        ) from error


def _tile(packed_rows: int, head_dim: int, gpu: Gpu) -> int:
    """Packed rows of a thread block's tile.

    Args:
        packed_rows: Average packed rows of a sequence.
    """
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 16 if packed_rows <= 16 and gpu.capability >= _AMPERE else 64


def _fa2_int_bytes(group: int, pieces: int, limits: StepLimits) -> int:
    max_seqs = limits.max_seqs
    max_tokens = limits.max_tokens
    # Tiles have 64 rows or more, except for sequences of 16 packed rows or fewer. Such
    # a sequence is in one or two tiles.
    tiles_of_tokens = -(-max_tokens * group // 64)
    tiles_of_short = max_seqs + max_seqs // 16 + 1
    tiles = max(tiles_of_tokens, tiles_of_short) + max_seqs
    listed = max(pieces, tiles)
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
    works = max(tiles, min(tiles, _FA3_MAX_TILES_PER_HEAD) * num_q_heads)
    sizes = [*[_INT_BYTES * works] * _FA3_LISTS, _INT_BYTES * (gpu.num_sms + 1)]
    return sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

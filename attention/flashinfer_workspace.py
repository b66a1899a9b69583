"""How much scratch memory FlashInfer's planner asks for at most (of the version in pyproject.toml).

Its plan of a step cuts contexts into pieces, whose partial results lie in the float workspace until
they are merged, and lists the pieces in the int workspace. Both are sized here, once, for the
largest steps of an engine; a plan beyond them would raise. No torch, no flashinfer.

FlashAttention-2, in tiles of `tile` packed rows, a row for each query token and query head of a KV
head: at most as many tiles times pieces as the GPU holds thread blocks for, or nothing is cut.
FlashAttention-3 cuts no contexts, but lists its tiles for each head.
Multi-head latent attention cuts into at most twice as many pieces as there are multiprocessors, and
lists them in a place of fixed size (support.py sees to it that they fit).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from attention.support import LATENT_DIM, StepLimits

BLOCKS_PER_SM: Final = 2  # as FlashInfer's planner counts thread blocks
LEAST_INT_BYTES: Final = 8 * 2**20  # of every wrapper, as FlashInfer makes it

_ALIGNMENT: Final = 16
_FLOAT_BYTES: Final = 4
_INT_BYTES: Final = 4
_LATENT_BYTES: Final = 2  # partial results of latents are in 16 bits
_LISTS_OF_FA2: Final = 3
_LISTS_OF_FA3: Final = 7
_FA3_TILE: Final = 128  # or 192
_FA3_MOST_OF_EACH_HEAD: Final = 4096  # tiles; with more, all heads have one list
_MLA_TILE: Final = 64  # of one thread block; two may work together
_AMPERE: Final = 8


class WorkspaceTooSmall(ValueError):
    """FlashInfer asked for more than this module found; the message says what helps."""


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
    """For attention to keys and values; heads are those of one rank."""
    group = num_q_heads // num_kv_heads
    fitting = BLOCKS_PER_SM * gpu.num_sms // num_kv_heads  # tiles times pieces
    rows = max(
        1, -(-fitting * _tile(limits.max_tokens * group, head_dim, gpu) // group)
    )
    return Workspace(
        floats=_aligned(num_q_heads * rows * head_dim * _FLOAT_BYTES)
        + _aligned(num_q_heads * rows * _FLOAT_BYTES),
        ints=max(
            LEAST_INT_BYTES,
            _fa2_ints(group, fitting, limits),
            _fa3_ints(num_q_heads, limits, gpu),
        ),
    )


def latent_workspace_of(gpu: Gpu) -> Workspace:
    """For attention to latents: the same for all steps."""
    rows = 2 * gpu.num_sms * _MLA_TILE
    floats = _aligned(rows * LATENT_DIM * _LATENT_BYTES) + _aligned(rows * _FLOAT_BYTES)
    return Workspace(floats, LEAST_INT_BYTES)


@contextmanager
def explaining(workspace: Workspace, limits: StepLimits) -> Iterator[None]:
    """Around a plan, for one that takes more than was worked out here.

    Raises:
        WorkspaceTooSmall: names the sizes and what helps.
    """
    try:
        yield
    except Exception as error:  # which class depends on how FlashInfer was built
        if "workspace buffer" not in str(error):
            raise
        raise WorkspaceTooSmall(
            f"FlashInfer's plan of a step does not fit the {workspace.floats / 2**20:.0f} MiB (and "
            f"{workspace.ints / 2**20:.0f} MiB of indices) worked out for steps of "
            f"{limits.max_seqs} sequences and {limits.max_tokens} tokens ({error}): lower "
            "--max-num-seqs, use the FlashInfer version that pyproject.toml names, or "
            "--attention-backend torch"
        ) from error


def _tile(packed_rows: int, head_dim: int, gpu: Gpu) -> int:
    """Packed rows that a thread block takes where sequences have `packed_rows`, on average."""
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 16 if packed_rows <= 16 and gpu.capability >= _AMPERE else 64


def _fa2_ints(group: int, pieces: int, limits: StepLimits) -> int:
    seqs, tokens = limits.max_seqs, limits.max_tokens
    # Tiles are 64 rows or more, but for sequences of 16 or fewer: they are all in one or two.
    tiles = max(-(-tokens * group // 64), seqs + seqs // 16 + 1) + seqs
    listed = max(pieces, tiles)
    lists = [_INT_BYTES * listed] * _LISTS_OF_FA2
    indptrs = [_INT_BYTES * (seqs + 1), _INT_BYTES * (tokens + 1)]
    return sum(map(_aligned, [*lists, *indptrs, listed, _INT_BYTES, _INT_BYTES]))


def _fa3_ints(num_q_heads: int, limits: StepLimits, gpu: Gpu) -> int:
    tiles = -(-limits.max_tokens // _FA3_TILE) + limits.max_seqs - 1
    works = max(tiles, min(tiles, _FA3_MOST_OF_EACH_HEAD) * num_q_heads)
    lists = [_INT_BYTES * works] * _LISTS_OF_FA3
    return sum(map(_aligned, [*lists, _INT_BYTES * (gpu.num_sms + 1)]))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

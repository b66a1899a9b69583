"""The limits of each attention backend, which are checked before a model is loaded.

This module imports neither torch nor flashinfer.
"""

from dataclasses import dataclass
from typing import Final

from protocol.handshake import FP8

LATENT_DIM: Final = 512
ROPE_DIM: Final = 64
# Query rows in a tile of the MLA kernel. Each query token has one row per head. If the
# number of heads does not divide QUERY_TILE, the kernel skips some keys at the borders
# of tiles, and its results are wrong.
QUERY_TILE: Final = 128

_HEAD_DIMS: Final = (64, 128, 256)
_DTYPES: Final = ("bfloat16", "float16")
# FlashInfer's MLA plan has space for this many work items: query tiles times pieces of
# contexts.
_MLA_MAX_WORK_ITEMS: Final = 16384
# Query rows of a planned tile. If sequences have at most 64 rows on average, the
# planner uses tiles of half this size.
_MLA_TILE: Final = 128
_MAX_SMS: Final = 256  # more streaming multiprocessors than any GPU has


class UnsupportedPool(ValueError):
    """A backend cannot read this KV pool; the message names the reason and the fix."""


@dataclass(frozen=True)
class AttentionSpec:
    """The pool and the queries that an attention backend must support."""

    device: str  # "cpu" | "cuda"
    dtype: str  # of the queries
    kv_dtype: str  # of the KV pool
    head_dim: int  # elements of a head in the KV pool; MLA: of latent and rope part
    num_components: int  # 2: keys and values; 1: latents
    num_q_heads: int  # of one rank
    # The combinations of (has a window, has a soft cap) of the model's layers.
    kinds: tuple[tuple[bool, bool], ...] = ((False, False),)

    @property
    def is_latent(self) -> bool:
        return self.num_components == 1


@dataclass(frozen=True)
class StepLimits:
    """The largest steps that a backend must support.

    Attributes:
        max_seqs: Sequences. Each row that verifies a proposal counts as a sequence.
        max_tokens: Query tokens of all sequences together.
        max_context: Context tokens of the longest sequence that has several query
            tokens.
        has_proposals: Whether steps usually verify proposals. Rows that verify
            proposals for the same sequence then read its context together.
    """

    max_seqs: int = 256
    max_tokens: int = 8192
    max_context: int = 8192
    has_proposals: bool = False


DEFAULT_LIMITS: Final = StepLimits()


def resolve_backend_name(name: str, device: str) -> str:
    """Returns `name`; for "auto", returns flashinfer on a GPU and torch elsewhere."""
    if name != "auto":
        return name
    return "flashinfer" if device == "cuda" else "torch"


def check_supported(name: str, spec: AttentionSpec, limits: StepLimits) -> None:
    """Checks that the backend `name` can serve `spec` in steps of up to `limits`.

    Raises:
        UnsupportedPool: The backend cannot serve it. The message names the limit, the
            value and the option to change.
    """
    if resolve_backend_name(name, spec.device) == "torch":
        return
    if spec.device != "cuda":
        raise _unsupported(
            f"reads GPU memory only, and the KV pool is on {spec.device}: use"
        )
    _check_dtypes(spec)
    if spec.is_latent:
        _check_latents(spec, limits)
    elif spec.head_dim not in _HEAD_DIMS:
        dims = ", ".join(map(str, _HEAD_DIMS))
        raise _unsupported(
            f"does not serve a head_dim of {spec.head_dim}, only {dims}: use"
        )


def extra_bytes_per_block(name: str, spec: AttentionSpec, block_size: int) -> int:
    """Returns the bytes that a backend allocates per block, in addition to the pool.

    The result is 0, except for FP8 latents with flashinfer. This backend copies each
    layer's blocks to 16 bits, into one buffer that all layers share.
    """
    if not spec.is_latent or spec.kv_dtype != FP8:
        return 0
    if resolve_backend_name(name, spec.device) == "torch":
        return 0
    return 2 * block_size * spec.head_dim


def _unsupported(reason: str) -> UnsupportedPool:
    return UnsupportedPool(
        f"attention_backend flashinfer {reason} --attention-backend torch"
    )


def _check_dtypes(spec: AttentionSpec) -> None:
    if spec.dtype in _DTYPES and spec.kv_dtype in (spec.dtype, FP8):
        return
    content = "latents" if spec.is_latent else "KV"
    kv_option = " and --kv-cache-dtype auto" if spec.kv_dtype == FP8 else ""
    raise _unsupported(
        f"does not serve queries of {spec.dtype} over {content} of {spec.kv_dtype}: "
        f"use --dtype bfloat16 or float16{kv_option}, or"
    )


def _check_latents(spec: AttentionSpec, limits: StepLimits) -> None:
    num_q_heads = spec.num_q_heads
    if spec.head_dim != LATENT_DIM + ROPE_DIM or QUERY_TILE % num_q_heads:
        raise _unsupported(
            f"does not serve latents of {spec.head_dim} elements for {num_q_heads} "
            f"query heads, only of {LATENT_DIM + ROPE_DIM} for a number of heads that "
            f"divides {QUERY_TILE}: use"
        )
    max_seqs = min(limits.max_seqs, limits.max_tokens)
    tiles_if_long = -(-limits.max_tokens * num_q_heads // _MLA_TILE) + max_seqs
    tiles_if_short = 2 * max_seqs + 2 * max_seqs // _MLA_TILE + 1
    # The planner makes one work item for each tile, and at most one more for each
    # multiprocessor.
    max_work_items = max(tiles_if_long, tiles_if_short) + _MAX_SMS
    if max_work_items > _MLA_MAX_WORK_ITEMS:
        raise _unsupported(
            f"splits a step over latents into {_MLA_MAX_WORK_ITEMS} parts at most; "
            f"{limits.max_tokens} tokens of {max_seqs} sequences with {num_q_heads} "
            f"query heads may take {max_work_items}: lower --max-num-batched-tokens or "
            "--max-num-seqs, use a larger --tp, or"
        )

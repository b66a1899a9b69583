"""The limits of each attention backend, known before a model is loaded: no torch, no flashinfer."""

from dataclasses import dataclass
from typing import Final

from protocol.handshake import FP8

LATENT_DIM: Final = 512
ROPE_DIM: Final = 64
QUERY_TILE: Final = 128  # rows: heads that do not divide it lose keys at tile borders

_HEAD_DIMS: Final = (64, 128, 256)
_DTYPES: Final = ("bfloat16", "float16")
_MLA_WORKS: Final = (
    16384  # tiles of queries times pieces of contexts that a plan has room for
)
_MLA_TILE: Final = (
    128  # queries times heads; half of it where sequences have 64 or fewer
)
_MOST_SMS: Final = 256  # of any GPU


class UnsupportedPool(ValueError):
    """A KV pool that a backend cannot read; the message names what it found and the fix."""


@dataclass(frozen=True)
class Wanted:
    """The pool that a backend is to read, and its queries."""

    device: str  # "cpu" | "cuda"
    dtype: str  # of the queries
    kv_dtype: str
    head_dim: int  # elements of a head in the KV cache, or of a latent
    num_components: int  # 2: keys and values; 1: latents
    num_q_heads: int  # of one rank
    # Of layers, whether they have a window and whether they have a soft cap: those there are.
    kinds: tuple[tuple[bool, bool], ...] = ((False, False),)

    @property
    def is_latent(self) -> bool:
        return self.num_components == 1


@dataclass(frozen=True)
class StepLimits:
    """The largest steps that a backend is asked for."""

    max_seqs: int = 256
    max_tokens: int = 8192  # queries, those of all sequences together
    max_context: int = 8192  # tokens of the longest sequence that has several queries


DEFAULT_LIMITS: Final = StepLimits()


def chosen(name: str, device: str) -> str:
    """The backend that `name` means on `device`: "auto" is flashinfer on a GPU, torch elsewhere."""
    if name != "auto":
        return name
    return "flashinfer" if device == "cuda" else "torch"


def check(name: str, wanted: Wanted, limits: StepLimits) -> None:
    """Refuses what the backend `name` will not serve, in steps up to `limits`.

    Raises:
        UnsupportedPool: names the limit, what was found and which option helps.
    """
    if chosen(name, wanted.device) == "torch":
        return
    if wanted.device != "cuda":
        raise _refused(
            f"reads GPU memory only, and the KV pool is on {wanted.device}: use"
        )
    _check_dtypes(wanted)
    if wanted.is_latent:
        _check_latents(wanted, limits)
    elif wanted.head_dim not in _HEAD_DIMS:
        dims = ", ".join(map(str, _HEAD_DIMS))
        raise _refused(
            f"does not serve a head_dim of {wanted.head_dim}, only {dims}: use"
        )


def copied_bytes(name: str, wanted: Wanted, block_size: int) -> int:
    """Of a block of a pool, what the backend `name` keeps besides: one layer's latents of FP8 in
    the queries' 16 bits."""
    if (
        not wanted.is_latent
        or wanted.kv_dtype != FP8
        or chosen(name, wanted.device) == "torch"
    ):
        return 0
    return 2 * block_size * wanted.head_dim


def _refused(why: str) -> UnsupportedPool:
    return UnsupportedPool(
        f"attention_backend flashinfer {why} --attention-backend torch"
    )


def _check_dtypes(wanted: Wanted) -> None:
    if wanted.dtype in _DTYPES and wanted.kv_dtype in (wanted.dtype, FP8):
        return
    kind = "latents" if wanted.is_latent else "KV"
    other_kv = " and --kv-cache-dtype auto" if wanted.kv_dtype == FP8 else ""
    raise _refused(
        f"does not serve queries of {wanted.dtype} over {kind} of {wanted.kv_dtype}: use --dtype "
        f"bfloat16 or float16{other_kv}, or"
    )


def _check_latents(wanted: Wanted, limits: StepLimits) -> None:
    num_q_heads = wanted.num_q_heads
    if wanted.head_dim != LATENT_DIM + ROPE_DIM or QUERY_TILE % num_q_heads:
        raise _refused(
            f"does not serve latents of {wanted.head_dim} elements for {num_q_heads} query heads, "
            f"only of {LATENT_DIM + ROPE_DIM} for a number of heads that divides {QUERY_TILE}: use"
        )
    seqs = min(limits.max_seqs, limits.max_tokens)
    long = -(-limits.max_tokens * num_q_heads // _MLA_TILE) + seqs
    short = 2 * seqs + 2 * seqs // _MLA_TILE + 1
    works = (
        max(long, short) + _MOST_SMS
    )  # so many pieces are cut beyond one for each tile
    if works > _MLA_WORKS:
        raise _refused(
            f"splits a step over latents into {_MLA_WORKS} parts at most; {limits.max_tokens} "
            f"tokens of {seqs} sequences with {num_q_heads} query heads may take {works}: lower "
            "--max-num-batched-tokens or --max-num-seqs, use a larger --tp, or"
        )

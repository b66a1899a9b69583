"""What each attention backend serves, known before a model is loaded: no torch, no flashinfer."""

from dataclasses import dataclass
from typing import Final

from protocol.handshake import FP8

NAMES: Final = ("auto", "torch", "flashinfer")
LATENT_DIM: Final = 512
ROPE_DIM: Final = 64
QUERY_TILE: Final = 128  # rows: heads that do not divide it lose keys at tile borders

_HEAD_DIMS: Final = (64, 128, 256)
_DTYPES: Final = ("bfloat16", "float16")


class UnsupportedPool(ValueError):
    """A KV pool that a backend cannot read; the message names what it found and the fix."""


@dataclass(frozen=True)
class Wanted:
    """What a backend is to read, and with which queries."""

    device: str  # "cpu" | "cuda"
    dtype: str  # of the queries
    kv_dtype: str
    head_dim: int  # elements of a head in the KV cache, or of a latent
    num_components: int  # 2: keys and values; 1: latents
    num_q_heads: int  # of one rank

    @property
    def is_latent(self) -> bool:
        return self.num_components == 1


def chosen(name: str, device: str) -> str:
    """The backend that `name` means on `device`: "auto" is flashinfer on a GPU, torch elsewhere.

    Raises:
        ValueError: there is no such backend.
    """
    if name not in NAMES:
        raise ValueError(f"attention_backend={name!r} is not known: use one of {', '.join(NAMES)}")
    if name != "auto":
        return name
    return "flashinfer" if device == "cuda" else "torch"


def check(name: str, wanted: Wanted) -> None:
    """Refuses what the backend `name` will not serve.

    Raises:
        UnsupportedPool: names the limit, what was found and which option helps.
        ValueError: there is no such backend.
    """
    if chosen(name, wanted.device) == "flashinfer":
        check_flashinfer(wanted)


def check_flashinfer(wanted: Wanted) -> None:
    """Raises UnsupportedPool for what FlashInfer's kernels lack."""
    if wanted.device != "cuda":
        raise UnsupportedPool(
            "attention_backend flashinfer reads GPU memory only, and the KV pool is on "
            f"{wanted.device}: use --attention-backend torch"
        )
    _check_dtypes(wanted)
    if wanted.is_latent:
        _check_latents(wanted)
    elif wanted.head_dim not in _HEAD_DIMS:
        raise UnsupportedPool(
            f"attention_backend flashinfer does not serve a head_dim of {wanted.head_dim}, only "
            f"{', '.join(map(str, _HEAD_DIMS))}: use --attention-backend torch"
        )


def _check_dtypes(wanted: Wanted) -> None:
    kv_dtypes = [wanted.dtype] if wanted.is_latent else [wanted.dtype, FP8]
    if wanted.dtype in _DTYPES and wanted.kv_dtype in kv_dtypes:
        return
    kind = "latents" if wanted.is_latent else "KV"
    other_kv = " and --kv-cache-dtype auto" if wanted.kv_dtype == FP8 else ""
    raise UnsupportedPool(
        f"attention_backend flashinfer does not serve queries of {wanted.dtype} over "
        f"{kind} of {wanted.kv_dtype}: use --dtype bfloat16 or float16{other_kv}, "
        "or --attention-backend torch"
    )


def _check_latents(wanted: Wanted) -> None:
    if wanted.head_dim != LATENT_DIM + ROPE_DIM or QUERY_TILE % wanted.num_q_heads:
        raise UnsupportedPool(
            f"attention_backend flashinfer does not serve latents of {wanted.head_dim} elements "
            f"for {wanted.num_q_heads} query heads, only of {LATENT_DIM + ROPE_DIM} for a number "
            f"of heads that divides {QUERY_TILE}: use --attention-backend torch"
        )

"""What backends lack is known without them, without a GPU; they are found by name."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from attention.registry import BackendMissing, backend_class
from attention.support import (
    DEFAULT_LIMITS,
    StepLimits,
    UnsupportedPool,
    Wanted,
    check,
    chosen,
    copied_bytes,
)
from tests.attention.reference import Shape, make

_SERVED = Wanted(
    device="cuda", dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, num_components=2,
    num_q_heads=32,
)  # fmt: skip
_LATENT = replace(_SERVED, head_dim=576, num_components=1, num_q_heads=16)


@pytest.mark.parametrize(
    "wanted",
    [
        _SERVED,
        replace(_SERVED, head_dim=64, num_q_heads=7),
        replace(_SERVED, head_dim=256),
        replace(_SERVED, dtype="float16", kv_dtype="float16"),
        replace(_SERVED, kv_dtype="float8_e4m3fn"),
        _LATENT,
        replace(_LATENT, num_q_heads=128),
        replace(_LATENT, kv_dtype="float8_e4m3fn"),
    ],
    ids=str,
)
def test_what_the_kernels_have_is_served(wanted):
    check("auto", wanted, DEFAULT_LIMITS)
    check("flashinfer", wanted, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            replace(_SERVED, device="cpu"),
            "reads GPU memory only, and the KV pool is on cpu",
        ),
        (replace(_SERVED, head_dim=80), r"head_dim of 80, only 64, 128, 256"),
        (replace(_SERVED, head_dim=576), r"head_dim of 576, only"),
        (
            replace(_SERVED, dtype="float32", kv_dtype="float32"),
            r"queries of float32 over KV of float32: use --dtype bfloat16 or float16, or",
        ),
        (
            replace(_SERVED, kv_dtype="float16"),
            r"queries of bfloat16 over KV of float16",
        ),
        (
            replace(_SERVED, dtype="float32", kv_dtype="float8_e4m3fn"),
            r"over KV of float8_e4m3fn: use --dtype .* and --kv-cache-dtype auto",
        ),
        (
            replace(_LATENT, dtype="float32", kv_dtype="float8_e4m3fn"),
            r"over latents of float8_e4m3fn: use --dtype .* and --kv-cache-dtype auto",
        ),
        (replace(_LATENT, head_dim=320), r"latents of 320 elements .*only of 576"),
        (replace(_LATENT, num_q_heads=20), r"for 20 query heads, .* that divides 128"),
    ],
)
def test_what_they_lack_is_refused_with_what_helps(wanted, message):
    with pytest.raises(UnsupportedPool, match=f"{message}.*--attention-backend torch"):
        check("flashinfer", wanted, DEFAULT_LIMITS)
    check("torch", wanted, DEFAULT_LIMITS)


def test_auto_is_the_kernels_on_a_gpu_only():
    unserved = replace(_SERVED, head_dim=80)
    check("auto", replace(unserved, device="cpu"), DEFAULT_LIMITS)
    with pytest.raises(UnsupportedPool):
        check("auto", unserved, DEFAULT_LIMITS)
    assert (chosen("auto", "cuda"), chosen("auto", "cpu")) == ("flashinfer", "torch")


@pytest.mark.parametrize(
    ("num_q_heads", "limits", "is_served"),
    [
        (128, StepLimits(max_seqs=256, max_tokens=8192), True),
        (128, StepLimits(max_seqs=256, max_tokens=16384), False),
        (128, StepLimits(max_seqs=9000, max_tokens=9000), False),
        (16, StepLimits(max_seqs=256, max_tokens=65536), True),
        (16, StepLimits(max_seqs=9000, max_tokens=9000), False),
    ],
)
def test_steps_over_latents_are_no_larger_than_their_plan(
    num_q_heads, limits, is_served
):
    wanted = replace(_LATENT, num_q_heads=num_q_heads)
    check("torch", wanted, limits)
    if is_served:
        check("flashinfer", wanted, limits)
        return
    told = rf"{limits.max_tokens} tokens of {limits.max_seqs} sequences .*{num_q_heads} query"
    with pytest.raises(
        UnsupportedPool, match=f"{told}.*lower --max-num-batched-tokens or"
    ):
        check("flashinfer", wanted, limits)


@pytest.mark.parametrize(
    ("name", "sizes", "copied"),
    [
        ("auto", {"kv_dtype": "float8_e4m3fn"}, 2 * 16 * 576),
        ("torch", {"kv_dtype": "float8_e4m3fn"}, 0),
        ("auto", {}, 0),
        ("auto", {"kv_dtype": "float8_e4m3fn", "num_components": 2}, 0),
        ("auto", {"kv_dtype": "float8_e4m3fn", "device": "cpu"}, 0),
    ],
)
def test_latents_of_fp8_are_copied_for_the_kernels(name, sizes, copied):
    assert copied_bytes(name, replace(_LATENT, **sizes), 16) == copied


def test_a_backend_that_cannot_read_the_pool_is_refused():
    with pytest.raises(ValueError, match=r"flashinfer .*--attention-backend torch"):
        make(Shape(), "flashinfer")


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="it is installed")
@pytest.mark.parametrize("num_components", [1, 2])
def test_a_missing_package_is_named_with_its_fix(num_components):
    with pytest.raises(
        BackendMissing, match=r"pip install flashinfer-python, or use --att"
    ):
        backend_class("auto", "cuda", num_components)

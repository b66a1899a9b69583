"""The limits of attention backends are checked without a GPU and without importing the
backends.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from attention.registry import BackendMissing, backend_class
from attention.support import (
    DEFAULT_LIMITS,
    AttentionSpec,
    StepLimits,
    UnsupportedPool,
    check_supported,
    extra_bytes_per_block,
    resolve_backend_name,
)
from tests.attention.reference import Shape, make

_SERVED = AttentionSpec(
    device="cuda",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    head_dim=128,
    num_components=2,
    num_q_heads=32,
)
_LATENT = replace(_SERVED, head_dim=576, num_components=1, num_q_heads=16)


@pytest.mark.parametrize(
    "spec",
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
def test_supported_pools_pass_the_check(spec):
    check_supported("auto", spec, DEFAULT_LIMITS)
    check_supported("flashinfer", spec, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            replace(_SERVED, device="cpu"),
            "reads GPU memory only, and the KV pool is on cpu",
        ),
        (replace(_SERVED, head_dim=80), r"head_dim of 80, only 64, 128, 256"),
        (replace(_SERVED, head_dim=576), r"head_dim of 576, only"),
        (
            replace(_SERVED, dtype="float32", kv_dtype="float32"),
            r"queries of float32 over KV of float32: use --dtype bfloat16 or float16, ",
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
def test_unsupported_pool_raises_an_error_with_the_fix(spec, message):
    with pytest.raises(UnsupportedPool, match=f"{message}.*--attention-backend torch"):
        check_supported("flashinfer", spec, DEFAULT_LIMITS)
    check_supported("torch", spec, DEFAULT_LIMITS)


def test_auto_is_flashinfer_on_a_gpu_only():
    unsupported = replace(_SERVED, head_dim=80)
    check_supported("auto", replace(unsupported, device="cpu"), DEFAULT_LIMITS)
    with pytest.raises(UnsupportedPool):
        check_supported("auto", unsupported, DEFAULT_LIMITS)
    assert resolve_backend_name("auto", "cuda") == "flashinfer"
    assert resolve_backend_name("auto", "cpu") == "torch"


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
def test_steps_over_latents_must_fit_into_their_plan(num_q_heads, limits, is_served):
    spec = replace(_LATENT, num_q_heads=num_q_heads)
    check_supported("torch", spec, limits)
    if is_served:
        check_supported("flashinfer", spec, limits)
        return
    message = (
        rf"{limits.max_tokens} tokens of {limits.max_seqs} sequences "
        rf".*{num_q_heads} query.*lower --max-num-batched-tokens or"
    )
    with pytest.raises(UnsupportedPool, match=message):
        check_supported("flashinfer", spec, limits)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("auto", {"kv_dtype": "float8_e4m3fn"}, 2 * 16 * 576),
        ("torch", {"kv_dtype": "float8_e4m3fn"}, 0),
        ("auto", {}, 0),
        ("auto", {"kv_dtype": "float8_e4m3fn", "num_components": 2}, 0),
        ("auto", {"kv_dtype": "float8_e4m3fn", "device": "cpu"}, 0),
    ],
)
def test_only_fp8_latents_on_a_gpu_need_extra_bytes(name, changes, expected):
    spec = replace(_LATENT, **changes)
    assert extra_bytes_per_block(name, spec, 16) == expected


def test_backend_that_cannot_read_the_pool_is_not_created():
    with pytest.raises(ValueError, match=r"flashinfer .*--attention-backend torch"):
        make(Shape(), "flashinfer")


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="it is installed")
@pytest.mark.parametrize("num_components", [1, 2])
def test_missing_package_raises_an_error_with_the_fix(num_components):
    with pytest.raises(
        BackendMissing, match=r"pip install flashinfer-python, or use --att"
    ):
        backend_class("auto", "cuda", num_components)

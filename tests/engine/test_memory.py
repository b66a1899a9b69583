"""Sizing the KV pool: the limits that decide, and the words of refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.support import UnsupportedPool
from engine.worker.load import (
    CannotStart,
    LoadProgress,
    check_weights_fit,
    describe_failure,
    explaining_failures,
)
from engine.worker.memory import (
    MemoryTooSmall,
    block_bytes,
    decide_max_model_len,
    size_pool,
)
from engine.worker.rank import measure_pool_size
from engine.worker.runner import ModelRunner
from kvcache.groups import ONE_GROUP
from model.config import load_config, parse_config
from model.files.safetensors_files import StoredTensor
from model.parallel import Parallel
from protocol.settings.machine import free_host_bytes
from tests.make_models import ensure_model
from tests.model.test_real_configs import MODELS
from tests.rigs.engines import make_config

_BASE = make_config(role="decode", block_size=16, max_num_seqs=4)


def _size(free_bytes: int = 10**9, **options: Any) -> tuple[int, int]:
    config = _BASE.model_copy(update=options)
    size = size_pool(config, block_bytes=1000, model_max_len=256, free_bytes=free_bytes)
    return size.num_blocks, size.max_model_len


@pytest.mark.parametrize(
    ("options", "sized"),
    [
        pytest.param(
            {"kv_cache_tokens": 300},
            (19 + 1, 256),
            id="tokens are rounded up to blocks",
        ),
        pytest.param(
            {"kv_cache_bytes": 20_999}, (20 + 1, 256), id="bytes are rounded down"
        ),
        pytest.param(
            {"free_bytes": 10**12}, (4 * 16 + 1, 256), id="no more than is useful"
        ),
        pytest.param(
            {"free_bytes": 100_000}, (20 + 1, 256), id="a share of what is free"
        ),
        pytest.param(
            {"kv_cache_tokens": 64}, (5, 64), id="a small pool shortens sequences"
        ),
        pytest.param(
            {"device": "cuda"}, (10**6, 256), id="a GPU gives all that is free"
        ),
        pytest.param(
            {"device": "cuda", "kv_cache_tokens": 160}, (11, 160), id="as was asked"
        ),
    ],
)
def test_the_number_of_blocks_beside_the_null_block(options, sized):
    assert _size(**options) == sized


_LITTLE = {"device": "cuda", "free_bytes": 2_000 - 2**20}
_FULL = {"device": "cuda", "free_bytes": 10_000}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_cache_tokens": 64, "max_model_len": 200}, "holds 64 tokens .* 136 .* are missing"),
        ({"kv_cache_bytes": 999}, "one block takes 1000 bytes"),
        ({"free_bytes": 10 << 20, "kv_cache_bytes": 10**8},
         r"--kv-cache-bytes takes 95 MiB, but .* has 10 MiB free .* lower --kv-cache-bytes"),
        ({**_FULL, "kv_cache_tokens": 160}, r"takes .* MiB, .* lower --kv-cache-tokens, or raise"),
        (_LITTLE, r" 1 MiB are missing for one block of 16 tokens; raise --gpu-memory-utilization "
         r"or --tp, lower --max-num-batched-tokens or --max-num-seqs, or free the GPU"),
        ({**_LITTLE, "tp": 2, "dcp": 2},
         r"of 32 tokens; .* lower --max-num-batched-tokens, --max-num-seqs or --max-model-len,"),
        ({**_FULL, "max_model_len": 256}, r"112 tokens are missing.*--gpu-memory-utilization"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_with_what_helps(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(MemoryTooSmall, match=told):
        _size(**options)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "told"),
    [(16, None, None), (4, 64, None), (4, None, 64), (16, 200, None), (5, None, 80)],
)
def test_a_pool_that_shortens_sequences_unasked_is_told(
    num_blocks, max_model_len, told, caplog
):
    options = {"kv_cache_tokens": 256, "max_model_len": max_model_len}
    config = _BASE.model_copy(update=options)
    size = size_pool(config, block_bytes=1000, model_max_len=256, free_bytes=10**9)
    length = decide_max_model_len(
        config, size, num_blocks + 1, 256
    )  # another rank had less room
    assert length == min(num_blocks * 16, max_model_len or 256)
    warnings = [
        one.getMessage() for one in caplog.records if one.levelname == "WARNING"
    ]
    if told is None:
        assert warnings == []
        return
    (warning,) = warnings
    for words in (
        f"more than {told} tokens",
        "allows 256",
        "--kv-cache-tokens",
        f"-len {told}",
    ):
        assert words in warning


def test_a_user_is_told_without_the_names_of_our_classes() -> None:
    with pytest.raises(CannotStart) as caught, explaining_failures():
        raise MemoryTooSmall("too small: lower it")
    assert describe_failure(caught.value) == "too small: lower it"
    assert describe_failure(KeyError("x")) == "KeyError: 'x'"


def test_free_memory_is_read_and_that_of_a_container_is_less(tmp_path: Path) -> None:
    assert free_host_bytes() > 2**20
    whole = free_host_bytes(tmp_path)
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    for limit, free in (("1000000", 400_000), ("500000", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_host_bytes(tmp_path) == free
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) > whole / 2


def test_a_model_larger_than_the_gpu_says_how_much_is_missing() -> None:
    config = _BASE.model_copy(update={"dtype": "bfloat16", "device": "cuda"})
    model, more = (
        parse_config(MODELS["phi-4"][1]),
        "or more",
    )  # shared by 1, 2, 5, 10 ranks
    for free, told in [
        (
            7,
            rf"take 27\.30 GiB.*cuda:1 has 7\.00 of its 16\.00 GiB free: 20\.30.*--tp 5 {more},",
        ),
        (15, f"use --tp 2 {more}, or --quantization fp8, or free the GPU"),
        (0, "use larger GPUs, or free the GPU"),
    ]:
        with pytest.raises(MemoryTooSmall, match=told):
            check_weights_fit(model, free << 30, 16 << 30, config, "cuda:1")
    check_weights_fit(model, 28 << 30, 80 << 30, config, "cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_no_machine_has_is_refused() -> None:
    config = _BASE.model_copy(update={"device": "cuda", "devices": [0]})
    with pytest.raises(ValueError, match=r"torch finds no GPU .*: use --device cpu"):
        ModelRunner(config, load_config(ensure_model("gqa")), Parallel())


def test_what_no_backend_serves_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    options = {
        "attention_backend": "flashinfer",
        "model_dir": str(tmp_path / "no weights"),
    }
    config = _BASE.model_copy(update=options)
    with pytest.raises(UnsupportedPool, match="reads GPU memory only"):
        ModelRunner(config, load_config(ensure_model("gqa")), Parallel())


def test_a_start_tells_how_far_its_weights_are() -> None:
    told: list[str] = []
    stored = StoredTensor(Path("a"), "F32", (1 << 28,), 0, 1 << 30)
    now = 0.0
    progress = LoadProgress(dict.fromkeys("abcd", stored), told.append, lambda: now)
    for name in "abcd":
        progress(name)
        now += 2.0
    at = "loading weights: 0.00 of 4.00 GiB, 0 of 4 tensors"
    assert told == [
        at,
        "loading weights: 2.00 of 4.00 GiB, 2 of 4 tensors, about 4 s left",
    ]


@pytest.mark.parametrize(
    ("transfer", "staged"), [("auto", 64), ("nixl", 64), ("mapped", 0)]
)
def test_what_a_rank_stages_with_is_no_kv_memory(transfer, staged, monkeypatch):
    monkeypatch.setattr("engine.worker.rank.kv_budget_bytes", lambda _: 300 << 20)
    monkeypatch.setattr("engine.worker.rank.block_bytes", lambda *_: 1 << 20)
    runner: Any = SimpleNamespace(groups=ONE_GROUP)
    model: Any = SimpleNamespace(max_position=256)
    options = {"device": "cuda", "max_num_seqs": 64, "staging_bytes": 64 << 20}
    config = _BASE.model_copy(update={"transfer": transfer, **options})
    assert measure_pool_size(config, model, runner).num_blocks == 300 - staged - 4


def test_a_block_of_latents_in_fp8_takes_a_copy_of_one_layer_besides():
    options = {"device": "cuda", "dtype": "bfloat16", "block_size": 16}
    model = load_config(ensure_model("mla"))
    wide = make_config(**options)
    small = wide.model_copy(update={"kv_cache_dtype": "float8_e4m3fn"})
    by_torch = small.model_copy(update={"attention_backend": "torch"})
    found = [
        block_bytes(config, model) // model.kv_dim // 16
        for config in (wide, small, by_torch)
    ]
    assert found == [2 * model.num_layers, model.num_layers + 2, model.num_layers]

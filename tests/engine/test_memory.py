"""The size of the KV pool, and the errors if the weights or the pool do not fit."""

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
    GpuUse,
    MemoryGauge,
    MemoryTooSmall,
    block_bytes,
    decide_max_model_len,
    kv_bytes,
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

_BASE_CONFIG = make_config(role="decode", block_size=16, max_num_seqs=4)


def _pool_size(free_bytes: int = 10**9, **options: Any) -> tuple[int, int]:
    """Returns the blocks of the pool, and the tokens of the longest sequence."""
    config = _BASE_CONFIG.model_copy(update=options)
    size = size_pool(config, block_bytes=1000, model_max_len=256, free_bytes=free_bytes)
    return size.num_blocks, size.max_model_len


@pytest.mark.parametrize(
    ("options", "size"),
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
            {"free_bytes": 10**12}, (4 * 16 + 1, 256), id="at most the useful blocks"
        ),
        pytest.param(
            {"free_bytes": 100_000}, (20 + 1, 256), id="a share of the free memory"
        ),
        pytest.param(
            {"kv_cache_tokens": 64}, (5, 64), id="a small pool shortens sequences"
        ),
        pytest.param({"device": "cuda"}, (10**6, 256), id="all free memory of a GPU"),
        pytest.param(
            {"device": "cuda", "kv_cache_tokens": 160}, (11, 160), id="option on a GPU"
        ),
    ],
)
def test_size_of_the_pool_follows_from_options_and_free_memory(options, size):
    assert _pool_size(**options) == size


_NO_MEMORY = {"device": "cuda", "free_bytes": 2_000 - 2**20}
_SMALL_MEMORY = {"device": "cuda", "free_bytes": 10_000}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_tokens": 64, "max_model_len": 200},
         "holds 64 tokens .* 136 .* are missing"),
        ({"kv_cache_bytes": 999}, "one block takes 1000 bytes"),
        ({"free_bytes": 10 << 20, "kv_cache_bytes": 10**8},
         r"--kv-cache-bytes takes 95 MiB, but .* has 10 MiB free .* lower "
         r"--kv-cache-bytes"),
        ({**_SMALL_MEMORY, "kv_cache_tokens": 160},
         r"takes .* MiB, .* lower --kv-cache-tokens, or raise"),
        (_NO_MEMORY,
         r" 1 MiB are missing for one block of 16 tokens; raise "
         r"--gpu-memory-utilization "
         r"or --tp, lower --max-num-batched-tokens or --max-num-seqs, or free the GPU"),
        ({**_NO_MEMORY, "tp": 2, "dcp": 2},
         r"of 32 tokens; .* lower --max-num-batched-tokens, --max-num-seqs or "
         r"--max-model-len,"),
        ({**_SMALL_MEMORY, "max_model_len": 256},
         r"112 tokens are missing.*--gpu-memory-utilization"),
    ],
)  # fmt: skip
def test_pool_that_does_not_fit_is_refused_with_the_options_that_help(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MemoryTooSmall, match=message):
        _pool_size(**options)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "reported_len"),
    [(16, None, None), (4, 64, None), (4, None, 64), (16, 200, None), (5, None, 80)],
)
def test_warns_if_only_the_pool_size_limits_the_length_of_sequences(
    num_blocks, max_model_len, reported_len, caplog
):
    """`num_blocks` blocks fit on every rank. More blocks may fit on this rank."""
    options = {"kv_cache_tokens": 256, "max_model_len": max_model_len}
    config = _BASE_CONFIG.model_copy(update=options)
    size = size_pool(config, block_bytes=1000, model_max_len=256, free_bytes=10**9)
    length = decide_max_model_len(config, size, num_blocks + 1, 256)
    assert length == min(num_blocks * 16, max_model_len or 256)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    if reported_len is None:
        assert warnings == []
        return
    (warning,) = warnings
    for words in (
        f"more than {reported_len} tokens",
        "allows 256",
        "--kv-cache-tokens",
        f"-len {reported_len}",
    ):
        assert words in warning


def test_message_for_the_user_has_no_class_name() -> None:
    with pytest.raises(CannotStart) as caught, explaining_failures():
        raise MemoryTooSmall("too small: lower it")
    assert describe_failure(caught.value) == "too small: lower it"
    assert describe_failure(KeyError("x")) == "KeyError: 'x'"


def test_free_memory_of_a_container_is_below_its_limit(tmp_path: Path) -> None:
    assert free_host_bytes() > 2**20
    machine_bytes = free_host_bytes(tmp_path)
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    for limit, free in (("1000000", 400_000), ("500000", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_host_bytes(tmp_path) == free
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) > machine_bytes / 2


def test_error_of_a_model_larger_than_the_gpu_states_how_much_is_missing() -> None:
    config = _BASE_CONFIG.model_copy(update={"dtype": "bfloat16", "device": "cuda"})
    model = parse_config(MODELS["phi-4"][1])  # phi-4 allows 1, 2, 5 or 10 ranks
    for free_gib, message in [
        (
            7,
            r"take 27\.30 GiB.*cuda:1 has 7\.00 of its 16\.00 GiB free: 20\.30.*"
            "--tp 5 or more,",
        ),
        (15, "use --tp 2 or more, or --quantization fp8, or free the GPU"),
        (0, "use larger GPUs, or free the GPU"),
    ]:
        with pytest.raises(MemoryTooSmall, match=message):
            check_weights_fit(model, free_gib << 30, 16 << 30, config, "cuda:1")
    check_weights_fit(model, 28 << 30, 80 << 30, config, "cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_device_cuda_is_refused_on_a_machine_without_a_gpu() -> None:
    config = _BASE_CONFIG.model_copy(update={"device": "cuda", "devices": [0]})
    with pytest.raises(ValueError, match=r"torch finds no GPU .*: use --device cpu"):
        ModelRunner(config, load_config(ensure_model("gqa")), Parallel())


def test_model_that_no_backend_serves_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    options = {
        "attention_backend": "flashinfer",
        "model_dir": str(tmp_path / "no weights"),
    }
    config = _BASE_CONFIG.model_copy(update=options)
    with pytest.raises(UnsupportedPool, match="reads GPU memory only"):
        ModelRunner(config, load_config(ensure_model("gqa")), Parallel())


def test_progress_of_loading_weights_is_reported() -> None:
    reports: list[str] = []
    stored = StoredTensor(Path("a"), "F32", (1 << 28,), 0, 1 << 30)
    now = 0.0
    progress = LoadProgress(dict.fromkeys("abcd", stored), reports.append, lambda: now)
    for name in "abcd":
        progress(name)
        now += 2.0
    assert reports == [
        "loading weights: 0.00 of 4.00 GiB, 0 of 4 tensors",
        "loading weights: 2.00 of 4.00 GiB, 2 of 4 tensors, about 4 s left",
    ]


@pytest.mark.parametrize(
    ("transfer", "staging_mib"), [("auto", 64), ("nixl", 64), ("mapped", 0)]
)
def test_staging_memory_of_a_rank_is_not_used_for_kv(
    transfer, staging_mib, monkeypatch
):
    monkeypatch.setattr("engine.worker.rank.kv_budget_bytes", lambda _: 300 << 20)
    monkeypatch.setattr("engine.worker.rank.block_bytes", lambda *_: 1 << 20)
    runner: Any = SimpleNamespace(groups=ONE_GROUP)
    model: Any = SimpleNamespace(max_position=256)
    options = {"device": "cuda", "max_num_seqs": 64, "staging_bytes": 64 << 20}
    config = _BASE_CONFIG.model_copy(update={"transfer": transfer, **options})
    assert measure_pool_size(config, model, runner).num_blocks == 300 - staging_mib - 4


def test_block_of_fp8_latents_takes_an_additional_copy_of_one_layer():
    options = {"device": "cuda", "dtype": "bfloat16", "block_size": 16}
    model = load_config(ensure_model("mla"))
    bfloat16 = make_config(**options)
    fp8 = bfloat16.model_copy(update={"kv_cache_dtype": "float8_e4m3fn"})
    fp8_with_torch = fp8.model_copy(update={"attention_backend": "torch"})
    bytes_per_element = [
        block_bytes(config, model) // model.kv_dim // 16
        for config in (bfloat16, fp8, fp8_with_torch)
    ]
    assert bytes_per_element == [
        2 * model.num_layers,
        model.num_layers + 2,
        model.num_layers,
    ]


def test_memory_in_use_is_that_of_this_process_on_a_cpu():
    gauge = MemoryGauge(torch.device("cpu"))
    used, total = gauge.values().values()
    assert 10_000_000 < used < total
    assert gauge.values() == gauge.values(), "it was measured twice at once"


_GIB = 2**30


@pytest.mark.parametrize(
    ("use", "utilization", "gib"),
    [
        pytest.param(
            GpuUse(total=100 * _GIB, free=68 * _GIB, reserved=30 * _GIB),
            0.9,
            90 - 2 - 20,
            id="alone, 2 GiB are outside torch",
        ),
        pytest.param(
            GpuUse(total=100 * _GIB, free=25 * _GIB, reserved=30 * _GIB),
            0.45,
            45 - 3 - 20,
            id="another server has 43 GiB",
        ),
        pytest.param(
            GpuUse(total=100 * _GIB, free=5 * _GIB, reserved=30 * _GIB),
            0.9,
            5 + 30 - 20,
            id="another server has 63 GiB of the 90 that this one may take",
        ),
    ],
)
def test_memory_of_other_processes_is_not_counted(
    use: GpuUse, utilization: float, gib: int
) -> None:
    assert kv_bytes(use, utilization, peak_bytes=20 * _GIB) == gib * _GIB

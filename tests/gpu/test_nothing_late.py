"""All kernels that requests can need are loaded before a server is ready."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.matrix import model_dir
from tests.make_models import CHAT_TEMPLATE, KINDS
from tests.rigs import cluster
from tests.rigs.client import MODEL, TIMEOUT_S, complete, prefill
from tests.rigs.cluster import Server, start_decode, start_prefill, started
from tests.rigs.plain_http import http

pytestmark = pytest.mark.gpu

_CONTEXT = 8192
_LENGTHS = (
    *(1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 200),
    *(255, 256, 257, 300, 383, 511, 512, 513, 700, 1000),
    *(1023, 1024, 1025, 1500, 2047, 2048, 2049, 3000, 4096, 5000),
)
_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 8}
_SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "mla": _LATENTS,
    "moe": _LATENTS,
}
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.8, "n": 5, "seed": 3},
    {"logprobs": 0},
    {"logprobs": 1, "temperature": 0.5},
    {"logprobs": 5, "n": 2, "temperature": 1.0},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 3},
    {"logit_bias": {"7": 5.0, "9": -100.0}, "temperature": 0.3},
    {"min_tokens": 4, "stop_token_ids": [5, 6]},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 5, "temperature": 0.9, "top_k": 40},
)
_NEW_KERNELS = """
import torch
from engine.worker.kernel_watch import KERNELS, set_kernel_cache, install_kernel_hooks
set_kernel_cache()
install_kernel_hooks()
KERNELS.is_ready = True
from flashinfer.page import get_page_module
from model import fused_ops
counts = [KERNELS.num_late]
for rows in (3, 16):  # both use one variant of the kernel
    x = torch.ones(rows, 72, device="cuda", dtype=torch.bfloat16)
    fused_ops.kernels().rms_norm(x, x[0], 1e-5)
    counts.append(KERNELS.num_late)
get_page_module()
print(*counts, KERNELS.num_late)
"""
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "old": {"type": "boolean"},
    },
    "required": ["name", "old"],
    "additionalProperties": False,
}


def _options(*options: str, context: int = _CONTEXT) -> tuple[str, ...]:
    gpu = ("--device", "cuda", "--dtype", "bfloat16", "--load-format", "dummy")
    # Requests may queue for long, because other tests may slow this GPU down.
    capacity = ("--kv-cache-tokens", "65536", "--max-queue-s", "600")
    return (*gpu, "--max-model-len", str(context), *capacity, *options)


_FP8 = ("--kv-cache-dtype", "float8_e4m3fn", "--kv-scales", "0.03")
_NHD = ("--block-size", "16", "--kv-layout", "LBCNHD")
_FEW = ("--max-num-batched-tokens", "300", "--max-num-seqs", "5")
_TP_2 = ("--tp", "2", "--devices", "0,1")


def _gpus(count: int) -> tuple[pytest.MarkDecorator, pytest.MarkDecorator]:
    has_fewer = torch.cuda.device_count() < count
    return (
        pytest.mark.multi_gpu,
        pytest.mark.skipif(has_fewer, reason=f"needs {count} CUDA GPUs"),
    )


@pytest.mark.parametrize(
    ("kind", "prefill_options", "decode_options"),
    [
        pytest.param("gqa", (), (), id="plain"),
        pytest.param(
            "gqa", _NHD, ("--enforce-eager",), id="another geometry, no graphs"
        ),
        pytest.param(
            "gqa", (*_NHD, *_FEW), (*_FEW, "--transfer", "nixl"), id="staged, chunks"
        ),
        pytest.param("gqa", _FP8, _FP8, id="fp8"),
        pytest.param("gqa", (*_FP8, *_NHD), ("--kv-convert",), id="fp8 to bfloat16"),
        pytest.param("mla", (), (), id="latents"),
        pytest.param("mla", _FP8, _FP8, id="latents, fp8"),
        pytest.param("moe", (), (), id="experts"),
        pytest.param("gqa", _TP_2, _TP_2, id="tp 2", marks=_gpus(2)),
        pytest.param(
            "gqa", (), (*_TP_2, "--dcp", "2"), id="shared tokens", marks=_gpus(2)
        ),
        pytest.param(
            "mla", (), (*_TP_2, "--dcp", "2"), id="shared latents", marks=_gpus(2)
        ),
    ],
)
def test_no_request_loads_a_kernel(
    kind, prefill_options, decode_options, tmp_path, monkeypatch
):
    # The start may take long, because kernels may have to be compiled.
    monkeypatch.setattr(cluster, "START_TIMEOUT_S", 500.0)
    model = _make_model(kind, tmp_path)
    p = partial(start_prefill, model, *_options(*prefill_options))
    d = partial(start_decode, model, *_options(*decode_options))
    with started(p, d) as servers:
        prefiller, decoder = servers
        for send_requests in (_send_all_lengths, _send_all_samplings, _send_crowds):
            send_requests(prefiller, decoder)
            for server in servers:
                num_late = server.metrics()["baton_kernels_loaded_late_total"]
                assert num_late == 0.0, (send_requests.__name__, server.name)


def test_late_kernels_and_modules_are_counted():
    process = subprocess.run(
        [sys.executable, "-c", _NEW_KERNELS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["0", "1", "1", "2"]
    assert "kernel _rms_norm is loaded" in process.stderr
    assert "kernel page is loaded" in process.stderr


def _make_model(kind: str, folder: Path) -> Path:
    """Saves a config and a tokenizer. Without weights, servers must use dummy weights.

    The kernels support the config's heads. The tokenizer is that of a trained model.
    """
    architecture, shape = KINDS[kind]
    trained = model_dir("gqa4")
    for path in trained.glob("*token*"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    trained_config = json.loads((trained / "config.json").read_text())
    names = ("vocab_size", "eos_token_id", "model_type")
    config = {
        **{name: trained_config[name] for name in names},
        **shape,
        **_SHAPES[kind],
        "architectures": [architecture],
        "model_type": "llama" if kind == "gqa" else "deepseek_v2",
        "num_hidden_layers": 2,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_prompt_rng = random.Random(11)


def _prompt(length: int) -> list[int]:
    return [_prompt_rng.randrange(3, 250) for _ in range(length)]


def _complete_through_both(
    prefiller: Server, decoder: Server, prompt: list[int], **members: Any
) -> None:
    """Sends a request through both servers, as the proxy does."""
    params = prefill(prefiller.url, prompt, **members)
    complete(decoder.url, prompt, **members, kv_transfer_params=params)


def _send_all_lengths(prefiller: Server, decoder: Server) -> None:
    for length in _LENGTHS:
        prompt = _prompt(length)
        _complete_through_both(prefiller, decoder, prompt)
        complete(decoder.url, _prompt(length))
        # The beginning of these longer prompts is cached.
        for server in (prefiller, decoder):
            complete(server.url, prompt + _prompt(length % 700 + 1))


def _send_all_samplings(prefiller: Server, decoder: Server) -> None:
    for members in _SAMPLING:
        prompt = _prompt(90)
        if "prompt_logprobs" not in members and "n" not in members:
            _complete_through_both(prefiller, decoder, prompt, **members)
        for server in (prefiller, decoder):
            complete(server.url, _prompt(150), **members)
    for server in (prefiller, decoder):
        _chat(server)


def _chat(server: Server, **members: Any) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell of Anna."}],
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": _SCHEMA},
        },
        **members,
    }
    response = http.post(
        f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S
    )
    assert response.status_code == 200, response.text


def _send_crowds(prefiller: Server, decoder: Server) -> None:
    """Sends many requests of all kinds concurrently, in random order.

    Steps then have large batches that mix all kinds of requests.
    """
    rng = random.Random(5)
    calls: list[Callable[[], Any]] = []
    for _ in range(120):
        prompt = _prompt(rng.choice(_LENGTHS))
        members = rng.choice((*_SAMPLING, {}, {}, {}))
        server = rng.choice((prefiller, decoder))
        max_tokens = rng.randrange(1, 60)
        calls.append(partial(complete, server.url, prompt, max_tokens, **members))
    for _ in range(40):
        prompt = _prompt(rng.choice(_LENGTHS))
        calls.append(partial(_complete_through_both, prefiller, decoder, prompt))
    chat = partial(_chat, rng.choice((prefiller, decoder)), n=3, logprobs=True)
    calls += [chat] * 6
    rng.shuffle(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        for future in futures:
            future.result()

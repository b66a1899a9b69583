"""The limits with which benchmarks.engine compares its measurements.

Two limits are measured on the device: the rate of a plain copy and the rate of a plain
matmul. The remaining functions count the work of a step: the bytes of weights and the
tokens of KV that a decode step reads, and the model FLOPs of a prefill.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from model.config import ModelConfig
from model.sizes import MatrixGroup, bits_per_element, implied_weights

_WARMUP_CALLS = 3


class Ceilings(NamedTuple):
    """Rates that an engine can hardly exceed, as measured on the device."""

    copy_bytes_per_s: float  # bytes read plus bytes written
    matmul_flops_per_s: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure a plain copy and a plain matmul, both large enough to fill the device."""
    is_gpu = device.type == "cuda"
    nbytes = 4 * 2**30 if is_gpu else 64 * 2**20
    side = 8192 if is_gpu else 512
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = mean_s(partial(target.copy_, source), 10)
    a = torch.randn(side, side, device=device, dtype=dtype)
    b = torch.randn(side, side, device=device, dtype=dtype)
    matmul_s = mean_s(partial(torch.mm, a, b), 20)
    del source, target, a, b
    if is_gpu:
        torch.cuda.empty_cache()
    return Ceilings(
        copy_bytes_per_s=2 * nbytes / copy_s,
        matmul_flops_per_s=2 * side**3 / matmul_s,
    )


def mean_s(call: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of `call` on the device.

    The calls run back to back, after three warm-up calls.
    """
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.timeit(_WARMUP_CALLS)
    return float(timer.timeit(repeats).mean)


def weight_bytes_per_step(
    config: ModelConfig, batch: int, itemsize: int, *, keep_quantised: bool
) -> int:
    """Return the bytes of weights that a decode step of `batch` sequences reads.

    The step reads as many experts as `batch` tokens select on average, if all experts
    are equally likely. It reads all other weights, except an input embedding that is
    not tied to the output layer.

    Args:
        itemsize: bytes per element of weights that are not quantized.
        keep_quantised: whether quantized weights stay quantized in memory.
    """
    expert_share = 1.0  # share of the experts that the step reads
    if moe := config.moe:
        expert_share = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
    bits = 0.0
    for weights in implied_weights(config):
        if "embed_tokens" in weights.name and not config.tie_embeddings:
            continue
        element_bits = bits_per_element(
            config, weights.name, itemsize, keep_quantised=keep_quantised
        )
        weight_bits = weights.elements * element_bits
        is_expert = _is_of_routed_experts(weights)
        bits += weight_bits * expert_share if is_expert else weight_bits
    return int(bits) // 8


def _is_of_routed_experts(weights: MatrixGroup) -> bool:
    return len(weights.shape) > 2 or ".experts." in weights.name


def num_attended_tokens(config: ModelConfig, num_tokens: int) -> int:
    """Return the number of tokens that a query attends to, summed over all layers.

    Args:
        num_tokens: tokens of the context, including the query's token.
    """
    windows = map(config.window_of, range(config.num_layers))
    return sum(min(num_tokens, window or num_tokens) for window in windows)


def prefill_flops(config: ModelConfig, num_tokens: int, num_before: int = 0) -> float:
    """Return the model FLOPs of one prompt, or of a part of it.

    Each token costs two FLOPs per weight that it uses. Causal attention and one row of
    logits are added.

    Args:
        num_before: preceding tokens of the prompt, with KV from earlier steps.
    """
    expert_share = 1.0  # share of the experts that compute a token
    if moe := config.moe:
        expert_share = moe.experts_per_token / moe.num_experts
    weights = sum(
        group.elements * (expert_share if _is_of_routed_experts(group) else 1.0)
        for group in implied_weights(config)
        if group.name.startswith("model.layers.")
    )
    first = num_before + 1
    pairs = sum(
        num_attended_tokens(config, first + index) for index in range(num_tokens)
    )
    dims = 2 * config.head_dim
    if config.mla:
        # Absorbed attention uses the latents both as keys and as values. Only keys have
        # a rope part.
        dims = 2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    attention_flops = 2.0 * pairs * config.num_heads * dims
    logits_flops = 2.0 * config.vocab_size * config.hidden_size
    return 2.0 * num_tokens * weights + attention_flops + logits_flops

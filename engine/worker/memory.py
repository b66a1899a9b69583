"""Makes the attention backend for a rank's KV pool, decides the size of the pool, and
raises errors if the memory is too small. Measures the memory in use."""

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention.base import AttentionBackend, LayerAttention
from attention.dcp import ContextParallelBackend
from attention.registry import create_backend
from attention.support import extra_bytes_per_block
from engine.config import EngineConfig
from engine.geometry import attention_spec, kv_groups, layout_of, step_limits
from engine.worker.grouped import GroupedBackend
from kvcache.groups import ONE_GROUP, KVGroups
from kvcache.layout import MAX_BLOCK_SIZE_TOKENS
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from model.config import ModelConfig
from model.decoder import StepModel

logger = logging.getLogger("baton.engine")

# By default, the KV pool of a rank on a CPU takes this share of the memory that is free
# for the rank once the weights are mapped, up to _CPU_DEFAULT_MAX_BYTES. Other servers,
# the page cache and activations need the rest.
_CPU_FREE_SHARE = 0.2
_CPU_DEFAULT_MAX_BYTES = 4 * 2**30
_UTILIZATION = "--gpu-memory-utilization"
# Upper bound of the GPU memory that one rank takes outside torch's allocator. A rank
# takes 0.7 GiB on an H200. The rest of the bound is for NCCL's buffers.
_MAX_OUTSIDE_TORCH_BYTES = 3 * 2**30
# Minimum time between two measurements of the memory in use. The driver takes 0.1 ms
# for a measurement, and an engine may collect its statistics many times per second.
_INTERVAL_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryTooSmall(Exception):
    """The weights, a step or the KV pool do not fit into the memory. The message states
    how much memory is missing and which options help."""


class PoolSize(NamedTuple):
    """The size of a KV pool.

    Attributes:
        num_blocks: blocks of the pool, including the null block.
        max_model_len: tokens of the longest sequence that the pool can hold and that
            the options and the model allow.
        explanation: the size and the option that decided it, for the log.
    """

    num_blocks: int
    max_model_len: int
    explanation: str


class RankMemory(NamedTuple):
    """A rank's KV pool, and the attention backend that reads and writes it."""

    pool: KVPool
    backend: AttentionBackend


def max_sequence_tokens(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of the longest sequence that the options and the model allow, even if the
    pool cannot hold it."""
    return config.max_model_len or model_config.max_position


def make_memory(
    config: EngineConfig, model_config: ModelConfig, model: StepModel, pool: KVPool
) -> RankMemory:
    """Makes the attention backend for a pool. Returns the pool and the backend."""
    spec = model.attention_spec
    context = model.parallel.context
    sizes: Any = {"head_dim": model_config.kv_dim, "scale": spec.scale}

    def make(
        backend_pool: KVPool,
        num_q_heads: int,
        layers: Sequence[LayerAttention] = spec.layers,
        shared_with: AttentionBackend | None = None,
    ) -> AttentionBackend:
        limits = step_limits(
            config, model_config, is_for_dcp_group=num_q_heads > spec.num_q_heads
        )
        return create_backend(
            config.attention_backend,
            backend_pool,
            **sizes,
            num_q_heads=num_q_heads,
            layers=layers,
            shared_with=shared_with,
            dtype=getattr(torch, config.dtype),
            limits=limits,
        )

    if pool.groups.count > 1:
        _, group_layers = kv_groups(model_config)
        make_for_group = partial(make, pool, spec.num_q_heads)
        grouped = GroupedBackend(
            pool,
            group_layers,
            spec.layers,
            make_for_group,
            num_q_heads=spec.num_q_heads,
            **sizes,
        )
        return RankMemory(pool, grouped)
    if context is None:
        return RankMemory(pool, make(pool, spec.num_q_heads))
    max_tokens = max_sequence_tokens(config, model_config)
    backend = ContextParallelBackend(
        Stripe(context.rank, context.size, config.block_size),
        context,
        pool,
        # With --dcp, no layer has attention options: check_parallelism (model/sizes.py)
        # refuses models that need them.
        partial(make, layers=()),
        num_q_heads=spec.num_q_heads,
        **sizes,
        scratch_tokens=max(max_tokens, config.max_num_batched_tokens),
    )
    return RankMemory(pool, backend)


class GpuUse(NamedTuple):
    """The memory of a GPU, in bytes.

    Attributes:
        total: the whole memory.
        free: not allocated by any process.
        reserved: allocated by this process's torch allocator, in use or not.
    """

    total: int
    free: int
    reserved: int

    @classmethod
    def of(cls, device: torch.device) -> "GpuUse":
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


def kv_bytes(use: GpuUse, utilization: float, *, peak_bytes: int) -> int:
    """Bytes of GPU memory that this process's KV may take. The result is negative if
    the weights and the largest step already exceed `utilization`.

    Args:
        utilization: share of the GPU's memory that this process may take. Memory
            outside this process's torch allocator counts up to
            _MAX_OUTSIDE_TORCH_BYTES.
        peak_bytes: the most memory that torch had allocated during the largest step,
            including the weights.
    """
    # CUDA contexts, kernels and NCCL's buffers, and all memory of other processes: in
    # some containers the driver does not report memory by process.
    outside_torch = use.total - use.free - use.reserved
    counted_bytes = min(outside_torch, _MAX_OUTSIDE_TORCH_BYTES)
    allowed = int(use.total * utilization) - counted_bytes - peak_bytes
    available = use.free + use.reserved - peak_bytes
    return min(allowed, available)


@contextmanager
def explaining_oom(subject: str, device: torch.device, fix: str) -> Iterator[None]:
    """Raises MemoryTooSmall if an allocation of GPU memory at the start fails.

    Args:
        subject: what is allocated, as the subject of a sentence.
        fix: the options that help.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        match = re.search(r"Tried to allocate ([0-9.]+ \w+)", str(error))
        allocation = f"an allocation of {match[1]}" if match else "an allocation"
        raise MemoryTooSmall(
            f"{subject} does not fit on {device}: {allocation} failed with "
            f"{free / 2**30:.2f} GiB free of {total / 2**30:.2f} GiB; {fix}"
        ) from error


def block_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes that a block takes on a rank: in the pool, and in the attention backend's
    own buffers."""
    layout = layout_of(config, model, 2)
    spec = attention_spec(config, model, 1)
    return layout.block_bytes + extra_bytes_per_block(
        config.attention_backend, spec, layout.block_size
    )


def size_pool(
    config: EngineConfig,
    *,
    block_bytes: int,
    model_max_len: int,
    free_bytes: int,
    groups: KVGroups = ONE_GROUP,
) -> PoolSize:
    """Decides the number of blocks from the options, or from the free memory.

    Args:
        block_bytes: bytes of one block on this rank.
        model_max_len: tokens of the longest sequence that the model's positions allow.
        free_bytes: device memory that is available for this rank's pool.
        groups: the KV groups of the model's layers.

    Raises:
        MemoryTooSmall: the requested pool does not fit, or the pool cannot hold one
            sequence of --max-model-len tokens (of 2 tokens without this option).
    """
    requested_len = config.max_model_len or model_max_len
    num_blocks, source = _decide_num_blocks(
        config, block_bytes, requested_len, free_bytes, groups
    )
    num_tokens = max_sequence_tokens_in(config, groups, num_blocks, requested_len)
    if config.max_model_len and num_tokens < requested_len:
        raise MemoryTooSmall(
            f"the KV pool holds {num_tokens} tokens ({source}), fewer than one "
            f"sequence of max_model_len {requested_len}: "
            f"{requested_len - num_tokens} tokens are missing; "
            f"raise {_options_for_larger_pool(config)}, or lower --max-model-len"
        )
    max_len = min(requested_len, num_tokens)
    if max_len < 2:
        raise MemoryTooSmall(
            f"the KV pool holds only {num_tokens} tokens ({source}), because one block "
            f"takes {block_bytes} bytes; raise {_options_for_larger_pool(config)}, or "
            "lower --block-size"
        )
    return PoolSize(
        num_blocks=num_blocks + 1,
        max_model_len=max_len,
        explanation=(
            f"KV pool: {_describe_tokens(config, groups, num_blocks)} in {num_blocks} "
            f"blocks of {config.tokens_per_block}, "
            f"{num_blocks * block_bytes / 2**20:.0f} MiB per rank ({source}); longest "
            f"sequence {max_len} tokens"
        ),
    )


def max_sequence_tokens_in(
    config: EngineConfig, groups: KVGroups, num_blocks: int, max_len: int
) -> int:
    """Tokens of the longest sequence that `num_blocks` blocks can hold. If a group has
    a window, only sequences of at most `max_len` tokens are considered.

    In a KV group with a window, a sequence needs blocks for the window, for the tokens
    of two steps, and for the tokens that a prefill server retains for readers with
    larger blocks.
    """
    return groups.max_tokens_in(
        num_blocks, max_len, _window_slack_tokens(config), config.tokens_per_block
    )


def _window_slack_tokens(config: EngineConfig) -> int:
    """Number of tokens in addition to the window for which a KV group with a window
    needs blocks."""
    return 2 * config.max_num_batched_tokens + MAX_BLOCK_SIZE_TOKENS


def _describe_tokens(config: EngineConfig, groups: KVGroups, num_blocks: int) -> str:
    tokens = num_blocks // groups.count * config.tokens_per_block
    if not groups.drops_blocks:
        return f"{tokens} tokens"
    windows = ", ".join(f"{window or 'all'}" for window in groups.windows)
    return f"{tokens} tokens, and more in sequences longer than a window ({windows}),"


def decide_max_model_len(
    config: EngineConfig,
    size: PoolSize,
    num_blocks: int,
    model_max_len: int,
    groups: KVGroups = ONE_GROUP,
) -> int:
    """Returns the tokens of the longest sequence that all ranks can hold. Logs the size
    of the pool. Warns if the pool allows only shorter sequences than the options and
    the model.

    Args:
        size: the size of the pool that this rank can hold, regardless of the other
            ranks.
        num_blocks: the number of blocks of every rank's pool, including the null block.
        model_max_len: tokens of the longest sequence that the model's positions allow.
    """
    logger.info("%s", size.explanation)
    pool_tokens = max_sequence_tokens_in(
        config, groups, num_blocks - 1, size.max_model_len
    )
    max_len = min(size.max_model_len, pool_tokens)
    if max_len < (config.max_model_len or model_max_len):
        logger.warning(
            "Requests of more than %d tokens, prompt and output, are refused, although "
            "the model allows %d: the KV pool holds no more. Raise %s, or confirm the "
            "limit with --max-model-len %d.",
            max_len,
            model_max_len,
            _options_for_larger_pool(config),
            max_len,
        )
    return max_len


def _decide_num_blocks(
    config: EngineConfig,
    block_bytes: int,
    requested_len: int,
    free_bytes: int,
    groups: KVGroups,
) -> tuple[int, str]:
    """The number of blocks without the null block, and the option or rule that decided
    it.

    On a GPU, the null block must also fit into the free memory, because all memory of
    the pool is allocated at once. On a CPU, a page takes memory only after its first
    write.
    """
    num_blocks = None
    option = ""
    if config.kv_cache_tokens is not None:
        blocks_per_group = -(-config.kv_cache_tokens // config.tokens_per_block)
        num_blocks = blocks_per_group * groups.count
        option = "--kv-cache-tokens"
    elif config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // block_bytes
        option = "--kv-cache-bytes"
    if num_blocks is not None:
        _check_requested_pool(config, num_blocks, block_bytes, free_bytes, option)
        return num_blocks, option
    if config.device != "cuda":
        budget_bytes = min(int(free_bytes * _CPU_FREE_SHARE), _CPU_DEFAULT_MAX_BYTES)
        blocks_per_sequence = groups.num_blocks_for(
            requested_len, _window_slack_tokens(config), config.tokens_per_block
        )
        max_useful_blocks = blocks_per_sequence * config.max_num_seqs
        num_blocks = min(budget_bytes // block_bytes, max_useful_blocks)
        return num_blocks, "a share of the free memory"
    source = f"{_UTILIZATION} {config.gpu_memory_utilization}"
    missing_bytes = 2 * block_bytes - free_bytes  # for one block and the null block
    if missing_bytes > 0:
        raise MemoryTooSmall(
            f"the model's weights and its largest step leave no memory for KV under "
            f"{source}: {missing_bytes / 2**20:.0f} MiB are missing for one block of "
            f"{config.tokens_per_block} tokens; raise {_UTILIZATION} or --tp, lower "
            f"{options_of_step_memory(config)}, or free the GPU"
        )
    return free_bytes // block_bytes - 1, source


def _check_requested_pool(
    config: EngineConfig,
    num_blocks: int,
    block_bytes: int,
    free_bytes: int,
    option: str,
) -> None:
    """Raises MemoryTooSmall if the pool that `option` requests does not fit."""
    on_gpu = config.device == "cuda"
    num_allocated = num_blocks + 1 if on_gpu else num_blocks
    needed_bytes = num_allocated * block_bytes
    if needed_bytes <= free_bytes:
        return
    free_mib = max(0, free_bytes) / 2**20
    if on_gpu:
        explanation = (
            f"the GPU has {free_mib:.0f} MiB left for it under {_UTILIZATION} "
            f"{config.gpu_memory_utilization}: lower {option}, or raise {_UTILIZATION}"
        )
    else:
        explanation = (
            f"this machine or container has {free_mib:.0f} MiB free for each of "
            f"{config.ranks_per_node} rank(s) of this node: lower {option}"
        )
    raise MemoryTooSmall(
        f"the KV pool of {option} takes {needed_bytes / 2**20:.0f} MiB, but "
        f"{explanation}"
    )


def options_of_step_memory(config: EngineConfig) -> str:
    """The options that determine how much memory a step takes, apart from weights and
    KV."""
    # With --dcp, ranks gather the longest context in a scratch buffer.
    if config.dcp > 1:
        return "--max-num-batched-tokens, --max-num-seqs or --max-model-len"
    return "--max-num-batched-tokens or --max-num-seqs"


def _options_for_larger_pool(config: EngineConfig) -> str:
    """The options that make the pool larger."""
    has_size_option = (
        config.kv_cache_tokens is not None or config.kv_cache_bytes is not None
    )
    if config.device == "cuda" and not has_size_option:
        return f"{_UTILIZATION} or --tp"
    return "--kv-cache-tokens or --kv-cache-bytes"


class MemoryGauge:
    """Measures the memory of a GPU, or of this process and its machine.

    On a GPU, the memory in use includes that of other processes, because this process
    cannot use it. On a CPU, the memory in use is the resident memory of this process,
    which includes the mapped files of weights.

    Args:
        device: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._due_s = 0.0
        self._values: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        """Return the values by metric series (protocol.metrics)."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _INTERVAL_S
            used, total = self._measure()
            self._values = {
                "baton_engine_memory_used_bytes": float(used),
                "baton_engine_memory_total_bytes": float(total),
            }
        return self._values

    def _measure(self) -> tuple[int, int]:
        """Return the bytes in use and the bytes of the whole memory."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free, total
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return resident * _PAGE_BYTES, os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES

"""A rank's KV pool and what reads it; how large it is, and what to say when that is too small."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from attention.base import AttentionBackend, LayerAttention
from attention.dcp import ContextParallelBackend
from attention.registry import create_backend
from attention.support import extra_bytes_per_block
from engine.config import EngineConfig
from engine.geometry import kv_groups, layout_of, step_limits, wanted_of
from engine.worker.grouped import GroupedBackend
from kvcache.groups import ONE_GROUP, KVGroups
from kvcache.layout import MAX_BLOCK_SIZE_TOKENS
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from model.config import ModelConfig
from model.decoder import CausalLM

logger = logging.getLogger("baton.engine")

# Without an option, the pool takes this share of the memory that is free once the weights are
# mapped: two servers, their page caches and their activations share a CPU host.
_CPU_FREE_SHARE = 0.2
_CPU_DEFAULT_MAX_BYTES = 4 * 2**30
_UTILIZATION = "--gpu-memory-utilization"


class MemoryTooSmall(Exception):
    """The KV pool cannot hold one sequence; the message says what is missing and what helps."""


class PoolSize(NamedTuple):
    num_blocks: int  # of a KV pool, the null block included
    max_model_len: int  # tokens of the longest sequence it serves
    explanation: str


class RankMemory(NamedTuple):
    """The allocation that a rank's agent registers, and what reads it."""

    pool: KVPool
    backend: AttentionBackend


def longest(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of the longest sequence that any pool might hold."""
    return config.max_model_len or model_config.max_position


def make_memory(
    config: EngineConfig, model_config: ModelConfig, model: CausalLM, pool: KVPool
) -> RankMemory:
    spec, context = model.attention_spec, model.parallel.context
    sizes: Any = {"head_dim": model_config.kv_dim, "scale": spec.scale}
    own = {"num_q_heads": spec.num_q_heads, **sizes}

    def make(
        over: KVPool,
        num_q_heads: int,
        layers: Sequence[LayerAttention] = spec.layers,
        shared_with: AttentionBackend | None = None,
    ) -> AttentionBackend:
        return create_backend(
            config.attention_backend,
            over,
            **sizes,
            num_q_heads=num_q_heads,
            layers=layers,
            shared_with=shared_with,
            dtype=getattr(torch, config.dtype),
            limits=step_limits(
                config, model_config, of_group=num_q_heads > spec.num_q_heads
            ),
        )

    if pool.groups.count > 1:
        _, dealt = kv_groups(model_config)
        of_group = partial(make, pool, spec.num_q_heads)
        return RankMemory(
            pool, GroupedBackend(pool, dealt, spec.layers, of_group, **own)
        )
    if context is None:
        return RankMemory(pool, make(pool, spec.num_q_heads))
    backend = ContextParallelBackend(
        Stripe(context.rank, context.size, config.block_size),
        context,
        pool,
        partial(make, layers=()),  # see check_parallelism
        **own,
        scratch_tokens=max(
            longest(config, model_config), config.max_num_batched_tokens
        ),
    )
    return RankMemory(pool, backend)


def free_gpu_bytes(device: torch.device, utilization: float, *, peak_bytes: int) -> int:
    """Bytes of a GPU that KV may take, negative where steps alone take more than they may.
    `peak_bytes`, weights included, is what torch had allocated at most in the largest step."""
    free, total = torch.cuda.mem_get_info(device)
    # Taken outside torch's allocator: contexts, kernels, and other processes on this GPU.
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - elsewhere - peak_bytes


@contextmanager
def fitting(what: str, device: torch.device, fix: str) -> Iterator[None]:
    """Around what takes GPU memory at start: raises MemoryTooSmall with what is missing, and the
    options that help (`fix`), where it does not fit. `what` is the subject of a sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (n / 2**30 for n in torch.cuda.mem_get_info(device))
        wanted = re.search(r"Tried to allocate ([0-9.]+ \w+)", str(error))
        raise MemoryTooSmall(
            f"{what} does not fit {device}: it has {total:.2f} GiB, of which {free:.2f} GiB were "
            f"left when {wanted[1] if wanted else 'more'} were missing; {fix}"
        ) from error


def block_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Of a block of a rank's pool, and of what its attention backend keeps of it besides."""
    layout, wanted = layout_of(config, model, 2), wanted_of(config, model, 1)
    return layout.block_bytes + extra_bytes_per_block(
        config.attention_backend, wanted, layout.block_size
    )


def size_pool(
    config: EngineConfig,
    *,
    block_bytes: int,
    model_max_len: int,
    free_bytes: int,
    groups: KVGroups = ONE_GROUP,
) -> PoolSize:
    """Decides the number of blocks from the options, or from what is free.

    Args:
        block_bytes: of one block on this rank.
        model_max_len: tokens of the longest sequence that the model's positions allow.
        free_bytes: of the device, for this rank to count on.
        groups: of the model's layers.

    Raises:
        MemoryTooSmall: not even one sequence of the wanted length fits.
    """
    wanted_len = config.max_model_len or model_max_len
    blocks, source = _capacity(config, block_bytes, wanted_len, free_bytes, groups)
    num_tokens = longest_in(config, groups, blocks, wanted_len)
    if config.max_model_len and num_tokens < wanted_len:
        raise MemoryTooSmall(
            f"the KV pool holds {num_tokens} tokens ({source}), fewer than one sequence of "
            f"max_model_len {wanted_len}: {wanted_len - num_tokens} tokens are missing; raise "
            f"{_more_memory(config)}, or lower --max-model-len"
        )
    max_len = min(wanted_len, num_tokens)
    if max_len < 2:
        raise MemoryTooSmall(
            f"the KV pool holds {num_tokens} tokens ({source}), one block takes {block_bytes} "
            f"bytes; raise {_more_memory(config)}, or lower --block-size"
        )
    return PoolSize(
        num_blocks=blocks + 1,
        max_model_len=max_len,
        explanation=(
            f"KV pool: {_held(config, groups, blocks)} in {blocks} blocks of "
            f"{config.tokens_per_block}, "
            f"{blocks * block_bytes / 2**20:.0f} MiB per rank ({source}); longest sequence "
            f"{max_len} tokens"
        ),
    )


def longest_in(
    config: EngineConfig, groups: KVGroups, num_blocks: int, max_len: int
) -> int:
    """Tokens of the longest sequence that so many blocks hold, with two steps beside each window,
    and what a prefill server keeps for other block sizes."""
    step = 2 * config.max_num_batched_tokens + MAX_BLOCK_SIZE_TOKENS
    return groups.max_tokens_in(num_blocks, max_len, step, config.tokens_per_block)


def _held(config: EngineConfig, groups: KVGroups, blocks: int) -> str:
    tokens = blocks // groups.count * config.tokens_per_block
    if not groups.drops_blocks:
        return f"{tokens} tokens"
    windows = ", ".join(f"{window or 'all'}" for window in groups.windows)
    return f"{tokens} tokens, and more in sequences longer than a window ({windows}),"


def longest_sequence(
    config: EngineConfig,
    size: PoolSize,
    num_blocks: int,
    model_max_len: int,
    groups: KVGroups = ONE_GROUP,
) -> int:
    """Tokens of the longest sequence in `num_blocks`, the fewest that a rank of this size has; logs
    them, and warns where nobody asked for fewer than the model takes."""
    logger.info("%s", size.explanation)
    held = longest_in(config, groups, num_blocks - 1, size.max_model_len)
    max_len = min(size.max_model_len, held)
    if max_len < (config.max_model_len or model_max_len):
        logger.warning(
            "requests of more than %d tokens, prompt and output, are refused, and the model takes "
            "%d: the KV pool holds no more; raise %s, or say that it is meant with "
            "--max-model-len %d",
            max_len,
            model_max_len,
            _more_memory(config),
            max_len,
        )
    return max_len


def _capacity(
    config: EngineConfig,
    block_bytes: int,
    wanted_len: int,
    free_bytes: int,
    groups: KVGroups,
) -> tuple[int, str]:
    """Usable blocks, and which option or rule decided. A GPU's null block counts: memory that is
    not there shows at once."""
    on_gpu = config.device == "cuda"
    share = f"{_UTILIZATION} {config.gpu_memory_utilization}"
    blocks, option = None, ""
    if config.kv_cache_tokens is not None:
        whole = -(-config.kv_cache_tokens // config.tokens_per_block)
        blocks, option = whole * groups.count, "--kv-cache-tokens"
    elif config.kv_cache_bytes is not None:
        blocks, option = config.kv_cache_bytes // block_bytes, "--kv-cache-bytes"
    if blocks is not None:
        needed, free_mib = (blocks + on_gpu) * block_bytes, max(0, free_bytes) / 2**20
        if needed > free_bytes:
            told = (
                f"the GPU has {free_mib:.0f} MiB left for it under {share}: lower {option}, or "
                f"raise {_UTILIZATION}"
                if on_gpu
                else f"this machine or container has {free_mib:.0f} MiB free for each of "
                f"{config.tp} rank(s): lower {option}"
            )
            raise MemoryTooSmall(
                f"the KV pool of {option} takes {needed / 2**20:.0f} MiB, but {told}"
            )
        return blocks, option
    if not on_gpu:
        budget = min(int(free_bytes * _CPU_FREE_SHARE), _CPU_DEFAULT_MAX_BYTES)
        step = 2 * config.max_num_batched_tokens + MAX_BLOCK_SIZE_TOKENS
        longest = groups.num_blocks_for(wanted_len, step, config.tokens_per_block)
        useful = longest * config.max_num_seqs
        return min(budget // block_bytes, useful), "a share of the free memory"
    missing = 2 * block_bytes - free_bytes  # one block beside the null block
    if missing > 0:
        raise MemoryTooSmall(
            f"the model's weights and its largest step leave no room for KV under {share}: "
            f"{missing / 2**20:.0f} MiB are missing for one block of {config.tokens_per_block} "
            f"tokens; raise {_UTILIZATION} or --tp, lower {lower_for_steps(config)}, or free the "
            "GPU"
        )
    return free_bytes // block_bytes - 1, share


def lower_for_steps(config: EngineConfig) -> str:
    """The options that what a step needs beside weights and KV grows with."""
    # Ranks that share tokens put the longest context together in memory set apart for it.
    if config.dcp > 1:
        return "--max-num-batched-tokens, --max-num-seqs or --max-model-len"
    return "--max-num-batched-tokens or --max-num-seqs"


def _more_memory(config: EngineConfig) -> str:
    """The options that make the pool larger."""
    if (
        config.device == "cuda"
        and config.kv_cache_tokens is config.kv_cache_bytes is None
    ):
        return f"{_UTILIZATION} or --tp"
    return "--kv-cache-tokens or --kv-cache-bytes"

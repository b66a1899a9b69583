"""How many KV blocks an engine gets, and what to say when that is too few."""

import os
from dataclasses import dataclass

from engine.config import EngineConfig

# Without an option, the pool takes this share of the memory that is free once the weights are
# mapped: two servers, their page caches and their activations share a CPU host.
_CPU_FREE_SHARE = 0.2
_CPU_DEFAULT_MAX_BYTES = 4 * 2**30


class MemoryTooSmall(Exception):
    """The KV pool cannot hold one sequence; the message says what is missing and what helps."""


@dataclass(frozen=True)
class PoolSize:
    """Blocks of a KV pool, the null block included, and the longest sequence it serves."""

    num_blocks: int
    max_model_len: int  # tokens
    explanation: str


def free_host_bytes() -> int:
    """Memory available to new allocations on this host, in bytes."""
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def size_pool(
    config: EngineConfig, *, block_bytes: int, model_max_len: int, free_bytes: int
) -> PoolSize:
    """Decides the number of blocks from the options, or from what is free.

    Args:
        block_bytes: bytes of one block on this rank.
        model_max_len: longest sequence the model's positions allow, in tokens.
        free_bytes: memory of the device that this rank may count on.

    Raises:
        MemoryTooSmall: not even one sequence of the wanted length fits.
    """
    wanted_len = config.max_model_len or model_max_len
    if wanted_len > model_max_len:
        raise MemoryTooSmall(
            f"max_model_len is {wanted_len} tokens, but the model's positions end at "
            f"{model_max_len}; use --max-model-len {model_max_len} or less"
        )
    capacity_blocks, source = _capacity(config, block_bytes, wanted_len, free_bytes)
    capacity_tokens = capacity_blocks * config.block_size
    if config.max_model_len and capacity_tokens < wanted_len:
        raise MemoryTooSmall(
            f"the KV pool holds {capacity_tokens} tokens ({source}), fewer than one sequence of "
            f"max_model_len {wanted_len}: {wanted_len - capacity_tokens} tokens are missing; raise "
            "--kv-cache-tokens or --kv-cache-bytes, or lower --max-model-len"
        )
    max_len = min(wanted_len, capacity_tokens)
    if max_len < 2:
        raise MemoryTooSmall(
            f"the KV pool holds {capacity_tokens} tokens ({source}), one block takes {block_bytes} "
            "bytes; raise --kv-cache-bytes or lower --block-size"
        )
    size_mib = capacity_blocks * block_bytes / 2**20
    return PoolSize(
        num_blocks=capacity_blocks + 1,
        max_model_len=max_len,
        explanation=(
            f"KV pool: {capacity_tokens} tokens in {capacity_blocks} blocks of {config.block_size},"
            f" {size_mib:.0f} MiB per rank ({source}); longest sequence {max_len} tokens"
        ),
    )


def _capacity(
    config: EngineConfig, block_bytes: int, wanted_len: int, free_bytes: int
) -> tuple[int, str]:
    """Usable blocks, and which option or rule decided."""
    if config.kv_cache_tokens is not None:
        return -(-config.kv_cache_tokens // config.block_size), "--kv-cache-tokens"
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // block_bytes, "--kv-cache-bytes"
    budget = min(int(free_bytes * _CPU_FREE_SHARE), _CPU_DEFAULT_MAX_BYTES)
    useful = -(-wanted_len // config.block_size) * config.max_num_seqs
    return min(budget // block_bytes, useful), "a share of the free memory"

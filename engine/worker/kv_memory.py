"""A rank's KV pool and the attention backend that reads it."""

from dataclasses import dataclass

import torch

from attention.base import AttentionBackend
from attention.dcp import ContextParallelBackend
from attention.registry import create_backend
from engine.config import EngineConfig
from engine.geometry import step_limits
from engine.worker.load import DTYPES
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from model.base import CausalLM
from model.config import ModelConfig


@dataclass(frozen=True)
class RankMemory:
    """The allocation a rank's agent registers."""

    pool: KVPool
    backend: AttentionBackend


def longest(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of the longest sequence that any pool might hold."""
    return config.max_model_len or model_config.max_position


def make_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    model: CausalLM,
    layout: KVLayout,
    device: torch.device,
) -> RankMemory:
    """A pool of `layout`, and what reads it."""
    spec = model.attention_spec
    pool = KVPool(layout, device, config.kv_scales)

    def make(over: KVPool, num_q_heads: int) -> AttentionBackend:
        return create_backend(
            config.attention_backend,
            over,
            num_q_heads=num_q_heads,
            head_dim=model_config.kv_dim,
            scale=spec.scale,
            dtype=DTYPES[config.dtype],
            limits=step_limits(config, of_group=num_q_heads > spec.num_q_heads),
        )

    context = model.parallel.context
    if context is None:
        return RankMemory(pool, make(pool, spec.num_q_heads))
    backend = ContextParallelBackend(
        Stripe(context.rank, context.size, config.block_size),
        context,
        pool,
        make,
        num_q_heads=spec.num_q_heads,
        head_dim=model_config.kv_dim,
        scale=spec.scale,
        scratch_tokens=max(longest(config, model_config), config.max_num_batched_tokens),
    )
    return RankMemory(pool, backend)

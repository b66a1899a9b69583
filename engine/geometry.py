"""What cannot work, found before any process of the engine starts. No torch here."""

from attention.support import StepLimits, Wanted, check
from engine.config import EngineConfig
from kvcache.layout import KVLayout
from kvcache.transfer.staged import least_staging_bytes
from kvcache.transfer.topology import heads_of
from model.config import ModelConfig
from model.sharding import check_parallelism


class InvalidGeometry(ValueError):
    """Options that contradict each other; the message names them, their values and the fix."""


def check_geometry(config: EngineConfig, model: ModelConfig) -> KVLayout:
    """The layout of rank 0's smallest pool, one block beside the null block.

    Raises:
        InvalidParallelism: `tp` ranks cannot share the model, or not in groups of `dcp`.
        LayoutError: `kv_layout` or `block_size` describe no KV cache.
    """
    check_parallelism(model, config.tp, config.dcp)
    return KVLayout(
        order=config.kv_layout,
        num_blocks=2,
        num_heads=len(heads_of(0, config.tp // config.dcp, model.kv_heads_total)),
        num_layers=model.num_layers,
        num_components=model.kv_components,
        block_size=config.block_size,
        head_dim=model.kv_dim,
        dtype=config.kv_dtype,
    )


def check_staging(config: EngineConfig, layout: KVLayout) -> None:
    """Raises InvalidGeometry when the staging memory cannot hold two blocks of `layout`.

    A peer's blocks may be larger still: the planner decides that, pull by pull.
    """
    least = least_staging_bytes(layout)
    if config.staging_bytes < least:
        raise InvalidGeometry(
            f"--staging-bytes is {config.staging_bytes}; a KV block of {config.block_size} tokens "
            f"takes {layout.block_bytes} bytes on each rank, and two must fit: use "
            f"--staging-bytes {least} or more, or a smaller --block-size"
        )


def check_attention(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses a model or options that no rank's attention backend would serve.

    Raises:
        UnsupportedPool: names the limit, what was found and which option helps.
    """
    own = model.num_heads // config.tp
    for num_q_heads in sorted({own, own * config.dcp}):
        wanted = Wanted(
            device=config.device,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            head_dim=model.kv_dim,
            num_components=model.kv_components,
            num_q_heads=num_q_heads,
        )
        check(config.attention_backend, wanted, step_limits(config, of_group=num_q_heads > own))


def step_limits(config: EngineConfig, *, of_group: bool) -> StepLimits:
    """The largest steps of a rank's attention backend.

    Args:
        of_group: for the heads of all ranks that share tokens, which only decodes attend with;
            prompts then have a backend of their own.
    """
    seqs = config.max_num_seqs
    captures = not config.enforce_eager
    if of_group:
        return StepLimits(seqs, seqs, captured=captures)
    tokens = max(config.max_num_batched_tokens, seqs)
    return StepLimits(seqs, tokens, captured=captures and config.dcp == 1)

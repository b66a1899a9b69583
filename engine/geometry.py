"""Checks that find impossible options before any process of the engine starts. No torch
here."""

from pathlib import Path
from typing import Final

from attention.support import AttentionSpec, StepLimits, check_supported
from engine.config import EngineConfig
from kvcache.groups import KVGroups, make_groups
from kvcache.layout import KVLayout
from kvcache.transfer.plan.endpoint import heads_of
from kvcache.transfer.plan.steps import min_staging_bytes
from model.config import ModelConfig, load_config
from model.files.safetensors_files import stored_elements
from model.sizes import (
    check_files,
    check_parallelism,
    largest_group,
    weight_bytes,
)
from protocol.handshake import ITEMSIZE
from protocol.settings.machine import free_host_bytes
from protocol.settings.settings import EngineSettings

_STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# More than any GPU has. The actual size is checked later, by the rank on that GPU.
_MAX_BYTES_OF_A_GPU: Final = 2**41


class InvalidGeometry(ValueError):
    """Options contradict each other. The message names them, their values and the fix."""


def read_config(
    model_dir: str | Path, options: EngineSettings | EngineConfig
) -> ModelConfig:
    """A model's config.json, with the options applied."""
    return load_config(
        model_dir,
        overrides=options.hf_overrides,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
    )


def check_weights(
    config: EngineConfig, model: ModelConfig, free_bytes: int | None = None
) -> None:
    """Checks the sizes of the weights, from which the sizes of all else follow.

    Args:
        free_bytes: memory of this machine or container; None: what is free now.

    Raises:
        ModelLoadError: the files do not have these weights.
        InvalidGeometry: no memory can hold them.
    """
    fix = "use a smaller model, or a machine with more memory"
    itemsize = ITEMSIZE.get(config.dtype, 1)  # others are refused with the layout
    needed_bytes = weight_bytes(model, itemsize, keep_quantised=config.device == "cuda")
    if config.load_format != "dummy":
        check_files(model, Path(config.model_dir))
    if config.device == "cpu":
        max_bytes = free_host_bytes() if free_bytes is None else free_bytes
        limit = "are free here"
        if config.load_format != "dummy":
            num_elements, fix = _unmapped_elements(config, model)
            needed_bytes = num_elements * itemsize
    else:
        max_bytes = config.tp * _MAX_BYTES_OF_A_GPU
        limit = f"is more than {config.tp} GPU(s) have"
    if needed_bytes > max_bytes:
        raise InvalidGeometry(
            f"the model's weights take {needed_bytes / 2**30:,.1f} GiB in "
            f"{config.dtype}, and {max_bytes / 2**30:,.1f} GiB {limit}; most of them are "
            f"{largest_group(model)}: correct config.json if that is wrong, else {fix}"
        )


def _unmapped_elements(config: EngineConfig, model: ModelConfig) -> tuple[int, str]:
    """Elements of weights that take memory in addition to the mapped files, and the fix
    that reduces them."""
    stored = stored_elements(Path(config.model_dir))
    mapped = sum(
        stored[name] for name, dtype in _STORED_DTYPES.items() if dtype == config.dtype
    )
    copied = stored.total() - mapped
    fix = "use --no-pack-weights"
    if model.quantization:
        # Quantised weights are dequantised, and one stored word has several of them.
        copied = max(copied, weight_bytes(model, 1, keep_quantised=False) - mapped)
    if copied > mapped:
        stored_type = max(_STORED_DTYPES, key=lambda name: stored[name])
        fix = f"use --dtype {_STORED_DTYPES[stored_type]}, as which the files can be mapped"
    # Experts are stacked, and packed weights are copied as well.
    if model.moe or (config.pack_weights and config.dtype == "float32"):
        embeddings = model.vocab_size * model.hidden_size
        copied = max(copied, weight_bytes(model, 1, keep_quantised=False) - embeddings)
    if model.moe:
        fix = f"{fix}, or more memory: experts are copied"
    return copied, fix


def check_geometry(config: EngineConfig, model: ModelConfig) -> KVLayout:
    """The layout of rank 0's smallest pool: one block and the null block.

    Raises:
        InvalidParallelism: `tp` ranks, in groups of `dcp`, cannot share the model.
        InvalidGeometry: --max-model-len exceeds the model's positions.
    """
    check_parallelism(model, config.tp, config.dcp, config.ep)
    if config.max_model_len and config.max_model_len > model.max_position:
        raise InvalidGeometry(
            f"--max-model-len is {config.max_model_len} tokens, but the model's positions "
            f"end at {model.max_position}; use --max-model-len {model.max_position} or "
            "less, or, if its rope is scaled to reach further, max_position_embeddings "
            "of --hf-overrides"
        )
    return layout_of(config, model, num_blocks=2)


def layout_of(config: EngineConfig, model: ModelConfig, num_blocks: int) -> KVLayout:
    """The layout of a rank's pool with `num_blocks` blocks, including the null block."""
    _, group_layers = kv_groups(model)
    return KVLayout(
        order=config.kv_layout,
        num_blocks=num_blocks,
        num_heads=len(heads_of(0, config.tp // config.dcp, model.kv_heads_total)),
        num_layers=max(map(len, group_layers)),
        num_components=model.kv_components,
        block_size=config.block_size,
        head_dim=model.kv_dim,
        dtype=config.kv_dtype,
    )


def kv_groups(model: ModelConfig) -> tuple[KVGroups, list[tuple[int, ...]]]:
    """The groups of layers that have KV blocks of their own, and the layers of each."""
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    return make_groups(windows, model.max_position)


def check_scales(config: EngineConfig, model: ModelConfig) -> None:
    """Raises InvalidGeometry if FP8 KV has scales other than 1 and the model's layers
    have blocks in several groups."""
    groups, _ = kv_groups(model)
    if groups.count > 1 and set(config.scales) - {1.0}:
        raise InvalidGeometry(
            f"the scales of FP8 KV are {min(config.scales):g} to "
            f"{max(config.scales):g}, but this model has KV in {groups.count} groups of "
            "layers, by their windows, which are served with scales of 1 only: use "
            "--kv-scales 1, or --kv-cache-dtype auto"
        )


def check_staging(config: EngineConfig, layout: KVLayout) -> None:
    """Raises InvalidGeometry if the staging memory cannot hold two blocks of `layout`. A
    peer's blocks may be larger; the planner checks them for each pull."""
    min_bytes = min_staging_bytes(layout)
    if config.staging_bytes < min_bytes:
        raise InvalidGeometry(
            f"--staging-bytes is {config.staging_bytes}; a KV block of "
            f"{config.block_size} tokens takes {layout.block_bytes} bytes on each rank, "
            f"and two must fit: use --staging-bytes {min_bytes} or more, or a smaller "
            "--block-size"
        )


def check_attention(config: EngineConfig, model: ModelConfig) -> None:
    """Raises UnsupportedPool, with the option that helps, if no rank's attention backend
    can serve the model."""
    num_q_heads = model.num_heads // config.tp
    check_supported(
        config.attention_backend,
        attention_spec(config, model, num_q_heads),
        step_limits(config, model, of_group=False),
    )
    if config.dcp > 1:
        check_supported(
            config.attention_backend,
            attention_spec(config, model, num_q_heads * config.dcp),
            step_limits(config, model, of_group=True),
        )


def attention_spec(
    config: EngineConfig, model: ModelConfig, num_q_heads: int
) -> AttentionSpec:
    """The requirements for the attention backend of a rank with `num_q_heads` heads."""
    has_window = {window is not None for window in model.layer_windows or (None,)}
    has_cap = bool(model.score_cap)
    return AttentionSpec(
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        head_dim=model.kv_dim,
        num_components=model.kv_components,
        num_q_heads=num_q_heads,
        kinds=tuple((windowed, has_cap) for windowed in sorted(has_window)),
    )


def step_limits(
    config: EngineConfig, model: ModelConfig, *, of_group: bool
) -> StepLimits:
    """The largest steps of a rank's attention backend.

    Args:
        of_group: for the backend with the heads of all ranks that share tokens. Only
            decodes use it.
    """
    max_seqs = config.max_num_seqs
    if of_group:
        return StepLimits(max_seqs, max_seqs, 0)
    max_tokens = max(config.max_num_batched_tokens, max_seqs)
    max_context = config.max_model_len or model.max_position
    return StepLimits(max_seqs, max_tokens, max_context)

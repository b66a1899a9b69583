"""Checks options against the model and the machine, before any engine process starts.

This module does not import torch.
"""

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
# More memory than any GPU has. Each rank checks the actual memory of its GPU later.
_MAX_GPU_BYTES: Final = 2**41


class InvalidGeometry(ValueError):
    """Options contradict each other, the model or the machine. The message names the
    options, their values and the fix.
    """


def read_config(
    model_dir: str | Path, options: EngineSettings | EngineConfig
) -> ModelConfig:
    """Reads a model's config.json, and applies the options to it."""
    return load_config(
        model_dir,
        overrides=options.hf_overrides,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
    )


def check_weights(
    config: EngineConfig, model: ModelConfig, free_bytes: int | None = None
) -> None:
    """Checks that the files have the weights that config.json describes, and that the
    memory of this machine can hold the weights. With --device cuda, only refuses
    weights that are too large for any GPU, because each rank checks its GPU later.

    Args:
        free_bytes: for the CPU, the free memory of this machine or container; None to
            measure it.

    Raises:
        ModelLoadError: the files do not have these weights.
        InvalidGeometry: the memory cannot hold these weights.
    """
    fix = "use a smaller model, or a machine with more memory"
    itemsize = ITEMSIZE.get(config.dtype, 1)  # check_geometry refuses other dtypes
    needed_bytes = weight_bytes(model, itemsize, keep_quantised=config.device == "cuda")
    if config.load_format != "dummy":
        check_files(model, Path(config.model_dir))
    if config.device == "cpu":
        max_bytes = free_host_bytes() if free_bytes is None else free_bytes
        limit = "are free on this machine"
        if config.load_format != "dummy":
            num_elements, fix = _unmapped_elements(config, model)
            needed_bytes = num_elements * itemsize
        needed_bytes //= config.nnodes
    else:
        max_bytes = config.tp * _MAX_GPU_BYTES
        limit = f"is more than {config.tp} GPU(s) have"
    if needed_bytes > max_bytes:
        raise InvalidGeometry(
            f"the model's weights take {needed_bytes / 2**30:,.1f} GiB in "
            f"{config.dtype}, and {max_bytes / 2**30:,.1f} GiB {limit}; most of them "
            f"are {largest_group(model)}: correct config.json if that is wrong, else "
            f"{fix}"
        )


def _unmapped_elements(config: EngineConfig, model: ModelConfig) -> tuple[int, str]:
    """Returns the number of weight elements that take memory in addition to the mapped
    files, and the advice (for an error message) that reduces this number."""
    stored = stored_elements(Path(config.model_dir))
    mapped = sum(
        stored[name] for name, dtype in _STORED_DTYPES.items() if dtype == config.dtype
    )
    copied = stored.total() - mapped
    fix = "use --no-pack-weights"
    if model.quantization:
        # Quantized weights are copied when they are dequantized. A stored element may
        # pack several weights, so the weights of the model are counted instead.
        copied = max(copied, weight_bytes(model, 1, keep_quantised=False) - mapped)
    if copied > mapped:
        stored_type = max(_STORED_DTYPES, key=lambda name: stored[name])
        fix = (
            f"use --dtype {_STORED_DTYPES[stored_type]}: files of this type are mapped"
        )
    # Stacking experts and packing weights copy all weights except the embeddings.
    if model.moe or (config.pack_weights and config.dtype == "float32"):
        embeddings = model.vocab_size * model.hidden_size
        copied = max(copied, weight_bytes(model, 1, keep_quantised=False) - embeddings)
    if model.moe:
        fix = f"{fix}, or more memory: experts are copied"
    return copied, fix


def check_geometry(config: EngineConfig, model: ModelConfig) -> KVLayout:
    """Checks that the model can be divided among the ranks, and that the model supports
    --max-model-len. Returns the layout of the smallest possible pool of rank 0, which
    has one block and the null block.

    Raises:
        InvalidParallelism: the model cannot be divided among `tp` ranks in groups of
            `dcp` ranks.
        InvalidGeometry: --max-model-len exceeds the model's positions.
    """
    check_parallelism(model, config.tp, config.dcp, config.ep)
    if config.max_model_len and config.max_model_len > model.max_position:
        raise InvalidGeometry(
            f"--max-model-len is {config.max_model_len} tokens, but the model has only "
            f"{model.max_position} positions; use --max-model-len {model.max_position} "
            "or less, or, if the model's rope is scaled to more positions, set "
            "max_position_embeddings with --hf-overrides"
        )
    return layout_of(config, model, num_blocks=2)


def layout_of(config: EngineConfig, model: ModelConfig, num_blocks: int) -> KVLayout:
    """The layout of a rank's pool of `num_blocks` blocks, including the null block."""
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
    """The model's KV groups, and the layers of each group (see kvcache/groups.py)."""
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    return make_groups(windows, model.max_position)


def check_scales(config: EngineConfig, model: ModelConfig) -> None:
    """Raises InvalidGeometry if FP8 KV has scales other than 1 and the model's layers
    form several KV groups."""
    groups, _ = kv_groups(model)
    if groups.count > 1 and set(config.scales) - {1.0}:
        raise InvalidGeometry(
            f"the scales of FP8 KV are {min(config.scales):g} to "
            f"{max(config.scales):g}, but this model's layers have different attention "
            "windows, and such models are served with scales of 1 only: use "
            "--kv-scales 1, or --kv-cache-dtype auto"
        )


def check_staging(config: EngineConfig, layout: KVLayout) -> None:
    """Raises InvalidGeometry if the staging memory cannot hold two blocks of `layout`.

    A peer's blocks may be larger. The planner of a pull checks their size
    (kvcache/transfer/plan).
    """
    min_bytes = min_staging_bytes(layout)
    if config.staging_bytes < min_bytes:
        raise InvalidGeometry(
            f"--staging-bytes is {config.staging_bytes}, but the staging memory must "
            f"hold two KV blocks: a block of {config.block_size} tokens takes "
            f"{layout.block_bytes} bytes on each rank; use --staging-bytes {min_bytes} "
            "or more, or a smaller --block-size"
        )


def check_attention(config: EngineConfig, model: ModelConfig) -> None:
    """Raises UnsupportedPool if the attention backend cannot serve the model. The
    message names the option that helps."""
    num_q_heads = model.num_heads // config.tp
    check_supported(
        config.attention_backend,
        attention_spec(config, model, num_q_heads),
        step_limits(config, model, is_for_dcp_group=False),
    )
    if config.dcp > 1:
        check_supported(
            config.attention_backend,
            attention_spec(config, model, num_q_heads * config.dcp),
            step_limits(config, model, is_for_dcp_group=True),
        )


def attention_spec(
    config: EngineConfig, model: ModelConfig, num_q_heads: int
) -> AttentionSpec:
    """The features that the attention backend of a rank must support.

    Args:
        num_q_heads: number of query heads that the backend computes.
    """
    window_kinds = {window is not None for window in model.layer_windows or (None,)}
    has_cap = bool(model.score_cap)
    return AttentionSpec(
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        head_dim=model.kv_dim,
        num_components=model.kv_components,
        num_q_heads=num_q_heads,
        kinds=tuple((has_window, has_cap) for has_window in sorted(window_kinds)),
    )


def step_limits(
    config: EngineConfig, model: ModelConfig, *, is_for_dcp_group: bool
) -> StepLimits:
    """The limits of the steps that a rank's attention backend computes.

    Args:
        is_for_dcp_group: whether the backend computes the heads of all ranks that share
            tokens. Only decode steps use such a backend.
    """
    max_seqs = config.max_step_rows
    has_proposals = bool(config.speculation.kind)
    if is_for_dcp_group:
        return StepLimits(max_seqs, max_seqs, 0, has_proposals)
    max_tokens = max(config.max_num_batched_tokens, max_seqs)
    max_context = config.max_model_len or model.max_position
    return StepLimits(max_seqs, max_tokens, max_context, has_proposals)

"""What cannot work, found before any process of the engine starts. No torch here."""

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

_STORED: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_BYTES_OF_A_GPU: Final = 2**41  # ample; how many it really has, its rank finds out


class InvalidGeometry(ValueError):
    """Options that contradict each other; the message names them, their values and the fix."""


def read_config(
    model_dir: str | Path, options: EngineSettings | EngineConfig
) -> ModelConfig:
    """What the options make of a model's config.json."""
    return load_config(
        model_dir,
        overrides=options.hf_overrides,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
    )


def check_weights(
    config: EngineConfig, model: ModelConfig, free_bytes: int | None = None
) -> None:
    """Refuses weights that the files do not have (ModelLoadError), or that no memory can hold
    (InvalidGeometry): the sizes of all that follows are the model's.

    Args:
        free_bytes: of this machine or container; None: what is free now.
    """
    fix = "use a smaller model, or a machine with more memory"
    itemsize = ITEMSIZE.get(config.dtype, 1)  # others are refused with the layout
    needed = weight_bytes(model, itemsize, keep_quantised=config.device == "cuda")
    if config.load_format != "dummy":
        check_files(model, Path(config.model_dir))
    if config.device == "cpu":
        most, told = (
            free_host_bytes() if free_bytes is None else free_bytes,
            "are free here",
        )
        if config.load_format != "dummy":
            elements, fix = _elements_beside_files(config, model)
            needed = elements * itemsize
    else:
        most, told = (
            config.tp * _MOST_BYTES_OF_A_GPU,
            f"is more than {config.tp} GPU(s) have",
        )
    if needed > most:
        raise InvalidGeometry(
            f"the model's weights take {needed / 2**30:,.1f} GiB in {config.dtype}, and "
            f"{most / 2**30:,.1f} GiB {told}; most of them are {largest_group(model)}: correct "
            f"config.json where that is wrong, else {fix}"
        )


def _elements_beside_files(config: EngineConfig, model: ModelConfig) -> tuple[int, str]:
    """Elements of weights that cannot be used where files are mapped, and what helps."""
    stored = stored_elements(Path(config.model_dir))
    mapped = sum(
        stored[name] for name, dtype in _STORED.items() if dtype == config.dtype
    )
    copied, fix = stored.total() - mapped, "use --no-pack-weights"
    if model.quantization:  # to be dequantised, and words hold several of them
        copied = max(copied, weight_bytes(model, 1, keep_quantised=False) - mapped)
    if copied > mapped:
        kept = max(_STORED, key=lambda name: stored[name])
        fix = f"use --dtype {_STORED[kept]}, as which the files can be mapped"
    if model.moe or (
        config.pack_weights and config.dtype == "float32"
    ):  # experts are stacked
        copied = max(
            copied,
            weight_bytes(model, 1, keep_quantised=False)
            - model.vocab_size * model.hidden_size,
        )
    return copied, f"{fix}, or more memory: experts are copied" if model.moe else fix


def check_geometry(config: EngineConfig, model: ModelConfig) -> KVLayout:
    """The layout of rank 0's smallest pool, one block beside the null block.

    Raises:
        InvalidParallelism: `tp` ranks cannot share the model, or not in groups of `dcp`.
        InvalidGeometry: the model has fewer positions than are wanted.
    """
    check_parallelism(model, config.tp, config.dcp, config.ep)
    if config.max_model_len and config.max_model_len > model.max_position:
        raise InvalidGeometry(
            f"--max-model-len is {config.max_model_len} tokens, but the model's positions end at "
            f"{model.max_position}; use --max-model-len {model.max_position} or less, or, if its "
            "rope is scaled to reach further, max_position_embeddings of --hf-overrides"
        )
    return layout_of(config, model, num_blocks=2)


def layout_of(config: EngineConfig, model: ModelConfig, num_blocks: int) -> KVLayout:
    """The layout of a rank's pool with `num_blocks` blocks, the null block included."""
    _, dealt = kv_groups(model)
    return KVLayout(
        order=config.kv_layout,
        num_blocks=num_blocks,
        num_heads=len(heads_of(0, config.tp // config.dcp, model.kv_heads_total)),
        num_layers=max(map(len, dealt)),
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
    """Raises InvalidGeometry for scales of FP8 KV where layers have blocks in several groups."""
    groups, _ = kv_groups(model)
    if groups.count > 1 and set(config.scales) - {1.0}:
        raise InvalidGeometry(
            f"the scales of FP8 KV are {min(config.scales):g} to {max(config.scales):g}, and this "
            f"model has KV in {groups.count} groups of layers, by their windows, which are served "
            "with scales of 1 only: use --kv-scales 1, or --kv-cache-dtype auto"
        )


def check_staging(config: EngineConfig, layout: KVLayout) -> None:
    """Raises InvalidGeometry when the staging memory cannot hold two blocks of `layout`. A peer's
    may be larger still: the planner decides that, pull by pull."""
    least = min_staging_bytes(layout)
    if config.staging_bytes < least:
        raise InvalidGeometry(
            f"--staging-bytes is {config.staging_bytes}; a KV block of {config.block_size} tokens "
            f"takes {layout.block_bytes} bytes on each rank, and two must fit: use "
            f"--staging-bytes {least} or more, or a smaller --block-size"
        )


def check_attention(config: EngineConfig, model: ModelConfig) -> None:
    """Raises UnsupportedPool, with the option that helps, where no rank's attention backend would
    serve the model."""
    own = model.num_heads // config.tp
    for num_q_heads, of_group in {own: False, own * config.dcp: config.dcp > 1}.items():
        wanted = wanted_of(config, model, num_q_heads)
        check_supported(
            config.attention_backend,
            wanted,
            step_limits(config, model, of_group=of_group),
        )


def wanted_of(
    config: EngineConfig, model: ModelConfig, num_q_heads: int
) -> AttentionSpec:
    """What the attention backend of a rank with so many query heads is to read."""
    return AttentionSpec(
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        head_dim=model.kv_dim,
        num_components=model.kv_components,
        num_q_heads=num_q_heads,
        kinds=tuple(
            (has_window, bool(model.score_cap))
            for has_window in sorted(
                {each is not None for each in model.layer_windows or (None,)}
            )
        ),
    )


def step_limits(
    config: EngineConfig, model: ModelConfig, *, of_group: bool
) -> StepLimits:
    """The largest steps of a rank's attention backend; `of_group`: of that for the heads of all
    ranks that share tokens, which only decodes attend with."""
    seqs, longest = config.max_num_seqs, config.max_model_len or model.max_position
    tokens = max(config.max_num_batched_tokens, seqs)
    return StepLimits(seqs, seqs, 0) if of_group else StepLimits(seqs, tokens, longest)

"""Scales of a KV cache in FP8.

The scales come from the option --kv-scales, else from the checkpoint, else they are 1.
A checkpoint that was calibrated for FP8 KV stores the scales of a layer's keys and
values under one of the names in _KV_SCALE_NAMES. The value of an element is the stored
FP8 number times the scale. This file does not import torch.
"""

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from model.config import ModelConfig
from model.errors import ModelLoadError
from model.files.safetensors_files import StoredTensor, read_headers
from protocol.short_repr import short_repr

# Possible names of the scales of keys and of values, after the prefix
# `model.layers.N.self_attn.`. MLA's latents use the names for keys.
_KV_SCALE_NAMES: Final = (
    ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
)
# Scales for attention that is computed in FP8, which Baton does not implement.
_UNUSED_SCALE_NAMES: Final = (
    "q_scale",
    "attn.q_scale",
    "q_proj.output_scale",
    "prob_scale",
    "attn.prob_scale",
)
_KV_SCALE_SUFFIXES: Final = tuple(
    f"self_attn.{name}" for names in _KV_SCALE_NAMES for name in names
)
# Suffixes of the names of all KV and attention scales, which no model loads as weights.
SUFFIXES: Final = (
    *_KV_SCALE_SUFFIXES,
    *(f"self_attn.{name}" for name in _UNUSED_SCALE_NAMES),
)
_OPTION_KEYS: Final = ("k_scale", "v_scale")
_FORMATS: Final = {"F64": "<d", "F32": "<f", "F16": "<e"}


class InvalidScales(ValueError):
    """Scales are invalid or do not fit the model.

    The message names the scales and the fix.
    """


def resolve_scales(
    option: str | None,
    config: ModelConfig,
    model_dir: str | Path,
    *,
    load_format: str = "auto",
) -> tuple[float, ...]:
    """Returns the scales of all layers: for each layer, the scale of each component.

    Args:
        option: a number for all scales, or the path of a JSON file with the keys
            "k_scale" and "v_scale". Each value is a number, or a list with a number for
            each layer. None: the scales of the checkpoint, or 1 if it has none.
        model_dir: as `hub.resolve_model` returns it; not read if load_format is
            "dummy".

    Raises:
        InvalidScales: a layer or component has no scale, or a scale is not a finite
            number above 0.
    """
    if option is not None:
        by_component = _scales_of_option(option, config)
    elif load_format == "dummy":
        by_component = [[1.0] * config.num_layers] * config.kv_components
    else:
        by_component = _scales_of_checkpoint(config, Path(model_dir))
    return tuple(scale for layer in zip(*by_component, strict=True) for scale in layer)


def _scales_of_option(option: str, config: ModelConfig) -> list[list[float]]:
    try:
        content: object = float(option)
    except ValueError:
        try:
            content = json.loads(Path(option).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidScales(
                f"--kv-scales {option} is neither a number nor a readable JSON file: "
                f"{error}"
            ) from error
    keys = _OPTION_KEYS[: config.kv_components]
    if isinstance(content, float):
        content = dict.fromkeys(keys, content)
    if not isinstance(content, dict) or set(content) != set(keys):
        raise InvalidScales(
            f"--kv-scales {option} must hold an object with {' and '.join(keys)}"
        )
    return [
        _per_layer(f"--kv-scales {option}: {key}", content[key], config) for key in keys
    ]


def _per_layer(name: str, value: object, config: ModelConfig) -> list[float]:
    scales = value if isinstance(value, list) else [value] * config.num_layers
    if len(scales) != config.num_layers:
        raise InvalidScales(
            f"{name} has {len(scales)} numbers, but the model has {config.num_layers} "
            "layers: give a number for each layer, or one number for all layers"
        )
    return [_checked(name, scale) for scale in scales]


def _checked(name: str, scale: object) -> float:
    is_valid = (
        isinstance(scale, int | float)
        and not isinstance(scale, bool)
        and math.isfinite(scale)
        and scale > 0
    )
    if not is_valid:
        raise InvalidScales(
            f"{name} is {short_repr(scale)}: a scale must be a finite number above 0; "
            "give valid scales with --kv-scales"
        )
    return float(scale)  # type: ignore[arg-type]


def _scales_of_checkpoint(config: ModelConfig, model_dir: Path) -> list[list[float]]:
    scales = {
        name: _read_number(name, tensor)
        for name, tensor in read_headers(model_dir).items()
        if name.endswith(_KV_SCALE_SUFFIXES)
    }
    if not scales:
        return [[1.0] * config.num_layers] * config.kv_components
    return [
        [_scale_of_layer(scales, layer, names) for layer in range(config.num_layers)]
        for names in _KV_SCALE_NAMES[: config.kv_components]
    ]


def _scale_of_layer(
    scales: dict[str, float], layer: int, names: Sequence[str]
) -> float:
    prefix = f"model.layers.{layer}.self_attn."
    for name in names:
        full_name = prefix + name
        if full_name in scales:
            return _checked(f"weight {full_name}", scales[full_name])
    raise InvalidScales(
        f"the checkpoint has scales for FP8 KV, but no {prefix}{names[0]}: give the "
        "scales of all layers with --kv-scales"
    )


def _read_number(name: str, tensor: StoredTensor) -> float:
    if tensor.size != 1:
        raise InvalidScales(
            f"weight {name} has shape {tuple(tensor.shape)}; supported: one scale for "
            "all heads, which --kv-scales can give"
        )
    dtype = tensor.dtype
    raw = tensor.content().tobytes()
    if dtype == "BF16":
        # The two bytes of a bfloat16 are the upper half of a float32.
        dtype = "F32"
        raw = b"\0\0" + raw
    if dtype not in _FORMATS or len(raw) != struct.calcsize(_FORMATS[dtype]):
        raise ModelLoadError(
            f"weight {name} has dtype {dtype}; supported for a scale: float32, "
            "bfloat16, float16"
        )
    return float(struct.unpack(_FORMATS[dtype], raw)[0])

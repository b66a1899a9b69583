"""The properties of a model, read from its config.json.

This file does not import torch, because the HTTP process reads configs, too. A feature
that this package does not implement is refused here, before any weight is read, with an
error that names the implemented alternatives.
"""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.architectures.experts import MoEConfig, parse_experts
from model.architectures.keys import (
    read_activation,
    refuse_unsupported,
    text_part,
    with_defaults,
)
from model.architectures.quantization import AT_LOAD, Quantization, parse_quantization
from model.architectures.rotation import NOT_ROTATED, RopeConfig, parse_ropes
from model.architectures.table import ARCHITECTURES, Architecture, explain_unsupported
from model.architectures.values import (
    config_error,
    read_number,
    read_size,
    unsupported_error,
)
from model.architectures.windows import parse_windows
from model.errors import ModelError, ModelLoadError
from model.hub import resolve_model
from protocol.settings.near_names import suggestion
from protocol.short_repr import short_repr


@dataclass(frozen=True)
class MLAConfig:
    """The sizes of multi-head latent attention."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """The properties of a model that decide its computation.

    Sizes are those of the whole model, not of one tensor-parallel rank.

    Attributes:
        architecture: a key of ARCHITECTURES.
        intermediate_size: of a dense feed-forward layer; 0 if no layer is dense.
        head_dim: elements of a head. For MLA, elements of the rotated part of a head;
            `mla` has the sizes of the other parts.
        max_position: longest sequence, in tokens.
        rope: the first rope. `ropes` lists all of them.
        attention_bias: q, k and v have a bias.
        output_bias: the output projection of attention has a bias.
        activation: "silu", "gelu", "gelu_tanh", "quick_gelu", "relu" or "relu2".
        qk_norm: "head", "row" or ""; see Architecture.
        other_ropes: the ropes after the first.
        layer_ropes: for each layer an index into `ropes`, or NOT_ROTATED. Empty: all
            layers use `rope`.
        layer_windows: for each layer the result of `window_of`. Empty: no layer has a
            window.
        embedding_scale: factor of the embeddings.
        residual_scale: factor of the outputs of attention and feed-forward.
        score_scale: factor of attention scores. None: 1 / sqrt(elements of a query).
        score_cap: scaled attention scores become tanh(score / cap) * cap. 0: no cap.
        logit_divisor: divisor of the logits.
        logit_cap: logits become tanh(logit / cap) * cap. 0: no cap.
        draft_layers: number of layers for speculative drafts. In the files, they follow
            the model's `num_layers` layers. `load_model` does not load them.
        dtype: data type in which the weights were saved.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    qk_norm: str = ""
    other_ropes: tuple[RopeConfig, ...] = ()
    layer_ropes: tuple[int, ...] = ()
    layer_windows: tuple[int | None, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float = 0.0
    logit_divisor: float = 1.0
    logit_cap: float = 0.0
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    draft_layers: int = 0
    quantization: Quantization | None = None
    dtype: str = "float32"

    @property
    def traits(self) -> Architecture:
        """The properties of the model's class that config.json does not contain."""
        return ARCHITECTURES[self.architecture]

    @property
    def summary(self) -> str:
        """One line for users: the architecture, its layers, windows and experts."""
        layers = f"{self.num_layers} layers"
        window_counts = Counter(window for window in self.layer_windows if window)
        if window_counts:
            windows = ", ".join(
                f"{count} see {window} tokens"
                for window, count in window_counts.items()
            )
            layers += f" ({windows})"
        experts = f", {self.moe.num_experts} experts" if self.moe else ""
        return f"served: {self.architecture}, {layers}{experts}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope, *self.other_ropes)

    def rope_index(self, layer: int) -> int | None:
        """Returns the layer's index in `ropes`, or None if the layer has no rope."""
        index = self.layer_ropes[layer] if self.layer_ropes else 0
        return None if index == NOT_ROTATED else index

    def window_of(self, layer: int) -> int | None:
        """Returns how many tokens a token of this layer attends to, including itself.

        None means the token itself and all earlier tokens.
        """
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def special_attention(self) -> str:
        """The features of the model's attention beyond plain causal attention, as text.

        The text is empty if there are no such features.
        """
        features = {
            "sliding windows": self.layer_windows,
            "soft caps of scores": self.score_cap,
            "attention sinks": self.traits.sinks,
        }
        return " and ".join(name for name, value in features.items() if value)

    @property
    def num_dense_layers(self) -> int:
        return len(self.moe.dense_layers) if self.moe else self.num_layers

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether the layer's feed-forward is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def kv_heads_total(self) -> int:
        """Number of KV heads in the cache for one token and layer, over all ranks.

        The latent of MLA counts as 1 head.
        """
        return 1 if self.mla else self.num_kv_heads

    @property
    def kv_components(self) -> int:
        """Components of a layer's cache: 2 for keys and values, 1 for MLA's latent."""
        return 1 if self.mla else 2

    @property
    def kv_dim(self) -> int:
        """Elements of one head in one component of the cache."""
        if self.mla:
            return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return self.head_dim

    @property
    def rope_canonical(self) -> str:
        """The rope parameters as JSON that is equal for equal rotations."""
        ropes = [dataclasses.asdict(rope) for rope in self.ropes]
        return json.dumps([ropes, self.layer_ropes], sort_keys=True)

    @property
    def semantic_json(self) -> str:
        """All fields that decide the values in the KV cache, as canonical JSON."""
        fields = dataclasses.asdict(self)
        for name in ("dtype", "max_position", "draft_layers"):
            del fields[name]
        return json.dumps(fields, sort_keys=True)


def load_config(
    path_or_id: str | Path,
    revision: str | None = None,
    overrides: str | None = None,
    quantization: str | None = None,
    max_model_len: int | None = None,
) -> ModelConfig:
    """Reads a model's config.json.

    Args:
        path_or_id: a local directory or a hub id.
        revision: branch, tag or commit on the hub; None: the default branch.
        overrides: a JSON object of values that replace those in the file.
        quantization: "fp8" quantises the weights to FP8 while they are loaded; None:
            weights are used as stored.
        max_model_len: tokens of the longest sequence; None: max_position_embeddings.

    Raises:
        UnsupportedModel: the architecture, rope type or attention variant is not
            implemented.
        ModelLoadError: config.json is missing, is not JSON or lacks a size; an override
            has no effect; or `quantization` is given for weights that are stored
            quantised.
    """
    path = resolve_model(str(path_or_id), revision) / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{path.parent} has no config.json: not a Hugging Face model directory"
        )
    raw = _read_object(path)
    try:
        if not raw.get("quantization_config"):
            quantization_config = _read_other_quantization_config(raw, path)
            if quantization_config:
                raw["quantization_config"] = quantization_config
        config = _parse_overridden(raw, json.loads(overrides or "{}"), max_model_len)
    except ModelError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise ModelLoadError(f"{path} has a value of a wrong kind: {error}") from error
    if quantization is None:
        return config
    if config.quantization is not None:
        raise ModelLoadError(
            f"--quantization {quantization}: the weights are already stored quantised "
            f"({config.quantization.stored}) and stay so; leave the option out"
        )
    return dataclasses.replace(config, quantization=Quantization(AT_LOAD))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(
            f"{path} holds a {type(value).__name__}, expected an object"
        )
    return value


def _read_other_quantization_config(raw: dict[str, Any], path: Path) -> Any:
    """Returns a quantization config that is stored in another place, or None.

    Early versions of compressed-tensors store the config under compression_config
    instead of quantization_config. ModelOpt stores it in hf_quant_config.json.
    """
    if raw.get("compression_config"):
        return raw["compression_config"]
    modelopt_path = path.with_name("hf_quant_config.json")
    if not modelopt_path.is_file():
        return None
    modelopt_file = _read_object(modelopt_path)
    modelopt_config = modelopt_file.get("quantization", modelopt_file)
    if not modelopt_config.get("quant_algo"):
        return None
    return {"quant_method": "modelopt", **modelopt_config}


def _parse_overridden(
    raw: dict[str, Any], overrides: dict[str, Any], max_model_len: int | None
) -> ModelConfig:
    """Parses a config with overrides.

    Raises:
        ModelLoadError: a key of the overrides has no effect, for example because it is
            misspelled.
    """
    config = parse_config(_with_values(raw, overrides), max_model_len)
    for key in overrides:
        if not _has_effect(key, raw, overrides, config, max_model_len):
            near = suggestion(key, sorted({*raw, *config.traits.defaults}))
            raise ModelLoadError(
                f"--hf-overrides: {short_repr(key)} changes nothing in this model"
                f"{near}; leave it out"
            )
    return config


def _has_effect(
    key: str,
    raw: dict[str, Any],
    overrides: dict[str, Any],
    config: ModelConfig,
    max_model_len: int | None,
) -> bool:
    """Returns whether the override of `key` changes the parsed config.

    An override that repeats config.json's value counts as effective.

    Args:
        raw: config.json without the overrides.
        config: the config with all overrides.
    """
    if raw.get(key) == overrides[key]:
        return True
    other_overrides = {name: value for name, value in overrides.items() if name != key}
    try:
        without_key = parse_config(_with_values(raw, other_overrides), max_model_len)
    except ModelError:
        return True  # the model is refused without this override
    return without_key != config


def _with_values(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns `raw` updated with `values`, also inside text_config if `raw` has one."""
    merged = {**raw, **values}
    text_config = merged.get("text_config")
    if isinstance(text_config, dict):
        merged["text_config"] = {**text_config, **values}
    return merged


def parse_config(raw: dict[str, Any], max_model_len: int | None = None) -> ModelConfig:
    """Builds the config from the content of config.json; see load_config."""
    name = _architecture_name(raw)
    architecture = ARCHITECTURES[name]
    raw = text_part(raw, architecture)
    refuse_unsupported(raw, architecture)
    raw = with_defaults(raw, architecture)
    raw["max_model_len"] = max_model_len
    num_heads = read_size(raw, "num_attention_heads")
    hidden_size = read_size(raw, "hidden_size")
    mla = _parse_mla(raw) if architecture.mla else None
    head_dim = _head_dim(raw, mla)
    bias = _has_qkv_bias(raw, architecture)
    raw["num_key_value_heads"] = raw["num_key_value_heads"] or num_heads
    ropes, layer_ropes = parse_ropes(raw, head_dim, architecture)
    moe = parse_experts(raw, architecture.mixture) if architecture.mixture else None
    has_only_experts = moe is not None and raw["intermediate_size"] is None
    config = ModelConfig(
        architecture=name,
        num_layers=read_size(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=(
            0 if has_only_experts else read_size(raw, "intermediate_size")
        ),
        num_heads=num_heads,
        num_kv_heads=read_size(raw, "num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=read_size(raw, "vocab_size"),
        max_position=read_size(raw, "max_position_embeddings"),
        rms_eps=read_number(raw, "rms_norm_eps", 1e-6),
        rope=ropes[0],
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and architecture.output_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        activation=read_activation(raw, architecture),
        qk_norm=_qk_norm(raw, architecture),
        other_ropes=tuple(ropes[1:]),
        layer_ropes=layer_ropes,
        layer_windows=parse_windows(raw, architecture),
        **_scales(raw, architecture),
        mla=mla,
        moe=moe,
        draft_layers=int(raw.get("num_nextn_predict_layers") or 0),
        quantization=parse_quantization(
            raw.get("quantization_config") or raw.get("quantization")
        ),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    return config


def _architecture_name(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if len(names) == 1 and names[0] in ARCHITECTURES:
        return str(names[0])
    if names:
        problem = f"architecture {', '.join(map(str, names))}"
    else:
        model_type = short_repr(raw.get("model_type"))
        problem = f"model_type {model_type} without an entry in architectures"
    if len(names) == 1:
        problem += f" ({explain_unsupported(str(names[0]))})"
    raise unsupported_error(problem, ", ".join(ARCHITECTURES))


def _has_qkv_bias(raw: dict[str, Any], architecture: Architecture) -> bool:
    if isinstance(architecture.bias, str):
        return bool(raw[architecture.bias])
    return architecture.bias


def _qk_norm(raw: dict[str, Any], architecture: Architecture) -> str:
    field = architecture.qk_norm_field
    return architecture.qk_norm if field is None or raw[field] else ""


def _head_dim(raw: dict[str, Any], mla: MLAConfig | None) -> int:
    """Returns ModelConfig.head_dim. Sets raw["head_dim"] if the value is missing."""
    num_heads = read_size(raw, "num_attention_heads")
    hidden_size = read_size(raw, "hidden_size")
    if not raw.get("head_dim") and num_heads > hidden_size:
        raise config_error(
            f"num_attention_heads is {num_heads}, above hidden_size {hidden_size}; "
            "correct one of them, or give head_dim"
        )
    raw["head_dim"] = raw.get("head_dim") or hidden_size // num_heads
    head_dim = mla.qk_rope_head_dim if mla else read_size(raw, "head_dim")
    if head_dim % 2:
        field = "qk_rope_head_dim" if mla else "head_dim"
        raise config_error(
            f"{field} is {head_dim}, expected an even number: its elements are rotated "
            "in pairs"
        )
    return head_dim


def _scales(raw: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Returns those fields of ModelConfig that are factors, divisors or caps."""
    query_scalar = _optional_number(raw, "query_pre_attn_scalar")
    if query_scalar:
        score_scale: float | None = query_scalar**-0.5
    else:
        score_scale = _optional_number(raw, "attention_multiplier")
    if architecture.scales_embedding:
        embedding_scale = math.sqrt(read_size(raw, "hidden_size"))
    else:
        embedding_scale = read_number(raw, "embedding_multiplier", 1.0)
    return {
        "embedding_scale": embedding_scale,
        "residual_scale": read_number(raw, "residual_multiplier", 1.0),
        "score_scale": score_scale,
        "score_cap": _read_cap(raw, "attn_logit_softcapping"),
        "logit_divisor": read_number(raw, "logits_scaling", 1.0),
        "logit_cap": _read_cap(raw, "final_logit_softcapping"),
    }


def _optional_number(raw: dict[str, Any], name: str) -> float | None:
    return None if raw.get(name) is None else read_number(raw, name, 1.0)


def _read_cap(raw: dict[str, Any], name: str) -> float:
    return read_number(raw, name, 1.0) if raw.get(name) else 0.0


def _parse_mla(raw: dict[str, Any]) -> MLAConfig:
    has_q_lora = raw["q_lora_rank"] is not None
    return MLAConfig(
        q_lora_rank=read_size(raw, "q_lora_rank") if has_q_lora else None,
        kv_lora_rank=read_size(raw, "kv_lora_rank"),
        qk_nope_head_dim=read_size(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=read_size(raw, "qk_rope_head_dim"),
        v_head_dim=read_size(raw, "v_head_dim"),
    )

"""What a model is, read from its config.json. No torch here: the HTTP process asks it too.

Whatever the maths of this package does not implement is refused here, before any weight is read,
with an error that names what is implemented.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError, ModelLoadError, UnsupportedModel
from model.hub import resolve_model
from protocol.near_names import suggestion
from protocol.short_repr import short_repr

ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")

# What a config.json of each architecture means when it leaves a key out.
_LLAMA: Final[dict[str, Any]] = {"head_dim": None, "attention_bias": False}
ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {**_LLAMA, "attention_bias": True},
    "Qwen3ForCausalLM": {**_LLAMA, "head_dim": 128},
    "DeepseekV2ForCausalLM": {**_LLAMA, "q_lora_rank": 1536, "routed_scaling_factor": 1.0},
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. Fields that a rope type does not use keep their defaults."""

    dim: int  # rotated elements of a head, even
    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn: tokens
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None derives it from factor and the mscales
    mscale: float = 0.0  # yarn: 0 means absent
    mscale_all_dim: float = 0.0  # yarn: 0 means absent
    truncate: bool = True  # yarn
    interleaved: bool = False  # DeepSeek rotates neighbours, the others rotate halves


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts with softmax scores, from layer `first_dense_layers` on."""

    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    first_dense_layers: int
    topk_method: str  # "greedy" | "group_limited_greedy"
    num_groups: int
    topk_groups: int
    routed_scaling_factor: float


@dataclass(frozen=True)
class ModelConfig:
    """The semantic facts of a model; sizes count elements over all tensor-parallel ranks."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # for MLA: of the rotated part, see `mla` for the rest
    vocab_size: int
    max_position: int  # tokens
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    dtype: str = "float32"  # what the weights were saved in

    @property
    def kv_heads_total(self) -> int:
        """KV heads of one token and layer in the cache, over all ranks; 1 for MLA's latent."""
        return 1 if self.mla else self.num_kv_heads

    @property
    def kv_components(self) -> int:
        """2 for keys and values, 1 for MLA's latent."""
        return 1 if self.mla else 2

    @property
    def kv_dim(self) -> int:
        """Elements of one head in one component of the cache."""
        return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def rope_canonical(self) -> str:
        """The rope parameters as JSON that is equal for equal rotations."""
        return json.dumps(dataclasses.asdict(self.rope), sort_keys=True)

    @property
    def semantic_json(self) -> str:
        """Everything that decides the values in the KV cache, as canonical JSON."""
        fields = dataclasses.asdict(self)
        for name in ("dtype", "max_position"):
            del fields[name]
        return json.dumps(fields, sort_keys=True)


def load_config(
    path_or_id: str | Path, revision: str | None = None, overrides: str | None = None
) -> ModelConfig:
    """Reads a model's config.json.

    Args:
        path_or_id: a local directory or a hub id.
        revision: branch, tag or commit on the hub; None is its default branch.
        overrides: a JSON object of values instead of the file's.

    Raises:
        UnsupportedModel: architecture, rope type or attention variant not implemented.
        ModelLoadError: config.json missing, not JSON, or lacking a size; an override without an
            effect.
    """
    path = resolve_model(str(path_or_id), revision) / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{path.parent} has no config.json: not a Hugging Face model directory"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} holds a {type(raw).__name__}, expected an object")
    try:
        return _overridden(raw, json.loads(overrides)) if overrides else parse_config(raw)
    except ModelError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelLoadError(f"{path} has a value of a wrong kind: {error}") from error


def _overridden(raw: dict[str, Any], overrides: dict[str, Any]) -> ModelConfig:
    """Raises ModelLoadError for a key that changes nothing, as a misspelt one does."""
    config = parse_config({**raw, **overrides})
    for key in overrides:
        others = {**raw, **{k: v for k, v in overrides.items() if k != key}}
        try:
            has_effect = raw.get(key) == overrides[key] or parse_config(others) != config
        except ModelError:  # the model is refused without it
            has_effect = True
        if not has_effect:
            near = suggestion(key, [*raw, *ARCHITECTURES[config.architecture]])
            told = f"{short_repr(key)} changes nothing of this model{near}"
            raise ModelLoadError(f"--hf-overrides: {told}; leave it out")
    return config


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Builds the config from the parsed config.json. See load_config."""
    architecture = _architecture(raw)
    raw = {**ARCHITECTURES[architecture], **raw}
    _refuse_unsupported(raw, architecture)
    num_heads = _size(raw, "num_attention_heads")
    hidden_size = _size(raw, "hidden_size")
    mla = _mla(raw) if architecture == "DeepseekV2ForCausalLM" else None
    if not raw["head_dim"] and num_heads > hidden_size:
        raise _wrong(
            f"num_attention_heads is {num_heads}, above hidden_size {hidden_size}; correct one of "
            "them, or give head_dim"
        )
    raw["head_dim"] = raw["head_dim"] or hidden_size // num_heads
    head_dim = mla.qk_rope_head_dim if mla else _size(raw, "head_dim")
    if head_dim % 2:
        field = "qk_rope_head_dim" if mla else "head_dim"
        told = "expected an even number: its elements are rotated in pairs"
        raise _wrong(f"{field} is {head_dim}, {told}")
    bias = bool(raw["attention_bias"])
    raw["num_key_value_heads"] = raw.get("num_key_value_heads") or num_heads
    config = ModelConfig(
        architecture=architecture,
        num_layers=_size(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_size(raw, "num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=_size(raw, "vocab_size"),
        max_position=_size(raw, "max_position_embeddings"),
        rms_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw, head_dim, interleaved=mla is not None),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        mla=mla,
        moe=_moe(raw) if mla else None,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    return config


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        kind = short_repr(raw.get("model_type"))
        told = ", ".join(map(str, names)) or f"model_type {kind} without one"
        raise _unsupported(f"architecture {told}", ", ".join(ARCHITECTURES))
    return str(names[0])


def _refuse_unsupported(raw: dict[str, Any], architecture: str) -> None:
    quantization = raw.get("quantization_config")
    if quantization and not _is_of_kv_only(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise _unsupported(
            f"quantization_config {short_repr(method or quantization)}",
            "weights in float32, bfloat16 or float16, and GGUF files (dequantised at load)",
        )
    if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise _unsupported(f"hidden_act {short_repr(act)}", "silu")
    if (partial := raw.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise _unsupported(f"partial_rotary_factor {short_repr(partial)}", "1")
    _refuse_sliding_window(raw, architecture)


def _is_of_kv_only(quantization: Any) -> bool:
    """Whether nothing but the KV cache was calibrated for FP8: the weights are plain."""
    if not isinstance(quantization, dict):
        return False
    has_kv = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    is_known = quantization.get("quant_method") in ("compressed-tensors", "modelopt")
    of_weights = ("config_groups", "quant_algo")
    return bool(has_kv) and is_known and not any(quantization.get(name) for name in of_weights)


def _refuse_sliding_window(raw: dict[str, Any], architecture: str) -> None:
    layer_types = set(raw.get("layer_types") or []) - {"full_attention"}
    window = raw.get("sliding_window")
    if architecture.startswith("Qwen"):
        late = raw.get("max_window_layers", 28) < raw.get("num_hidden_layers", 0)
        window = window if raw.get("use_sliding_window") and (late or layer_types) else None
    elif architecture == "LlamaForCausalLM":
        window = None
    limit = raw.get("max_position_embeddings") or 0
    if (window and window < limit) or layer_types:
        kinds = short_repr(sorted(layer_types)) if layer_types else "all"
        raise UnsupportedModel(
            f"sliding_window {short_repr(window)} (layer types {kinds}) is not supported"
            f" below max_position_embeddings {limit}; supported: full attention in every layer"
        )


def _size(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(f"{name} is {short_repr(value)}, expected a positive integer")
    return value


def _number(raw: dict[str, Any], name: str, default: float) -> float:
    value = raw.get(name) or default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _wrong(f"{name} is {short_repr(value)}, expected a number above 0")
    return float(value)


def _wrong(what: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {what}")


def _unsupported(what: str, supported: str) -> UnsupportedModel:
    return UnsupportedModel(f"{what} is not supported; supported: {supported}")


def _rope(raw: dict[str, Any], dim: int, *, interleaved: bool) -> RopeConfig:
    # transformers 5 stores rope_parameters; before, rope_theta and rope_scaling lay side by side.
    found = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    rope_type = str(found.get("rope_type") or found.get("type") or "default")
    if rope_type not in ROPE_TYPES:
        raise _unsupported(f"rope type {short_repr(rope_type)}", ", ".join(ROPE_TYPES))
    if found.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    told = found.get("rope_theta") or raw.get("rope_theta")
    theta = _number({"rope_theta": told}, "rope_theta", 10000.0)
    base = RopeConfig(dim=dim, theta=theta, rope_type=rope_type, interleaved=interleaved)
    if rope_type == "default":
        return base
    return dataclasses.replace(base, **_rope_scaling(raw, found, rope_type))


def _rope_scaling(raw: dict[str, Any], found: dict[str, Any], rope_type: str) -> dict[str, Any]:
    max_position = _size(raw, "max_position_embeddings")
    original = found.get("original_max_position_embeddings") or max_position
    factor = found.get("factor") or (max_position / original if rope_type == "yarn" else None)
    if factor is None:
        raise _wrong(f"rope type {short_repr(rope_type)} lacks its factor")
    required = ("low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ()
    if missing := [name for name in required if found.get(name) is None]:
        raise _wrong(f"rope type {short_repr(rope_type)} lacks {', '.join(missing)}")
    used = {name: float(found[name]) for name in required}
    if rope_type == "yarn":
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        used = {name: float(found[name]) for name in names if found.get(name)}
        if found.get("attention_factor") is not None:
            used["attention_factor"] = float(found["attention_factor"])
        used["truncate"] = bool(found.get("truncate", True))
    if rope_type != "linear":
        used["original_max_position"] = int(original)
    return {"factor": float(factor), **used}


def _mla(raw: dict[str, Any]) -> MLAConfig:
    low = None if raw["q_lora_rank"] is None else _size(raw, "q_lora_rank")
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MLAConfig(low, *(_size(raw, name) for name in names))


def _moe(raw: dict[str, Any]) -> MoEConfig | None:
    first_dense = int(raw.get("first_k_dense_replace") or 0)
    if not raw.get("n_routed_experts") or first_dense >= _size(raw, "num_hidden_layers"):
        return None
    method = str(raw.get("topk_method") or "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise _unsupported(f"topk_method {short_repr(method)}", "greedy, group_limited_greedy")
    if raw.get("scoring_func", "softmax") != "softmax" or raw.get("norm_topk_prob"):
        scoring = short_repr(raw.get("scoring_func", "softmax"))
        normalised = short_repr(raw.get("norm_topk_prob"))
        told = f"scoring_func {scoring} with norm_topk_prob {normalised}"
        raise _unsupported(told, "softmax, not normalised")
    if raw.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModel("moe_layer_freq other than 1 is not supported")
    experts, each = _size(raw, "n_routed_experts"), _size(raw, "num_experts_per_tok")
    if each > experts:
        raise _wrong(f"num_experts_per_tok is {each}, above n_routed_experts {experts}")
    return MoEConfig(
        num_experts=experts,
        num_shared_experts=_size(raw, "n_shared_experts"),
        experts_per_token=each,
        expert_intermediate_size=_size(raw, "moe_intermediate_size"),
        first_dense_layers=first_dense,
        topk_method=method,
        num_groups=int(raw.get("n_group") or 1),
        topk_groups=int(raw.get("topk_group") or 1),
        routed_scaling_factor=float(raw["routed_scaling_factor"]),
    )

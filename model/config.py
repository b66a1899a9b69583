"""What a model is, read from its config.json. No torch here: the HTTP process asks it too.

Whatever the maths of this package does not implement is refused here, before any weight is read,
with an error that names what is implemented.
"""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.architectures.experts import MoEConfig, parse_experts
from model.architectures.quantization import AT_LOAD, Quantization, parse_quantization
from model.architectures.rotation import NOT_ROTATED, RopeConfig, parse_ropes
from model.architectures.table import ARCHITECTURES, Architecture, nearest
from model.architectures.values import number, size, unsupported, wrong
from model.architectures.windows import parse_windows
from model.errors import ModelError, ModelLoadError
from model.hub import resolve_model
from protocol.near_names import suggestion
from protocol.short_repr import short_repr

# Names of transformers, some of them of one function, and what the layers call it.
_ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
# Keys that are read of every model, whether or not its class lists them in its defaults.
_COMMON_KEYS: Final = frozenset({
    "architectures", "dtype", "torch_dtype", "quantization_config", "quantization", "head_dim",
    "tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta",
    "partial_rotary_factor", "original_max_position_embeddings", "layer_types", "scoring_func",
    "topk_method", "moe_layer_freq", "num_nextn_predict_layers",
})  # fmt: skip
# Of a model that may take images, those that do not stand in text_config.
_TOP_KEYS: Final = (
    "architectures", "dtype", "torch_dtype", "quantization_config", "quantization",
    "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


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
    activation: str = "silu"  # or "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"
    qk_norm: str = ""  # "head", "row": see Architecture
    other_ropes: tuple[RopeConfig, ...] = ()
    layer_ropes: tuple[
        int, ...
    ] = ()  # 0 is `rope`, then the others, or NOT_ROTATED; () all 0
    layer_windows: tuple[
        int | None, ...
    ] = ()  # tokens, see `window_of`; () all see all
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    score_scale: float | None = (
        None  # of attention scores; None: 1 / sqrt(elements of a query)
    )
    score_cap: float = 0.0  # tanh(score / cap) * cap, of the scaled ones; 0: none
    logit_divisor: float = 1.0
    logit_cap: float = 0.0  # tanh(logit / cap) * cap; 0: none
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    draft_layers: int = 0  # in the files behind the others, for drafts: not loaded
    quantization: Quantization | None = None
    dtype: str = "float32"  # what the weights were saved in

    @property
    def declared(self) -> Architecture:
        """What the architecture says and the config does not."""
        return ARCHITECTURES[self.architecture]

    @property
    def summary(self) -> str:
        experts = f", {self.moe.num_experts} experts" if self.moe else ""
        counts = Counter(window for window in self.layer_windows if window)
        told = ", ".join(
            f"{count} see {window} tokens" for window, count in counts.items()
        )
        layers = f"{self.num_layers} layers" + (f" ({told})" if told else "")
        return f"served: {self.architecture}, {layers}{experts}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope, *self.other_ropes)

    def rope_of(self, layer: int) -> int | None:
        """Its index in `ropes`; None where positions do not matter."""
        index = self.layer_ropes[layer] if self.layer_ropes else 0
        return None if index == NOT_ROTATED else index

    def window_of(self, layer: int) -> int | None:
        """Tokens that a token of this layer sees, itself included; None: all before it."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def special_attention(self) -> str:
        """How layers attend beside to all tokens before, in words; empty where they do not."""
        found = {
            "sliding windows": self.layer_windows,
            "soft caps of scores": self.score_cap,
            "attention sinks": self.declared.sinks,
        }
        return " and ".join(name for name, has in found.items() if has)

    @property
    def num_dense_layers(self) -> int:
        return len(self.moe.dense_layers) if self.moe else self.num_layers

    def is_mixed(self, layer: int) -> bool:
        """Whether its feed-forward is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

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
        return (
            self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
            if self.mla
            else self.head_dim
        )

    @property
    def rope_canonical(self) -> str:
        """The rope parameters as JSON that is equal for equal rotations."""
        ropes = [dataclasses.asdict(rope) for rope in self.ropes]
        return json.dumps([ropes, self.layer_ropes], sort_keys=True)

    @property
    def semantic_json(self) -> str:
        """Everything that decides the values in the KV cache, as canonical JSON."""
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
        revision: branch, tag or commit on the hub; None is its default branch.
        overrides: a JSON object of values instead of the file's.
        quantization: "fp8": to be quantised at load.
        max_model_len: tokens of the longest sequence; None: max_position_embeddings.

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
    raw = _read_object(path)
    try:
        if not raw.get("quantization_config") and (found := _said_elsewhere(raw, path)):
            raw["quantization_config"] = found
        config = _overridden(raw, json.loads(overrides or "{}"), max_model_len)
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
    if (stored := config.quantization) is not None:
        told = f"the weights are stored quantised already ({stored.stored}), and are served so"
        raise ModelLoadError(f"--quantization {quantization}: {told}: leave it out")
    return dataclasses.replace(config, quantization=Quantization(AT_LOAD))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(
            f"{path} holds a {type(found).__name__}, expected an object"
        )
    return found


def _said_elsewhere(raw: dict[str, Any], path: Path) -> Any:
    """Of quantised weights, by early compressed-tensors, or by ModelOpt in a file of its own."""
    beside = path.with_name("hf_quant_config.json")
    if raw.get("compression_config") or not beside.is_file():
        return raw.get("compression_config")
    whole = _read_object(beside)
    found = whole.get("quantization", whole)
    return {"quant_method": "modelopt", **found} if found.get("quant_algo") else None


def _overridden(
    raw: dict[str, Any], overrides: dict[str, Any], longest: int | None
) -> ModelConfig:
    """Raises ModelLoadError for a key that changes nothing, as a misspelt one does."""
    config = parse_config(_with_values(raw, overrides), longest)
    for key in overrides:
        others = _with_values(raw, {k: v for k, v in overrides.items() if k != key})
        try:
            has_effect = (
                raw.get(key) == overrides[key]
                or parse_config(others, longest) != config
            )
        except ModelError:  # the model is refused without it
            has_effect = True
        if not has_effect:
            near = suggestion(key, sorted({*raw, *config.declared.defaults}))
            told = f"{short_repr(key)} changes nothing of this model{near}"
            raise ModelLoadError(f"--hf-overrides: {told}; leave it out")
    return config


def _with_values(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with other values, also within the text_config of one that has it."""
    whole = {**raw, **values}
    if isinstance(text := whole.get("text_config"), dict):
        whole["text_config"] = {**text, **values}
    return whole


def parse_config(raw: dict[str, Any], max_model_len: int | None = None) -> ModelConfig:
    """Builds the config from the parsed config.json. See load_config."""
    architecture = _architecture(raw)
    declared = ARCHITECTURES[architecture]
    raw = _of_text(raw, declared)
    _refuse_unsupported(raw, declared)
    raw = _complete(raw, declared)
    raw["max_model_len"] = max_model_len
    num_heads = size(raw, "num_attention_heads")
    hidden_size = size(raw, "hidden_size")
    mla = _mla(raw) if declared.mla else None
    head_dim = _head_dim(raw, mla)
    bias = bool(raw[declared.bias] if isinstance(declared.bias, str) else declared.bias)
    raw["num_key_value_heads"] = raw["num_key_value_heads"] or num_heads
    has_qk_norm = declared.qk_norm_field is None or raw[declared.qk_norm_field]
    ropes, layer_ropes = parse_ropes(raw, head_dim, declared)
    moe = parse_experts(raw, declared.mixture) if declared.mixture else None
    only_mixed = moe is not None and raw["intermediate_size"] is None
    config = ModelConfig(
        architecture=architecture,
        num_layers=size(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=0 if only_mixed else size(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=size(raw, "num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=size(raw, "vocab_size"),
        max_position=size(raw, "max_position_embeddings"),
        rms_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=ropes[0],
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and declared.output_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        activation=_activation(raw, declared),
        qk_norm=declared.qk_norm if has_qk_norm else "",
        other_ropes=tuple(ropes[1:]),
        layer_ropes=layer_ropes,
        layer_windows=parse_windows(raw, declared),
        **_scales(raw, math.sqrt(hidden_size) if declared.scales_embedding else None),
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


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        kind = short_repr(raw.get("model_type"))
        told = ", ".join(map(str, names)) or f"model_type {kind} without one"
        why = f" ({nearest(str(names[0]))})" if len(names) == 1 else ""
        raise unsupported(f"architecture {told}{why}", ", ".join(ARCHITECTURES))
    return str(names[0])


def _of_text(raw: dict[str, Any], declared: Architecture) -> dict[str, Any]:
    """Returns the keys of the text part of a model, which may take images, too."""
    if not declared.text_type:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise wrong(f"text_config is {short_repr(text)}, expected an object")
    if (found := text.get("model_type", declared.text_type)) != declared.text_type:
        raise unsupported(
            f"text_config of model_type {short_repr(found)}", declared.text_type
        )
    top = {name: raw[name] for name in _TOP_KEYS if name in raw}
    return {**text, "tie_word_embeddings": True, **top}


def _complete(raw: dict[str, Any], declared: Architecture) -> dict[str, Any]:
    """Returns the keys that this class reads, with what the missing ones mean."""
    if (mixture := declared.mixture) is not None and mixture.other_count in raw:
        raw = {mixture.count: raw[mixture.other_count], **raw}
    read = {
        name: value
        for name, value in raw.items()
        if name in declared.defaults or name in _COMMON_KEYS
    }
    for name in ("rope_parameters", "rope_theta"):
        if read.get(name) is None:  # null means what a missing one does
            read.pop(name, None)
    whole = {**declared.defaults, **read, **declared.fixed}
    if whole.get("rope_scaling") and "rope_parameters" not in read:
        whole["rope_parameters"] = None
    return whole


def _head_dim(raw: dict[str, Any], mla: MLAConfig | None) -> int:
    num_heads, hidden_size = size(raw, "num_attention_heads"), size(raw, "hidden_size")
    if not raw.get("head_dim") and num_heads > hidden_size:
        raise wrong(
            f"num_attention_heads is {num_heads}, above hidden_size {hidden_size}; correct one of "
            "them, or give head_dim"
        )
    raw["head_dim"] = raw.get("head_dim") or hidden_size // num_heads
    head_dim = mla.qk_rope_head_dim if mla else size(raw, "head_dim")
    if head_dim % 2:
        field = "qk_rope_head_dim" if mla else "head_dim"
        told = "expected an even number: its elements are rotated in pairs"
        raise wrong(f"{field} is {head_dim}, {told}")
    return head_dim


def _scales(raw: dict[str, Any], embedding_scale: float | None) -> dict[str, Any]:
    """What values are multiplied by, divided by and capped at on their way."""

    def given(name: str) -> float | None:
        return None if raw.get(name) is None else number(raw, name, 1.0)

    def cap(name: str) -> float:
        return number(raw, name, 1.0) if raw.get(name) else 0.0

    scalar = given("query_pre_attn_scalar")
    return {
        "embedding_scale": embedding_scale or number(raw, "embedding_multiplier", 1.0),
        "residual_scale": number(raw, "residual_multiplier", 1.0),
        "score_scale": scalar**-0.5 if scalar else given("attention_multiplier"),
        "score_cap": cap("attn_logit_softcapping"),
        "logit_divisor": number(raw, "logits_scaling", 1.0),
        "logit_cap": cap("final_logit_softcapping"),
    }


def _activation(raw: dict[str, Any], declared: Architecture) -> str:
    name = (
        "hidden_activation"
        if "hidden_activation" in declared.defaults
        else "hidden_act"
    )
    if (value := raw[name]) not in _ACTIVATIONS:
        raise unsupported(f"{name} {short_repr(value)}", ", ".join(_ACTIVATIONS))
    return (
        "gelu_tanh"
        if value == "gelu" and declared.gelu_is_tanh
        else _ACTIVATIONS[value]
    )


def _refuse_unsupported(raw: dict[str, Any], declared: Architecture) -> None:
    """Raises UnsupportedModel for what would change the computation and is not implemented."""
    for name in ("clip_qkv", "use_bidirectional_attention"):
        if raw.get(name) and name in declared.defaults:
            raise unsupported(f"{name} {short_repr(raw[name])}", f"{name} null")
    # Gemma 3 lists caps, but applies none to scores, and its form for images none to logits.
    caps = ["attn_logit_softcapping"]
    if declared.text_type:
        caps.append("final_logit_softcapping")
    for name in caps:
        if raw.get(name) and declared.defaults.get(name) is None:
            what = f"{name} {short_repr(raw[name])} in this architecture"
            raise unsupported(what, f"{name} null")
    if declared.gelu_is_tanh:
        _refuse_two_activations(raw, declared)


def _refuse_two_activations(raw: dict[str, Any], declared: Architecture) -> None:
    """Of Gemma 1, transformers 4 reads hidden_activation and transformers 5 hidden_act."""
    first = raw.get("hidden_act", declared.defaults["hidden_act"])
    second = raw.get("hidden_activation")
    if second is None:
        return
    names = (_ACTIVATIONS.get(name, name) for name in (first, second))
    meanings = {"gelu_tanh" if name == "gelu" else name for name in names}
    if len(meanings) > 1:
        raise wrong(
            f"hidden_activation is {short_repr(second)}, but hidden_act is {short_repr(first)}: "
            "give them the same value, or leave hidden_activation out"
        )


def _mla(raw: dict[str, Any]) -> MLAConfig:
    low = None if raw["q_lora_rank"] is None else size(raw, "q_lora_rank")
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MLAConfig(low, *(size(raw, name) for name in names))

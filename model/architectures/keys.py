"""Selects the keys of a config.json that a model class reads.

defaults.py lists the keys of each class. Values that Baton does not implement are
refused.
"""

from typing import Any, Final

from model.architectures.table import Architecture
from model.architectures.values import config_error, unsupported_error
from protocol.short_repr import short_repr

# Maps transformers' names of activations to the names that Baton's layers use.
# transformers has several names for some functions.
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
# Keys that are read for every model, even if the defaults of its class do not list
# them.
_COMMON_KEYS: Final = frozenset(
    {
        "architectures",
        "dtype",
        "torch_dtype",
        "quantization_config",
        "quantization",
        "head_dim",
        "tie_word_embeddings",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "layer_types",
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
        "num_nextn_predict_layers",
    }
)
# If config.json has a text_config, these keys are still read from its top level.
_TOP_LEVEL_KEYS: Final = (
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "quantization",
    "tie_word_embeddings",
)


def text_part(raw: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Returns the keys that describe the text part of a model.

    For a text-only model, these are all keys. For a model that also accepts images,
    they are the keys of text_config and some top-level keys.

    Raises:
        ModelLoadError: text_config is not an object.
        UnsupportedModel: text_config is of another model_type than the class expects.
    """
    if not architecture.text_type:
        return raw
    text_config = raw.get("text_config")
    if not isinstance(text_config, dict):
        raise config_error(
            f"text_config is {short_repr(text_config)}, expected an object"
        )
    text_type = text_config.get("model_type", architecture.text_type)
    if text_type != architecture.text_type:
        raise unsupported_error(
            f"text_config of model_type {short_repr(text_type)}", architecture.text_type
        )
    top_level = {name: raw[name] for name in _TOP_LEVEL_KEYS if name in raw}
    return {**text_config, "tie_word_embeddings": True, **top_level}


def with_defaults(raw: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Returns the keys that a model class reads, with defaults for missing keys."""
    mixture = architecture.mixture
    if mixture is not None and mixture.alternative_count_field in raw:
        raw = {mixture.count_field: raw[mixture.alternative_count_field], **raw}
    given = {
        name: value
        for name, value in raw.items()
        if name in architecture.defaults or name in _COMMON_KEYS
    }
    for name in ("rope_parameters", "rope_theta"):
        if given.get(name) is None:  # null means the same as a missing key
            given.pop(name, None)
    merged = {**architecture.defaults, **given, **architecture.fixed_values}
    if merged.get("rope_scaling") and "rope_parameters" not in given:
        merged["rope_parameters"] = None
    return merged


def read_activation(raw: dict[str, Any], architecture: Architecture) -> str:
    field = "hidden_act"
    if "hidden_activation" in architecture.defaults:
        field = "hidden_activation"
    value = raw[field]
    if value not in _ACTIVATIONS:
        raise unsupported_error(f"{field} {short_repr(value)}", ", ".join(_ACTIVATIONS))
    if value == "gelu" and architecture.gelu_is_tanh:
        return "gelu_tanh"
    return _ACTIVATIONS[value]


def refuse_unsupported(raw: dict[str, Any], architecture: Architecture) -> None:
    """Refuses fields that would change the computation and are not implemented.

    Raises:
        UnsupportedModel: a field that is not implemented is set.
        ModelLoadError: hidden_act and hidden_activation contradict each other.
    """
    for name in ("clip_qkv", "use_bidirectional_attention"):
        if raw.get(name) and name in architecture.defaults:
            raise unsupported_error(f"{name} {short_repr(raw[name])}", f"{name} null")
    # The config of Gemma 3 has fields for both soft caps. But transformers' text-only
    # class does not apply the cap of scores, and its class with images applies neither.
    caps = ["attn_logit_softcapping"]
    if architecture.text_type:
        caps.append("final_logit_softcapping")
    for name in caps:
        if raw.get(name) and architecture.defaults.get(name) is None:
            raise unsupported_error(
                f"{name} {short_repr(raw[name])} in this architecture", f"{name} null"
            )
    if architecture.gelu_is_tanh:
        _refuse_two_activations(raw, architecture)


def _refuse_two_activations(raw: dict[str, Any], architecture: Architecture) -> None:
    """Checks that hidden_act and hidden_activation of Gemma 1 agree.

    transformers 4 reads hidden_activation and transformers 5 reads hidden_act.

    Raises:
        ModelLoadError: the two fields name different functions.
    """
    hidden_act = raw.get("hidden_act", architecture.defaults["hidden_act"])
    hidden_activation = raw.get("hidden_activation")
    if hidden_activation is None:
        return
    functions = set()
    for name in (hidden_act, hidden_activation):
        function = _ACTIVATIONS.get(name, name)
        functions.add("gelu_tanh" if function == "gelu" else function)
    if len(functions) > 1:
        raise config_error(
            f"hidden_activation is {short_repr(hidden_activation)}, but hidden_act is "
            f"{short_repr(hidden_act)}: give them the same value, or leave "
            "hidden_activation out"
        )

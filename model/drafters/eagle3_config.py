"""The properties of an EAGLE-3 drafter, read from the config.json of its checkpoint.

This file does not import torch. The checks need no weights, so a drafter that does not
fit its target is refused before any weights are loaded.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.architectures.values import config_error, read_size, unsupported_error
from model.config import ModelConfig, parse_config
from model.errors import ModelError, ModelLoadError, UnsupportedModel
from model.files.safetensors_files import StoredTensor, read_headers
from protocol.short_repr import short_repr

# Class names that config.json of EAGLE-3 checkpoints may give.
_ARCHITECTURES: Final = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
# For each model_type of a drafter, the model class with the same decoder layer.
_LAYER_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Number of target layers that provide states to a drafter.
_NUM_TARGET_LAYERS: Final = 3
# Keys of config.json that may list these target layers.
_TARGET_LAYER_KEYS: Final = (
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_state_layer_ids",
)


@dataclass(frozen=True)
class Eagle3Config:
    """The properties of an EAGLE-3 drafter.

    Attributes:
        model: a config that describes the drafter's decoder layer as a model with one
            layer. The vocabulary is that of the target.
        draft_vocab_size: number of tokens that the drafter can propose.
        target_hidden_size: the hidden size of the target.
        target_layers: see StateCapture.
        norms_residual: whether the residual stream starts from the normalized states,
            instead of the raw states.
        norms_target_states: whether the target's states are normalized before they are
            projected.
    """

    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    target_layers: tuple[int, ...]
    norms_residual: bool = False
    norms_target_states: bool = False

    @property
    def captured_size(self) -> int:
        """The elements of a row of a StateCapture for this drafter."""
        return len(self.target_layers) * self.target_hidden_size


def load_eagle3_config(
    folder: Path, target: ModelConfig, *, load_format: str = "auto"
) -> Eagle3Config:
    """Reads the config.json of a drafter, and checks it against the target.

    Args:
        folder: the directory of the drafter's checkpoint.
        load_format: "dummy" if the directory has no weights; see `load_model`.

    Raises:
        ModelError: the directory holds no EAGLE-3 drafter, or the drafter does not fit
            the target. The message begins with the option.
    """
    try:
        config = _parse(_read(folder), target)
        if load_format != "dummy":
            _check_files(config, eagle3_tensors(folder))
    except ModelError as error:
        raise type(error)(f"--speculate eagle3:{folder}: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ModelLoadError(
            f"--speculate eagle3:{folder}: config.json has a value of a wrong kind: "
            f"{error}"
        ) from error
    return config


def eagle3_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a drafter's files by the names that most files use.

    In some files the names have the prefix "model.", or the layer is called "layers.0"
    instead of "midlayer".
    """
    tensors = {}
    for name, tensor in read_headers(folder).items():
        plain_name = name.removeprefix("model.")
        if plain_name.startswith("layers.0."):
            plain_name = "midlayer." + plain_name.removeprefix("layers.0.")
        tensors[plain_name] = tensor
    return tensors


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        problem = "has no config.json" if folder.is_dir() else "is not a directory"
        raise ModelLoadError(
            f"{folder} {problem}; give the directory of an EAGLE-3 checkpoint"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"config.json is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(
            f"config.json holds a {type(raw).__name__}, expected an object"
        )
    return raw


def _parse(raw: dict[str, Any], target: ModelConfig) -> Eagle3Config:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise unsupported_error(
            f"architectures {short_repr(names)} of a drafter", ", ".join(_ARCHITECTURES)
        )
    # The library "speculators" writes the layer's sizes into a nested object.
    layer_config = raw.get("transformer_layer_config")
    norms_residual = raw.get("norm_before_residual", layer_config is not None)
    raw = {**raw, **(layer_config or {})}
    model = _parse_layer(raw)
    if model.vocab_size != target.vocab_size:
        raise ModelLoadError(
            f"its vocab_size is {model.vocab_size}, but that of the model is "
            f"{target.vocab_size}; use a drafter that was trained for this model"
        )
    target_hidden_size = model.hidden_size
    if raw.get("target_hidden_size") is not None:
        target_hidden_size = read_size(raw, "target_hidden_size")
    if target_hidden_size != target.hidden_size:
        field = "target_hidden_size" if "target_hidden_size" in raw else "hidden_size"
        raise ModelLoadError(
            f"its {field} is {target_hidden_size}, but the hidden_size of the model is "
            f"{target.hidden_size}; use a drafter that was trained for this model"
        )
    draft_vocab_size = model.vocab_size
    if raw.get("draft_vocab_size") is not None:
        draft_vocab_size = read_size(raw, "draft_vocab_size")
    if draft_vocab_size > model.vocab_size:
        raise config_error(
            f"draft_vocab_size is {draft_vocab_size}, above vocab_size "
            f"{model.vocab_size}"
        )
    return Eagle3Config(
        model=model,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        target_layers=_target_layers(raw, target.num_layers),
        norms_residual=bool(norms_residual),
        norms_target_states=bool(raw.get("norm_before_fc")),
    )


def _parse_layer(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of the drafter's decoder layer."""
    model_type = raw.get("model_type", "llama")
    if "transformer_layer_config" in raw:
        model_type = raw["transformer_layer_config"].get("model_type", "llama")
    if model_type not in _LAYER_CLASSES:
        raise unsupported_error(
            f"model_type {short_repr(model_type)} of a drafter",
            ", ".join(_LAYER_CLASSES),
        )
    if raw.get("num_hidden_layers", 1) != 1:
        raise unsupported_error(
            f"num_hidden_layers {short_repr(raw['num_hidden_layers'])} of a drafter",
            "1",
        )
    values = {
        **raw,
        "architectures": [_LAYER_CLASSES[model_type]],
        "num_hidden_layers": 1,
        # The head may have fewer tokens than the embedding, so it is never tied.
        "tie_word_embeddings": False,
    }
    model = parse_config(values)
    return dataclasses.replace(model, layer_windows=(), draft_layers=0)


def _target_layers(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns, for each state that the drafter reads, how many layers precede it.

    Files use two conventions. A list that begins with 1 contains indices of layers,
    from 0 on, and means the outputs of these layers. Any other list, like the default,
    contains for each state the number of layers before it.
    """
    eagle_config = raw.get("eagle_config") or {}
    if eagle_config.get("use_aux_hidden_state") is False:
        raise UnsupportedModel(
            "eagle_config.use_aux_hidden_state false is not supported; supported: true"
        )
    layers: Any = (2, num_layers // 2, num_layers - 3)
    name = "the default"
    for source in (eagle_config, raw):
        for key in _TARGET_LAYER_KEYS:
            if source.get(key):
                layers = source[key]
                name = key
    is_list = isinstance(layers, list | tuple) and len(layers) == _NUM_TARGET_LAYERS
    if not is_list or not all(isinstance(layer, int) for layer in layers):
        raise config_error(
            f"{name} is {short_repr(layers)}, expected {_NUM_TARGET_LAYERS} integers"
        )
    counted = tuple(layers)
    if counted[0] == 1 and name != "the default":
        counted = tuple(layer + 1 for layer in counted)
    if not all(0 <= layer <= num_layers for layer in counted):
        raise ModelLoadError(
            f"it reads the states after the model's layers {list(counted)} ({name}), "
            f"but the model has {num_layers} layers; use a drafter that was trained "
            "for this model"
        )
    return counted


def _check_files(config: Eagle3Config, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that the tensors in the files have the shapes that the config implies.

    Raises:
        ModelLoadError: a shape differs, or a tensor is missing.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (config.model.hidden_size, config.captured_size),
        "lm_head.weight": (config.draft_vocab_size, config.model.hidden_size),
    }
    if config.draft_vocab_size < config.model.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    if (
        "embed_tokens.weight" not in tensors
        and config.model.hidden_size != config.target_hidden_size
    ):
        raise ModelLoadError(
            "its files have no embed_tokens.weight, and the embedding of the model has "
            f"{config.target_hidden_size} columns instead of its hidden_size "
            f"{config.model.hidden_size}"
        )
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelLoadError(f"its files have no {name}")
        if tensors[name].shape != shape:
            raise ModelLoadError(
                f"{name} has shape {tensors[name].shape} in its files, its config.json "
                f"implies {shape}"
            )

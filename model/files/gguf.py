"""Conversion of GGUF files to Hugging Face directories with float32 weights.

This file does not import torch.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from model.errors import ModelError, ModelLoadError, UnsupportedModel
from model.files.gguf_tokenizer import write_json, write_tokenizer

# This number is part of the key of a converted directory. After a change of the number,
# all files are converted again.
CONVERTER_VERSION: Final = 5

_ARCHITECTURES: Final = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

_LAYER_TENSORS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS: Final = "rope_freqs.weight"

# Each of these two tokens may end a turn of Llama 3. A file has a key for only one of
# them.
_END_OF_TURN_TOKENS: Final = ("<|eot_id|>", "<|eom_id|>")
Array = npt.NDArray[Any]


def convert_gguf(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Converts the GGUF file `source` to a Hugging Face directory.

    Writes the config, the generation config, the tokenizer and float32 weights into the
    directory `target`.

    Args:
        progress: called with a line of text about each part of the work.

    Raises:
        UnsupportedModel: the architecture, rope or tokenizer is not implemented.
        ModelLoadError: the file is not a GGUF file, or has tensors that do not belong
            to its architecture.
        OSError: a file cannot be read or written.
    """
    try:
        _convert(source, target, progress)
    except (ModelError, OSError):
        raise
    except Exception as error:  # damaged values raise errors of any type when used
        raise ModelLoadError(
            f"{source} is not a GGUF file, or is damaged: {error!r}"
        ) from error


def _convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    fields = _Fields(reader)
    num_files = int(fields.get("split.count", 1))
    if num_files > 1:
        raise UnsupportedModel(
            f"{source} is one of {num_files} files of a model; split models are not "
            "supported; supported: a single file, which llama-gguf-split --merge makes"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rope_tensor = tensors.pop(_ROPE_FACTORS, None)
    rope_factors = None if rope_tensor is None else np.asarray(rope_tensor.data)
    for key, token_id in fields.unknown_tokens().items():
        progress(
            f"{key} is {token_id}, which is not a token of the file; the key is ignored"
        )
    config = _config(fields, tensors, rope_factors)
    write_json(target / "config.json", config)
    generation_config = _generation_config(fields, config)
    write_json(target / "generation_config.json", generation_config)
    progress("writing the tokenizer")
    write_tokenizer(target, fields.get, config["max_position_embeddings"])
    progress(f"dequantising {len(tensors)} tensors")
    _write_weights(target, tensors, fields.architecture, config)


def _generation_config(fields: "_Fields", config: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of generation_config.json.

    The token that ends a turn or a message may differ from the token that ends a text.
    Not every file has a key for the former token, so known tokens are also found by
    their text.
    """
    tokens = fields.get("tokenizer.ggml.tokens", [])
    eos_token_id = config["eos_token_id"]
    turn_ends = {fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")}
    turn_ends |= {
        index for index, token in enumerate(tokens) if token in _END_OF_TURN_TOKENS
    }
    other_ends = sorted(turn_ends - {None, eos_token_id})
    if other_ends:
        all_ends = [eos_token_id, *other_ends]
        eos_token_id = [token_id for token_id in all_ends if token_id is not None]
    return {
        "_from_model_config": True,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": eos_token_id,
        "pad_token_id": config["pad_token_id"],
    }


class _Fields:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields
        tokens = self._fields.get("tokenizer.ggml.tokens")
        self._num_tokens = 0 if tokens is None else len(tokens.contents())
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"GGUF architecture {self.architecture!r} is not supported; supported: "
                + ", ".join(_ARCHITECTURES)
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, or `default` if the file has no such key.

        The id of a token that is not in the vocabulary counts as missing.
        """
        field = self._fields.get(key)
        if field is None or not self._is_valid(key):
            return default
        return field.contents()

    def unknown_tokens(self) -> dict[str, int]:
        """Returns the keys with a token id outside the vocabulary, and these ids."""
        return {
            key: field.contents()
            for key, field in self._fields.items()
            if not self._is_valid(key)
        }

    def _is_valid(self, key: str) -> bool:
        if not (key.startswith("tokenizer.") and key.endswith("_token_id")):
            return True
        return 0 <= int(self._fields[key].contents()) < self._num_tokens

    def get_required(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, prefixed with the file's architecture.

        Raises:
            ModelLoadError: the file has no such key, and there is no default.
        """
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"the GGUF file lacks {self.architecture}.{key}")
        return value


def _config(
    fields: _Fields, tensors: dict[str, Any], rope_factors: Array | None
) -> dict[str, Any]:
    name, model_type = _ARCHITECTURES[fields.architecture]
    num_heads = int(fields.get_required("attention.head_count"))
    hidden_size = int(fields.get_required("embedding_length"))
    head_dim = int(
        fields.get_required("attention.key_length", hidden_size // num_heads)
    )
    return {
        "architectures": [name],
        "model_type": model_type,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(fields.get_required("feed_forward_length")),
        "max_position_embeddings": int(fields.get_required("context_length")),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(fields.get_required("block_count")),
        "num_key_value_heads": int(
            fields.get_required("attention.head_count_kv", num_heads)
        ),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": _shortest_decimal(
            fields.get_required("attention.layer_norm_rms_epsilon")
        ),
        "rope_parameters": _rope(fields, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
    }


def _shortest_decimal(value: float) -> float:
    """Returns the shortest decimal that rounds to the float32 nearest to `value`.

    For example, this is 1e-05 instead of 9.99999974737875e-06.
    """
    return float(str(np.float32(value)))


def _rope(fields: _Fields, head_dim: int, rope_factors: Array | None) -> dict[str, Any]:
    base = {
        "rope_theta": _shortest_decimal(fields.get_required("rope.freq_base", 10000.0))
    }
    if int(fields.get_required("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(
            "a GGUF file that rotates only a part of each head is not supported"
        )
    if rope_factors is not None:
        return {**base, **_llama3_rope(base["rope_theta"], head_dim, rope_factors)}
    scaling = str(fields.get_required("rope.scaling.type", "none"))
    if scaling == "none":
        return {**base, "rope_type": "default"}
    if scaling != "linear":
        raise UnsupportedModel(
            f"GGUF rope scaling {scaling!r} is not supported; supported: none, linear, "
            "llama3"
        )
    return {
        **base,
        "rope_type": "linear",
        "factor": float(fields.get_required("rope.scaling.factor")),
    }


def _llama3_rope(theta: float, head_dim: int, rope_factors: Array) -> dict[str, Any]:
    """Returns the parameters of the llama3 rope that has these factors.

    GGUF stores the factors, but not the parameters from which they are computed. All
    released models have the same parameters, except for `factor`.

    Raises:
        UnsupportedModel: the other parameters differ from those of released models.
    """
    factor = float(rope_factors.max())
    low_freq_factor = 1.0
    high_freq_factor = 4.0
    original_context = 8192
    inverse = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    rotations = original_context * inverse / (2 * np.pi)
    blend_width = high_freq_factor - low_freq_factor
    smooth = ((rotations - low_freq_factor) / blend_width).clip(0, 1)
    expected_factors = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(expected_factors, rope_factors, rtol=1e-3):
        raise UnsupportedModel(
            "this GGUF file's rope_freqs are not supported; supported: llama3 with "
            "low_freq_factor 1, high_freq_factor 4, original context 8192"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_context,
    }


def _write_weights(
    target: Path, tensors: dict[str, Any], architecture: str, config: dict[str, Any]
) -> None:
    """Writes the weights and their index as safetensors files.

    Each layer has a file, and so has each tensor that is not in a layer. Only the
    tensors of one file are in memory at a time.
    """
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    files: dict[str, dict[str, Callable[[], Array]]] = {}
    for name, tensor in tensors.items():
        match = _LAYER_NAME.fullmatch(name)
        permuted_heads = 0
        if name in _TOP_TENSORS:
            file = name.partition(".")[0]
            new_name = _TOP_TENSORS[name]
        elif match is not None and match[2] in _LAYER_TENSORS:
            file, module, kind = match.groups()
            new_name = f"model.layers.{file}.{_LAYER_TENSORS[module]}.{kind}"
            if architecture == "llama":
                permuted_heads = heads.get(module, 0)
        else:
            raise ModelLoadError(
                f"the GGUF file's tensor {name} does not belong to {architecture}"
            )
        contents = files.setdefault(f"model-{file}.safetensors", {})
        contents[new_name] = partial(_values, tensor, permuted_heads)
    for file, contents in files.items():
        values = {name: make() for name, make in contents.items()}
        save_file(values, target / file, metadata={"format": "pt"})
    weight_map = {name: file for file, contents in files.items() for name in contents}
    index = {"metadata": {}, "weight_map": weight_map}
    write_json(target / "model.safetensors.index.json", index)


def _values(tensor: Any, permuted_heads: int) -> Array:
    from gguf.quants import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
    return _unpermute(values, permuted_heads) if permuted_heads else values


def _unpermute(values: Array, num_heads: int) -> Array:
    """Restores the order of the rows of q or k that transformers expects.

    transformers rotates the halves of a head against each other, and llama.cpp rotates
    neighboring elements. llama.cpp's converter has therefore reordered the rows.
    """
    pairs = values.reshape(
        num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:]
    )
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

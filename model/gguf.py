"""GGUF files become Hugging Face directories: dequantised to float32, no torch involved."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from model.errors import ModelError, ModelLoadError, UnsupportedModel

# What a conversion depends on besides its input; a new number makes directories anew.
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

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES: Final = {
    "llama-bpe": _CONTRACTIONS + _WORDS % r"\p{N}{1,3}",
    "qwen2": _CONTRACTIONS + _WORDS % r"\p{N}",
}
_ENDS: Final = (
    "<|eot_id|>",
    "<|eom_id|>",
)  # of Llama 3's turns; a file names one token only
_SPECIAL: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

Array = npt.NDArray[Any]
_Get = Callable[..., Any]


def convert_gguf(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Writes config, generation config, tokenizer and float32 weights of `source` into `target`.

    Raises:
        UnsupportedModel: an architecture, rope or tokenizer that is not implemented.
        ModelLoadError: not a GGUF file, or one with tensors that its architecture does not have.
        OSError: a file cannot be read or written.
    """
    try:
        _convert(source, target, progress)
    except (ModelError, OSError):
        raise
    except Exception as error:  # of any kind: what a file says is taken at its word
        raise ModelLoadError(
            f"{source} is not a GGUF file that can be read: {error!r}"
        ) from error


def _convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    fields = _Fields(reader)
    if (count := int(fields.get("split.count", 1))) > 1:
        raise UnsupportedModel(
            f"{source} is one of {count} files of a model, which are not supported; supported: "
            "one file, as llama-gguf-split --merge makes it of them"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    for key, token_id in fields.unknown_tokens().items():
        progress(f"{key} is {token_id}, which is no token of the file; it is left out")
    config = _config(
        fields, tensors, None if factors is None else np.asarray(factors.data)
    )
    _write_json(target / "config.json", config)
    ids = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    # A turn or a message may end with another token than a text does; not all files tell of it.
    ends = {fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eot", "eom")}
    ends |= {
        i
        for i, token in enumerate(fields.get("tokenizer.ggml.tokens", []))
        if token in _ENDS
    }
    if more := sorted(ends - {None, ids["eos_token_id"]}):
        ids["eos_token_id"] = [i for i in (ids["eos_token_id"], *more) if i is not None]
    _write_json(target / "generation_config.json", {"_from_model_config": True, **ids})
    progress("writing the tokenizer")
    _write_tokenizer(target, fields.get, config["max_position_embeddings"])
    progress(f"dequantising {len(tensors)} tensors")
    _write_weights(target, tensors, fields.architecture, config)


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
        """A value, or `default` where the file has none, or names a token that it does not have."""
        field = self._fields.get(key)
        if field is None or not self._is_known(key):
            return default
        return field.contents()

    def unknown_tokens(self) -> dict[str, int]:
        """The keys that name a token beyond the vocabulary, and its id."""
        return {
            key: field.contents()
            for key, field in self._fields.items()
            if not self._is_known(key)
        }

    def _is_known(self, key: str) -> bool:
        if not (key.startswith("tokenizer.") and key.endswith("_token_id")):
            return True
        return 0 <= int(self._fields[key].contents()) < self._num_tokens

    def of_model(self, key: str, default: Any = None) -> Any:
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"the GGUF file lacks {self.architecture}.{key}")
        return value


def _config(
    fields: _Fields, tensors: dict[str, Any], factors: Array | None
) -> dict[str, Any]:
    name, model_type = _ARCHITECTURES[fields.architecture]
    num_heads = int(fields.of_model("attention.head_count"))
    hidden_size = int(fields.of_model("embedding_length"))
    head_dim = int(fields.of_model("attention.key_length", hidden_size // num_heads))
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
        "intermediate_size": int(fields.of_model("feed_forward_length")),
        "max_position_embeddings": int(fields.of_model("context_length")),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(fields.of_model("block_count")),
        "num_key_value_heads": int(
            fields.of_model("attention.head_count_kv", num_heads)
        ),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": _shortest(fields.of_model("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(fields, head_dim, factors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
    }


def _shortest(value: float) -> float:
    """The short decimal that a float32 came from: 1e-05, not 9.99999974737875e-06."""
    return float(str(np.float32(value)))


def _rope(fields: _Fields, head_dim: int, factors: Array | None) -> dict[str, Any]:
    base = {"rope_theta": _shortest(fields.of_model("rope.freq_base", 10000.0))}
    if int(fields.of_model("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(
            "a GGUF file that rotates only a part of each head is not supported"
        )
    if factors is not None:
        return {**base, **_llama3_rope(base["rope_theta"], head_dim, factors)}
    scaling = str(fields.of_model("rope.scaling.type", "none"))
    if scaling == "none":
        return {**base, "rope_type": "default"}
    if scaling != "linear":
        raise UnsupportedModel(
            f"GGUF rope scaling {scaling!r} is not supported; supported: none, linear, llama3"
        )
    return {
        **base,
        "rope_type": "linear",
        "factor": float(fields.of_model("rope.scaling.factor")),
    }


def _llama3_rope(theta: float, head_dim: int, factors: Array) -> dict[str, Any]:
    """GGUF stores what llama3's rule yields; all released models share its other parameters."""
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    inverse = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = original * inverse / (2 * np.pi)
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise UnsupportedModel(
            "this GGUF file's rope_freqs are not supported; supported: llama3 with "
            "low_freq_factor 1, high_freq_factor 4, original context 8192"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_weights(
    target: Path, tensors: dict[str, Any], architecture: str, config: dict[str, Any]
) -> None:
    """A file for each layer and for each tensor of none: no more is in memory at once."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    files: dict[str, dict[str, Callable[[], Array]]] = {}
    for name, tensor in tensors.items():
        match, permuted = _LAYER_NAME.fullmatch(name), 0
        if name in _TOP_TENSORS:
            file, new_name = name.partition(".")[0], _TOP_TENSORS[name]
        elif match is not None and match[2] in _LAYER_TENSORS:
            file, module = match[1], _LAYER_TENSORS[match[2]]
            new_name = f"model.layers.{file}.{module}.{match[3]}"
            permuted = heads.get(match[2], 0) if architecture == "llama" else 0
        else:
            raise ModelLoadError(
                f"the GGUF file's tensor {name} does not belong to {architecture}"
            )
        contents = files.setdefault(f"model-{file}.safetensors", {})
        contents[new_name] = partial(_values, tensor, permuted)
    for file, contents in files.items():
        values = {name: make() for name, make in contents.items()}
        save_file(values, target / file, metadata={"format": "pt"})
    where = {name: file for file, contents in files.items() for name in contents}
    _write_json(
        target / "model.safetensors.index.json", {"metadata": {}, "weight_map": where}
    )


def _values(tensor: Any, permuted_heads: int) -> Array:
    from gguf.quants import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
    return _unpermute(values, permuted_heads) if permuted_heads else values


def _unpermute(values: Array, num_heads: int) -> Array:
    """llama.cpp rotates neighbours where transformers rotates halves, and reorders q and k."""
    pairs = values.reshape(
        num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:]
    )
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


# -- the tokenizer


def _write_tokenizer(target: Path, get: _Get, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; `get` is the value of a key or a default."""
    kind = get("tokenizer.ggml.model", None)
    tokens = [str(token) for token in get("tokenizer.ggml.tokens", [])]
    if kind == "gpt2":
        tokenizer = _byte_level(get, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(get, tokens)
    else:
        raise UnsupportedModel(
            f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama"
        )
    _add_specials(tokenizer, get, tokens)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json", _tokenizer_config(get, tokens, max_length)
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(
        json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _tokenizer_config(get: _Get, tokens: list[str], max_length: int) -> dict[str, Any]:
    special = {
        name: tokens[index]
        for name, key in _SPECIAL.items()
        if (index := get(f"tokenizer.ggml.{key}", None)) is not None
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **special,
    }
    keys = {
        "default": "",
        **{name: f".{name}" for name in get("tokenizer.chat_templates", [])},
    }
    named = {
        name: get(f"tokenizer.chat_template{key}", None) for name, key in keys.items()
    }
    found = {name: text for name, text in named.items() if text is not None}
    if list(found) == ["default"]:
        return {**config, "chat_template": found["default"]}
    templates = [{"name": name, "template": text} for name, text in found.items()]
    return {**config, "chat_template": templates} if templates else config


def _byte_level(get: _Get, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in get("tokenizer.ggml.merges", [])]
    split = str(get("tokenizer.ggml.pre", "default"))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe")
    )
    tokenizer.pre_tokenizer = _splitter(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _splitter(split: str) -> Any:
    if split in _REGEXES:
        regex = pre_tokenizers.Split(Regex(_REGEXES[split]), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([regex, plain])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if split in ("default", "gpt-2"):
        return byte_level
    raise UnsupportedModel(
        f"GGUF text splitting {split!r} is not supported; supported: "
        + ", ".join(["default", "gpt-2", "smollm", *_REGEXES])
    )


def _sentencepiece(get: _Get, tokens: list[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = get("tokenizer.ggml.scores", [])
    found = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            if token[:cut] in vocab and token[cut:] in vocab:
                left, right = token[:cut], token[cut:]
                found.append((-scores[index], vocab[left], vocab[right], (left, right)))
    unknown = tokens[get("tokenizer.ggml.unknown_token_id", 0)]
    merges = [merge for *_, merge in sorted(found)]
    model = BPE(
        vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    prefixed = get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁"), space] if prefixed else [space]
    tokenizer.normalizer = normalizers.Sequence(steps)
    restore = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(restore + strip)
    return tokenizer


def _add_specials(tokenizer: Tokenizer, get: _Get, tokens: list[str]) -> None:
    types = get("tokenizer.ggml.token_type", [])
    controls = [
        token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL
    ]
    words = [
        token
        for token, kind in zip(tokens, types, strict=False)
        if kind == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in controls]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in words])
    bos = get("tokenizer.ggml.bos_token_id", None)
    kinds = {get("tokenizer.ggml.model", None), get("tokenizer.ggml.pre", None)}
    default = not kinds.isdisjoint({"llama", "llama-bpe"})  # as in llama.cpp
    if bos is not None and get("tokenizer.ggml.add_bos_token", default):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )

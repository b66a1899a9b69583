"""Conversion of the tokenizer in a GGUF file to Hugging Face tokenizer files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

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

from model.errors import UnsupportedModel

# Token types of GGUF.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES: Final = {
    "llama-bpe": _CONTRACTIONS + _WORDS % r"\p{N}{1,3}",
    "qwen2": _CONTRACTIONS + _WORDS % r"\p{N}",
}
_SPECIAL_TOKENS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


_Get = Callable[..., Any]


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(
        json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def write_tokenizer(target: Path, get: _Get, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Args:
        get: returns the value of a key of the GGUF file, or a default.
    """
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
    write_json(
        target / "tokenizer_config.json", _tokenizer_config(get, tokens, max_length)
    )


def _tokenizer_config(get: _Get, tokens: list[str], max_length: int) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for name, key in _SPECIAL_TOKENS.items():
        index = get(f"tokenizer.ggml.{key}", None)
        if index is not None:
            config[name] = tokens[index]
    templates = _chat_templates(get)
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return config


def _chat_templates(get: _Get) -> dict[str, str]:
    """Returns the chat templates by name. The unnamed one is called "default"."""
    keys = {"default": "tokenizer.chat_template"}
    for name in get("tokenizer.chat_templates", []):
        keys[name] = f"tokenizer.chat_template.{name}"
    templates = {name: get(key, None) for name, key in keys.items()}
    return {name: text for name, text in templates.items() if text is not None}


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
    scored_merges = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in vocab and right in vocab:
                order = (-scores[index], vocab[left], vocab[right])
                scored_merges.append((*order, (left, right)))
    unknown = tokens[get("tokenizer.ggml.unknown_token_id", 0)]
    merges = [merge for *_, merge in sorted(scored_merges)]
    model = BPE(
        vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    normalizer_steps: list[Any] = [space]
    decoder_steps: list[Any] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if get("tokenizer.ggml.add_space_prefix", True):
        normalizer_steps = [normalizers.Prepend("▁"), space]
        decoder_steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer_steps)
    tokenizer.decoder = decoders.Sequence(decoder_steps)
    return tokenizer


def _add_specials(tokenizer: Tokenizer, get: _Get, tokens: list[str]) -> None:
    types = get("tokenizer.ggml.token_type", [])
    control_tokens = []
    user_tokens = []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            control_tokens.append(AddedToken(token, normalized=False))
        elif token_type == _USER_DEFINED:
            user_tokens.append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(control_tokens)
    tokenizer.add_tokens(user_tokens)
    bos = get("tokenizer.ggml.bos_token_id", None)
    kinds = {get("tokenizer.ggml.model", None), get("tokenizer.ggml.pre", None)}
    adds_bos = not kinds.isdisjoint({"llama", "llama-bpe"})  # llama.cpp's default
    if bos is not None and get("tokenizer.ggml.add_bos_token", adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )

"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json."""

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
from model.files import write_json

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REGEXES: Final = {
    "llama-bpe": _CONTRACTIONS + _WORDS % r"\p{N}{1,3}",
    "qwen2": _CONTRACTIONS + _WORDS % r"\p{N}",
}
_SPECIAL: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

Fields = Callable[[str, Any], Any]


def write_tokenizer(target: Path, get: Fields, max_length: int) -> None:
    """Writes both files into `target`.

    Args:
        get: value of a GGUF key, or the default given.
        max_length: tokens of context.

    Raises:
        UnsupportedModel: a kind of tokenizer, or of text splitting, that is not implemented.
    """
    kind = get("tokenizer.ggml.model", None)
    tokens = [str(token) for token in get("tokenizer.ggml.tokens", [])]
    if kind == "gpt2":
        tokenizer = _byte_level(get, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(get, tokens)
    else:
        raise UnsupportedModel(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    _add_specials(tokenizer, get, tokens)
    tokenizer.save(str(target / "tokenizer.json"))
    write_json(target / "tokenizer_config.json", _config(get, tokens, max_length))


def _config(get: Fields, tokens: list[str], max_length: int) -> dict[str, Any]:
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
    template = get("tokenizer.chat_template", None)
    return config if template is None else {**config, "chat_template": template}


def _byte_level(get: Fields, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in get("tokenizer.ggml.merges", [])]
    split = str(get("tokenizer.ggml.pre", "default"))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
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


def _sentencepiece(get: Fields, tokens: list[str]) -> Tokenizer:
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
    model = BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    prefixed = get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁"), space] if prefixed else [space]
    tokenizer.normalizer = normalizers.Sequence(steps)
    restore = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(restore + strip)
    return tokenizer


def _add_specials(tokenizer: Tokenizer, get: Fields, tokens: list[str]) -> None:
    types = get("tokenizer.ggml.token_type", [])
    controls = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    words = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in controls])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in words])
    bos = get("tokenizer.ggml.bos_token_id", None)
    default = get("tokenizer.ggml.model", None) == "llama"
    if bos is not None and get("tokenizer.ggml.add_bos_token", default):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )

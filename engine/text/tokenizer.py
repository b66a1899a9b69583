"""Turns text into token ids and back, without torch or transformers.

The tokenizer is read from the files of a Hugging Face directory: tokenizer.json (which
also defines the special tokens to add around a text), tokenizer_config.json,
special_tokens_map.json, chat templates, generation_config.json and config.json. The
results equal those of transformers' AutoTokenizer.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from engine.text.chat_template import ChatTemplate, find_chat_template
from protocol.openai.requests import refuse
from protocol.openai.responses import TokenText
from protocol.short_repr import short_repr

# An empty template file, for the argument `chat_template` of callers that render no
# chats. It replaces the model's own template, which may be broken.
NO_TEMPLATE = Path(os.devnull)
# `decode_all` releases the GIL only for more ids than this. Decoding this many ids
# takes a millisecond.
_MAX_INLINE_IDS = 2048
_SPECIAL_NAMES = [
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
]
_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_DIGEST_FILES = ("tokenizer.json", _CONFIG_FILE, _SPECIAL_TOKENS_FILE)
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "special")
_PIECE_CHARS = 1 << 16  # `min_num_tokens` tokenizes a text in pieces of this size
# Matches a token that stands for one byte, in vocabularies that are not byte-level.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class TokenizerNotFound(ValueError):
    """A model directory has no usable tokenizer. The message says how to fix it."""


class Tokenizer:
    """One model's tokenizer. Threads may share it.

    Args:
        model_dir: a directory with a tokenizer.json.
        chat_template: a file that replaces the directory's templates.

    Raises:
        TokenizerNotFound: there is no tokenizer.json, or one of the files is malformed.
        BrokenTemplate: the chat template cannot be read.

    Attributes:
        folder: the model directory.
        special_tokens: the text of each named special token, by a name such as
            "eos_token".
        special_ids: the ids of all special tokens.
        vocab_size: the number of tokens in the vocabulary, including added tokens.
        longest_token_chars: an upper bound of the number of characters in a token's
            text.
        token_bytes: the bytes of each token, by id; None if the vocabulary is not
            byte-level.
        eos_ids: the ids of the tokens that end a generation.
        unknown_eos_ids: ids of end tokens in the model's files that the model cannot
            generate, because it has no logits for them.
        chat_template: the model's chat template, or None.
        digest: a hash of everything that determines the token ids of a prompt: the
            tokenizer's files and the chat template.
    """

    def __init__(
        self, model_dir: str | Path, chat_template: Path | None = None
    ) -> None:
        self.folder = folder = Path(model_dir)
        config = _read_json(folder / _CONFIG_FILE)
        # Older models have their special tokens in a second file.
        if "added_tokens_decoder" not in config:
            config = {**config, **_read_json(folder / _SPECIAL_TOKENS_FILE)}
        self._tokenizer = _load(folder)
        self.special_tokens = _special_tokens(config)
        try:
            _add_missing_tokens(self._tokenizer, config, self.special_tokens)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TokenizerNotFound(
                f"{folder / 'tokenizer_config.json'} has a token with a value of the "
                f"wrong type: {type(error).__name__}: {error}; correct the file"
            ) from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # The spelling of a token in the vocabulary has at least as many characters as
        # the token's text, because each byte or character is spelled as one character.
        self.longest_token_chars = max(
            map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1
        )
        self.token_bytes = _byte_level_table(self._tokenizer)
        end_ids = dict.fromkeys(self._find_eos_ids(folder))
        num_logits = _model_vocab_size(folder) or self.vocab_size
        self.eos_ids = tuple(i for i in end_ids if 0 <= i < num_logits)
        self.unknown_eos_ids = tuple(i for i in end_ids if i not in self.eos_ids)
        self.chat_template = find_chat_template(folder, config, chat_template)
        self.digest = _compute_digest(folder, self.chat_template)
        # The id of a token that has the same text at any position; see `_token_raw`.
        # Empty if the vocabulary is byte-level, because `_token_raw` then needs no
        # such token.
        self._anchor_ids: list[int] = []
        if self.token_bytes is None:
            plain_ids = (
                i for i in range(self.vocab_size) if self.decode([i]).isalnum()
            )
            self._anchor_ids = list(itertools.islice(plain_ids, 1))
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        Args:
            add_special_tokens: whether to add the special tokens that the model expects
                around a prompt.
        """
        # Only the batch functions of the library `tokenizers` release the GIL.
        encoded = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list[int](encoded[0].ids)

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library `tokenizers`. Callers must not change it."""
        return self._tokenizer

    def added_tokens(self) -> dict[str, bool]:
        """Return the texts of the added tokens, and whether each is `special`."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {token.content: token.special for token in added}

    def with_marker_deleted(
        self, marker: str, tokens: Collection[str]
    ) -> tokenizers.Tokenizer:
        """Return a copy of the tokenizer that deletes `marker` from each text.

        Args:
            tokens: added tokens that the copy must find before the normalizer runs. The
                original tokenizer finds an added token with `normalized=True` only
                after the normalizer has run.
        """
        inner = self._tokenizer
        tokens_by_id = sorted(inner.get_added_tokens_decoder().items())
        added = []
        for _, token in tokens_by_id:
            is_raw = token.content in tokens or not token.normalized
            flags = {name: getattr(token, name) for name in _ADDED_TOKEN_FLAGS}
            added.append(
                tokenizers.AddedToken(token.content, normalized=not is_raw, **flags)
            )
        copy = tokenizers.Tokenizer(inner.model)  # both share the vocabulary
        copy.add_tokens(added)
        if sorted(copy.get_added_tokens_decoder()) != [i for i, _ in tokens_by_id]:
            copy = self._copy_through_json(added)
        steps = [normalizers.Replace(marker, "")]
        if inner.normalizer is not None:
            steps.append(inner.normalizer)
        copy.normalizer = normalizers.Sequence(steps)
        for part in ("pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(inner, part)) is not None:
                setattr(copy, part, value)
        return copy

    def _copy_through_json(
        self, added: Sequence[tokenizers.AddedToken]
    ) -> tokenizers.Tokenizer:
        """Return a copy of the tokenizer, made through JSON.

        JSON keeps gaps between the ids of added tokens.

        Args:
            added: the added tokens, with the values of `normalized` for the copy.
        """
        tokenizer_json = json.loads(self.to_json())
        normalized = {token.content: token.normalized for token in added}
        for token in tokenizer_json["added_tokens"]:
            token["normalized"] = normalized[token["content"]]
        return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json))

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    def min_num_tokens(
        self, text: str, limit: int, *, on_piece: Callable[[], None] = lambda: None
    ) -> int:
        """Return a lower bound of the number of tokens in a text that is far too long.

        Returns 0 unless the text certainly has more than `limit` tokens. Tokenizing a
        complete text takes hundreds of times the text's memory. So the text is
        tokenized piece by piece, until the pieces have more than twice `limit` tokens.
        The result is half of this number. The pieces may have more tokens than the
        text, because a token of the text may extend over the border of two pieces.

        Args:
            on_piece: called before each piece. It may raise an exception to stop.
        """
        num_tokens = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            on_piece()
            piece = text[begin : begin + _PIECE_CHARS]
            num_tokens += len(self.encode(piece, add_special_tokens=False))
            if num_tokens > 2 * limit:
                return (num_tokens + 1) // 2
        return 0

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, including the text of special tokens."""
        if len(token_ids) > _MAX_INLINE_IDS:  # the batch function releases the GIL
            return str(
                self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]
            )
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def id_of(self, text: str) -> int | None:
        """Return the id of the token that is spelled `text`; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's spelling of each token; None for an unknown id."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def byte_of(self, token_id: int) -> bytes | None:
        """Return the byte of a token such as `<0xE2>`; None for any other token."""
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return bytes.fromhex(match[1]) if match else None

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        field: str = "messages",
        **options: Any,
    ) -> str:
        """Return the prompt for the assistant's next turn, including special tokens.

        Args:
            field, options: arguments of ChatTemplate.render.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses the
                messages.
        """
        if self.chat_template is None:
            refuse(
                field,
                "cannot be used: the model has no chat template; use /v1/completions, "
                "or start the server with --chat-template",
            )
        return self.chat_template.render(
            messages, self.special_tokens, field=field, **options
        )

    def _token_text(self, token_id: int) -> TokenText:
        """Return the text of a single token, as responses show it.

        A special token is shown by its text, such as `<|im_end|>`. A token with an
        incomplete character is shown as `bytes:\\xe2\\x82`, as in OpenAI's API, so that
        different tokens have different texts.
        """
        raw = self._token_raw(token_id)
        try:
            return TokenText(raw.decode(), raw)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)

    def _token_raw(self, token_id: int) -> bytes:
        """Return the bytes of a single token."""
        if self.token_bytes is not None and token_id < len(self.token_bytes):
            return self.token_bytes[token_id]
        byte = self.byte_of(token_id)
        if byte is not None:
            return byte
        # A decoder may drop a space at the start of a text, so the token is decoded
        # after the anchor token.
        anchored: str = self._tokenizer.decode(
            [*self._anchor_ids, token_id], skip_special_tokens=False
        )
        return anchored[len(self._tokenizer.decode(self._anchor_ids)) :].encode()

    def _find_eos_ids(self, folder: Path) -> tuple[int, ...]:
        """Return the ids that end a generation.

        The first source that has such ids is used: generation_config.json, then
        config.json, then the tokenizer.

        Raises:
            TokenizerNotFound: the value in a file is not a token id or a list of ids.
        """
        for name in ("generation_config.json", "config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if any(type(token_id) is not int for token_id in ids):
                raise TokenizerNotFound(
                    f"eos_token_id of {folder / name} is {short_repr(value)}, expected "
                    "a token id or a list of token ids; correct the file"
                )
            return tuple(ids)
        eos = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        return () if eos is None else (eos,)


def _load(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in a model's directory.

    Raises:
        TokenizerNotFound: there is no tokenizer.json, or it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        patterns = ("*.model", "*.txt", "tekken.json")
        names = sorted(
            file.name for pattern in patterns for file in folder.glob(pattern)
        )
        raise TokenizerNotFound(
            f"{folder} has no tokenizer.json (found: "
            f"{', '.join(names) or 'no vocabulary'}); copy the file from a model with "
            "the same vocabulary, or try to create it with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerNotFound(f"{path} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _compute_digest(folder: Path, template: ChatTemplate | None) -> str:
    digest = hashlib.sha256(
        (template.source if template else "").encode(errors="replace")
    )
    for name in _DIGEST_FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(b"%s %d\0" % (name.encode(), len(content)) + content)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerNotFound(f"{path} is not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _model_vocab_size(folder: Path) -> int | None:
    """Return the number of the model's logits, `vocab_size` in config.json, or None."""
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):  # multimodal models have this object
        config = {**config, **text_config}
    size = config.get("vocab_size")
    return size if type(size) is int else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens by name, the seven usual names first.

    Chat templates use these names. In `config`, a token is a string or an object with
    `content`.
    """
    texts: dict[str, str] = {}
    for name in (*_SPECIAL_NAMES, *config):
        if not name.endswith("_token"):
            continue
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _add_missing_tokens(
    tokenizer: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]
) -> None:
    """Add the tokens of `config` that tokenizer.json lacks, as transformers does."""
    listed = sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
    )
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for _, token in listed:
        if token["content"] not in present:
            tokenizer.add_tokens([tokenizers.AddedToken(**token)])
            present.add(token["content"])
    missing = [content for content in special.values() if content not in present]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(text, special=True) for text in missing]
    )


def _byte_level_table(tokenizer: tokenizers.Tokenizer) -> list[bytes] | None:
    """Return the bytes of every id if the decoder is byte-level, else None.

    A byte-level vocabulary spells a printable byte as the character with the same code,
    and any other byte as a character from U+0100 on. The spelling of an added token is
    the token's text, so the token's bytes are this text in UTF-8.
    """
    if type(tokenizer.decoder) is not tokenizers.decoders.ByteLevel:
        return None
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    byte_by_char = {
        chr(byte if byte in printable else next(substitutes)): byte
        for byte in range(256)
    }
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        is_byte_spelling = byte_by_char.keys() >= set(token)
        if is_byte_spelling:
            table[token_id] = bytes(map(byte_by_char.__getitem__, token))
        else:
            table[token_id] = token.encode()
    return table

"""How many tokens a text has at least, without tokenizing it: its length by that of the longest
token. Where a tokenizer may drop text, or treats it in a way not known here, nothing is said: no
text is refused that fits."""

import json
from typing import Any, Final

import tokenizers

_SPACE: Final = "\u2581"  # how vocabularies of words spell a space
_FORMS: Final = ("NFC", "NFKC", "NFD", "NFKD")
_MOST_SHRUNK: Final = 4  # UTF-8 bytes that a Unicode form makes one of, at most
# Of the ways to cut a text those that keep all of it.
_CUTS: Final = ("ByteLevel", "Digits", "Split", "Metaspace", "Punctuation")


def byte_alphabet() -> list[str]:
    """The character of each byte: itself where it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class TokenBound:
    """The bound of one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = list(tokenizer.get_added_tokens_decoder().values())
        self._loses_spaces = any(token.lstrip or token.rstrip for token in added)
        # The most UTF-8 bytes of a text that one token stands for; None: not known.
        self._longest = _longest_token(tokenizer, [token.content for token in added])

    def at_least(self, text: str, enough: int) -> int:
        """How many tokens `text` has at least, with 0 for any number below `enough`."""
        if self._longest is None or 4 * len(text) < enough * self._longest:
            return 0
        kept = "".join(text.split()) if self._loses_spaces else text
        found = -(-len(kept.encode(errors="ignore")) // self._longest)
        return found if found >= enough else 0


def _longest_token(tokenizer: tokenizers.Tokenizer, added: list[str]) -> int | None:
    own = tokenizer.get_vocab(with_added_tokens=False)
    cuts, changes = _parts(tokenizer.pre_tokenizer), _parts(tokenizer.normalizer)
    num_byte_levels = sum(part["type"] == "ByteLevel" for part in cuts)
    forms = [part for part in changes if part["type"] in _FORMS]
    spellings = [part for part in changes if part not in forms]
    if not _keeps_text(tokenizer.model, own, is_byte_level=num_byte_levels == 1):
        return None
    if len(forms) > 1 or not (all(map(_keeps_all, cuts)) and all(map(_spells_spaces, spellings))):
        return None
    if num_byte_levels and (spellings or any(part["type"] == "Metaspace" for part in cuts)):
        return None  # bytes of other spaces
    lengths = [len(token.encode()) for token in added]
    if num_byte_levels:
        lengths += map(len, own)
    else:
        lengths += [len(token.replace(_SPACE, " ").encode()) for token in own]
    return max(lengths, default=1) * (_MOST_SHRUNK if forms else 1)


def _keeps_text(model: Any, own: dict[str, int], *, is_byte_level: bool) -> bool:
    """Whether whatever has no token of its own becomes tokens of its bytes, not one or none."""
    if type(model) is not tokenizers.models.BPE:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return all(char in own for char in byte_alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in own for byte in range(256))


def _parts(component: Any) -> list[dict[str, Any]]:
    """What a normalizer or pre-tokenizer does, one after the other."""
    todo = [] if component is None else [json.loads(component.__getstate__())]
    parts = []
    while todo:
        part = todo.pop(0)
        inner = part.get("normalizers", part.get("pretokenizers"))
        if part["type"] == "Sequence" and inner is not None:
            todo = [*inner, *todo]
        else:
            parts.append(part)
    return parts


def _keeps_all(cut: dict[str, Any]) -> bool:
    is_known = cut["type"] in _CUTS and cut.get("behavior") != "Removed"
    return bool(is_known) and cut.get("replacement", _SPACE) == _SPACE


def _spells_spaces(change: dict[str, Any]) -> bool:
    """Whether all that a normalizer does is to spell spaces as `_SPACE`, or to put one in front."""
    if change["type"] == "Prepend":
        return True
    is_of_space = change.get("pattern") == {"String": " "} and change.get("content") == _SPACE
    return bool(change["type"] == "Replace" and is_of_space)

"""How many tokens a text has at least, without tokenizing it: a sum over its characters.

Every token stands for a stretch of the text, and these do not overlap. So give each byte a weight
such that the bytes of no token weigh more than 1 together: then no text has fewer tokens than it
weighs. What may vanish on its way into tokens weighs nothing, and where a tokenizer treats text in
a way that is not known here, nothing weighs anything: no text is refused that fits.

    vanishes                                       so weighs nothing
    what the vocabulary cannot spell: dropped, or  all of which it has neither the character nor
    any number of it is one token                  the bytes
    whitespace that an added token swallows        whitespace, where one may (lstrip, rstrip)
    what a Unicode normalizer joins or replaces    all but `_stable` characters, and as many of
                                                   these as may be joined with what follows them
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

_Form = Literal["NFC", "NFKC", "NFD", "NFKD"]
Floats = npt.NDArray[np.float64]

_SPACE: Final = "\u2581"  # how vocabularies of words spell a space
_FORMS: Final[tuple[_Form, ...]] = ("NFC", "NFKC", "NFD", "NFKD")
# Of the ways to cut a text those that keep all of it.
_CUTS: Final = ("ByteLevel", "Digits", "Split", "Metaspace", "Punctuation")
_ROUNDS: Final = 10  # of raising the weights, after which they hardly grow
_CHUNK_CHARS: Final = 1 << 15  # counted before other threads have their turn
_NUM_CODES: Final = 0x110000
_ROUNDING: Final = 1 - 1e-9


class _Rules(NamedTuple):
    """How a tokenizer treats text.

    Attributes:
        is_byte_level: the vocabulary spells each byte as one character.
        spells_spaces: a space becomes `_SPACE` before the vocabulary is asked.
        form: the Unicode normalization, or None.
        has_all_bytes: a character without a token of its own becomes tokens of its bytes.
        swallows: an added token takes the whitespace around it.
    """

    is_byte_level: bool
    spells_spaces: bool
    form: _Form | None
    has_all_bytes: bool
    swallows: bool


class _Found(NamedTuple):
    """What the weight of a character follows from.

    Attributes:
        weights: of each byte, 0 to 1.
        characters: those of the vocabulary without added tokens, which may be of no use where they
            stand.
    """

    rules: _Rules
    weights: list[float]
    characters: frozenset[str]

    def weight_of(self, char: str) -> float:
        rules = self.rules
        if (rules.swallows and char.isspace()) or unicodedata.category(char) == "Cs":
            return 0.0
        spelled = _SPACE if char == " " and rules.spells_spaces else char
        if not rules.is_byte_level and not rules.has_all_bytes and spelled not in self.characters:
            return 0.0
        return sum(self.weights[byte] for byte in char.encode())

    def weight_of_all(self, counts: Counter[str]) -> float:
        """Of a text with so many of each character."""
        total, heaviest, num_unstable = 0.0, 0.0, 0
        for char, count in counts.items():
            if self.rules.form and not _stable(char, self.rules.form):
                num_unstable += count
                continue
            weight = self.weight_of(char)
            total += weight * count
            heaviest = max(heaviest, weight)
        return max(0.0, total - heaviest * num_unstable)


class TokenBound:
    """The bound of one tokenizer. What takes time to know is found out for the first long text, or
    by `prepare`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Takes seconds for a vocabulary of 250,000 tokens, a part of them in one turn."""
        _ = self._found

    def at_least(self, text: str, enough: int) -> int:
        """How many tokens `text` has at least, with 0 for any number below `enough`.

        Takes half a second for ten million characters, in turns that leave other threads theirs.
        """
        if 4 * len(text) < enough or self._found is None:  # no byte weighs more than 1
            return 0
        counts: Counter[str] = Counter()
        for start in range(0, len(text), _CHUNK_CHARS):
            counts.update(text[start : start + _CHUNK_CHARS])
        found = int(self._found.weight_of_all(counts) * _ROUNDING)
        return found if found >= enough else 0

    @cached_property
    def _found(self) -> _Found | None:
        """None: not known well enough."""
        own = self._tokenizer.get_vocab(with_added_tokens=False)
        rules = _rules_of(self._tokenizer, own)
        if rules is None:
            return None
        spellings = {*own, *self._added_spellings()}
        stretches = {s for token in spellings for s in _stretches(token, rules)} - {b""}
        weights = _weigh(list(stretches))
        if rules.is_byte_level:
            alphabet = enumerate(byte_alphabet())
            weights = [weights[byte] if char in own else 0.0 for byte, char in alphabet]
        return _Found(rules, weights, frozenset(token for token in own if len(token) == 1))

    def _added_spellings(self) -> Iterator[str]:
        """What added tokens are looked for as, some of them only in text that is normalized."""
        normalizer = self._tokenizer.normalizer
        for token in self._tokenizer.get_added_tokens_decoder().values():
            yield token.content
            if token.normalized and normalizer is not None:
                yield normalizer.normalize_str(token.content)


def _stretches(token: str, rules: _Rules) -> Iterator[bytes]:
    """All that a token of this spelling may stand for, or more."""
    yield token.encode()  # an added one
    if rules.is_byte_level:
        mapped = [_BYTES.get(char) for char in token]
        yield bytes(byte for byte in mapped if byte is not None)
    else:
        yield token.replace(_SPACE, " ").encode()
        if (byte := _byte_of_piece(token)) is not None:
            yield bytes([byte])


def byte_alphabet() -> list[str]:
    """The character of each byte: itself where it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTES: Final = {char: byte for byte, char in enumerate(byte_alphabet())}


def _byte_of_piece(token: str) -> int | None:
    """The byte that a vocabulary of words spells as "<0xE2>"."""
    try:
        byte = int(token[3:5], 16)
    except ValueError:
        return None
    return byte if token == f"<0x{byte:02X}>" else None


def _weigh(stretches: list[bytes]) -> list[float]:
    """A weight for each byte, as large as may be, such that no stretch weighs more than 1."""
    lengths = np.array([len(stretch) for stretch in stretches])
    flat = np.frombuffer(b"".join(stretches), np.uint8)
    starts, owner = np.cumsum(lengths) - lengths, np.repeat(np.arange(len(lengths)), lengths)

    def heaviest(of: Floats) -> Floats:
        """For each byte the largest of the stretches that it is in; 0 for a byte in none."""
        found = np.zeros(256)
        np.maximum.at(found, flat, of[owner])
        return found

    weights: Floats = np.ones(256)
    for _ in range(_ROUNDS):
        # A byte's weight is divided by that of its heaviest stretch: afterwards no stretch weighs
        # more than all of it divided by its own weight.
        most = heaviest(np.add.reduceat(weights[flat], starts))
        weights = np.divide(weights, most, out=np.zeros(256), where=most > 0)
    found: list[float] = weights.tolist()
    return found


def _rules_of(tokenizer: tokenizers.Tokenizer, own: dict[str, int]) -> _Rules | None:
    model = tokenizer.model
    if type(model) is not tokenizers.models.BPE:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    cuts, changes = _parts(tokenizer.pre_tokenizer), _parts(tokenizer.normalizer)
    num_byte_levels = sum(part["type"] == "ByteLevel" for part in cuts)
    spells_spaces = any(part["type"] in ("Metaspace", "Replace") for part in (*cuts, *changes))
    forms = [form for form in _FORMS if any(part["type"] == form for part in changes)]
    if not all(map(_keeps_all, cuts)) or len(forms) > 1:
        return None
    if not all(part["type"] in _FORMS or _spells_spaces(part) for part in changes):
        return None
    if num_byte_levels > 1 or (num_byte_levels and spells_spaces):  # bytes of other characters
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    return _Rules(
        is_byte_level=num_byte_levels > 0,
        spells_spaces=spells_spaces,
        form=forms[0] if forms else None,
        has_all_bytes=model.byte_fallback and all(f"<0x{b:02X}>" in own for b in range(256)),
        swallows=any(token.lstrip or token.rstrip for token in added),
    )


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


@lru_cache(maxsize=1 << 16)
def _stable(char: str, form: _Form) -> bool:
    """Whether `char` is itself after normalization unless an unstable one follows it.

    Joining two characters takes at least one unstable one, and changes at most one stable one. A
    character that Python's Unicode does not know yet is unstable.
    """
    if char.isascii():
        return True
    known = unicodedata.category(char) not in ("Cn", "Cs")
    return known and char not in _joining() and unicodedata.normalize(form, char) == char


@lru_cache
def _joining() -> frozenset[str]:
    """Characters that may be joined with the one before them."""
    pairs = (unicodedata.decomposition(chr(code)).split() for code in range(_NUM_CODES))
    seconds = {chr(int(pair[1], 16)) for pair in pairs if len(pair) == 2 and pair[0][0] != "<"}
    jamo = (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))
    return frozenset(seconds).union(map(chr, jamo))

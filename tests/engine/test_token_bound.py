"""No tokenization of a text is below its bound, whatever the tokenizer does to text."""

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from engine.text.token_bound import TokenBound, byte_alphabet

_CORPUS = [
    "the cat sat on the mat, he said hello world",
    "        deep  indents\n\n\n and ======== lines ---------",
    "ångström é ẹ́ 각각 你好 世界 か゛が",
]
_PIECES = [
    *("a", "the", " ", "        ", "\n", "=", "hello", "0", "\u2581", "\x1c", "\u3000", "q", "~"),
    *("<end>", "<wide>", "<n> é", "<0x41>", "Ġ", "Ċ"),
    # Joined or replaced by a normalizer: marks, jamo, singletons, what grows and what shrinks.
    *("e\u0301", "\u0301", "\u0323", "\u0338", ">", "<end>\u0338", "\u1100\u1161\u11a8", "\uac00"),
    *("\u11a8", "\u212b", "\u2126", "\ufb01", "\u0958", "\u1f82", "\u03b1\u0313\u0300\u0345"),
    *("你", "か\u3099", "🙂", "\U0001d15f", "\u09c7\u09be", "\u0fb2\u0f71\u0f80"),
]


def _trained(
    tokenizer: tokenizers.Tokenizer, alphabet: list[str], special: list[str]
) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 200,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),  # of others, which are equally frequent it would choose
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 5, trainer)
    return tokenizer


def _byte_level(alphabet: list[str] | None = None, form: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.normalizer = form
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    return _trained(tokenizer, letters, ["<end>"])


def _words(*, byte_fallback: bool, missing: str = "") -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    pieces = [piece for piece in pieces if piece != missing]
    letters = sorted({*"\u2581=-", *_CORPUS[0]} - {"a", " "})
    return _trained(tokenizer, letters, ["<unk>", "<end>", *pieces])


def _without_some_bytes() -> tokenizers.Tokenizer:
    tokenizer = _byte_level([char for char in byte_alphabet() if char not in "aĠĊÃ"])
    tokenizer.add_tokens([AddedToken("<aa>")])
    return tokenizer


def _swallowing() -> tokenizers.Tokenizer:
    tokenizer = _byte_level()
    tokenizer.add_tokens([AddedToken("<wide>", lstrip=True, rstrip=True)])
    return tokenizer


def _with_normalized_tokens() -> tokenizers.Tokenizer:
    tokenizer = _byte_level(form=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<n> e\u0301", normalized=True), AddedToken("\u212b" * 9)])
    return tokenizer


def _of_characters(spelled: str, added: AddedToken) -> tokenizers.Tokenizer:
    vocab = {char: at for at, char in enumerate(["<unk>", *spelled])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True))
    tokenizer.add_tokens([added])
    return tokenizer


def _with_words_added() -> tokenizers.Tokenizer:
    tokenizer = _of_characters("\u2581abceh lot", AddedToken("hello", normalized=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.add_tokens([AddedToken("a t", normalized=True)])
    return tokenizer


def _cutting(cut: Any) -> tokenizers.Tokenizer:
    tokenizer = _byte_level()
    inner = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, inner])
    return tokenizer


def _with_other_spaces() -> tokenizers.Tokenizer:
    tokenizer = _of_characters("_a", AddedToken("<x>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_")
    return tokenizer


def _spelling_words(**marks: str) -> tokenizers.Tokenizer:
    """Where a character stands in a word decides whether the vocabulary has it."""
    return tokenizers.Tokenizer(models.BPE({"a": 0, "a</w>": 1, "<unk>": 2}, [], **marks))


def _word_pieces() -> tokenizers.Tokenizer:
    vocab = {"[UNK]": 0, "the": 1, "##a": 2, "a": 3}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


# Whether anything is known of it.
_KNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": _byte_level,
    "NFC": lambda: _byte_level(form=normalizers.NFC()),
    "NFKC": lambda: _byte_level(form=normalizers.NFKC()),
    "NFD": lambda: _byte_level(form=normalizers.NFD()),
    "normalized tokens": _with_normalized_tokens,
    "swallowing": _swallowing,
    "words": lambda: _words(byte_fallback=True),
    "split": lambda: _cutting(pre_tokenizers.Split(Regex("[ae]"), "merged_with_next")),
}
_UNKNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes missing": _without_some_bytes,
    "words without bytes": lambda: _words(byte_fallback=False),
    "words without a byte": lambda: _words(byte_fallback=True, missing="<0xA9>"),
    "words added": _with_words_added,
    "a character added": lambda: _of_characters("\u2581aehlo", AddedToken("q", single_word=True)),
    "removing": lambda: _cutting(pre_tokenizers.Split(Regex("[ae]"), "removed")),
    "whitespace": lambda: _cutting(pre_tokenizers.WhitespaceSplit()),
    "lowering": lambda: _byte_level(form=normalizers.Lowercase()),
    "stripping": lambda: _byte_level(form=normalizers.Strip()),
    "replacing": lambda: _byte_level(form=normalizers.Replace(Regex(" +"), " ")),
    "two forms": lambda: _byte_level(
        form=normalizers.Sequence([normalizers.NFKD(), normalizers.NFC()])
    ),
    "prefixes": lambda: _spelling_words(continuing_subword_prefix="##"),
    "suffixes": lambda: _spelling_words(end_of_word_suffix="</w>"),
    "spaces dropped": lambda: _byte_level(form=normalizers.Replace(" ", "")),
    "spaces as something else": _with_other_spaces,
    "word pieces": _word_pieces,
    "bytes of other spaces": lambda: _cutting(pre_tokenizers.Metaspace()),
    "bytes of bytes": lambda: _cutting(pre_tokenizers.ByteLevel()),
}
_MADE = {name: make() for name, make in {**_KNOWN, **_UNKNOWN}.items()}
_BOUNDS = {name: TokenBound(tokenizer) for name, tokenizer in _MADE.items()}


@pytest.mark.parametrize("name", _KNOWN)
@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(_PIECES), st.integers(1, 12)) | st.tuples(st.characters()),
        max_size=12,
    )
)
@example(pieces=[(" ", 5000), ("<wide>", 1), (" ", 5000)])
@example(pieces=[("<end>\u0338", 500)])
@example(pieces=[("\u1100\u1161\u11a8", 500)])
@example(pieces=[("~", 5000)])
@example(pieces=[("\u212b", 900)])
@example(pieces=[(" hello", 900)])
@example(pieces=[("a\u2581t", 900)])
@example(pieces=[("a", 1), ("q", 900), ("a", 1)])
@example(pieces=[(" ", 900), ("a", 1)])
@example(pieces=[("\u00c5", 900)])
@example(pieces=[("a", 900)])
@example(pieces=[("\u00e9", 900)])
@example(pieces=[("e\u0301\u0301", 90), ("か\u3099", 90), ("\u09c7\u09be", 90)])
def test_no_text_has_fewer_tokens_than_its_bound(name: str, pieces: list[tuple[Any, ...]]) -> None:
    text = "".join(piece * (times[0] if times else 1) for piece, *times in pieces)
    tokenizer = _MADE[name]
    if any("\ud800" <= char <= "\udfff" for char in text):
        return  # no tokenizer takes half a character
    found = len(tokenizer.encode(text, add_special_tokens=False))
    assert _BOUNDS[name].at_least(text, 0) <= found


@pytest.mark.parametrize("name", _KNOWN)
def test_a_long_text_of_a_known_tokenizer_has_a_bound_of_use(name: str) -> None:
    text = "Hello, world: he said 1234 things. " * 1000
    found = len(_MADE[name].encode(text, add_special_tokens=False))
    assert len(text.encode()) / 200 < _BOUNDS[name].at_least(text, 100) <= found


@pytest.mark.parametrize("name", _UNKNOWN)
def test_where_too_little_is_known_nothing_is_said(name: str) -> None:
    assert _BOUNDS[name].at_least("a" * 100_000, 1) == 0


def test_what_is_below_enough_is_not_told() -> None:
    bound = _BOUNDS["byte-level"]
    sure = bound.at_least("q~" * 5000, 1)
    assert sure > 100
    assert bound.at_least("q~" * 5000, sure) == sure and bound.at_least("q~" * 5000, sure + 1) == 0

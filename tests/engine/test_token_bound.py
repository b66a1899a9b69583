"""No tokenization of a text is below its bound, whatever the tokenizer does to text."""

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from engine.text.tokenizer import Tokenizer

_CORPUS = [
    "the cat sat on the mat, he said hello world",
    "        deep  indents\n\n\n and ======== lines ---------",
    "ångström é ẹ́ 각각 你好 世界 か゛が",
]
_PIECES = [
    *("a", "the", " ", "        ", "\n", "=", "hello", "0", "\u2581", "\x1c", "\u3000", "q", "~"),
    *("<end>", "<wide>", "<n> é", "<0x41>", "Ġ", "Ċ", " hello", "a\u2581t"),
    # Joined or replaced by a normalizer: marks, jamo, singletons, what grows and what shrinks.
    *("e\u0301", "\u0301", "\u0323", "\u0338", ">", "<end>\u0338", "\u1100\u1161\u11a8", "\uac00"),
    *("\u11a8", "\u212b", "\u2126", "\ufb01", "\u0958", "\u1f82", "\u03b1\u0313\u0300\u0345"),
    *(
        "你",
        "か\u3099",
        "🙂",
        "\U0001d15f",
        "\u09c7\u09be",
        "\u0fb2\u0f71\u0f80",
        "\u00c5",
        "\u00e9",
    ),
]
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _trained(tokenizer: Any, alphabet: list[str], special: list[str]) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 200,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),  # of others, which are equally frequent it would choose
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 5, trainer)
    return tokenizer


def _bytes(form: Any = None, cut: Any = None, missing: str = "", *added: Any) -> Any:
    """A vocabulary of bytes, as Llama 3 has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    inner = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cuts = [cut or pre_tokenizers.Digits(), inner]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.normalizer = form
    alphabet = [char for char in pre_tokenizers.ByteLevel.alphabet() if char not in missing]
    _trained(tokenizer, alphabet, ["<end>"])
    tokenizer.add_tokens(list(added))
    return tokenizer


def _words(special: list[str], *, byte_fallback: bool = True, form: Any = None) -> Any:
    """A vocabulary of words, as Llama 2 has it."""
    model = models.BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    spelled = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = form or normalizers.Sequence([normalizers.Prepend("\u2581"), spelled])
    return _trained(tokenizer, sorted({*"\u2581=-", *_CORPUS[0]} - {"a", " "}), special)


def _of_characters(cut: Any = None, **marks: str) -> Any:
    vocab = {"a": 0, "a</w>": 1, "<unk>": 2, "_": 3}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", **marks))
    tokenizer.pre_tokenizer = cut
    return tokenizer


_UNK = ["<unk>", "<end>"]
_KNOWN: dict[str, Callable[[], Any]] = {
    "bytes": _bytes,
    "NFC": lambda: _bytes(normalizers.NFC()),
    "NFKC": lambda: _bytes(normalizers.NFKC()),
    "NFD": lambda: _bytes(normalizers.NFD()),
    "split": lambda: _bytes(None, pre_tokenizers.Split(Regex("[ae]"), "merged_with_next")),
    "normalized tokens": lambda: _bytes(
        normalizers.NFC(), None, "", AddedToken("<n> e\u0301", normalized=True), "\u212b" * 9
    ),
    "swallowing": lambda: _bytes(
        None, None, "", AddedToken("<wide>", lstrip=True, rstrip=True), "q"
    ),
    "words": lambda: _words([*_UNK, *_BYTE_TOKENS]),
}
_UNKNOWN: dict[str, Callable[[], Any]] = {
    "bytes missing": lambda: _bytes(None, None, "aĠĊÃ"),
    "words without bytes": lambda: _words(_UNK, byte_fallback=False),
    "words without a byte": lambda: _words([*_UNK, *_BYTE_TOKENS[:-1]]),
    "words, spaces dropped": lambda: _words(
        [*_UNK, *_BYTE_TOKENS], form=normalizers.Replace(" ", "")
    ),
    "removing": lambda: _bytes(None, pre_tokenizers.Split(Regex("[ae]"), "removed")),
    "whitespace": lambda: _bytes(None, pre_tokenizers.WhitespaceSplit()),
    "lowering": lambda: _bytes(normalizers.Lowercase()),
    "stripping": lambda: _bytes(normalizers.Strip()),
    "replacing": lambda: _bytes(normalizers.Replace(Regex(" +"), " ")),
    "two forms": lambda: _bytes(normalizers.Sequence([normalizers.NFKD(), normalizers.NFC()])),
    "bytes of other spaces": lambda: _bytes(None, pre_tokenizers.Metaspace()),
    "bytes of bytes": lambda: _bytes(None, pre_tokenizers.ByteLevel()),
    "spaces as something else": lambda: _of_characters(pre_tokenizers.Metaspace("_")),
    "prefixes": lambda: _of_characters(continuing_subword_prefix="##"),
    "suffixes": lambda: _of_characters(end_of_word_suffix="</w>"),
    "word pieces": lambda: tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1})),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    found: dict[str, Tokenizer] = {}

    def make(name: str) -> Tokenizer:
        if name not in found:
            folder = tmp_path_factory.mktemp("tokenizer")
            {**_KNOWN, **_UNKNOWN}[name]().save(str(folder / "tokenizer.json"))
            found[name] = Tokenizer(folder)
        return found[name]

    return make


@pytest.mark.parametrize("name", _KNOWN)
@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(_PIECES), st.integers(1, 12))
        | st.tuples(st.characters(exclude_categories=["Cs"]), st.just(1)),
        max_size=12,
    )
)
@example(pieces=[(" ", 5000), ("<wide>", 1), (" ", 5000)])
@example(pieces=[("a", 1), ("q", 900), ("a", 1)])
@example(pieces=[("e\u0301\u0301", 90), ("か\u3099", 90), ("\u09c7\u09be", 90)])
def test_no_text_has_fewer_tokens_than_its_bound(
    made: Callable[[str], Tokenizer], name: str, pieces: list[tuple[str, int]]
) -> None:
    text = "".join(piece * times for piece, times in pieces)
    tokenizer = made(name)
    assert tokenizer.at_least(text, 0) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", _KNOWN)
def test_a_known_tokenizer_has_a_bound_of_use(made: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = made(name)
    for piece in [*_PIECES, "Hello, world: he said 1234 things. "]:
        found = len(tokenizer.encode(piece * 900, add_special_tokens=False))
        assert tokenizer.at_least(piece * 900, 0) <= found
    sure = tokenizer.at_least(piece * 900, 100)
    assert sure > 100 and len(piece * 900) / 200 < sure
    assert tokenizer.at_least(piece * 900, sure) == sure
    assert tokenizer.at_least(piece * 900, sure + 1) == 0, "what is below enough is not told"


@pytest.mark.parametrize("name", _UNKNOWN)
def test_where_too_little_is_known_nothing_is_said(
    made: Callable[[str], Tokenizer], name: str
) -> None:
    assert made(name).at_least("a" * 100_000, 1) == 0

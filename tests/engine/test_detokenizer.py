"""The text does not depend on the pieces in which tokens and characters arrive."""

import functools
import re
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.text.detokenizer import (
    ByteDetokenizer,
    StopFinder,
    WindowDetokenizer,
    create_detokenizer,
)
from tests.rigs.examples import examples


class PieceTokenizer:
    """A tokenizer like SentencePiece: it drops a leading space and joins byte tokens.
    The id 0 is a special token.
    """

    special_ids = frozenset([0])
    token_bytes = None

    def __init__(self, pieces: list[str | bytes]) -> None:
        self.pieces = pieces

    def id_of(self, text: str) -> int | None:
        return self.pieces.index(text) if text in self.pieces else None

    def byte_of(self, token_id: int) -> bytes | None:
        piece = self.pieces[token_id]
        return piece if isinstance(piece, bytes) else None

    def decode(self, token_ids: list[int]) -> str:
        return self.decode_all([i for i in token_ids if i not in self.special_ids])

    def decode_all(self, token_ids: list[int]) -> str:
        pieces = [self.pieces[i] for i in token_ids]
        data = b"".join(p if isinstance(p, bytes) else p.encode() for p in pieces)
        return data.decode("utf-8", "replace").replace("▁", " ").removeprefix(" ")


PIECES: list[str | bytes] = ["<s>", "▁", "▁he", "llo", "▁wörld", "!", *"ab\n"]
PIECES += [bytes([byte]) for byte in "€🙂é".encode()]
TOKENIZER = PieceTokenizer(PIECES)

TOKEN_BYTES = [bytes([byte]) for byte in range(256)] + [
    b"",
    "🙂".encode(),
    b"ab\xe2",
    b"\x82\xac",
]


def detokenize(detokenizer: ByteDetokenizer | WindowDetokenizer, ids: list[int]) -> str:
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


def ids_of(text: str) -> list[int]:
    """Return the ids of `text`. Characters without a token become byte tokens."""
    ids = []
    for char in text:
        if char in PIECES:
            ids.append(PIECES.index(char))
        else:
            ids += [PIECES.index(bytes([byte])) for byte in char.encode()]
    return ids


@given(
    st.lists(
        st.sampled_from([0, 256, 257, 258, 259, 0xE2, 0x82, 0xAC, 0xF0, 0x80, 0x41])
    )
)
def test_decoding_bytes_in_parts_gives_the_whole_text(ids):
    expected = b"".join(TOKEN_BYTES[i] for i in ids if i != 256).decode(
        "utf-8", "replace"
    )
    assert detokenize(ByteDetokenizer(TOKEN_BYTES, frozenset([256])), ids) == expected


TEXTS = ["<s>", "▁he", "llo", "▁", "€", "🙂", "é", "▁wörld", "a", "\n"]
PROMPT_PIECES = ["▁he", "llo", "▁", "▁wörld", "a"]  # the tokens of a prompt


@examples(200)
@given(
    st.lists(st.sampled_from(PROMPT_PIECES), max_size=12),
    st.lists(st.sampled_from(TEXTS)),
)
def test_decoding_windows_gives_the_whole_text_and_joins_the_prompt(prompt, texts):
    before = [PIECES.index(text) for text in prompt]
    ids = [
        i
        for text in texts
        for i in ([PIECES.index(text)] if text in PIECES else ids_of(text))
    ]
    text = detokenize(create_detokenizer(TOKENIZER, before), ids)
    assert TOKENIZER.decode(before) + text == TOKENIZER.decode(before + ids)


@examples(200)
@given(
    st.lists(
        st.sampled_from([0x41, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xF0, 0x9F, 256]),
        max_size=9,
    ),
    st.lists(st.sampled_from([0x41, 0x82, 0xA9, 0xAC, 0xF0, 0x9F, 0x99, 0x82, 256])),
)
def test_echo_and_an_output_join_to_the_text_of_all_bytes(prompt, output):
    whole_text = bytes(i for i in [*prompt, *output] if i != 256).decode(
        "utf-8", "replace"
    )
    echoing = create_detokenizer(ByteTokenizer(), prompt, echoes_prompt=True)
    text, offsets = echoing.echo(prompt)
    assert text + detokenize(echoing, output) == whole_text
    assert offsets == sorted(offsets) and len(offsets) == len(prompt)
    single = detokenize(create_detokenizer(ByteTokenizer(), prompt), output)
    assert whole_text.removeprefix(text) in (single, f"\ufffd{single}")


BYTE_IDS = [PIECES.index(bytes([byte])) for byte in "€🙂".encode()]


def _splits_bytes(ids: list[int]) -> bool:
    """True if special tokens separate two byte tokens."""
    others = [(index, token) for index, token in enumerate(ids) if token != 0]
    return any(
        index + 1 < next_index and token in BYTE_IDS and next_token in BYTE_IDS
        for (index, token), (next_index, next_token) in pairwise(others)
    )


@examples(200)
@given(
    st.lists(
        st.sampled_from([0, *map(PIECES.index, PROMPT_PIECES), *BYTE_IDS]), max_size=12
    ),
    st.lists(
        st.sampled_from([0, *map(PIECES.index, PROMPT_PIECES), *BYTE_IDS]), max_size=12
    ),
)
def test_echo_and_an_output_join_to_the_text_of_all_pieces(prompt, output):
    """The joined text may differ from the decoded text in two ways: the space after a
    special token, where decoders start a new text, and the number of U+FFFD for invalid
    bytes. The test skips special tokens that split the bytes of a character, because
    decoders differ.
    """
    assume(not _splits_bytes([*prompt, *output]))
    echoing = create_detokenizer(TOKENIZER, prompt, echoes_prompt=True)
    text, offsets = echoing.echo(prompt)
    joined = text + detokenize(echoing, output)
    expected = "".join(
        TOKENIZER.decode(list(part))
        for is_special, part in groupby([*prompt, *output], lambda token: token == 0)
        if not is_special
    )
    normalised = [
        re.sub("\ufffd+", "\ufffd", text.replace(" ", ""))
        for text in (joined, expected)
    ]
    assert normalised[0] == normalised[1]
    assert offsets == sorted(offsets) and len(offsets) == len(prompt)


@pytest.mark.parametrize(
    ("ids", "pushed", "rest"),
    [
        # A character is returned once it is complete.
        (ids_of("a€b"), ["a", "", "", "€", "b"], ""),
        (ids_of("a€")[:-1], ["a", "", ""], "\N{REPLACEMENT CHARACTER}"),
        # Invalid bytes are returned with a delay, followed by the next character.
        ([9] * 7 + [10, 10], [""] * 7 + ["\ufffd" * 6, "\u2082"], ""),
        ([0, 2, 0, 2], ["", "he", "", " he"], ""),  # special tokens have no text
    ],
)
def test_text_that_each_token_adds(ids, pushed, rest):
    detokenizer = create_detokenizer(TOKENIZER)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert [detokenizer.push(i) for i in ids] == pushed
    assert [detokenizer.flush(), detokenizer.flush()] == [rest, ""]


def test_text_after_a_special_token_starts_anew():
    assert detokenize(create_detokenizer(TOKENIZER, [3, 0]), [2, 3]) == "hello"


def test_endless_invalid_bytes_are_emitted():
    detokenizer = create_detokenizer(TOKENIZER)
    lead = PIECES.index("€".encode()[:1])
    assert any(detokenizer.push(lead) for _ in range(20))


def test_special_tokens_are_text_where_requested():
    detokenizer = create_detokenizer(TOKENIZER, skip_special_tokens=False)
    assert detokenize(detokenizer, [2, 0, 2]) == "he<s> he"
    raw = create_detokenizer(ByteTokenizer(), skip_special_tokens=False)
    assert detokenize(raw, [0x41, 256, 0x42]) == "A<end>B"
    tagged = create_detokenizer(TOKENIZER, [3], visible_tags=["<s>", "none such"])
    assert detokenize(tagged, [2, 10, 0, 2]) == " he\ufffd<s>he", (
        "decoders start a new text after a special token"
    )
    assert (
        detokenize(
            create_detokenizer(ByteTokenizer(), visible_tags=["<end>"]), [0x41, 256]
        )
        == "A<end>"
    )


class ByteTokenizer:
    """A byte-level vocabulary with one special token."""

    special_ids = frozenset([256])
    token_bytes = (*TOKEN_BYTES[:256], b"<end>")

    def id_of(self, text: str) -> int | None:
        return 256 if text == "<end>" else None


def test_id_beyond_the_vocabulary_has_no_text():
    """Models pad their output layer, and random weights can generate such an id."""
    assert ByteDetokenizer(TOKEN_BYTES, frozenset()).push(10_000) == ""


# -- stop strings ----------------------------------------------------------------------


@functools.cache
def expected_cut(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """A simple reference: return the text before the first complete stop string, and
    whether there is one."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@examples(600)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\n", max_size=4), max_size=8),
    st.booleans(),
)
def test_stop_string_is_matched_across_pieces_and_optionally_included(
    stops, pieces, keeps_stop
):
    finder = StopFinder(stops, keeps_stop=keeps_stop)
    text = ""
    for piece in pieces:
        emitted, is_stopped = finder.push(piece)
        text += emitted
        if is_stopped:
            break
    before, is_stopped = expected_cut(tuple(stops), "".join(pieces))
    assert (finder.matched_stop is not None) == is_stopped
    assert finder.matched_stop is None or finder.matched_stop in stops
    assert text + finder.flush() == before + (
        (keeps_stop and finder.matched_stop) or ""
    )


@pytest.mark.timeout(60)
def test_long_stop_strings_that_nearly_match_are_scanned_once():
    """The test takes a second. If text were scanned again for each character, it would
    take minutes.
    """
    stops = [
        "a" * 1023 + "b",
        *("a" * 500 + chr(200 + i) + "a" * 500 for i in range(63)),
    ]
    finder = StopFinder(stops)
    assert not any(finder.push("a")[1] for _ in range(20_000))
    assert finder.push("b") == ("", True) and finder.matched_stop == stops[0]


def test_only_text_that_may_begin_a_stop_is_held():
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("Hi\n") == ("Hi", False)
    assert finder.push("\nUs") == ("", False)
    assert finder.push("a") == ("\n\nUsa", False)
    assert finder.push("\n\nUser") == ("", False)
    assert finder.push(": me") == ("", True)

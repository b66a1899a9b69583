"""The option --speculate, which names a drafter and a number of tokens."""

import pytest

from protocol.settings.speculation import Speculation, parse_speculation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, Speculation("", 16, uses_predictions=True)),
        ("off", Speculation("", 0, uses_predictions=False)),
        ("ngram:1", Speculation("ngram", 1)),
        ("ngram:16", Speculation("ngram", 16)),
        ("model:a/b:4", Speculation("model", 4, folder="a/b")),
        ("model:C:/a:4", Speculation("model", 4, folder="C:/a")),
        ("mtp", Speculation("mtp", 3)),
        ("mtp:1", Speculation("mtp", 1)),
        ("eagle3:a/b:4", Speculation("eagle3", 4, folder="a/b")),
    ],
)
def test_valid_values(text: str | None, expected: Speculation) -> None:
    assert parse_speculation(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no drafter"),
        ("guess:3", '"guess:3" names no drafter: write off, or'),
        ("ngram", "has no number of tokens"),
        ("ngram:", "has no number of tokens"),
        ("ngram:x", "has no number of tokens"),
        ("ngram:-1", "has no number of tokens"),
        ("ngram:٣", "has no number of tokens"),
        ("ngram:" + "9" * 5000, "has no number of tokens"),
        ("model", '"model" has no directory .*: write model:DIR:4'),
        ("model:4", "no directory"),
        ("model::4", "no directory"),
        ("model:a/b", "no directory"),
        ("model:a:b", "has no number of tokens"),
        ("model:a:17", "verifies 1 to 16"),
        ("mtp:", "has no number of tokens"),
        ("mtp:a/b:4", "has no number of tokens"),
        ("mtp:17", "verifies 1 to 16"),
        ("eagle3", '"eagle3" has no directory .*: write eagle3:DIR:4'),
        ("eagle3:4", "no directory"),
        ("eagle3:a:0", "verifies 1 to 16"),
        ("ngram:0", "verifies 1 to 16"),
        ("ngram:17", "verifies 1 to 16"),
    ],
)
def test_other_values_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_speculation(text)

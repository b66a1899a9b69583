"""Which words of a text are options, and how they are renamed."""

import pytest

from protocol.settings.sources import of_group, renamed


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("use --tp 2", "use --decode.tp 2"),
        ("use --tp=2, or --no-kv-convert.", "use --decode.tp=2, or --no-decode.kv-convert."),
        ("(--tp)", "(--decode.tp)"),
        ("--decode.tp and --prefill.tp", "--decode.tp and --prefill.tp"),
        ("--tpp --tp-x x--tp", "--tpp --tp-x x--tp"),
        ("/cache/models--tp--kv-convert", "/cache/models--tp--kv-convert"),
        ("---tp -- tp", "---tp -- tp"),
    ],
)
def test_options_of_a_group_get_its_name(text: str, written: str) -> None:
    assert of_group(text, "decode", {"tp", "kv-convert"}) == written


def test_what_has_no_other_name_stays() -> None:
    assert renamed("--a --no-b", lambda _: None) == "--a --no-b"

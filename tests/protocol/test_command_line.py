"""Positional arguments and --help of the programs."""

from typing import ClassVar

import pytest
from pydantic_settings import SettingsError

from protocol.settings import sources
from protocol.settings.command_line import TOPICS, make_parser
from protocol.settings.settings import (
    PROGRAMS,
    BatonSettings,
    DecodeSettings,
    ProxySettings,
    ServeSettings,
    UpSettings,
    load,
)
from protocol.settings.sources import ConfigError


class ListSettings(BatonSettings):
    """A program with any number of positional arguments."""

    positional: ClassVar[str] = "url"
    url: sources.Listed[str] = ()
    """URL of a server"""


@pytest.mark.parametrize(
    "argv",
    [
        ["M", "--port=7"],
        ["--port", "7", "M"],
        ["--no-ui", "M", "--port=7"],
        ["--model", "M", "--port", "7"],
    ],
)
@pytest.mark.parametrize("cls", [UpSettings, ServeSettings])
def test_model_is_a_positional_argument_or_an_option(cls, argv):
    settings = load(cls, argv)
    assert (settings.model, settings.port) == ("M", 7)


def test_servers_take_a_positional_model_too():
    assert load(DecodeSettings, ["M"]).model == "M"


def test_positional_model_precedes_the_variable(monkeypatch):
    monkeypatch.setenv("BATON_MODEL", "of the variable")
    assert load(ServeSettings, ["M"]).model == "M"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["M", "--model", "N"], "MODEL is given twice: as M, and by --model"),
        (["M", "N"], "unrecognized arguments: N"),
        (["M", "M"], "unrecognized arguments: M"),
        (["M", "--prot", "1"], r"unrecognized arguments: --prot 1 \(did you mean"),
        (["--prot", "1"], r"unrecognized arguments: --prot 1 \(did you mean"),
        (["--ui", "false"], "unrecognized arguments: false"),
        (["--port"], "--port: expected one argument"),
    ],
)
def test_wrong_words_are_named(argv, message):
    with pytest.raises(ConfigError, match=message):
        load(UpSettings, argv)


def test_program_without_positional_arguments_refuses_words():
    with pytest.raises(ConfigError, match="unrecognized arguments: M"):
        load(ProxySettings, ["M"])


def test_repeatable_positional_takes_all_words():
    assert load(ListSettings, ["a", "b"]).url == ("a", "b")
    assert load(ListSettings, ["--url=a", "--url=b"]).url == ("a", "b")
    with pytest.raises(ConfigError, match="unrecognized arguments: --c"):
        load(ListSettings, ["a", "--c", "b"])


# -- help


def options_of(text: str) -> set[str]:
    """Returns the options that a help text explains."""
    words = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    return {word.rstrip(",") for word in words}


@pytest.mark.parametrize("prog", PROGRAMS)
def test_help_shows_common_options_first_and_names_the_topics(prog):
    parser = make_parser(PROGRAMS[prog], prog)
    text = parser.help_text("")
    common = PROGRAMS[prog].common
    assert len(options_of(text)) == len(common) <= 15
    assert text.startswith(f"usage: {prog} ")
    for topic, options in parser.sections.items():
        assert (f"\n  {topic} " in text) == bool(options)
        if options:
            shown = options_of(parser.help_text(topic))
            assert shown == {option.option_strings[0] for option in options}


@pytest.mark.parametrize("prog", PROGRAMS)
def test_help_all_explains_every_option_once(prog):
    cls = PROGRAMS[prog]
    text = make_parser(cls, prog).help_text("all")
    paths = sources.field_paths(cls)
    groups = {path[:1] for path in paths if len(path) > 1}
    names = {sources.option_name(path) for path in paths if path not in groups}
    assert options_of(text) == names
    assert len(names) == sum(line.startswith("  --") for line in text.splitlines())


def test_every_option_of_the_programs_has_a_topic():
    for prog, cls in PROGRAMS.items():
        others = make_parser(cls, prog).sections["other"]
        assert [option.dest for option in others] == ["config"]


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("block-size", {"--prefill.block-size", "--decode.block-size"}),
        ("block_size", {"--prefill.block-size", "--decode.block-size"}),
        ("--decode.block-size", {"--decode.block-size"}),
    ],
)
def test_help_of_a_word_shows_the_options_whose_name_contains_it(word, options):
    parser = make_parser(UpSettings, "baton up")
    assert options_of(parser.help_text(word)) == options


def test_help_of_an_unknown_word_proposes_a_topic():
    with pytest.raises(SettingsError, match=r"=acces \(did you mean access\?\)"):
        make_parser(DecodeSettings, "baton decode").help_text("acces")


def test_help_ends_the_program_before_other_options_are_checked(capsys):
    with pytest.raises(SystemExit) as ended:
        load(UpSettings, ["--help", "--prot=1"], prog="baton up")
    assert ended.value.code == 0
    assert "usage: baton up [MODEL] [options]" in capsys.readouterr().out


def test_topics_are_those_of_the_classes():
    used = {
        topic
        for cls in PROGRAMS.values()
        for base in cls.__mro__
        if (topic := vars(base).get("topic"))
    }
    assert used | {"prefill", "decode"} == set(TOPICS)

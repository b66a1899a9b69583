"""The command line of a settings class: its parser and its --help.

The options of a class belong to topics. --help shows the common options and the names
of the topics, or all options if the class names no common ones. --help=TOPIC shows the
options of one topic, --help=WORD shows options with the word in their names, and
--help=all shows all options.
"""

import argparse
from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from protocol.settings.near_names import suggestion

# The order of the topics in --help, and their descriptions. A settings class names the
# topic of its own options in the class attribute `topic`.
TOPICS = {
    "model": "the model, and how to load and run it",
    "cluster": "the processes of the local cluster",
    "prefill": "the prefill servers of the local cluster",
    "decode": "the decode servers of the local cluster",
    "engine": "attention, KV cache, GPUs, memory and batching",
    "nodes": "one server over several hosts",
    "kv": "how KV is leased to other servers and pulled from them",
    "routing": "how the proxy chooses servers",
    "members": "how the proxy and its servers find and call each other",
    "http": "address, limits of requests and of the waiting queue",
    "access": "API keys and TLS",
    "telemetry": "metrics, traces and logs",
    "other": "other options",
}
ALL = "all"
# Placeholders of values in --help, by the name of the type in pydantic.
_METAVARS = {"str": "TEXT", "SecretStr": "TEXT", "int": "N", "float": "NUMBER"}
_LIST_METAVARS = {
    f"tuple[{kind},...]": f"{word},.." for kind, word in _METAVARS.items()
}
# Words that are not taken for the positional value, unless it is a list. A user who
# writes `--ui false` instead of --no-ui gets an error.
_NOT_A_POSITIONAL = ("true", "false")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats --help without Python types and empty defaults."""

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str
    ) -> Callable[[int], tuple[str, ...]]:
        names = super()._metavar_formatter(action, default_metavar)
        return lambda size: tuple(
            {**_METAVARS, **_LIST_METAVARS}.get(name, name) for name in names(size)
        )

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return text.removesuffix(" (default: None)").removesuffix(" (default: ())")


class _Section(NamedTuple):
    """The context in which pydantic-settings adds the options of a nested model."""

    parser: "Parser"
    title: str  # such as "prefill options"


class Parser(argparse.ArgumentParser):
    """The parser of a settings class.

    Attributes:
        settings: The settings class.
        sections: The options by topic.
    """

    def __init__(self, settings: type[BaseSettings], prog: str | None) -> None:
        super().__init__(
            prog=prog,
            description=cleandoc(settings.__doc__ or ""),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.settings = settings
        self.sections: dict[str, list[argparse.Action]] = {name: [] for name in TOPICS}
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            const="",
            metavar="TOPIC",
            default=argparse.SUPPRESS,
            help="show the common options, those of a topic, or all",
        )

    @property
    def positional(self) -> str:
        """The field whose value may be given without its option; empty: none."""
        name: str = getattr(self.settings, "positional", "")
        return name

    @property
    def usage_line(self) -> str:
        name = self.positional.upper()
        is_list = bool(name) and _is_list(self.settings, self.positional)
        words = [f"[{name}{' ..' if is_list else ''}]"] if name else []
        return " ".join(["%(prog)s", *words, "[options]"])

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def help_text(self, word: str) -> str:
        """Returns the help about a topic, or about the options that contain a word.

        Args:
            word: Empty: the common options and the names of the topics, or all options
                if the settings class names no common ones; "all": all options.

        Raises:
            SettingsError: No topic and no option matches.
        """
        topics = {name: options for name, options in self.sections.items() if options}
        common = getattr(self.settings, "common", ())
        formatter = HelpFormatter(prog=self.prog)
        formatter.add_usage(self.usage_line, [], [])
        if word in ("", ALL):
            formatter.add_text(self.description)
        is_short = not word and bool(common)
        if word in topics:
            shown = {TOPICS[word]: topics[word]}
        elif is_short:
            options = [option for group in topics.values() for option in group]
            by_name = {option.dest: option for option in options}
            shown = {"common options": [by_name[name] for name in common]}
        elif word in ("", ALL):
            titles = TOPICS if common else dict.fromkeys(topics, "options")
            shown = {}
            for topic, options in topics.items():
                shown.setdefault(titles[topic], []).extend(options)
        else:
            shown = self._matching_options(word)
        for title, options in shown.items():
            formatter.start_section(title)
            formatter.add_arguments(options)
            formatter.end_section()
        if is_short:
            formatter.add_text(self._list_of_topics(topics))
        return formatter.format_help()

    def _matching_options(self, word: str) -> dict[str, list[argparse.Action]]:
        part = word.strip("-").replace("_", "-")
        options = [
            option
            for group in self.sections.values()
            for option in group
            if any(part in name for name in option.option_strings)
        ]
        if not options:
            hint = suggestion(word, [name for name in TOPICS if self.sections[name]])
            raise SettingsError(f"no topic or option of --help={word}{hint}")
        return {f"options with {part}": options}

    def _list_of_topics(self, topics: dict[str, list[argparse.Action]]) -> str:
        lines = [f"All options: {self.prog} --help=all. Options of a topic, or with a"]
        lines.append(f"word in their name: {self.prog} --help=TOPIC or --help=WORD.")
        lines.append("Topics:")
        lines += [
            f"  {name:<9} {TOPICS[name]} ({len(options)} options)"
            for name, options in topics.items()
        ]
        return "\n".join(lines)


class _Help(argparse.Action):
    """Prints the help and ends the program."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        print(parser.help_text(values), end="")
        parser.exit()


def make_parser(cls: type[BaseSettings], prog: str | None) -> Parser:
    """Returns the parser of a settings class, for completion only."""
    source: CliSettingsSource[Any] = _source(cls, prog)
    parser: Parser = source.root_parser
    return parser


def parse_command_line(
    cls: type[BaseSettings], argv: Sequence[str], prog: str | None
) -> CliSettingsSource[Any]:
    """Returns the values of the command line, as a source of settings.

    Raises:
        SettingsError: An option is unknown, or lacks its value.
    """
    return _source(cls, prog)(args=list(argv))


def _source(cls: type[BaseSettings], prog: str | None) -> CliSettingsSource[Any]:
    return CliSettingsSource[Any](
        cls,
        root_parser=Parser(cls, prog),
        parse_args_method=_parse,
        add_argument_method=_add_argument,
        add_argument_group_method=lambda parser, title, **_: _Section(parser, title),
    )


def _parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments. A word without an option is the positional field's value.

    In some Python versions, argparse itself rejects such a word after an option.
    """
    parsed, words = parser.parse_known_args(argv)
    name = parser.positional
    if not name or not words:
        positionals = []
    elif _is_list(parser.settings, name):
        positionals = [word for word in words if not word.startswith("-")]
    else:
        is_value = not words[0].startswith("-") and words[0] not in _NOT_A_POSITIONAL
        positionals = words[:1] if is_value else []
    others = [word for word in words if word not in positionals]
    if others or len(words) > len(positionals):
        parser.error(f"unrecognized arguments: {' '.join(others or words[1:])}")
    if not positionals:
        return parsed
    if hasattr(parsed, name):
        parser.error(
            f"{name.upper()} is given twice: as {positionals[0]}, and by --{name}"
        )
    is_list = _is_list(parser.settings, name)
    setattr(parsed, name, positionals if is_list else positionals[0])
    return parsed


def _is_list(cls: type[BaseModel], name: str) -> bool:
    return getattr(cls.model_fields[name].annotation, "__origin__", None) is tuple


def _add_argument(
    context: Parser | _Section, *names: str, **options: Any
) -> argparse.Action:
    """Adds an option to the parser and to its topic."""
    if isinstance(context, _Section):
        parser = context.parser
        topic = context.title.partition(" ")[0]
    else:
        parser = context
        topic = _topic_of(parser.settings, options["dest"])
    action = parser.add_argument(*names, **options)
    if action.help != argparse.SUPPRESS:
        parser.sections[topic if topic in TOPICS else "other"].append(action)
    return action


def _topic_of(cls: type[BaseModel], name: str) -> str:
    """Returns the topic of the class that defines a field.

    If subclasses define the field again, for example with another default, the topic is
    that of the base class.
    """
    fields = {info.alias or field: field for field, info in cls.model_fields.items()}
    field = fields.get(name, name)
    owner = cls
    for base in cls.__mro__:
        if field in vars(base).get("__annotations__", {}):
            owner = base
    topic: str = vars(owner).get("topic", "other")
    return topic

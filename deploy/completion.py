"""`baton completion SHELL` prints a script that completes commands and options."""

import argparse
import re
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import shtab

from protocol.settings.command_line import Parser, make_parser

SHELLS = ("bash", "zsh", "fish")
# Names of options whose value is or may be the path of a file. A prefix that ends with
# a dot, such as `prefill.`, is left out.
_FILES = frozenset(
    "config model chat_template api_keys_file servers_file kv_scales tls_cert tls_key "
    "tls_ca".split()
)
_FOLDERS = frozenset({"dir"})
# Placeholder of an option with a few possible values, such as "{auto,cpu,cuda}".
_CHOICES = re.compile(r"\{([^{}]+)\}")


def completion_parser() -> argparse.ArgumentParser:
    """Returns the parser of `baton completion`."""
    parser = argparse.ArgumentParser(
        prog="baton completion",
        description="Prints a script that completes commands, options and values. "
        'bash: eval "$(baton completion bash)" in ~/.bashrc. zsh: '
        'baton completion zsh > "${fpath[1]}/_baton". fish: '
        "baton completion fish > ~/.config/fish/completions/baton.fish.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    return parser


def parser_of_all(commands: dict[str, tuple[str, str]]) -> argparse.ArgumentParser:
    """Returns a parser of all commands. It serves only to make the completion script.

    Args:
        commands: The summary of each command, and the module and name of its settings
            class, or of a function that returns its argparse parser.
    """
    root = argparse.ArgumentParser(prog="baton", allow_abbrev=False)
    root.add_argument("--version", action="store_true", help="print the version")
    subparsers = root.add_subparsers(dest="command")
    for name, (summary, options) in commands.items():
        parser = subparsers.add_parser(
            name, help=summary, description=summary, add_help=False, allow_abbrev=False
        )
        target: Any = resolve_name(options)
        if isinstance(target, type):
            source: argparse.ArgumentParser = make_parser(target, f"baton {name}")
        else:
            source = target()
        _copy_options(source, parser)
    return root


def _copy_options(
    source: argparse.ArgumentParser, target: argparse.ArgumentParser
) -> None:
    """Adds a command's options to its subparser, with the completions of values."""
    for action in source._actions:
        if action.help == argparse.SUPPRESS:
            continue
        field = action.dest.rpartition(".")[2]
        _complete_values(action, field)
        target._add_action(action)
    if isinstance(source, Parser) and source.positional:
        field = source.positional
        positional = target.add_argument(field.upper(), nargs="*", help=field)
        _complete_values(positional, field)


def _complete_values(action: argparse.Action, field: str) -> None:
    choices = _CHOICES.fullmatch(str(action.metavar))
    if choices and not action.choices:
        action.choices = choices[1].split(",")
    elif field in _FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif field in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script. Returns the exit status."""
    from deploy.cli import COMMANDS

    arguments = completion_parser().parse_args(argv)
    commands = {
        name: (command.summary, command.options) for name, command in COMMANDS.items()
    }
    sys.stdout.write(shtab.complete(parser_of_all(commands), shell=arguments.shell))
    print()
    return 0

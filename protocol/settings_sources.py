"""Where settings come from: finding the file, checking names, and wording what is wrong.

protocol/settings.py says what can be configured; this file knows no option by name.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from protocol.near_names import suggestion
from protocol.shown import shown

ENV_PREFIX = "BATON_"
# Set by Baton itself from one process to the next.
INTERNAL_VARIABLES = frozenset({"BATON_READY_FD", "BATON_PARENT_FD"})
# No settings but facts about this machine, which every process inherits: where converted models
# and the machine's own secret are kept, where evaluations find their data, and what the tests find
# here.
MACHINE_VARIABLES = frozenset({"BATON_CACHE", "BATON_EVAL_DATA"})
MACHINE_PREFIX = "BATON_TEST_"


# What to write for an option, by the name that pydantic gives its type.
_METAVARS = {"str": "TEXT", "SecretStr": "TEXT", "int": "N", "float": "NUMBER"}
_LISTS = {"tuple[str,...]": "TEXT,..", "tuple[int,...]": "N,..", "tuple[float,...]": "NUMBER,.."}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """`--help` without a usage that repeats every option, types of Python and empty defaults."""

    def add_usage(self, usage: str | None, *args: Any, **options: Any) -> None:
        super().add_usage("%(prog)s [options]", *args, **options)

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str
    ) -> Callable[[int], tuple[str, ...]]:
        names = super()._metavar_formatter(action, default_metavar)
        return lambda size: tuple({**_METAVARS, **_LISTS}.get(n, n) for n in names(size))

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return text.removesuffix(" (default: None)").removesuffix(" (default: ())")


class ConfigError(ValueError):
    """A setting that cannot be; the message names the key, the value and the fix."""


def field_paths(cls: type[BaseModel]) -> list[tuple[str, ...]]:
    """Every settable field of `cls`, nested ones as paths: ("prefill", "block_size")."""
    paths: list[tuple[str, ...]] = []
    for name, info in cls.model_fields.items():
        nested = _nested_model(info)
        inner = field_paths(nested) if nested else []
        paths += [(name,), *((name, *rest) for rest in inner)]
    return paths


def _nested_model(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def option_name(path: Sequence[str]) -> str:
    """("prefill", "block_size") -> "--prefill.block-size"."""
    return "--" + ".".join(part.replace("_", "-") for part in path)


def variable_name(path: Sequence[str]) -> str:
    """("prefill", "block_size") -> "BATON_PREFILL__BLOCK_SIZE"."""
    return ENV_PREFIX + "__".join(path).upper()


def option_argv(name: str, value: Any) -> list[str]:
    """The arguments that set one field to `value`; nothing for None, secrets and groups."""
    option = option_name((name,))
    match value:
        case None | SecretStr() | BaseModel():
            return []
        case bool():
            return [option if value else option.replace("--", "--no-", 1)]
        case tuple() | list():
            return [f"{option}={item}" for item in value]
        case _:
            return [f"{option}={value}"]


def split_list(value: Any) -> Any:
    """Lists may be written as JSON, with commas, or (on the command line) by repeating."""
    if isinstance(value, str):
        text = value.strip()
        return json.loads(text) if text.startswith("[") else [v for v in text.split(",") if v]
    return value


def base_url(url: str) -> str:
    """`url` without a slash at its end. Raises ValueError unless it is http://host:port."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ValueError(f"{shown(url)} is not a URL ({error}); write http://host:port") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{shown(url)} is not a URL; write http://host:port")
    if port == 0 or re.search(r"[\s@]", parts.netloc):
        raise ValueError(f"{shown(url)} names no server; write http://host:port, the port above 0")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise ValueError(f"{shown(url)} has a path; write http://host:port alone")
    return f"{parts.scheme}://{parts.netloc}"


def check_environment(cls: type[BaseModel], programs: Sequence[type[BaseModel]]) -> None:
    """Refuses a BATON_* variable that is no option of any Baton program.

    An option of another program is let through: one environment may serve several of them.
    """
    known = {variable_name(path) for program in (cls, *programs) for path in field_paths(program)}
    for name in sorted(os.environ):
        if not name.upper().startswith(ENV_PREFIX) or _is_of_machine(name):
            continue
        if name in INTERNAL_VARIABLES or name.upper() in known:
            continue
        raise ConfigError(f"unknown environment variable {name}{suggestion(name, known)}")


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without BATON_* settings: a launcher's own must not reach its children."""
    return {
        name: value
        for name, value in environ.items()
        if not name.upper().startswith(ENV_PREFIX) or _is_of_machine(name)
    }


def _is_of_machine(name: str) -> bool:
    return name in MACHINE_VARIABLES or name.startswith(MACHINE_PREFIX)


def find_config(argv: Sequence[str]) -> str | None:
    """The file named by `--config` (the last one wins) or BATON_CONFIG."""
    found = os.environ.get(ENV_PREFIX + "CONFIG") or None
    for position, word in enumerate(argv):
        if word.startswith("--config="):
            found = word.removeprefix("--config=")
        elif word == "--config" and position + 1 < len(argv):
            found = argv[position + 1]
    return found


def read_file(cls: type[BaseModel], name: str | None) -> dict[str, Any]:
    """The file's values with keys in snake_case; unknown keys raise ConfigError."""
    if name is None:
        return {}
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {name}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {name}: not a mapping of options to values")
    return _checked(cls, content, name, ())


def _checked(
    cls: type[BaseModel], content: Mapping[Any, Any], file: str, path: tuple[str, ...]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        info = cls.model_fields.get(name)
        if info is None or name == "config":
            wrong = ".".join((*path, str(key)))
            raise ConfigError(
                f"--config {file}: unknown key {wrong}{suggestion(name, cls.model_fields)}"
            )
        nested = _nested_model(info)
        if nested and isinstance(value, dict):
            value = _checked(nested, value, file, (*path, name))
        values[name] = value
    return values


def explain_validation(error: ValidationError) -> str:
    """One line per wrong value: option, reason, and what was given."""
    lines = []
    for item in error.errors(include_url=False):
        path = [str(part) for part in item["loc"] if isinstance(part, str)]
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "literal_error":
            reason = reason.replace("'", '"')
        secret = bool(path) and path[-1].endswith("secret")
        if secret:  # pydantic counts its items
            reason = reason.replace("items after validation, not", "characters, not")
        given = "" if secret or item["type"] == "value_error" else f", not {shown(item['input'])}"
        lines.append(f"{option_name(path)}: {reason}{given}")
    return "\n".join(lines)


def explain_cli(cls: type[BaseModel], error: Exception) -> str:
    """The parser's complaint with near matches of unknown options."""
    message = str(error).removeprefix("error parsing CLI: ")
    known = [option_name(path) for path in field_paths(cls)]
    unknown = re.findall(r"--[\w.-]+", message) if "unrecognized arguments" in message else []
    hints = "".join(suggestion(word, known) for word in unknown)
    return f"{message}{hints}; see --help"

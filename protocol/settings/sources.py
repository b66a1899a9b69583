"""Where settings come from: finding the file, checking names, and wording what is wrong.

protocol/settings/settings.py says what can be configured; this file knows no option by name.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import NoDecode

from protocol.near_names import did_you_mean, near_names, suggestion
from protocol.short_repr import short_repr

ENV_PREFIX = "BATON_"
# Set by Baton itself from one process to the next.
INTERNAL_VARIABLES = frozenset({"BATON_PARENT_FD"})
# No settings but facts about this machine, which every process inherits.
MACHINE_VARIABLES = frozenset({"BATON_CACHE", "BATON_EVAL_DATA"})
MACHINE_PREFIX = "BATON_TEST_"
DNS_SCHEME = "dns+"  # before a URL: its host is a name of many servers
_URL_FIX = "write http://host:port"
# What to write for an option, by the name that pydantic gives its type.
_METAVARS = {"str": "TEXT", "SecretStr": "TEXT", "int": "N", "float": "NUMBER"}
_LISTS = {f"tuple[{kind},...]": f"{word},.." for kind, word in _METAVARS.items()}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """`--help` without a usage that repeats every option, types of Python and empty defaults."""

    def add_usage(self, usage: str | None, *args: Any, **options: Any) -> None:
        super().add_usage("%(prog)s [options]", *args, **options)

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str
    ) -> Callable[[int], tuple[str, ...]]:
        names = super()._metavar_formatter(action, default_metavar)
        return lambda size: tuple(
            {**_METAVARS, **_LISTS}.get(n, n) for n in names(size)
        )

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return text.removesuffix(" (default: None)").removesuffix(" (default: ())")


class ConfigError(ValueError):
    """A setting that cannot be; the message names the key, the value and the fix."""


def field_paths(cls: type[BaseModel]) -> list[tuple[str, ...]]:
    """Every settable field of `cls`, nested ones as paths: ("prefill", "block_size")."""
    paths: list[tuple[str, ...]] = []
    for name, info in fields_by_name(cls).items():
        nested = _nested_model(info)
        inner = field_paths(nested) if nested else []
        paths += [(name,), *((name, *rest) for rest in inner)]
    return paths


def fields_by_name(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields of `cls` by the names that users write."""
    return {info.alias or name: info for name, info in cls.model_fields.items()}


def _nested_model(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def option_name(path: Sequence[str]) -> str:
    """("prefill", "block_size") -> "--prefill.block-size"."""
    return "--" + ".".join(part.replace("_", "-") for part in path)


def variable_name(path: Sequence[str]) -> str:
    """("prefill", "block_size") -> "BATON_PREFILL__BLOCK_SIZE"."""
    return ENV_PREFIX + "__".join(path).upper()


def split_list(value: Any) -> Any:
    """Lists may be written as JSON, with commas, or (on the command line) by repeating."""
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("["):
            return [v for v in text.split(",") if v]
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(
                f"{short_repr(text)} is not a list; write a,b or repeat it"
            ) from None
    return value


_Item = TypeVar("_Item")
Listed = Annotated[tuple[_Item, ...], NoDecode, BeforeValidator(split_list)]


def base_url(url: str) -> str:
    """`url` without a slash at its end. Raises ValueError unless it is http://host:port."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ValueError(
            f"{short_repr(url)} is not a URL ({error}); {_URL_FIX}"
        ) from None
    problem = ""
    if parts.scheme not in ("http", "https") or not host:
        problem = "is not a URL"
    elif port == 0 or re.search(r"[\s@]", parts.netloc):
        problem = "names no server"
    elif parts.path.rstrip("/") or parts.query or parts.fragment:
        problem = "has a path"
    if problem:
        raise ValueError(
            f"{short_repr(url)} {problem}; {_URL_FIX} alone, the port above 0"
        )
    return f"{parts.scheme}://{parts.netloc}"


def server_url(url: str) -> str:
    """As `base_url`, perhaps after DNS_SCHEME. Raises ValueError."""
    plain = url.removeprefix(DNS_SCHEME)
    if plain == url:
        return base_url(url)
    if plain.startswith("https:"):
        told = (
            f"{short_repr(url)}: certificates are of names, not of the addresses found"
        )
        raise ValueError(f"{told}; use dns+http, or let the servers --register")
    return DNS_SCHEME + base_url(plain)


Url = Annotated[str, AfterValidator(base_url)]
ServerUrl = Annotated[str, AfterValidator(server_url)]
Origin = Annotated[
    str, AfterValidator(lambda name: name if name == "*" else base_url(name))
]


def check_environment(
    cls: type[BaseModel], programs: Iterable[type[BaseModel]]
) -> None:
    """Refuses a BATON_* variable that is no option of any Baton program: one environment may serve
    several of them."""
    known = {
        variable_name(path)
        for program in (cls, *programs)
        for path in field_paths(program)
    }
    for name in _other_variables(known):
        near = suggestion(name, known | MACHINE_VARIABLES)
        raise ConfigError(f"unknown environment variable {name}{near}")


def unread_variables(cls: type[BaseModel]) -> list[str]:
    """The BATON_* variables that are options of other programs, each with near matches of ours."""
    known = [variable_name(path) for path in field_paths(cls)]
    found = []
    for name in _other_variables(known):
        last = name.upper().removeprefix(
            ENV_PREFIX
        )  # as options of a group may be called, too
        found.append(
            name + did_you_mean([var for var in known if var.endswith(f"__{last}")])
        )
    return found


def _other_variables(known: Collection[str]) -> list[str]:
    kept = {*known, *INTERNAL_VARIABLES}
    return [
        name
        for name in sorted(os.environ)
        if _is_setting(name) and name.upper() not in kept
    ]


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without BATON_* settings: a launcher's own must not reach its children."""
    return {name: value for name, value in environ.items() if not _is_setting(name)}


def _is_setting(name: str) -> bool:
    is_of_machine = name in MACHINE_VARIABLES or name.startswith(MACHINE_PREFIX)
    return name.upper().startswith(ENV_PREFIX) and not is_of_machine


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is given twice is a mistake."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found {key.value} a second time", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_file(cls: type[BaseModel], name: str | None) -> dict[str, Any]:
    """The file's values with keys in snake_case; unknown keys raise ConfigError."""
    if name is None:
        return {}
    if not name:
        raise ConfigError("--config: names no file")
    try:
        with open(
            name, encoding="utf-8"
        ) as file:  # of a text it would quote what may be secret
            content = yaml.load(file, UniqueKeys)
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--config {name}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {name}: not a mapping of options to values")
    return _checked(cls, content, f"--config {name}:", "")


def _checked(
    cls: type[BaseModel], content: Mapping[Any, Any], file: str, group: str
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        info = fields_by_name(cls).get(name)
        if info is None or name == "config":
            paths = [".".join(path) for path in field_paths(cls)]
            near = " (write it as a key under its group, such as prefill: {tp: 1})"
            near = near if name in paths else _near_options(name, paths)
            raise ConfigError(f"{file} unknown key {group}{key}{near}")
        nested = _nested_model(info)
        if (
            isinstance(value, bool) and info.annotation is not bool
        ):  # else 1, to pydantic
            told = f"{group}{name} is {short_repr(value)}"
            raise ConfigError(f"{file} {told}; only on/off options take that")
        if nested and isinstance(value, dict):
            value = _checked(nested, value, file, f"{group}{name}.")
        values[name] = value
    return values


def explain_validation(
    error: ValidationError,
    cls: type[BaseModel],
    argv: Sequence[str],
    file: Mapping[str, Any],
) -> str:
    """One line per wrong value: how the user gave it, the reason, and what was given."""
    options = {word.partition("=")[0] for word in argv}
    lines = []
    for item in error.errors(include_url=False):
        path = [part for part in item["loc"] if isinstance(part, str)]
        lines.append(f"{_given_as(path, options, file)}: {_reason(item, path, cls)}")
    return "\n".join(lines)


def _given_as(
    path: Sequence[str], options: Collection[str], file: Mapping[str, Any]
) -> str:
    """How the user gave the value at `path`: an option, a variable, or a key of the file."""
    option = option_name(path)
    if option in options or option.replace("--", "--no-", 1) in options:
        return option
    variables = {name.upper(): name for name in os.environ}
    if variable := variables.get(variable_name(path)):
        return variable
    group = variables.get(variable_name(path[:1]))
    if group and _has(path[1:], json.loads(os.environ[group])):
        return f"{option} (in {group})"  # its group as JSON
    return f"{option} (in the --config file)" if _has(path, file) else option


def _has(path: Sequence[str], values: Any) -> bool:
    if not path:
        return True
    return (
        isinstance(values, Mapping)
        and path[0] in values
        and _has(path[1:], values[path[0]])
    )


def _reason(item: ErrorDetails, path: Sequence[str], cls: type[BaseModel]) -> str:
    reason = item["msg"].removeprefix("Value error, ")
    reason = re.sub("^(Input|String|Value) should ", "must ", reason)
    if item["type"] == "literal_error":
        reason = reason.replace("'", "")
    if item["type"] == "model_type":
        reason = f"must be a group of options, such as {option_name((*path, 'tp'))}"
    if item["type"] == "extra_forbidden":
        reason = "is no option"
    if item["type"].endswith("_parsing"):  # and why Python could not
        reason = reason.partition(",")[0]
    if path and path[-1].endswith(
        ("secret", "api_key", "admin_key")
    ):  # pydantic counts its items
        reason = reason.replace("items after validation, not", "characters, not")
        return reason.replace(short_repr(item["input"]), "it")
    if item["type"] in ("value_error", "extra_forbidden"):
        return reason
    # A value of the command line as it stands there; of a file, as JSON.
    value = item["input"]
    is_word = isinstance(value, str) and re.fullmatch(r"[!-~]{1,80}", value)
    return f"{reason}, not {value if is_word else short_repr(value)}"


def explain_cli(
    cls: type[BaseModel], error: Exception, programs: Mapping[str, type[BaseModel]]
) -> str:
    """The parser's complaint with whose options unknown ones are, or near matches."""
    message = str(error).removeprefix("error parsing CLI: ")
    if group := re.search(r'value for field "(\w+)" from source "EnvS', message):
        name = variable_name((group[1],))
        return (
            f"{name}: not JSON; better set its options one by one, such as {name}__TP"
        )
    known = [option_name(path) for path in field_paths(cls)]
    unknown = (
        re.findall(r"--[\w.-]+", message) if "unrecognized arguments" in message else []
    )
    having = programs if len(unknown) == 1 else {}
    hints = "".join(_near_options(word, known, having) for word in unknown)
    return f"{message}{hints}; see --help"


def _near_options(
    word: str, known: Sequence[str], programs: Mapping[str, type[BaseModel]] = {}
) -> str:
    """Near matches: those called so in some group, else in one of the programs, before those
    spelled alike."""
    is_no = word.startswith("--no-")
    name = word.replace("--no-", "--", 1)
    last = re.split(r"--|\.", name)[-1]
    same = [option for option in known if re.split(r"--|\.", option)[-1] == last]
    owners = [
        told
        for told, of in programs.items()
        if name in map(option_name, field_paths(of))
    ]
    if owners and not same:
        return f" (an option of {' and '.join(owners)})"
    hint = _near_member(name, known, programs)
    if not hint:
        hint = did_you_mean(same[:3]) if same else suggestion(name, known)
    return hint.replace("--", "--no-") if is_no else hint


def _near_member(
    name: str, known: Sequence[str], programs: Mapping[str, type[BaseModel]]
) -> str:
    """Near matches of an option of a group, such as --prefil.tp: the group is matched first, then
    its member. Empty where no group is near, or where the member is one of another group."""
    group, _, member = name.partition(".")
    members: dict[str, list[str]] = {}
    for option in known:
        owner, _, own = option.partition(".")
        if own:
            members.setdefault(owner, []).append(own)
    near = near_names(group, members)
    if not member or not near:
        return ""
    group = near[0]
    found = near_names(member, members[group])
    if found:
        return did_you_mean([f"{group}.{own}" for own in found])
    wanted = f"{group}.{member}"
    dashes = "--" if group.startswith("--") else ""
    whole = f"{dashes}{member}"
    program = f"baton {group.removeprefix('--')}"
    of_program = programs.get(program)
    if whole in known:
        fact = f"no such option here, but {whole} for the whole cluster"
    elif of_program and whole in map(option_name, field_paths(of_program)):
        fact = f"no such option here, but {whole} of {program}"
    else:
        return ""
    return (
        f" ({fact})" if wanted == name else f" (did you mean {wanted}? There is {fact})"
    )

"""Reads the --config file, checks the names of settings, and writes error messages.

options.py and server_options.py define the options, and settings.py combines them.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import NoDecode

from protocol.settings.near_names import did_you_mean, near_names, suggestion
from protocol.short_repr import short_repr

ENV_PREFIX = "BATON_"
# Variables that a process of Baton sets for its child processes.
INTERNAL_VARIABLES = frozenset({"BATON_PARENT_FD"})
# Variables about this machine. They are not options, and child processes inherit them.
MACHINE_VARIABLES = frozenset({"BATON_CACHE", "BATON_EVAL_DATA"})
# Variables of the options that only tools such as `baton chat` have (deploy/).
TOOL_VARIABLES = frozenset(
    {
        "BATON_DIR",
        "BATON_FORCE",
        "BATON_JSON",
        "BATON_LIMIT_S",
        "BATON_MAX_PAIRS",
        "BATON_MAX_TOKENS",
        "BATON_MEASURE",
        "BATON_NBYTES",
        "BATON_SYSTEM",
        "BATON_TARGET",
        "BATON_TEMPERATURE",
        "BATON_TIMEOUT_S",
        "BATON_URL",
        "BATON_URLS",
    }
)
MACHINE_PREFIX = "BATON_TEST_"  # all variables with this prefix are about the machine
DNS_SCHEME = "dns+"  # prefix of a URL that stands for all addresses of its host name
# Kubernetes sets BATON_PORT=tcp://10.96.0.10:80 for a Service named "baton".
_SERVICE_LINK_SCHEME = "tcp://"
_URL_FIX = "write http(s)://host:port"


class ConfigError(ValueError):
    """An invalid or unknown setting. The message names the setting and the problem."""


def field_paths(cls: type[BaseModel]) -> list[tuple[str, ...]]:
    """Returns the paths of all fields of `cls`, such as ("prefill", "block_size")."""
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
    """Returns the option of a path: ("prefill", "tp") -> "--prefill.tp"."""
    return "--" + ".".join(part.replace("_", "-") for part in path)


def variable_name(path: Sequence[str]) -> str:
    """Returns the variable of a path: ("prefill", "tp") -> "BATON_PREFILL__TP"."""
    return ENV_PREFIX + "__".join(path).upper()


def split_list(value: Any) -> Any:
    """Returns the items of a list that is written as JSON or with commas.

    A value that is not a string is returned unchanged, such as the values of a repeated
    option.

    Raises:
        ValueError: The string begins with [ but is not JSON.
    """
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("["):
            return [v for v in text.split(",") if v]
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(
                f"{short_repr(text)} is not a list; write a,b or repeat the option"
            ) from None
    return value


_Item = TypeVar("_Item")
# The type of an option that has several values; see `split_list`.
Listed = Annotated[tuple[_Item, ...], NoDecode, BeforeValidator(split_list)]


def base_url(url: str) -> str:
    """Returns `url` without a trailing slash.

    Raises:
        ValueError: The URL is not http(s)://host or http(s)://host:port, or its port is
            0.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ValueError(
            f"{short_repr(url)} is not a URL ({error}); {_URL_FIX}"
        ) from None
    problem = ""
    if parts.scheme not in ("http", "https") or not host:
        problem = "is not a URL"
    elif port == 0 or re.search(r"[\s@]", parts.netloc):
        problem = "does not name a server"
    elif parts.path.rstrip("/") or parts.query or parts.fragment:
        problem = "has a path"
    if problem:
        raise ValueError(
            f"{short_repr(url)} {problem}; {_URL_FIX} without a path, and with a port "
            "above 0"
        )
    return f"{parts.scheme}://{parts.netloc}"


def server_url(url: str) -> str:
    """Returns the URL of a server, which may begin with DNS_SCHEME, without a trailing
    slash.

    Raises:
        ValueError: The URL is invalid (see `base_url`), or an https URL has DNS_SCHEME.
    """
    plain = url.removeprefix(DNS_SCHEME)
    if plain == url:
        return base_url(url)
    if plain.startswith("https:"):
        raise ValueError(
            f"{short_repr(url)}: certificates name hosts, not the addresses that DNS "
            "returns; use dns+http, or let the servers --register"
        )
    return DNS_SCHEME + base_url(plain)


Url = Annotated[str, AfterValidator(base_url)]
ServerUrl = Annotated[str, AfterValidator(server_url)]
Origin = Annotated[
    str, AfterValidator(lambda name: name if name == "*" else base_url(name))
]


def check_environment(
    cls: type[BaseModel], programs: Iterable[type[BaseModel]]
) -> None:
    """Raises ConfigError for a BATON_* variable that no Baton program reads, or that
    Kubernetes has set.

    A variable of a different program is not an error, because several programs may run
    in the same environment.
    """
    _check_service_links()
    valid_names = {
        variable_name(path)
        for program in (cls, *programs)
        for path in field_paths(program)
    }
    valid_names |= TOOL_VARIABLES
    for name in _other_variables(valid_names):
        hint = suggestion(name, valid_names | MACHINE_VARIABLES)
        raise ConfigError(f"unknown environment variable {name}{hint}")


def _check_service_links() -> None:
    """Raises ConfigError for a variable that Kubernetes sets for a Service.

    A Service named "baton" makes Kubernetes set BATON_PORT in the namespace's pods.
    """
    for name, value in sorted(os.environ.items()):
        if _is_setting(name) and value.startswith(_SERVICE_LINK_SCHEME):
            raise ConfigError(
                f"{name} is {short_repr(value)}, which Kubernetes sets because the "
                "namespace has a Service with this name: set enableServiceLinks: false "
                "in the pod's spec"
            )


def unread_variables(cls: type[BaseModel]) -> list[str]:
    """Returns the BATON_* variables in the environment that `cls` does not read.

    A hint follows the name of a variable if `cls` reads similar variables.
    """
    read_names = [variable_name(path) for path in field_paths(cls)]
    variables = []
    for name in _other_variables(read_names):
        # The name may lack the group, such as BATON_TP for BATON_PREFILL__TP.
        member = name.upper().removeprefix(ENV_PREFIX)
        similar = [
            variable for variable in read_names if variable.endswith(f"__{member}")
        ]
        variables.append(name + did_you_mean(similar))
    return variables


def _other_variables(names: Collection[str]) -> list[str]:
    """Returns the BATON_* settings in the environment that are not in `names`."""
    excluded = {*names, *INTERNAL_VARIABLES}
    return [
        name
        for name in sorted(os.environ)
        if _is_setting(name) and name.upper() not in excluded
    ]


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environ` without BATON_* settings, which child processes must not
    inherit.
    """
    return {name: value for name, value in environ.items() if not _is_setting(name)}


def _is_setting(name: str) -> bool:
    is_about_machine = name in MACHINE_VARIABLES or name.startswith(MACHINE_PREFIX)
    return name.upper().startswith(ENV_PREFIX) and not is_about_machine


class UniqueKeys(yaml.SafeLoader):
    """Loads YAML and refuses a key that occurs twice in a mapping."""

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
    """Returns the values of the --config file, with keys in snake_case.

    Args:
        cls: The settings class that will receive the values.
        name: Path of the file; None: no file.

    Raises:
        ConfigError: The file cannot be read, or has an invalid key or value.
    """
    if name is None:
        return {}
    if not name:
        raise ConfigError("--config is empty; give the name of a file")
    try:
        # PyYAML gets the open file, not a string with its content. An error about a
        # string would quote the content, which may be secret.
        with open(name, encoding="utf-8") as file:
            content = yaml.load(file, UniqueKeys)
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--config {name}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {name}: not a mapping of options to values")
    return _normalize(cls, content, f"--config {name}:", "")


def _normalize(
    cls: type[BaseModel], content: Mapping[Any, Any], message_prefix: str, group: str
) -> dict[str, Any]:
    """Returns the content of a mapping, with keys in snake_case.

    Args:
        message_prefix: The beginning of error messages, which names the file.
        group: The group of the keys, such as "prefill."; empty for the whole file.

    Raises:
        ConfigError: A key is unknown, or an option that is not on/off has the value
            true or false.
    """
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        info = fields_by_name(cls).get(name)
        if info is None or name == "config":
            paths = [".".join(path) for path in field_paths(cls)]
            hint = _near_options(name, paths)
            if name in paths:
                hint = " (write it as a key under its group, such as prefill: {tp: 1})"
            raise ConfigError(f"{message_prefix} unknown key {group}{key}{hint}")
        nested = _nested_model(info)
        # Pydantic would convert true to the number 1.
        if isinstance(value, bool) and info.annotation is not bool:
            problem = f"{group}{name} is {short_repr(value)}"
            raise ConfigError(
                f"{message_prefix} {problem}, but it is not an on/off option; give it "
                "a value of its type"
            )
        if nested and isinstance(value, dict):
            value = _normalize(nested, value, message_prefix, f"{group}{name}.")
        values[name] = value
    return values


def explain_validation(
    error: ValidationError,
    cls: type[BaseModel],
    argv: Sequence[str],
    file_values: Mapping[str, Any],
) -> str:
    """Returns one line per wrong value, with its setting, the reason and, unless the
    setting is secret, the value.

    Args:
        file_values: The values of the --config file.
    """
    options = {word.partition("=")[0] for word in argv}
    lines = []
    for item in error.errors(include_url=False):
        path = [part for part in item["loc"] if isinstance(part, str)]
        setting = _setting_name(path, options, file_values)
        lines.append(f"{setting}: {_reason(item, path)}")
    return "\n".join(lines)


def _setting_name(
    path: Sequence[str], options: Collection[str], file_values: Mapping[str, Any]
) -> str:
    """Returns the setting that the user wrote: an option, a variable, or an option with
    the source of its value in parentheses.

    Args:
        path: Path of the field, such as ("prefill", "tp").
        options: The options on the command line.
        file_values: The values of the --config file.
    """
    option = option_name(path)
    if option in options or option.replace("--", "--no-", 1) in options:
        return option
    variables = {name.upper(): name for name in os.environ}
    if variable := variables.get(variable_name(path)):
        return variable
    group = variables.get(variable_name(path[:1]))
    if group and _contains(json.loads(os.environ[group]), path[1:]):
        return f"{option} (in {group})"  # the variable has the group as JSON
    is_in_file = _contains(file_values, path)
    return f"{option} (in the --config file)" if is_in_file else option


def _contains(values: Any, path: Sequence[str]) -> bool:
    if not path:
        return True
    return (
        isinstance(values, Mapping)
        and path[0] in values
        and _contains(values[path[0]], path[1:])
    )


def _reason(item: ErrorDetails, path: Sequence[str]) -> str:
    """Returns why a value is invalid, with the value unless it is secret."""
    reason = item["msg"].removeprefix("Value error, ")
    reason = re.sub("^(Input|String|Value) should ", "must ", reason)
    if item["type"] == "literal_error":
        reason = reason.replace("'", "")
    if item["type"] == "model_type":
        reason = f"must be a group of options, such as {option_name((*path, 'tp'))}"
    if item["type"] == "extra_forbidden":
        reason = "is not an option"
    if item["type"].endswith("_parsing"):
        # The text after the comma explains the error in terms of Python.
        reason = reason.partition(",")[0]
    # Pydantic counts the characters of a secret as items.
    if path and path[-1].endswith(("secret", "api_key", "admin_key")):
        reason = reason.replace("items after validation, not", "characters, not")
        return reason.replace(short_repr(item["input"]), "it")
    if item["type"] in ("value_error", "extra_forbidden"):
        return reason
    # A simple word is shown as it is, and all other values as JSON.
    value = item["input"]
    is_word = isinstance(value, str) and re.fullmatch(r"[!-~]{1,80}", value)
    return f"{reason}, not {value if is_word else short_repr(value)}"


def explain_cli(
    cls: type[BaseModel], error: Exception, programs: Mapping[str, type[BaseModel]]
) -> str:
    """Returns the message for an error in the command line, with hints for unknown
    options.

    Args:
        programs: The settings classes of all programs, by the name of the program.
    """
    message = str(error)
    if group := re.search(r'value for field "(\w+)" from source "EnvS', message):
        name = variable_name((group[1],))
        return (
            f"{name}: not JSON; set the options one by one, for example by {name}__TP"
        )
    valid_names = [option_name(path) for path in field_paths(cls)]
    unknown: list[str] = []
    if "unrecognized arguments" in message:
        unknown = re.findall(r"--[\w.-]+", message)
    candidates = programs if len(unknown) == 1 else {}
    hints = "".join(_near_options(word, valid_names, candidates) for word in unknown)
    return f"{message}{hints}; see --help"


def _near_options(
    word: str, valid_names: Sequence[str], programs: Mapping[str, type[BaseModel]] = {}
) -> str:
    """Returns a hint for an unknown option, or an empty string.

    The hint names the programs that have the option. If the option exists in a group,
    the hint names the option with its group instead. Otherwise the hint names options
    with similar names.
    """
    is_negated = word.startswith("--no-")
    name = word.replace("--no-", "--", 1)
    member = re.split(r"--|\.", name)[-1]
    options_with_member = [
        option for option in valid_names if re.split(r"--|\.", option)[-1] == member
    ]
    programs_with_option = [
        program
        for program, cls in programs.items()
        if name in map(option_name, field_paths(cls))
    ]
    if programs_with_option and not options_with_member:
        return f" (an option of {_join(programs_with_option)})"
    hint = _near_member(name, valid_names, programs)
    if not hint and options_with_member:
        hint = did_you_mean(options_with_member[:3])
    elif not hint:
        hint = suggestion(name, valid_names)
    return hint.replace("--", "--no-") if is_negated else hint


def _join(names: Sequence[str]) -> str:
    """Returns the names as text: "a", "a and b" or "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _near_member(
    name: str, valid_names: Sequence[str], programs: Mapping[str, type[BaseModel]]
) -> str:
    """Returns a hint for an unknown option with a group, such as --prefil.tp.

    The name of the group is corrected first, then the member of the group. If no member
    is similar, but the member is an option of the whole cluster or of the group's
    program, the hint names that option. In all other cases, the hint is empty.
    """
    group, _, member = name.partition(".")
    members: dict[str, list[str]] = {}
    for option in valid_names:
        option_group, _, option_member = option.partition(".")
        if option_member:
            members.setdefault(option_group, []).append(option_member)
    near_groups = near_names(group, members)
    if not member or not near_groups:
        return ""
    group = near_groups[0]
    near_members = near_names(member, members[group])
    if near_members:
        return did_you_mean([f"{group}.{near_member}" for near_member in near_members])
    corrected = f"{group}.{member}"
    dashes = "--" if group.startswith("--") else ""
    cluster_option = f"{dashes}{member}"
    program = f"baton {group.removeprefix('--')}"
    server_class = programs.get(program)
    if cluster_option in valid_names:
        fact = f"no such option here, but {cluster_option} for the whole cluster"
    elif server_class and cluster_option in map(option_name, field_paths(server_class)):
        fact = f"no such option here, but {cluster_option} of {program}"
    else:
        return ""
    if corrected == name:
        return f" ({fact})"
    return f" (did you mean {corrected}? There is {fact})"

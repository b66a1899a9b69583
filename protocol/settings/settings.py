"""One settings class per Baton process: what can be configured, and how it is read.

A value comes from the command line, else a BATON_* variable, else the file named by `--config`,
else its default. A key that means nothing in any of the three is an error that names near matches.
The classes are frozen: facts learned later (number of blocks, bound ports) live elsewhere.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from protocol.settings import sources
from protocol.settings.machine import MIN_SECRET_BYTES, WILDCARDS, check_is_local
from protocol.settings.options import (
    ApiKey,
    DecodeOptions,
    Device,
    DType,
    KVOptions,
    ListenOptions,
    LogLevel,
    ModelOptions,
    Options,
    Port,
    PrefillOptions,
    QueueOptions,
    RegisterOptions,
    RoutingOptions,
    Seconds,
    Threads,
)
from protocol.settings.sources import ConfigError


class BatonSettings(Options, BaseSettings):
    """Reads CLI, environment and file; see `load`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        env_prefix=sources.ENV_PREFIX,
        env_prefix_target="all",
        env_nested_delimiter="__",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        nested_model_default_partial_update=True,
    )
    config: str | None = None
    """YAML file with any of these options"""

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, settings_cls: type[BaseSettings], **found: Any
    ) -> tuple[Any, ...]:
        # The file's values arrive as init; the command line goes first.
        return found["env_settings"], found["init_settings"]


class EngineSettings(KVOptions, ModelOptions, RegisterOptions, BatonSettings):
    """What a prefill and a decode server have in common: all but their defaults."""

    port: Port = 8100
    side_channel_host: str | None = None
    """address at which other servers reach this one, to read its KV (None: --host)"""
    side_channel_port: Port = Field(
        0, description="port of the KV side channel (0: a free one)"
    )

    @field_validator("side_channel_host")
    @classmethod
    def _is_an_address_to_connect_to(
        cls, name: str | None, info: ValidationInfo
    ) -> str | None:
        told = name or info.data.get("host")
        if told in WILDCARDS and (name or info.data.get("role") != "decode"):
            raise ValueError(
                f"decode servers cannot connect to {told}, which means every address of this "
                "machine; give the name or address that they reach it at"
            )
        if name and info.data.get("cluster_secret", ...) is None:
            check_is_local(name, name)
        return name

    @property
    def advertised_host(self) -> str | None:
        """The address other machines reach the side channel at; None where none is known."""
        return self.side_channel_host or (None if self.host in WILDCARDS else self.host)


class PrefillSettings(PrefillOptions, EngineSettings):
    """A prefill server: runs prompts and leases their KV to decode servers."""


class DecodeSettings(DecodeOptions, EngineSettings):
    """A decode server: pulls a prompt's KV and generates."""

    port: Port = 8200


class ProxySettings(ListenOptions, RoutingOptions, BatonSettings):
    """The proxy: one OpenAI-compatible endpoint in front of prefill and decode servers."""

    port: Port = 8000
    prefill: sources.Listed[sources.ServerUrl] = ()
    """URL of a prefill server (repeatable; none: decode servers do everything);
    dns+http://NAME:PORT: every address of that name"""
    decode: sources.Listed[sources.ServerUrl] = ()
    """URL of a decode server (repeatable); dns+http://NAME:PORT: every address of that name"""
    servers_file: str | None = Field(None, min_length=1)
    """YAML file of more servers, prefill: [URL, ..] and decode: [URL, ..], read again when it
    changes"""
    discovery_interval_s: Seconds = 5.0
    """time between two looks at --servers-file and at names (s)"""
    cluster_secret: SecretStr | None = Field(None, min_length=MIN_SECRET_BYTES)
    """that of the servers, for streams that go on elsewhere, KV of other servers and registrations,
    better given as BATON_CLUSTER_SECRET (None: as a server's, and none may register)"""
    health_interval_s: Seconds = 1.0
    """time between two health checks (s)"""
    health_timeout_s: Seconds = 2.0
    """longest health check (s)"""
    prefill_wait_s: float | None = Field(None, ge=0, le=1_000_000, allow_inf_nan=False)
    """longest time from the start in which GET /ready waits for a prefill server of each model (s;
    0: it does not wait; None: 600 for models of which a prefill server is named or registered)"""
    connect_timeout_s: Seconds = 2.0
    """longest connect to a server (s)"""
    read_timeout_s: Seconds = 600.0
    """longest silence of a server (s)"""
    upstream_api_key: Annotated[
        ApiKey | None, BeforeValidator(lambda key: key or None)
    ] = None
    """key that the servers ask for, one of their admin keys, better given as
    BATON_UPSTREAM_API_KEY; sent instead of the client's"""
    log_level: LogLevel = "info"

    @property
    def passes_keys_on(self) -> bool:
        """Whether the servers may have API keys that the clients know."""
        return not (self.has_keys or self.upstream_api_key)


class _Group(Options):
    """Options of `baton up` for one kind of server, beside that server's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    count: int = Field(1, ge=1, le=64)
    """how many servers of this kind"""
    device: Device | None = None
    """where these run (None: as --device)"""
    dtype: DType | None = None
    """type of weights and KV (None: as --dtype)"""
    threads: Threads | None = None
    """CPU threads of one rank (threads; None: a share of the cores)"""


class PrefillGroup(PrefillOptions, _Group):
    """The prefill servers of a local cluster."""

    option_prefix: ClassVar[str] = "prefill."

    role: Literal["prefill", "both"] = Field(
        "prefill", description="both: answers go there, too"
    )


class DecodeGroup(DecodeOptions, _Group):
    """The decode servers of a local cluster."""

    option_prefix: ClassVar[str] = "decode."

    role: Literal["decode", "both"] = Field(
        "decode", description="both: prompts go there, too"
    )


class UpSettings(
    ModelOptions, ListenOptions, QueueOptions, RoutingOptions, BatonSettings
):
    """A local cluster: prefill servers, decode servers and the proxy on this machine."""

    port: Port = 8000
    start_timeout_s: Seconds = 600.0
    """longest start of all servers, including model downloads (s)"""
    prefill: PrefillGroup = PrefillGroup()
    """the prefill servers"""
    decode: DecodeGroup = DecodeGroup()
    """the decode servers"""

    @field_validator("decode")
    @classmethod
    def _can_read_from_prefill(
        cls, decode: DecodeGroup, info: ValidationInfo
    ) -> DecodeGroup:
        prefill = info.data.get("prefill", decode)
        if decode.dcp > 1 and decode.block_size % prefill.block_size:
            raise ValueError(
                f"with --decode.dcp {decode.dcp} --decode.block-size {decode.block_size} must be a "
                f"multiple of --prefill.block-size, which is {prefill.block_size}"
            )
        return decode


PROGRAMS: dict[str, type[BatonSettings]] = {
    "baton prefill": PrefillSettings,
    "baton decode": DecodeSettings,
    "baton proxy": ProxySettings,
    "baton up": UpSettings,
}
SettingsT = TypeVar("SettingsT", bound=BatonSettings)


def load(
    cls: type[SettingsT], argv: Sequence[str], *, prog: str | None = None
) -> SettingsT:
    """Reads `cls` from argv, BATON_* variables and the `--config` file.

    Raises:
        ConfigError: a value that cannot be, or a key that means nothing; names it and the fix.
    """
    sources.check_environment(cls, PROGRAMS.values())
    options: dict[str, Any] = {
        "cli_prog_name": prog,
        "formatter_class": sources.HelpFormatter,
    }
    file_values: dict[str, Any] = {}
    try:
        command_line = CliSettingsSource[Any](cls, cli_parse_args=list(argv), **options)
        file = command_line().get(
            "config", os.environ.get(f"{sources.ENV_PREFIX}CONFIG") or None
        )
        file_values = sources.read_file(cls, file)
        return cls(_cli_settings_source=command_line, **file_values)
    except ValidationError as error:
        told = sources.explain_validation(error, cls, argv, file_values)
        raise ConfigError(told) from None
    except SettingsError as error:
        raise ConfigError(sources.explain_cli(cls, error, PROGRAMS)) from None


def parse(
    cls: type[SettingsT], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> SettingsT:
    """`load` for a main function: a ConfigError is printed and the process ends with status 2."""
    try:
        return load(cls, sys.argv[1:] if argv is None else argv, prog=prog)
    except ConfigError as error:
        print(f"{prog or 'baton'}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def describe(settings: BatonSettings) -> str:
    """One JSON line, secrets masked, that every process prints at its start: what differs from the
    defaults, and with --log-level debug all of it."""
    brief = getattr(settings, "log_level", None) != "debug"
    shown = settings.model_dump(mode="json", by_alias=True, exclude_defaults=brief)
    return json.dumps(shown)


def to_argv(options: BaseModel, *, only: Iterable[str] | None = None) -> list[str]:
    """The command line that sets `options`, or `only` some, again; without None, secrets and
    groups."""
    argv: list[str] = []
    fields = type(options).model_fields
    for name in fields if only is None else only:
        option = sources.option_name((fields[name].alias or name,))
        value = getattr(options, name)
        match value:
            case None | SecretStr() | BaseModel():
                pass
            case bool():
                argv.append(option if value else option.replace("--", "--no-", 1))
            case tuple() | list():
                argv += [f"{option}={v}" for v in value if not isinstance(v, SecretStr)]
            case _:
                argv.append(f"{option}={value}")
    return argv

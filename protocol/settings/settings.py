"""The settings classes of PROGRAMS, and the functions that read settings.

A value comes from the command line, else from a BATON_* variable, else from the file of
`--config`; otherwise the default is used. An unknown key in one of these sources is an
error that names similar keys. The classes are frozen. Values that are known only after
the start, such as the number of blocks or the bound ports, are not settings.
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
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from protocol.settings import sources
from protocol.settings.command_line import parse_command_line
from protocol.settings.launcher_options import LauncherOptions
from protocol.settings.machine import MIN_SECRET_BYTES, WILDCARDS, check_is_local
from protocol.settings.node_options import NodeOptions
from protocol.settings.options import (
    NONE_IF_EMPTY,
    ApiKey,
    DecodeOptions,
    Device,
    DType,
    KVOptions,
    LogOptions,
    ModelOptions,
    Options,
    Port,
    PrefillOptions,
    Seconds,
    Speculate,
    Threads,
    TransferOptions,
)
from protocol.settings.server_options import (
    DisaggregationOptions,
    ListenOptions,
    QueueOptions,
    RegisterOptions,
    RoutingOptions,
)
from protocol.settings.sources import ConfigError


class BatonSettings(Options, BaseSettings):
    """Base class of the settings of a program; `load` creates the instances."""

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
    """YAML file with any of these options (None: no file)"""

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, settings_cls: type[BaseSettings], **default_sources: Any
    ) -> tuple[Any, ...]:
        # `load` passes the values of the file as arguments (init_settings), and the
        # command line as a third source, with precedence over variables and file.
        return default_sources["env_settings"], default_sources["init_settings"]


class EngineSettings(
    NodeOptions, KVOptions, ModelOptions, RegisterOptions, BatonSettings
):
    """The options that prefill and decode servers share. Their defaults may differ."""

    topic: ClassVar[str] = "members"
    common: ClassVar[tuple[str, ...]] = (
        "model",
        "host",
        "port",
        "role",
        "tp",
        "devices",
        "max_model_len",
        "kv_cache_tokens",
        "gpu_memory_utilization",
        "register",
        "cluster_secret",
        "api_key",
        "config",
    )
    port: Port = 8100
    side_channel_host: str | None = None
    """address at which other servers connect to this server to read its KV (None: the
    value of --host)
    """
    side_channel_port: Port = Field(
        0, description="TCP port of the KV side channel (0: a free port)"
    )

    @field_validator("side_channel_host")
    @classmethod
    def _check_side_channel_host(
        cls, name: str | None, info: ValidationInfo
    ) -> str | None:
        host = name or info.data.get("host")
        if host in WILDCARDS and (name or info.data.get("role") != "decode"):
            raise ValueError(
                f"decode servers cannot connect to {host}, which means every address "
                "of this machine; give a name or an address that decode servers reach"
            )
        if name and info.data.get("cluster_secret", ...) is None:
            check_is_local(name, name)
        return name

    @property
    def advertised_side_channel_host(self) -> str | None:
        """The address at which other servers connect to this server's KV side channel.

        None: unknown, because this server listens on every address of the machine.
        """
        return self.side_channel_host or (None if self.host in WILDCARDS else self.host)


class PrefillSettings(PrefillOptions, EngineSettings):
    """A prefill server: computes prompts and leases their KV to decode servers."""


class DecodeSettings(DecodeOptions, EngineSettings):
    """A decode server: pulls the KV of prompts and generates tokens."""

    port: Port = 8200


class ProxySettings(
    ListenOptions, RoutingOptions, DisaggregationOptions, LogOptions, BatonSettings
):
    """The proxy: one OpenAI-compatible endpoint for all prefill and decode servers."""

    topic: ClassVar[str] = "members"
    common: ClassVar[tuple[str, ...]] = (
        "prefill",
        "decode",
        "servers_file",
        "host",
        "port",
        "cluster_secret",
        "disaggregate",
        "api_key",
        "api_keys_file",
        "config",
    )
    port: Port = 8000
    prefill: sources.Listed[sources.ServerUrl] = ()
    """URL of a prefill server (repeatable; none: decode servers compute all prompts).
    dns+http://NAME:PORT stands for every address of that name
    """
    decode: sources.Listed[sources.ServerUrl] = ()
    """URL of a decode server (repeatable). dns+http://NAME:PORT stands for every
    address of that name
    """
    servers_file: str | None = Field(None, min_length=1)
    """YAML file with additional servers, {prefill: [URL, ..], decode: [URL, ..]}. The
    file is read again when it changes
    """
    discovery_interval_s: Seconds = 5.0
    """interval of reading --servers-file and resolving names (s)"""
    cluster_secret: SecretStr | None = Field(None, min_length=MIN_SECRET_BYTES)
    """cluster secret of the servers. The proxy needs it for stream failover, KV pulls
    between servers and registrations. Prefer the variable BATON_CLUSTER_SECRET (None:
    the file that servers on this machine use; without a configured secret, servers
    cannot register)"""
    health_interval_s: Seconds = 1.0
    """interval of the health checks (s)"""
    health_timeout_s: Seconds = 2.0
    """timeout of a health check (s)"""
    prefill_wait_s: float | None = Field(None, ge=0, le=1_000_000, allow_inf_nan=False)
    """how long after its start the proxy waits for a prefill server of each model
    before GET /ready reports that the proxy is ready (s; 0: it does not wait; None: 600
    for models with a prefill server that is configured or registered)"""
    connect_timeout_s: Seconds = 2.0
    """timeout of connecting to a server (s)"""
    read_timeout_s: Seconds = 600.0
    """timeout of waiting for the next bytes from a server (s)"""
    upstream_api_key: Annotated[
        ApiKey | None, BeforeValidator(lambda key: key or None)
    ] = None
    """API key that the proxy sends to the servers instead of the client's key: an admin
    key of the servers. Prefer the variable BATON_UPSTREAM_API_KEY (None: pass on the
    client's key, unless the proxy has keys of its own)"""

    @property
    def passes_keys_on(self) -> bool:
        """Whether the proxy forwards the API keys of clients to the servers."""
        return not (self.has_keys or self.upstream_api_key)


class StoreSettings(LogOptions, BatonSettings):
    """The KV store of a host: keeps KV of the host's servers in host memory, even after
    a server has ended.
    """

    topic: ClassVar[str] = "kv"
    common: ClassVar[tuple[str, ...]] = (
        "host_kv_bytes",
        "host",
        "port",
        "cluster_secret",
        "config",
    )
    host_kv_bytes: Annotated[int | None, Field(ge=1, le=2**48), NONE_IF_EMPTY] = None
    """host memory for KV (bytes; None or empty: a tenth of the free memory)"""
    max_models: int = Field(1, ge=1, le=16)
    """number of models, or kinds of KV, whose servers use this store. Each has an equal
    share of the memory"""
    host: str = Field("127.0.0.1", min_length=1)
    """IP address or host name to listen on"""
    port: Port = Field(
        8300, description="TCP port of the store (0: a free port, which is logged)"
    )
    side_channel_port: Port = Field(
        0,
        description="TCP port over which KV is looked up and leased (0: a free port); "
        "with --max-models N the first of N ports",
    )
    cluster_secret: SecretStr | None = Field(None, min_length=MIN_SECRET_BYTES)
    """cluster secret of the servers. Prefer the variable BATON_CLUSTER_SECRET (None:
    the file that servers on this machine use)"""
    transfer: Literal["auto", "nixl", "mapped"] | None = None
    """transport of KV to the store, as in `baton decode` (None: auto on a host with a
    GPU, else nixl)"""
    staging_bytes: int = Field(64 * 2**20, ge=1, le=2**40)
    """staging memory for KV with a different geometry (bytes)"""
    kv_verify: Literal["off", "sample", "all"] = "off"
    """compare the digests of KV from servers with the servers' digests, as in
    `baton decode`"""
    shutdown_grace_s: Seconds = 5.0
    """timeout of the shutdown, in which servers finish pulling KV (s)"""

    @field_validator("host")
    @classmethod
    def _check_is_reachable(cls, host: str) -> str:
        if host in WILDCARDS:
            raise ValueError(
                f"servers cannot connect to {host}, which means every address of a "
                "machine: give the name or address by which they reach this store"
            )
        return host

    @field_validator("cluster_secret")
    @classmethod
    def _check_is_configured(
        cls, secret: SecretStr | None, info: ValidationInfo
    ) -> SecretStr | None:
        if secret is None and (host := info.data.get("host")):
            check_is_local(host, f"--host {host}")
        return secret


class _Group(Options):
    """Options that `baton up` has for each kind of server, such as --prefill.count.

    PrefillGroup and DecodeGroup add the server's own options.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    count: int = Field(1, ge=1, le=64)
    """number of servers of this kind"""
    device: Device | None = None
    """device of these servers (None: the value of --device)"""
    dtype: DType | None = None
    """type of weights and KV (None: the value of --dtype)"""
    threads: Threads | None = None
    """CPU threads of one rank (threads; None: a share of the machine's cores)"""


class PrefillGroup(PrefillOptions, _Group):
    """The prefill servers of a local cluster."""

    option_prefix: ClassVar[str] = "prefill."

    role: Literal["prefill", "both"] = Field(
        "prefill", description="both: these servers also serve decode legs"
    )


class DecodeGroup(DecodeOptions, _Group):
    """The decode servers of a local cluster."""

    option_prefix: ClassVar[str] = "decode."

    role: Literal["decode", "both"] = Field(
        "decode", description="both: these servers also serve prefill legs"
    )


class LocalSettings(
    ModelOptions,
    ListenOptions,
    QueueOptions,
    RoutingOptions,
    LauncherOptions,
    BatonSettings,
):
    """The options that `baton up` and `baton serve` share.

    The launcher passes an option on to its proxy if `baton proxy` has this option.
    """

    topic: ClassVar[str] = "cluster"
    port: Port = 8000
    start_timeout_s: Seconds = 600.0
    """timeout of the start of all servers, including model downloads (s)"""

    def server_groups(self) -> dict[str, "PrefillGroup | DecodeGroup"]:
        """Returns the groups of servers to start, by their kind: prefill or decode."""
        raise NotImplementedError


class UpSettings(LocalSettings, DisaggregationOptions):
    """Prefill servers, decode servers and a proxy on one machine or a Ray cluster."""

    topic: ClassVar[str] = "cluster"
    common: ClassVar[tuple[str, ...]] = (
        "model",
        "host",
        "port",
        "prefill.count",
        "prefill.tp",
        "prefill.devices",
        "decode.count",
        "decode.tp",
        "decode.devices",
        "on",
        "disaggregate",
        "max_model_len",
        "api_key",
        "config",
    )
    prefill: PrefillGroup = PrefillGroup()
    """the prefill servers"""
    decode: DecodeGroup = DecodeGroup()
    """the decode servers"""
    speculate: Speculate | None = None
    """value of --prefill.speculate and --decode.speculate if they are not given"""

    def server_groups(self) -> dict[str, PrefillGroup | DecodeGroup]:
        return {"prefill": self.prefill, "decode": self.decode}

    @field_validator("decode")
    @classmethod
    def _check_block_sizes(
        cls, decode: DecodeGroup, info: ValidationInfo
    ) -> DecodeGroup:
        prefill = info.data.get("prefill", decode)
        if decode.dcp > 1 and decode.block_size % prefill.block_size:
            raise ValueError(
                f"with --decode.dcp {decode.dcp}, --decode.block-size "
                f"{decode.block_size} must be a multiple of --prefill.block-size, "
                f"which is {prefill.block_size}"
            )
        return decode


class ServeSettings(TransferOptions, LocalSettings):
    """Complete servers, which compute both prompts and answers, behind one endpoint."""

    topic: ClassVar[str] = "cluster"
    common: ClassVar[tuple[str, ...]] = (
        "model",
        "host",
        "port",
        "count",
        "tp",
        "devices",
        "max_model_len",
        "kv_cache_tokens",
        "gpu_memory_utilization",
        "quantization",
        "api_key",
        "config",
    )
    count: int = Field(1, ge=1, le=64)
    """number of servers. Each has --tp ranks and the complete model"""
    threads: Threads | None = None
    """CPU threads of one rank (threads; None: a share of the machine's cores)"""

    def server_groups(self) -> dict[str, PrefillGroup | DecodeGroup]:
        options = {name: getattr(self, name) for name in TransferOptions.model_fields}
        group = DecodeGroup(
            role="both", count=self.count, threads=self.threads, **options
        )
        return {"decode": group}


PROGRAMS: dict[str, type[BatonSettings]] = {
    "baton prefill": PrefillSettings,
    "baton decode": DecodeSettings,
    "baton proxy": ProxySettings,
    "baton kv": StoreSettings,
    "baton up": UpSettings,
    "baton serve": ServeSettings,
}
SettingsT = TypeVar("SettingsT", bound=BatonSettings)


def load(
    cls: type[SettingsT], argv: Sequence[str], *, prog: str | None = None
) -> SettingsT:
    """Reads `cls` from argv, BATON_* variables and the `--config` file.

    Raises:
        ConfigError: A value is invalid, or a key is unknown. The message has the name
            and the problem.
    """
    sources.check_environment(cls, PROGRAMS.values())
    file_values: dict[str, Any] = {}
    try:
        command_line = parse_command_line(cls, argv, prog)
        file = command_line().get(
            "config", os.environ.get(f"{sources.ENV_PREFIX}CONFIG") or None
        )
        file_values = sources.read_file(cls, file)
        return cls(_cli_settings_source=command_line, **file_values)
    except ValidationError as error:
        problem = sources.explain_validation(error, cls, argv, file_values)
        raise ConfigError(problem) from None
    except SettingsError as error:
        raise ConfigError(sources.explain_cli(cls, error, PROGRAMS)) from None


def parse(
    cls: type[SettingsT], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> SettingsT:
    """Returns the settings for a main function; see `load`.

    If a setting is invalid, the process prints the ConfigError and exits with status 2.
    """
    try:
        return load(cls, sys.argv[1:] if argv is None else argv, prog=prog)
    except ConfigError as error:
        print(f"{prog or 'baton'}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def describe(settings: BatonSettings) -> str:
    """Returns the settings as the JSON line that a program writes when it starts.

    The line has the values that differ from the defaults, or all values with
    --log-level debug. Secrets are masked.
    """
    only_changed = getattr(settings, "log_level", None) != "debug"
    values = settings.model_dump(
        mode="json", by_alias=True, exclude_defaults=only_changed
    )
    return json.dumps(values)


def to_argv(options: BaseModel, *, only: Iterable[str] | None = None) -> list[str]:
    """Returns command-line arguments that set `options`.

    Secrets, groups and values that are None are left out.

    Args:
        only: Names of the fields to include; None: all fields.
    """
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

"""Derives the command lines of a cluster's processes from the cluster's settings.

This module does no I/O.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, SecretStr

from deploy.healthcheck import LOOPBACK
from protocol.settings.options import ModelOptions, TransferOptions
from protocol.settings.server_options import (
    RESTART_WAIT_S,
    DisaggregationOptions,
    QueueOptions,
    TelemetryOptions,
)
from protocol.settings.settings import PROGRAMS as SETTINGS_BY_PROGRAM
from protocol.settings.settings import LocalSettings, ProxySettings, to_argv
from protocol.settings.sources import variable_name

Kind = Literal["prefill", "decode", "proxy", "kv"]
SERVERS: tuple[Kind, ...] = ("prefill", "decode")
PROGRAMS: dict[Kind, tuple[str, ...]] = {
    "prefill": (sys.executable, "-m", "prefill_server"),
    "decode": (sys.executable, "-m", "decode_server"),
    "proxy": (sys.executable, "-m", "proxy"),
}
STORE_PROGRAM = (sys.executable, "-m", "engine.store")
# By default, the ranks of each server divide at least this many cores among them, or
# all cores if there are fewer, even if servers then share cores. If two servers divided
# the cores of a small machine instead, the time to first token would double. Sharing
# costs little, because prefill and decode servers are rarely busy at the same time.
MIN_CORES_PER_SERVER = 4


@dataclass(frozen=True)
class Command:
    """One process to start."""

    name: str  # such as "prefill-0"
    kind: Kind
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def with_ports(self, ports: Mapping[str, int]) -> "Command":
        """Returns this command with other ports.

        Args:
            ports: The ports, by the field names of their options, such as "port".
        """
        options = {name.replace("_", "-"): port for name, port in ports.items()}
        prefixes = tuple(f"--{name}=" for name in options)
        argv = [word for word in self.argv if not word.startswith(prefixes)]
        argv += [f"--{name}={port}" for name, port in options.items()]
        return replace(self, argv=tuple(argv))


def server_commands(
    settings: LocalSettings, *, secret: str, cores: int, key: str | None = None
) -> list[Command]:
    """Returns the commands of all prefill and decode servers; see `server_command`."""
    return [
        server_command(settings, kind, index, secret=secret, cores=cores, key=key)
        for kind, index in server_indices(settings)
    ]


def server_indices(settings: LocalSettings) -> list[tuple[Kind, int]]:
    """Returns the kind and the index of each server that the settings name."""
    groups = settings.server_groups()
    return [
        (kind, index)
        for kind in SERVERS
        if kind in groups
        for index in range(groups[kind].count)
    ]


def option_prefix(settings: LocalSettings, kind: Kind) -> str:
    """Returns the prefix of the options of a kind of server, such as "--decode."."""
    return f"--{kind}." if len(settings.server_groups()) > 1 else "--"


def server_command(
    settings: LocalSettings,
    kind: Kind,
    index: int,
    *,
    secret: str,
    cores: int,
    key: str | None = None,
    host: str = LOOPBACK,
    store: str | None = None,
) -> Command:
    """Returns the command of a prefill or decode server that listens on free ports.

    Args:
        index: Number of the server among the servers of its kind.
        secret: The cluster secret. It is passed as an environment variable, which other
            users of this machine cannot read.
        cores: CPU cores from which the default of --threads is computed; see
            `Place.cores`.
        key: The API key with which the proxy calls the servers. It is one of the
            servers' admin keys. None if the servers have no API keys.
        host: The value of --host; see `Place.host`.
        store: The address of the KV store, HOST:PORT; None if there is none. A server
            does not get it if its group names another store, or cannot use a store.

    Raises:
        ValueError: The group has devices, but too few for this server.
    """
    groups = settings.server_groups()
    group = groups[kind]
    prefix = option_prefix(settings, kind)
    name = f"{kind if len(groups) > 1 else 'server'}-{index}"
    # If the group has `tp` devices, its servers share them. If it has more, each server
    # has `tp` devices of its own. Without devices, no --devices is passed.
    devices = group.devices
    if len(devices) != group.tp:
        devices = devices[index * group.tp : (index + 1) * group.tp]
    if group.devices and len(devices) < group.tp:
        given = ",".join(map(str, group.devices))
        raise ValueError(
            f"{prefix}devices {given} are too few for {name}: give {group.tp} "
            f"({prefix}tp) for each server, or {group.tp} that all servers share"
        )
    admin_keys = [key] if key else []
    admin_keys += _revealed(settings.admin_key)
    argv = (
        *PROGRAMS[kind],
        *server_argv(settings, kind, cores=cores, host=host),
        *(f"--devices={device}" for device in devices),
    )
    if store is not None and _can_use_store(group):
        argv += (f"--host-kv={store}",)
    env = {"BATON_CLUSTER_SECRET": secret, **_environment(admin_key=admin_keys)}
    return Command(name, kind, argv, env)


def server_argv(
    settings: LocalSettings, kind: Kind, *, cores: int, host: str = LOOPBACK
) -> list[str]:
    """Returns the arguments of a server of `kind`, without its devices and the address
    of the cluster's KV store."""
    group = settings.server_groups()[kind]
    group_options = _options_of_group(group)
    server_class = SETTINGS_BY_PROGRAM[f"baton {kind}"]
    shared_options = group_options & server_class.model_fields.keys()
    cluster_options = {*ModelOptions.model_fields, "speculate"}
    threads = group.threads or default_threads(settings, cores=cores, tp=group.tp)
    limits = (
        "max_body_bytes",
        "max_unfinished_bytes",
        "max_held_bytes",
        "client_timeout_s",
        "shutdown_grace_s",
    )
    return [
        *_changed_options(settings, cluster_options - group_options),
        *_changed_options(group, shared_options - {"threads", "devices"}),
        f"--host={host}",
        "--port=0",
        f"--threads={threads}",
        # Servers use the proxy's client timeout, because a slow client also delays the
        # proxy's reads. They do not get --request-timeout-s: the proxy sends each
        # request's timeout with the request.
        *to_argv(
            settings,
            only=[*limits, *QueueOptions.model_fields, *TelemetryOptions.model_fields],
        ),
    ]


def _options_of_group(group: BaseModel) -> set[str]:
    """Returns the names of the options whose values servers take from their group.

    They take the value from the group even if it is the default. `device`, `dtype` and
    `speculate` are left out if the group's value is None: servers then take the value
    from the cluster.
    """
    shared_options = ("device", "dtype", "speculate")
    inherited = {name for name in shared_options if getattr(group, name) is None}
    return type(group).model_fields.keys() - inherited


def _changed_options(options: BaseModel, names: Iterable[str]) -> list[str]:
    """Returns the arguments for those of `names` that differ from their defaults."""
    fields = type(options).model_fields
    changed = [name for name in names if getattr(options, name) != fields[name].default]
    return to_argv(options, only=sorted(changed))


def uses_store(settings: LocalSettings) -> bool:
    """Returns whether any server can use a KV store that `baton up` starts."""
    return any(map(_can_use_store, settings.server_groups().values()))


def _can_use_store(group: TransferOptions) -> bool:
    return (
        group.host_kv is None
        and group.enable_prefix_caching
        and group.borrow_prefixes != "never"
    )


def store_command(settings: LocalSettings, num_bytes: int, secret: str) -> Command:
    """Returns the command of the KV store, on a free port.

    Args:
        num_bytes: Host memory of the store.
        secret: The cluster secret.
    """
    shared = ("log_level", "log_format", "shutdown_grace_s")
    argv = (
        *STORE_PROGRAM,
        f"--host-kv-bytes={num_bytes}",
        f"--host={LOOPBACK}",
        "--port=0",
        *to_argv(settings, only=shared),
    )
    return Command("kv", "kv", argv, {"BATON_CLUSTER_SECRET": secret})


def proxy_command(
    settings: LocalSettings,
    urls: Mapping[Kind, Sequence[str]],
    secret: str,
    key: str | None = None,
) -> Command:
    """Returns the command of the proxy.

    Args:
        urls: The URLs of the servers of each kind.
        secret: The cluster secret.
        key: The API key with which the proxy calls the servers; None if they have no
            API keys. If clients need keys, the launcher calls the proxy with this key.
    """
    shared = ProxySettings.model_fields.keys() & LocalSettings.model_fields.keys()
    argv = to_argv(settings, only=sorted(shared - {"config"}))
    if isinstance(settings, DisaggregationOptions):
        argv += to_argv(settings, only=DisaggregationOptions.model_fields)
    else:
        argv.append("--disaggregate=never")
    argv += [f"--{kind}={url}" for kind in SERVERS for url in urls[kind]]
    if settings.resume_wait_s is None and settings.max_restarts > 0:
        argv.append(f"--resume-wait-s={RESTART_WAIT_S:g}")
    operator_keys = [key] if key and settings.has_keys else []
    env = _environment(
        api_key=_revealed(settings.api_key),
        admin_key=[*_revealed(settings.admin_key), *operator_keys],
        upstream_api_key=[key] if key else (),
        cluster_secret=[secret],
    )
    return Command("proxy", "proxy", (*PROGRAMS["proxy"], *argv), env)


def _revealed(keys: Iterable[SecretStr]) -> list[str]:
    """Returns the keys as plain texts, for the environment of a process."""
    return [key.get_secret_value() for key in keys]


def _environment(**options: Sequence[str]) -> dict[str, str]:
    """Returns environment variables that set secret options of a program.

    Other users of this machine can read a process's arguments, but not its environment.

    Args:
        options: The values of each option; options without values are left out.
    """
    return {
        variable_name((name,)): ",".join(values)
        for name, values in options.items()
        if values
    }


def default_threads(settings: LocalSettings, *, cores: int, tp: int) -> int:
    """Returns the default of --threads: the CPU threads of each rank of a server."""
    servers = sum(group.count for group in settings.server_groups().values())
    share = min(cores, max(MIN_CORES_PER_SERVER, cores // servers))
    return max(1, share // tp)

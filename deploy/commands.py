"""What `baton up` runs: from its settings to the command lines of a local cluster. Pure."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, SecretStr

from deploy.healthcheck import LOOPBACK
from protocol.settings.options import ModelOptions, QueueOptions
from protocol.settings.settings import PROGRAMS as SETTINGS
from protocol.settings.settings import ProxySettings, UpSettings, to_argv
from protocol.settings.sources import variable_name

Kind = Literal["prefill", "decode", "proxy"]
SERVERS: tuple[Kind, ...] = ("prefill", "decode")
PROGRAMS: dict[Kind, tuple[str, ...]] = {
    "prefill": (sys.executable, "-m", "prefill_server"),
    "decode": (sys.executable, "-m", "decode_server"),
    "proxy": (sys.executable, "-m", "proxy"),
}
# Below this many cores a prefill and a decode server are rarely busy at once in earnest, and
# halving them would double the time to first token: each server may use them all.
MIN_CORES_PER_SERVER = 4


@dataclass(frozen=True)
class Command:
    """One process to start."""

    name: str  # "prefill-0"
    kind: Kind
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def server_commands(
    settings: UpSettings, *, secret: str, cores: int, key: str | None = None
) -> list[Command]:
    """All prefill and decode servers, each on free ports of the loopback address.

    Args:
        secret: the cluster secret; it goes by environment, which other users cannot read.
        cores: CPU cores of this machine.
        key: the proxy's, where the cluster has API keys.
    """
    commands = []
    keys = _environment(
        admin_key=(*([key] if key else ()), *_revealed(settings.admin_key))
    )
    for kind in SERVERS:
        argv = (*PROGRAMS[kind], *server_argv(settings, kind, cores=cores))
        env, group = {"BATON_CLUSTER_SECRET": secret, **keys}, getattr(settings, kind)
        for index in range(group.count):
            devices = (
                group.devices
            )  # one server's, or of several that share; else a share of them
            if len(devices) != group.tp:
                devices = devices[index * group.tp : (index + 1) * group.tp]
            own = (f"--devices={device}" for device in devices)
            commands.append(Command(f"{kind}-{index}", kind, (*argv, *own), env))
    return commands


def server_argv(settings: UpSettings, kind: Kind, *, cores: int) -> list[str]:
    """The options of one server of `kind`, without its devices."""
    group = getattr(settings, kind)
    own = _own(group)
    told = own & SETTINGS[f"baton {kind}"].model_fields.keys() - {"threads", "devices"}
    threads = group.threads or default_threads(settings, cores=cores, tp=group.tp)
    of_bodies = ("max_body_bytes", "max_unfinished_bytes", "max_held_bytes")
    of_clients = (*of_bodies, "client_timeout_s", "shutdown_grace_s")
    return [
        *_changed(settings, ModelOptions.model_fields.keys() - own),
        *_changed(group, told),
        f"--host={LOOPBACK}",
        "--port=0",
        f"--threads={threads}",
        # A slow client makes the proxy slow. The time of a request is told with it.
        *to_argv(settings, only=[*of_clients, *QueueOptions.model_fields]),
    ]


def _own(group: BaseModel) -> set[str]:
    """The options of a group, but those that it leaves to the whole cluster."""
    left = {name for name in ("device", "dtype") if getattr(group, name) is None}
    return type(group).model_fields.keys() - left


def _changed(options: BaseModel, names: Iterable[str]) -> list[str]:
    """The arguments for those of `names` that are not at their default."""
    fields = type(options).model_fields
    changed = [name for name in names if getattr(options, name) != fields[name].default]
    return to_argv(options, only=sorted(changed))


def proxy_command(
    settings: UpSettings,
    urls: Mapping[Kind, Sequence[str]],
    secret: str,
    key: str | None = None,
) -> Command:
    """The proxy in front of servers that already serve, have this secret and want this API key."""
    shared = ProxySettings.model_fields.keys() & UpSettings.model_fields.keys()
    argv = to_argv(settings, only=sorted(shared - {"config", *SERVERS}))
    argv += [f"--{kind}={url}" for kind in SERVERS for url in urls[kind]]
    env = _environment(
        api_key=_revealed(settings.api_key),
        admin_key=_revealed(settings.admin_key),
        upstream_api_key=[key] if key else (),
        cluster_secret=[secret],
    )
    return Command("proxy", "proxy", (*PROGRAMS["proxy"], *argv), env)


def _revealed(keys: Iterable[SecretStr]) -> list[str]:
    return [key.get_secret_value() for key in keys]


def _environment(**keys: Sequence[str]) -> dict[str, str]:
    """Options for a process as variables, which other users cannot read."""
    return {
        variable_name((name,)): ",".join(given) for name, given in keys.items() if given
    }


def default_threads(settings: UpSettings, *, cores: int, tp: int) -> int:
    """CPU threads of each rank of a server, where not configured."""
    servers = settings.prefill.count + settings.decode.count
    share = min(cores, max(MIN_CORES_PER_SERVER, cores // servers))
    return max(1, share // tp)

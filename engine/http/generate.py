"""One call of an endpoint that generates: from the body to the engine, and to an answer (call.py).

body -> parse -> tokenize -> AddRequests (with the server's hooks) -> a place in the queue
     -> PromptGenerations (choice.py) -> a whole response, or a stream
"""

import secrets
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.http.api import Api, Endpoint
from engine.http.call import HttpRequestState
from engine.http.limits import (
    check_against_server,
    check_logprobs,
    check_size,
    check_token_ids,
    guided_decodings,
    settle_model,
    token_limit,
)
from engine.http.middleware import (
    cancelled_on_disconnect,
    error_response,
    read_json,
    refusal_of,
)
from engine.http.request_stats import RequestStats
from engine.http.resume import Framing, going_on, is_open, take_from
from engine.text.request_grammar import grammar_of
from protocol.errors import BatonError
from protocol.http.deadlines import deadline_of, within
from protocol.http.json_bounds import INLINE_BODY_BYTES
from protocol.kv_params import sender_releases
from protocol.messages import AddRequest, ReleaseRemote
from protocol.openai.sampling import GenerationRequest
from protocol.openai.structured import GuidedDecoding
from protocol.process.logging import current_request_id


async def respond(request: Request, *, api: Api, endpoint: Endpoint) -> Response:
    """Answers one HTTP request; never raises a BatonError, but ClientDisconnected."""
    stats = RequestStats(api.metrics, endpoint.name, request.scope)
    members: dict[str, Any] = {}
    call: HttpRequestState | None = None
    try:
        deadline = deadline_of(request.scope["headers"], api.settings.request_timeout_s)
        async with within(deadline):
            members, num_bytes = await read_json(request, api.settings.max_body_bytes)
            call = await _start(request, api, endpoint, members, num_bytes, stats)
            members.clear()  # an answer may take minutes
        if deadline is not None:
            stats.on_end(call.subscription.fail_at(deadline.at, deadline.error))
        return await call.respond(request.receive)
    except (BatonError, RecursionError) as raised:
        error = refusal_of(raised)
        if call is None:
            _release_offered_kv(api, members)
        stats.close(error)
        return error_response(error)
    except BaseException as error:
        if call is None:  # the client has gone before the engine had its request
            _release_offered_kv(api, members)
        stats.close(error)
        raise


def _release_offered_kv(api: Api, members: dict[str, Any]) -> None:
    """Tells the prefill server that nobody will come for the KV of a request that is not begun,
    unless its sender does that."""
    offered = members.get("kv_transfer_params")
    if not sender_releases(offered):
        for message in api.hooks.refused(offered):
            api.client.send(message)


async def _start(
    request: Request,
    api: Api,
    endpoint: Endpoint,
    members: dict[str, Any],
    num_bytes: int,
    stats: RequestStats,
) -> "HttpRequestState":
    """Prepares a call and submits it. It enters the queue only once nothing has to be waited for
    before the engine has it: until then its length is not known, nor that it can be served."""
    resumed = take_from(members, api.secret)
    settle_model(members, api.model_name)
    api.client.require_ready()
    if resumed is None:
        priority = members.get("priority")
        api.client.queue.check_wait(priority if type(priority) is int else 0)
    async with cancelled_on_disconnect(request.receive):
        parsed, adds = await _prepare(api, endpoint, members, num_bytes)
        adds = api.salted(adds, parsed, request.scope)
        if resumed is not None:
            adds = going_on(resumed, api, endpoint, adds)
        prepare = partial(api.hooks.prepare, parsed, adds, api.client.require_ready())
        adds = await api.texts.run_python(_parsing_size(api, num_bytes), prepare)
    adds = [msgspec.structs.replace(add, share=stats.share) for add in adds]
    open_adds = [add for add in adds if is_open(add)]
    place = api.client.queue.enter(open_adds, is_resumed=resumed is not None)
    stats.on_end(place.leave)
    stats.on_end(api.grammars.hold(adds[0].sampling.grammar))
    stats.on_end(
        api.hooks.admit(adds, api.client.require_ready(), parsed.kv_transfer_params)
    )
    told = request.scope["headers"], api, endpoint, adds, resumed
    keeps_logprobs = not parsed.streams_logprobs_once
    framing = Framing.of(*told, is_stream=parsed.stream, keeps_logprobs=keeps_logprobs)
    for add in adds:
        if add.remote is not None and not is_open(add):
            api.client.send(ReleaseRemote(add.remote))
    subscription = api.client.submit(open_adds, place)
    try:  # all else is made while the engine has begun
        parsed = parsed.without_inputs()
        return HttpRequestState(
            api, endpoint, parsed, adds, subscription, stats, framing
        )
    except BaseException:
        subscription.close()
        raise


def _parsing_size(api: Api, num_bytes: int) -> int:
    """The size of a body for `TextWorkers.run_python`; 0 where it is parsed on the event loop.
    References to KV, which proxies add, may be larger than bodies of clients: they count less."""
    return (
        min(num_bytes, api.settings.max_body_bytes)
        if num_bytes > INLINE_BODY_BYTES
        else 0
    )


async def _prepare(
    api: Api, endpoint: Endpoint, members: dict[str, Any], num_bytes: int
) -> tuple[GenerationRequest, list[AddRequest]]:
    """Parses and tokenizes a call. Returns one of the engine's requests for each prompt.

    Raises:
        BatonError: this server cannot do what is requested; says why.
    """
    ready = api.client.require_ready()
    api.texts.check_num_items(members, ready.max_model_len)

    def parse() -> tuple[GenerationRequest, list[GuidedDecoding]]:
        api.texts.check_num_chars(members, ready.max_model_len)
        parsed = endpoint.parse(members).with_defaults(api.generation_config)
        return parsed, guided_decodings(parsed)

    parsed, all_guided = await api.texts.run_python(
        _parsing_size(api, num_bytes), parse
    )
    check_against_server(parsed, ready.vocab_size, api.settings.max_num_seqs)
    if all_guided:
        await api.grammars.check(all_guided)
    prompts = await api.texts.tokenize(parsed, num_bytes, ready.max_model_len)
    room, default = ready.max_model_len, api.generation_config.max_new_tokens
    limits = [token_limit(parsed, len(ids), room, default) for ids in prompts]
    for ids in prompts:  # none of which is too long to look through here
        check_token_ids(ids, ready.vocab_size, parsed.prompt_field)
    lengths = [len(ids) + limit for ids, limit in zip(prompts, limits, strict=True)]
    check_size(parsed, lengths, room, api.settings.max_num_seqs)
    check_logprobs(parsed, sum(map(len, prompts)), sum(limits) * parsed.num_candidates)
    size = sum(map(len, parsed.bad_words))  # to be tokenized
    adds = await api.texts.run(size, partial(_adds, api, parsed, prompts, limits))
    return parsed, adds


def _adds(
    api: Api, parsed: GenerationRequest, prompts: list[list[int]], limits: list[int]
) -> list[AddRequest]:
    sampling = parsed.sampling(
        parsed.seed if parsed.seed is not None else secrets.randbits(63)
    )
    grammar = grammar_of(
        sampling.grammar, parsed, prompts[0], api.tokenizer, api.settings
    )
    sampling = msgspec.structs.replace(sampling, grammar=grammar)
    end_ids = [] if parsed.ignore_eos else list(api.tokenizer.eos_ids)
    # Unique even where a client uses one X-Request-Id twice, and short whatever it sent.
    unique = f"{(current_request_id() or '')[:64]}-{secrets.token_hex(6)}"
    return [
        AddRequest(
            request_id=f"{unique}-{index}",
            token_ids=ids,
            sampling=sampling,
            max_tokens=limit,
            stop_token_ids=[
                *end_ids,
                *(i for i in parsed.stop_token_ids if i not in end_ids),
            ],
            num_choices=parsed.num_candidates,
            num_prompt_logprobs=parsed.num_prompt_logprobs,
            grammar_bytes=api.grammars.nbytes(sampling.grammar),
            priority=parsed.priority,
        )
        for index, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
    ]

"""Handles one call of an endpoint that generates text.

body -> parse -> tokenize -> AddRequests, as changed by the server's hooks
     -> queue -> engine
     -> PromptGenerations (choice.py) -> one response, or a stream (call.py)
"""

import secrets
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.http.api import Api
from engine.http.call import HttpRequestState
from engine.http.limits import (
    check_against_server,
    check_logprobs,
    check_num_tokens,
    check_token_ids,
    guided_decodings,
    output_token_limit,
    set_default_model,
)
from engine.http.middleware import (
    as_baton_error,
    cancelled_on_disconnect,
    error_response,
    read_json,
)
from engine.http.request_stats import RequestStats
from engine.http.resume import Framing, has_open_choice, pop_resume, resume_requests
from engine.text.request_grammar import answer_grammar
from protocol.errors import BatonError
from protocol.http.deadlines import deadline_of, enforce_deadline
from protocol.http.endpoints import Endpoint
from protocol.kv_params import sender_releases
from protocol.messages import AddRequest, ReleaseRemote, Retention
from protocol.openai.sampling import GenerationRequest
from protocol.openai.structured import GuidedDecoding
from protocol.process.logging import current_request_id


async def respond(request: Request, *, api: Api, endpoint: Endpoint) -> Response:
    """Return the response to one HTTP request. Baton's errors become error responses.

    Raises:
        ClientDisconnected: the client disconnected before the response began.
    """
    stats = RequestStats(api.metrics, endpoint.name, request.scope)
    members: dict[str, Any] = {}
    call: HttpRequestState | None = None
    try:
        deadline = deadline_of(request.scope["headers"], api.settings.request_timeout_s)
        async with enforce_deadline(deadline):
            members, num_bytes = await read_json(request, api.settings.max_body_bytes)
            call = await _start(request, api, endpoint, members, num_bytes, stats)
            members.clear()  # frees the body's memory: the response may take minutes
        if deadline is not None:
            stats.on_end(
                call.subscription.fail_at(deadline.expires_at_s, deadline.error)
            )
        return await call.respond(request.receive)
    except (BatonError, RecursionError) as raised:
        error = as_baton_error(raised)
        if call is None:
            _release_referenced_kv(api, members)
        stats.mark_failed(error)
        return error_response(error, request.scope["path"])
    except BaseException as error:
        if call is None:  # for example, the client has disconnected
            _release_referenced_kv(api, members)
        stats.mark_failed(error)
        raise


def _release_referenced_kv(api: Api, members: dict[str, Any]) -> None:
    """Release the KV to which a request refers, because the request could not start.

    Does nothing if the sender of the request releases the KV itself.

    Args:
        members: the members of the request's body.
    """
    params = members.get("kv_transfer_params")
    if not sender_releases(params):
        for message in api.hooks.release_messages(params):
            api.client.send(message)


async def _start(
    request: Request,
    api: Api,
    endpoint: Endpoint,
    members: dict[str, Any],
    num_bytes: int,
    stats: RequestStats,
) -> "HttpRequestState":
    """Prepare a call and submit it to the engine.

    The call enters the queue once it has been checked and its tokens are counted.

    Args:
        members: the body's members. Removes `baton_resume`, and adds a missing `model`.
        num_bytes: the size of the body.

    Raises:
        BatonError: the request is invalid, or this server cannot serve it.
        ClientDisconnected: the client disconnected while the call was prepared.
    """
    resumed = pop_resume(members, api.secret)
    set_default_model(members, api.model_name)
    api.client.require_ready()
    if resumed is None:
        priority = members.get("priority")
        api.client.queue.check_wait(priority if type(priority) is int else 0)
    async with cancelled_on_disconnect(request.receive):
        parsed, adds = await _prepare(api, endpoint, members, num_bytes)
        adds = api.with_cache_salt(adds, parsed, request.scope)
        if resumed is not None:
            adds = resume_requests(resumed, api, endpoint, adds)
        prepare = partial(api.hooks.prepare, parsed, adds, api.client.require_ready())
        adds = await api.run_parser(num_bytes, prepare)
    adds = [msgspec.structs.replace(add, share=stats.share) for add in adds]
    open_adds = [add for add in adds if has_open_choice(add)]
    queue_entry = api.client.queue.enter(open_adds, is_resumed=resumed is not None)
    stats.on_end(queue_entry.drop_all)
    stats.on_end(api.grammars.reserve_memory(adds[0].sampling.grammar))
    ready = api.client.require_ready()
    stats.on_end(api.hooks.admit(adds, ready, parsed.kv_transfer_params))
    framing = Framing.from_request(
        request.scope["headers"],
        api,
        endpoint,
        adds,
        resumed,
        is_stream=parsed.stream,
        keeps_logprobs=not parsed.streams_logprobs_once,
    )
    _release_unused_kv(api, adds)
    subscription = api.client.submit(open_adds, queue_entry)
    # The engine already works on the request while this process prepares the response.
    try:
        parsed = parsed.without_prompt_fields()
        return HttpRequestState(
            api, endpoint.writer, parsed, adds, subscription, stats, framing
        )
    except BaseException:
        subscription.close()
        raise


def _release_unused_kv(api: Api, adds: list[AddRequest]) -> None:
    """Release the remote KV of prompts that have no choice left to generate."""
    for add in adds:
        if add.remote is not None and not has_open_choice(add):
            api.client.send(ReleaseRemote(add.remote))


async def _prepare(
    api: Api, endpoint: Endpoint, members: dict[str, Any], num_bytes: int
) -> tuple[GenerationRequest, list[AddRequest]]:
    """Parse, check and tokenize a call.

    Returns:
        The parsed request, and the requests to the engine, one for each prompt.

    Raises:
        BatonError: the call is invalid, or this server cannot serve it.
    """
    ready = api.client.require_ready()
    max_model_len = ready.max_model_len
    api.text_encoder.check_num_items(members, max_model_len)

    def parse() -> tuple[GenerationRequest, list[GuidedDecoding]]:
        api.text_encoder.check_num_chars(members, max_model_len)
        parsed = endpoint.parse(members).with_defaults(api.generation_config)
        return parsed, guided_decodings(parsed)

    parsed, all_guided = await api.run_parser(num_bytes, parse)
    check_against_server(parsed, ready.vocab_size, ready.max_num_seqs)
    if all_guided:
        await api.grammars.check(all_guided)
    prompts = await api.text_encoder.tokenize(parsed, num_bytes, max_model_len)
    default_limit = api.generation_config.max_new_tokens
    limits = [
        output_token_limit(parsed, len(ids), max_model_len, default_limit)
        for ids in prompts
    ]
    # The prompts are known to fit the context, so checking their ids on the event loop
    # does not take long.
    for ids in prompts:
        check_token_ids(ids, ready.vocab_size, parsed.prompt_field)
    lengths = [len(ids) + limit for ids, limit in zip(prompts, limits, strict=True)]
    check_num_tokens(parsed, lengths, max_model_len, ready.max_num_seqs)
    check_logprobs(
        parsed,
        num_prompt_tokens=sum(map(len, prompts)),
        num_output_tokens=sum(limits) * parsed.num_candidates,
    )
    retentions = await api.text_encoder.retentions(parsed, prompts, num_bytes)
    # `_make_adds` tokenizes the bad words and the prediction, so its cost depends on
    # their lengths.
    num_chars = sum(map(len, parsed.bad_words))
    num_chars += len(parsed.prediction.text) if parsed.prediction else 0
    make_adds = partial(_make_adds, api, parsed, prompts, limits, retentions)
    adds = await api.text_encoder.run(num_chars, make_adds)
    return parsed, adds


def _make_adds(
    api: Api,
    parsed: GenerationRequest,
    prompts: list[list[int]],
    limits: list[int],
    retentions: list[list[Retention]],
) -> list[AddRequest]:
    """Return the request to the engine for each prompt.

    Args:
        prompts: the token ids of each prompt.
        limits: for each prompt, how many tokens each of its choices may have at most.
        retentions: for each prompt, the parts of it to keep in the prefix cache.
    """
    sampling = parsed.sampling_params(
        parsed.seed if parsed.seed is not None else secrets.randbits(63)
    )
    grammar = answer_grammar(
        sampling.grammar, parsed, prompts[0], api.tokenizer, api.settings
    )
    sampling = msgspec.structs.replace(sampling, grammar=grammar)
    vocab_size = api.client.require_ready().vocab_size
    predictions = api.text_encoder.predictions(parsed, limits, vocab_size)
    stop_ids = [] if parsed.ignore_eos else list(api.tokenizer.eos_ids)
    stop_ids += [i for i in parsed.stop_token_ids if i not in stop_ids]
    # The random part keeps ids unique if a client sends the same X-Request-Id twice. A
    # long X-Request-Id is cut, so that ids stay short.
    unique_id = f"{(current_request_id() or '')[:64]}-{secrets.token_hex(6)}"
    return [
        AddRequest(
            request_id=f"{unique_id}-{index}",
            token_ids=ids,
            sampling=sampling,
            max_tokens=limit,
            stop_token_ids=[*stop_ids],
            num_choices=parsed.num_candidates,
            num_prompt_logprobs=parsed.num_prompt_logprobs,
            grammar_bytes=api.grammars.nbytes(sampling.grammar),
            priority=parsed.priority,
            cache_hit_threshold=parsed.cache_hit_threshold,
            retention=retentions[index],
            prediction=predictions[index],
        )
        for index, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
    ]

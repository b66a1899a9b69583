"""One call of an endpoint that generates: from the body to the last byte.

    body -> parse -> tokenize -> AddRequests (with the server's hooks) -> PromptGeneration
         -> response

engine_requests.py has what comes before an AddRequest is accepted, call.py what comes after.
"""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.http.api import Api
from engine.http.call import HttpRequestState, PromptGeneration
from engine.http.choice import choice_groups
from engine.http.endpoints import Endpoint
from engine.http.engine_requests import engine_requests
from engine.http.limits import fill_in_model
from engine.http.middleware import CLIENT_GONE, error_response, read_body, refusal_of
from engine.http.request_stats import RequestStats
from protocol.errors import BatonError
from protocol.http.body import ClientDisconnected
from protocol.kv_params import sender_releases
from protocol.openai.prefill_leg import decode_context
from protocol.openai.requests import parse_json_object

# Larger bodies are checked off the event loop: one of many small messages takes half a second for
# a megabyte.
INLINE_BODY_BYTES = 1 << 16


async def respond(request: Request, *, api: Api, endpoint: Endpoint) -> Response:
    """Answers one HTTP request; never raises a BatonError."""
    stats = RequestStats(api.metrics, endpoint.name)
    members: dict[str, Any] = {}
    try:
        raw = await read_body(request, api.settings.max_body_bytes)
        members = parse_json_object(raw)
        call = await _start(request, api, endpoint, members, len(raw), stats)
    except (BatonError, RecursionError) as raised:
        error = refusal_of(raised)
        offered = members.get("kv_transfer_params")
        if not sender_releases(offered):
            for message in api.hooks.refused(offered):
                api.client.tell(message)
        stats.close(error)
        return error_response(error)
    except ClientDisconnected as gone:
        stats.close(gone)
        return Response(status_code=CLIENT_GONE)
    except BaseException as error:
        stats.close(error)
        raise
    return await call.respond(request.receive)


async def _start(
    request: Request,
    api: Api,
    endpoint: Endpoint,
    members: dict[str, Any],
    num_bytes: int,
    stats: RequestStats,
) -> HttpRequestState:
    """Takes a request on."""
    fill_in_model(members, api.model_names)
    if num_bytes > INLINE_BODY_BYTES:
        read = asyncio.to_thread(endpoint.read, members, api.generation_config)
        parsed, behind = await read
    else:
        parsed, behind = endpoint.read(members, api.generation_config)
    context = decode_context(members)
    adds = await engine_requests(api, parsed, behind, context, request.receive)
    stats.on_end(api.grammars.hold(adds[0].sampling.grammar))
    stats.on_end(api.hooks.admit(adds, api.require_ready(), parsed.kv_transfer_params))
    subscription = api.client.submit(adds)
    try:  # all else is made while the engine has begun
        stats.accepted(sum(len(add.token_ids) for add in adds))
        writer = endpoint.new_writer(parsed, api.fingerprint)
        groups = choice_groups(parsed, adds, api.tokenizer, api.settings.tool_call_parser)
        generation = PromptGeneration(subscription, groups, parsed.n, stats)
    except BaseException:
        subscription.close()
        raise
    return HttpRequestState(api.hooks, parsed, writer, generation, stats)

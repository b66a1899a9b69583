"""OpenAI's HTTP API as these servers speak it: one import for requests, responses and legs.

openai_fields.py holds what is accepted without being used, openai_requests.py what is read and
openai_responses.py what is written. The proxy needs only `parse_json_object` and the two legs.
"""

from typing import Any

from protocol.errors import InvalidRequest
from protocol.openai_requests import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    parse_chat,
    parse_completion,
    parse_json_object,
)
from protocol.openai_responses import (
    ChatWriter,
    ChoicePiece,
    CompletionWriter,
    LogprobsPiece,
    ResponseWriter,
    Usage,
    kv_header,
    model_list,
)

__all__ = [
    "DEFAULT_COMPLETION_TOKENS",
    "ChatRequest",
    "ChatWriter",
    "ChoicePiece",
    "CompletionRequest",
    "CompletionWriter",
    "GenerationRequest",
    "InvalidRequest",
    "LogprobsPiece",
    "Message",
    "ResponseWriter",
    "Usage",
    "decode_leg",
    "kv_header",
    "model_list",
    "parse_chat",
    "parse_completion",
    "parse_json_object",
    "prefill_leg",
]

# The field's convention: a prefill server is told by this object that it prefills only.
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_leg(body: dict[str, Any]) -> dict[str, Any]:
    """The body that the prefill server gets for the user's `body`; `body` stays as it is."""
    leg = {name: value for name, value in body.items() if name != "stream_options"}
    leg["max_tokens"] = 1
    if leg.get("max_completion_tokens") is not None:
        leg["max_completion_tokens"] = 1
    leg["stream"] = False
    leg["kv_transfer_params"] = dict(REMOTE_DECODE)
    return leg


def decode_leg(body: dict[str, Any], kv_transfer_params: Any | None) -> dict[str, Any]:
    """The body that the decode server gets: the user's, with the prefill server's params or none.

    Params that a client sent are dropped: they name hosts, and only a server may do that.
    """
    leg = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if kv_transfer_params is not None:
        leg["kv_transfer_params"] = kv_transfer_params
    return leg

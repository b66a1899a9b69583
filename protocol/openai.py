"""OpenAI's HTTP API as these servers speak it: one import for requests and responses.

openai_fields.py holds what is accepted without being used; openai_sampling.py, _completions.py and
_chat.py what is read, by the means of openai_requests.py; openai_responses.py what is written.
The proxy needs only `REMOTE_DECODE`: see proxy/body.py.
"""

from typing import Any

from protocol.errors import InvalidRequest
from protocol.openai_chat import ChatRequest, Message, parse_chat
from protocol.openai_completions import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    parse_completion,
)
from protocol.openai_logprobs import TokenReport, TokenText
from protocol.openai_requests import parse_json_object
from protocol.openai_responses import (
    ChatWriter,
    ChoicePiece,
    CompletionWriter,
    ResponseWriter,
    Usage,
    kv_header,
    model_list,
)
from protocol.openai_sampling import GenerationRequest

__all__ = [
    "DEFAULT_COMPLETION_TOKENS",
    "ChatRequest",
    "ChatWriter",
    "ChoicePiece",
    "CompletionRequest",
    "CompletionWriter",
    "GenerationRequest",
    "InvalidRequest",
    "Message",
    "ResponseWriter",
    "TokenReport",
    "TokenText",
    "Usage",
    "kv_header",
    "model_list",
    "parse_chat",
    "parse_completion",
    "parse_json_object",
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

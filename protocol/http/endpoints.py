"""The endpoints that generate text: their names, parsers and writers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from protocol.anthropic.errors import MESSAGES_PATH
from protocol.anthropic.request import parse_messages
from protocol.anthropic.writer import MessagesWriter
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import validate
from protocol.openai.responses import ChatWriter, CompletionWriter, ResponseWriter
from protocol.openai.responses_request import parse_responses
from protocol.openai.responses_writer import ResponsesWriter
from protocol.openai.sampling import GenerationRequest


class Endpoint(NamedTuple):
    """The name, the parser and the writer of an endpoint that generates text.

    Attributes:
        name: The value of the metric label `endpoint`.
        parse: Validates the members of a body, and returns them as a request.
        writer: Writes responses in the endpoint's format.
    """

    name: str
    parse: Callable[[dict[str, Any]], GenerationRequest]
    writer: type[ResponseWriter]


ENDPOINTS: Final = {
    "/v1/completions": Endpoint(
        "completions", partial(validate, CompletionRequest), CompletionWriter
    ),
    "/v1/chat/completions": Endpoint(
        "chat", partial(validate, ChatRequest), ChatWriter
    ),
    "/v1/responses": Endpoint("responses", parse_responses, ResponsesWriter),
    MESSAGES_PATH: Endpoint("messages", parse_messages, MessagesWriter),
}

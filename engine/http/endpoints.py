"""The endpoints that generate: what each takes, and how it answers."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from protocol.openai.chat import parse_chat
from protocol.openai.completions import parse_completion
from protocol.openai.prefill_leg import client_request
from protocol.openai.responses import ChatWriter, CompletionWriter, ResponseWriter
from protocol.openai.responses_request import ResponsesChat, parse_responses
from protocol.openai.responses_writer import ResponsesWriter
from protocol.openai.sampling import GenerationConfig, GenerationRequest


@dataclass(frozen=True)
class Endpoint:
    """What differs between them."""

    name: str
    parse: Callable[[dict[str, Any]], GenerationRequest]
    writer: type[ResponseWriter]

    def read(
        self, members: dict[str, Any], config: GenerationConfig
    ) -> tuple[GenerationRequest, GenerationRequest | None]:
        """A request, and the client's own where it is the prefill leg of one: what the decode
        server would refuse after the prefill."""
        parsed, asked = self.parse(members).with_defaults(config), client_request(members)
        return parsed, None if asked is None else self.parse(asked)

    def new_writer(self, parsed: GenerationRequest, fingerprint: str | None) -> ResponseWriter:
        """Writes the answer to one request."""
        response_id, created = secrets.token_hex(16), int(time.time())
        if isinstance(parsed, ResponsesChat):
            return ResponsesWriter(response_id, created, parsed.model, asked=parsed.asked)
        return self.writer(
            response_id,
            created,
            parsed.model,
            fingerprint=fingerprint,
            include_usage=parsed.include_usage,
            continuous_usage=parsed.continuous_usage,
            return_token_ids=parsed.return_token_ids,
        )


ENDPOINTS: Final = {
    "/v1/completions": Endpoint("completions", parse_completion, CompletionWriter),
    "/v1/chat/completions": Endpoint("chat", parse_chat, ChatWriter),
    "/v1/responses": Endpoint("responses", parse_responses, ResponsesWriter),
}

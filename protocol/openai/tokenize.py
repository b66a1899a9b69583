"""The bodies of /tokenize and /detokenize, which are vLLM's: OpenAI has neither."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from protocol.openai.chat import ChatRequest, Message, read_messages
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import ModelName, Strict, body_of, clean, validate
from protocol.openai.sampling import GenerationRequest, Switch, refuse
from protocol.short_repr import short_repr


@body_of("/tokenize", "The token ids of a text or a conversation.")
class TokenizeRequest(Strict):
    """Either `prompt` or `messages`."""

    model: ModelName = ""
    prompt: str | None = Field(None, description="a string")
    messages: tuple[Message, ...] | None = Field(
        None, description="a list, not empty, of objects with `role` and `content`"
    )
    # For a text true unless said otherwise, for messages false: their template writes them.
    add_special_tokens: bool | None = Field(None, description="true or false")
    return_token_strs: Switch = False
    add_generation_prompt: bool | None = Field(None, description="true or false")
    continue_final_message: Switch = False
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="an object of variables for the chat template"
    )


@body_of("/detokenize", "The text of token ids.")
class DetokenizeRequest(Strict):
    model: ModelName = ""
    # Checked by hand: pydantic takes half a second for millions of ids, and all streams wait.
    tokens: Annotated[
        Any,
        BeforeValidator(lambda ids: msgspec.convert(ids, list[int])),  # its error is a ValueError
        Field(description="a list of token ids"),
        WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
    ]


def parse_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    """Validates the body of /tokenize. Raises InvalidRequest naming the field."""
    cleaned = clean(body, TokenizeRequest)
    if "messages" in cleaned:
        cleaned["messages"] = read_messages(TokenizeRequest, cleaned["messages"])
    parsed = validate(TokenizeRequest, cleaned)
    if (parsed.prompt is None) == (parsed.messages is None):
        refuse("prompt", f"is {short_repr(parsed.prompt)}; send it or `messages`, one of the two")
    if parsed.messages is not None:
        as_request(parsed).check()
    return parsed


def as_request(parsed: TokenizeRequest) -> GenerationRequest:
    """The request whose prompt is to be tokenized, its `model` aside."""
    adds = parsed.add_special_tokens
    if parsed.messages is None:
        # Unchecked, because an empty text is one here.
        return CompletionRequest.model_construct(
            prompt=parsed.prompt or "", add_special_tokens=adds is not False
        )
    return ChatRequest(
        messages=parsed.messages,
        add_special_tokens=bool(adds),
        add_generation_prompt=parsed.add_generation_prompt,
        continue_final_message=parsed.continue_final_message,
        chat_template_kwargs=parsed.chat_template_kwargs,
    )


def parse_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    """Validates the body of /detokenize. Raises InvalidRequest naming the field."""
    return validate(DetokenizeRequest, clean(body, DetokenizeRequest))

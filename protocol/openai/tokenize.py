"""The bodies of /tokenize and /detokenize, which are vLLM's: OpenAI has neither."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from protocol.openai.chat import ChatRequest, Messages
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import ModelName, Strict, refuse, validate
from protocol.openai.sampling import GenerationRequest, Switch, Text, Variables
from protocol.short_repr import short_repr


class TokenizeRequest(Strict):
    """Either `prompt` or `messages`."""

    endpoint = "/tokenize"
    summary = "The token ids of a text or a conversation."

    model: ModelName = ""
    prompt: Text = None
    messages: Messages | None = Field(
        None, description=ChatRequest.model_fields["messages"].description
    )
    # For a text true unless said otherwise, for messages false: their template writes them.
    add_special_tokens: bool | None = Field(None, description="true or false")
    return_token_strs: Switch = False
    add_generation_prompt: bool | None = Field(None, description="true or false")
    continue_final_message: Switch = False
    chat_template_kwargs: Variables = Field({})


class DetokenizeRequest(Strict):
    endpoint = "/detokenize"
    summary = "The text of token ids."

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
    parsed = validate(TokenizeRequest, body)
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
    return validate(DetokenizeRequest, body)

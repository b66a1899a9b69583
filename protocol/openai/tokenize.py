"""The bodies of /tokenize and /detokenize, which are vLLM's: OpenAI has neither."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from protocol.openai.chat import ChatRequest, Messages
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import ModelName, Strict, refuse
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

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            told = f"is {short_repr(self.prompt)}; send it or `messages`, one of the two"
            refuse("prompt", told)
        if self.messages is not None:
            self.as_generation().check()

    def as_generation(self) -> GenerationRequest:
        """The request whose prompt is to be tokenized, its `model` aside."""
        adds = self.add_special_tokens
        if self.messages is None:
            # Unchecked, because an empty text is one here.
            return CompletionRequest.model_construct(
                prompt=self.prompt or "", add_special_tokens=adds is not False
            )
        return ChatRequest(
            messages=self.messages,
            add_special_tokens=bool(adds),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


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

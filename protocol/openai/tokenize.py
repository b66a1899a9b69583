"""The request bodies of /tokenize and /detokenize. These endpoints are vLLM's; OpenAI's
API does not have them.
"""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from protocol.openai.chat import ChatRequest, Messages, PromptFields
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import ModelName, Strict, refuse
from protocol.openai.sampling import GenerationRequest, Switch, Text
from protocol.short_repr import short_repr


class TokenizeRequest(PromptFields):
    """The request body of /tokenize, with either a `prompt` or `messages`."""

    endpoint = "/tokenize"
    summary = "The token ids of a text or a conversation."

    model: ModelName = ""
    prompt: Text = None
    messages: Messages | None = Field(
        None, description=ChatRequest.model_fields["messages"].description
    )
    # The default is true for a `prompt`, and false for `messages`, because the chat
    # template adds special tokens itself.
    add_special_tokens: bool | None = Field(None, description="true or false")
    return_token_strs: Switch = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            problem = (
                f"is {short_repr(self.prompt)}; send either `prompt` or `messages`"
            )
            refuse("prompt", problem)
        if self.messages is not None:
            self.as_generation().check()
            return
        chat_fields = self.model_fields_set & PromptFields.model_fields.keys()
        if chat_fields:
            refuse(
                min(chat_fields),
                "is for `messages`, and this request has a `prompt`; leave it out",
            )

    def as_generation(self) -> GenerationRequest:
        """Returns a generation request with the same prompt."""
        if self.messages is None:
            adds_special_tokens = self.add_special_tokens is not False
            # The request is not validated, because an empty text is valid for
            # /tokenize, but not as a prompt.
            return CompletionRequest.model_construct(
                prompt=self.prompt or "", add_special_tokens=adds_special_tokens
            )
        given = self.model_fields_set & ChatRequest.model_fields.keys()
        return ChatRequest(**{name: getattr(self, name) for name in given})


class DetokenizeRequest(Strict):
    endpoint = "/detokenize"
    summary = "The text of token ids."

    model: ModelName = ""
    # msgspec validates the ids. For millions of ids pydantic would take half a second,
    # and block all streams.
    tokens: Annotated[
        Any,
        # pydantic expects a ValueError, and msgspec.ValidationError is a subclass.
        BeforeValidator(lambda ids: msgspec.convert(ids, list[int])),
        Field(description="a list of token ids"),
        WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
    ]

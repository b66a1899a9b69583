"""The request body of /v1/completions."""

import contextlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from pydantic import BeforeValidator, Field, WithJsonSchema

from protocol.openai.requests import neutral, refuse
from protocol.openai.sampling import (
    MAX_CHOICES,
    MAX_INT31,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    Switch,
    integer,
)

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 1024

_NonEmpty = Meta(min_length=1)
_Text = Annotated[str, _NonEmpty]
_Ids = Annotated[list[int], _NonEmpty]
_Several = Meta(min_length=1, max_length=MAX_PROMPTS)
_PROMPT_TYPES = (
    _Text,
    _Ids,
    Annotated[list[_Text], _Several],
    Annotated[list[_Ids], _Several],
)


def _check_prompt(prompt: Any) -> Any:
    """Returns `prompt`. Raises ValueError if its type is not one of _PROMPT_TYPES.

    msgspec checks a long list of token ids ten times as fast as pydantic.
    """
    for kind in _PROMPT_TYPES:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(prompt, kind)
    raise ValueError("the prompt has a wrong type")


class CompletionRequest(GenerationRequest):
    endpoint = "/v1/completions"
    summary = "Continues texts."

    prompt: Annotated[
        Any,
        BeforeValidator(_check_prompt),
        Field(
            description="a string, a list of strings, a list of token ids or a list of "
            f"lists of token ids, not empty, with at most {MAX_PROMPTS} prompts"
        ),
        WithJsonSchema(
            {"anyOf": [msgspec.json.schema(kind) for kind in _PROMPT_TYPES]}
        ),
    ]
    max_tokens: int | None = integer(None, 0, MAX_INT31)
    max_completion_tokens: int | None = integer(None, 0, MAX_INT31)
    logprobs: int | None = integer(None, 0, MAX_TOP_LOGPROBS)
    echo: Switch = False
    # Add the special tokens that the model expects around a text.
    add_special_tokens: Switch = True
    best_of: int | None = integer(None, 0, MAX_CHOICES)  # 0 means the same as null
    suffix: Any = neutral("")
    continue_final_message: Any = neutral(False)

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None and self.num_candidates > self.n:
            return 0  # needed for ranking the candidates
        return self.logprobs

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_prompt_logprobs(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    def check(self) -> None:
        super().check()
        if self.add_special_tokens and "add_special_tokens" in self.model_fields_set:
            if isinstance(self.prompts[0], list):
                refuse(
                    "add_special_tokens",
                    "is true, but no `prompt` is a text; leave it out",
                )
        if self.num_candidates < self.n:
            refuse("best_of", f"is {self.best_of}, below `n`, which is {self.n}")
        if self.stream and self.num_candidates > self.n:
            refuse(
                "best_of",
                f"is {self.best_of} with `n` {self.n}, but a ranking cannot be "
                "streamed; set `stream` to false or `best_of` to `n`",
            )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; a list of token ids is one prompt."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else self.prompt

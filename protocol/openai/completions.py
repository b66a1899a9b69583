"""The body of /v1/completions."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from protocol.openai.requests import body_of, neutral, validate
from protocol.openai.sampling import (
    MAX_CHOICES,
    MAX_INT31,
    MAX_LOGPROBS,
    GenerationRequest,
    Switch,
    clean_request,
    integer,
    refuse,
)

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 1024

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}


def _several(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": schema}


def _check_prompt(prompt: Any) -> Any:
    """Refuses what no prompt can be; cheap on long lists of token ids."""
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        return _check_ids(prompt)
    if len(prompt) > MAX_PROMPTS:
        raise ValueError("prompt")
    if isinstance(prompt[0], str):
        if not all(isinstance(item, str) and item for item in prompt):
            raise ValueError("prompt")
        return prompt
    return [_check_ids(item) for item in prompt]


def _check_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise ValueError("prompt")
    return msgspec.convert(ids, list[int])  # its error is a ValueError


@body_of("/v1/completions", "Continues texts.")
class CompletionRequest(GenerationRequest):
    # Checked by hand: pydantic takes milliseconds for the token ids of a long prompt.
    prompt: Annotated[
        Any,
        BeforeValidator(_check_prompt),
        Field(
            description="a string, a list of strings, a list of token ids or a list of lists of "
            f"token ids, not empty, with at most {MAX_PROMPTS} prompts"
        ),
        WithJsonSchema({"anyOf": [_TEXT, _several(_TEXT), _IDS, _several(_IDS)]}),
    ]
    max_tokens: int | None = integer(None, 0, MAX_INT31)
    max_completion_tokens: int | None = integer(None, 0, MAX_INT31)
    logprobs: int | None = integer(None, 0, MAX_LOGPROBS)
    echo: Switch = False
    add_special_tokens: Switch = True  # those that the model expects around a text
    best_of: int | None = integer(None, 1, MAX_CHOICES)
    suffix: Any = neutral("")
    continue_final_message: Any = neutral(False)

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None and self.num_candidates > self.n:
            return 0  # to rank them by
        return self.logprobs

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def wants_echo(self) -> bool:
        return self.echo and not self.is_prefill

    @property
    def num_candidates(self) -> int:
        return self.best_of or self.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((k for k in wanted if k is not None), default=None)

    def check(self) -> None:
        super().check()
        if self.num_candidates < self.n:
            refuse("best_of", f"is {self.best_of}, below `n`, which is {self.n}")
        if self.stream and self.num_candidates > self.n:
            refuse(
                "best_of",
                f"is {self.best_of} with `n` {self.n}, and no ranking can be streamed; "
                "set `stream` to false or `best_of` to `n`",
            )

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt; a list of token ids is one prompt."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Validates the body of /v1/completions. Raises InvalidRequest naming the field."""
    parsed = validate(CompletionRequest, clean_request(body, CompletionRequest))
    parsed.check()
    return parsed

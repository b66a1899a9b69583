"""The body of /v1/completions."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from protocol.openai_fields import NEUTRAL_COMPLETION
from protocol.openai_requests import validate
from protocol.openai_sampling import GenerationRequest, clean_request

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 1024


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
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        raise ValueError("prompt")
    return ids


class CompletionRequest(GenerationRequest):
    endpoint = "/v1/completions"

    # Checked by hand: pydantic takes milliseconds for the token ids of a long prompt.
    prompt: Annotated[
        Any,
        BeforeValidator(_check_prompt),
        Field(
            description="a string, a list of strings, a list of token ids or a list of lists of "
            f"token ids, not empty, with at most {MAX_PROMPTS} prompts"
        ),
    ]
    logprobs: int | None = Field(None, ge=0, le=20, description="an integer from 0 to 20")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt; a list of token ids is one prompt."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Validates the body of /v1/completions. Raises InvalidRequest naming the field."""
    cleaned = clean_request(body, CompletionRequest, NEUTRAL_COMPLETION)
    parsed = validate(CompletionRequest, cleaned)
    parsed.check()
    return parsed

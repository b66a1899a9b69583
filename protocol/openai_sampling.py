"""What /v1/completions and /v1/chat/completions share: limits, sampling, stopping, streaming.

Limits that are choices of ours: temperature up to 2 (as OpenAI), below 1e-5 it is greedy; seed
from 0 to 2**63 - 1 (a negative one is refused, not read as "random"); top_k -1 and 0 are off;
at most 1,024 prompts and 64 stop strings a request. `max_tokens` and `max_completion_tokens` may
both be given: both are limits, so the smaller one counts.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from protocol.messages import SamplingParams
from protocol.openai_fields import NEUTRAL_STREAM_OPTIONS, drop_neutral
from protocol.openai_requests import Strict, clean

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
GREEDY_BELOW = 1e-5  # a softmax this cold overflows float32 and is greedy anyway
MAX_INT31 = 2**31 - 1

_A_LIMIT = f"an integer from 1 to {MAX_INT31}"
_A_SWITCH = "true or false"


def _as_stops(stop: Any) -> Any:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS:
        raise ValueError("stop")
    if not all(isinstance(item, str) and 0 < len(item) <= MAX_STOP_CHARS for item in stops):
        raise ValueError("stop")
    return tuple(stops)


Tokens = Annotated[int, Field(ge=1, le=MAX_INT31, description=_A_LIMIT)]
Switch = Annotated[bool, Field(description=_A_SWITCH)]
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_stops),
    Field(
        description=f"a string or a list of at most {MAX_STOPS} strings, none of them empty or "
        f"longer than {MAX_STOP_CHARS} characters"
    ),
]


class StreamOptions(Strict):
    include_usage: bool = False


class GenerationRequest(Strict):
    """What both endpoints share. A field's description ends its error message: "must be ..."."""

    endpoint: ClassVar[str]

    model: Annotated[str, Field(min_length=1, description="the name of a served model")]
    max_tokens: Tokens | None = Field(None, description=_A_LIMIT)
    max_completion_tokens: Tokens | None = Field(None, description=_A_LIMIT)
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: int = Field(
        0,
        ge=-1,
        le=MAX_INT31,
        description=f"an integer from -1 to {MAX_INT31} (-1 and 0 are off)",
    )
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    seed: int | None = Field(None, ge=0, lt=2**63, description="an integer from 0 to 2**63 - 1")
    stop: Stops = ()
    stream: Switch = False
    stream_options: StreamOptions | None = Field(
        None, description="an object with `include_usage`: true or false"
    )
    ignore_eos: Switch = False
    return_token_ids: Switch = False
    user: str | None = Field(None, description="a string")
    kv_transfer_params: dict[str, Any] | list[Any] | None = Field(
        None, description="an object, or a list of objects for several prompts"
    )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """The tokens that the client allows, or None when it named no limit."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)

    @property
    def num_logprobs(self) -> int | None:
        return None

    def check(self) -> None:
        """Refuses members that contradict each other; a subclass calls this one first.

        Raises:
            InvalidRequest: names both members.
        """

    def sampling(self, seed: int) -> SamplingParams:
        """How to draw the tokens; `seed` is the client's or one that the server drew."""
        return SamplingParams(
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=seed,
            num_logprobs=self.num_logprobs,
        )


def clean_request(
    body: dict[str, Any], model: type[GenerationRequest], neutral: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The members of `body` that `model` knows, those of `stream_options` looked at as well.

    Raises:
        InvalidRequest: a member is unknown, or not implemented and not neutral.
    """
    cleaned = clean(body, model, neutral)
    options = cleaned.get("stream_options")
    if isinstance(options, dict):
        known = frozenset(StreamOptions.model_fields)
        cleaned["stream_options"] = drop_neutral(
            options, known, NEUTRAL_STREAM_OPTIONS, "stream_options."
        )
    return cleaned

"""What /v1/completions and /v1/chat/completions share: limits, sampling, stopping, streaming.

Of `max_tokens` and `max_completion_tokens` the smaller counts. Every 64-bit seed, negative or not,
names one reproducible sequence of draws; none means "random".
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from protocol.cache_salt import MAX_CHARS
from protocol.messages import SamplingParams
from protocol.openai.requests import ModelName, Read, Strict, fault, neutral, refuse
from protocol.openai.structured import StructuredFields
from protocol.openai.truncation import max_prompt_tokens

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROBS = 20
MAX_CHOICES = 128
GREEDY_BELOW = 1e-5  # a softmax this cold overflows float32 and is greedy anyway
MAX_INT31 = 2**31 - 1
MIN_TOP_P = 1e-9  # leaves the likeliest token alone; a `top_p` of 0 is drawn with it


def integer(default: int | None, low: int, high: int) -> Any:
    """A field that is an integer in these bounds."""
    return Field(
        default, ge=low, le=high, description=f"an integer from {low} to {high}"
    )


def _listed(item: Any, least: int, most: int) -> Read:
    """A list, kept as a tuple."""
    size = Field(fail_fast=True, min_length=least, max_length=most)
    return Read(Annotated[list[item], size], tuple)


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_INT31)]
_TokenText = Annotated[
    str, Field(pattern="^[0-9]{1,10}$")
]  # JSON has no other keys than text
_Bias = Annotated[float, Field(ge=-100, le=100)]
_ListedBiases = Field(
    max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}
)

Penalty = Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")]
Temperature = Annotated[float, Field(ge=0, le=2, description="a number from 0 to 2")]
TopP = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")]
Text = Annotated[str | None, Field(description="a string")]
AnswerId = Annotated[
    str | None,
    Field(pattern="^[!-~]{1,128}$", description="1 to 128 visible ASCII characters"),
]
# What clients send to OpenAI's own servers, and no answer of ours depends on.
UnreadText = Annotated[
    str | None, Field(description="a string; it changes nothing here")
]
UNREAD = Field(None, exclude=True, description="anything; it changes nothing here")
Variables = Annotated[
    dict[str, Any], Field(description="an object of variables for the chat template")
]
CacheSalt = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=MAX_CHARS,
        description=f"a string of 1 to {MAX_CHARS} characters",
    ),
]
Switch = Annotated[bool, Field(description="true or false")]
Stops = Annotated[
    tuple[str, ...],
    Read(
        _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)],
        lambda stop: (stop,) if isinstance(stop, str) else tuple(stop),
    ),
    Field(
        description=f"a string or a list of at most {MAX_STOPS} strings, none of them empty or "
        f"longer than {MAX_STOP_CHARS} characters"
    ),
]
StopTokenIds = Annotated[
    tuple[int, ...],
    _listed(_TokenId, 0, MAX_STOP_TOKEN_IDS),
    Field(description=f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"),
]
AllowedTokenIds = Annotated[
    tuple[int, ...],
    _listed(_TokenId, 1, MAX_ALLOWED_TOKEN_IDS),
    Field(description=f"a list of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids"),
]
BadWords = Annotated[
    tuple[str, ...],
    _listed(_BadWord, 0, MAX_BAD_WORDS),
    Field(
        description=f"a list of at most {MAX_BAD_WORDS} strings, none of them empty or longer than "
        f"{MAX_BAD_WORD_CHARS} characters"
    ),
]
Biases = Annotated[
    dict[int, float],
    Read(
        Annotated[dict[_TokenText, _Bias], _ListedBiases],
        lambda biases: {int(token): bias for token, bias in biases.items()},
    ),
    Field(
        description=f"an object of at most {MAX_BIASES} members, each a token id (as text) with a "
        "number from -100 to 100"
    ),
]


class StreamOptions(Strict):
    include_usage: Switch = False
    continuous_usage_stats: Switch = False
    include_obfuscation: Switch = False  # no answer has any

    @model_validator(mode="after")
    def _shows_usage_where_it_is_included(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise fault(
                "continuous_usage_stats", "is true; it needs `include_usage`: true."
            )
        return self


class SamplingFields(Strict):
    """What a client may leave to the model's generation_config.json."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: int = Field(
        0,
        ge=-1,
        le=MAX_INT31,
        description=f"an integer from -1 to {MAX_INT31} (-1 and 0 are off)",
    )
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="a number above 0 and at most 100"
    )


class ShapingFields(SamplingFields):
    """What shapes an answer's tokens, and where it ends, at every endpoint that generates."""

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases = Field(default_factory=dict)
    stop: Stops = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: Switch = False
    min_tokens: int = integer(0, 0, MAX_INT31)
    allowed_token_ids: AllowedTokenIds = ()
    bad_words: BadWords = ()
    skip_special_tokens: Switch = True


class GenerationConfig(SamplingFields):
    """The values of that file; those that it does not have are not among `model_fields_set`."""

    max_new_tokens: int | None = integer(None, 1, MAX_INT31)


class CommonFields(Strict):
    """What all endpoints that generate share. A field's description ends its error message: "must
    be ..."."""

    model: ModelName = ""
    request_id: AnswerId = None
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="an integer from -2**63 to 2**63 - 1"
    )
    stream: Switch = False
    ignore_eos: Switch = False
    truncate_prompt_tokens: (
        Literal[-1] | Annotated[int, Field(ge=1, le=MAX_INT31)] | None
    ) = Field(
        None,
        description=f"an integer from 1 to {MAX_INT31}, or -1 for what fits the context",
    )
    priority: int = integer(0, -MAX_INT31 - 1, MAX_INT31)
    user: Text = None
    store: Switch = False  # nothing is
    service_tier: UnreadText = None
    safety_identifier: UnreadText = None
    prompt_cache_key: UnreadText = None
    prompt_cache_retention: UnreadText = None
    prompt_cache_options: Any = UNREAD
    cache_salt: CacheSalt = None
    kv_transfer_params: dict[str, Any] | list[Any] | None = Field(
        None, description="an object, or a list of objects for several prompts"
    )

    @property
    def is_prefill(self) -> bool:
        """Whether a proxy asks for a prefill: the limits of the client's own are not known."""
        params = self.kv_transfer_params
        return isinstance(params, dict) and params.get("do_remote_decode") is True

    def check(self) -> None:
        is_given = "stream_options" in self.model_fields_set
        if is_given and not self.stream and not self.is_prefill:
            refuse("stream_options", "needs `stream`: true; set that or leave it out")


class GenerationRequest(ShapingFields, StructuredFields, CommonFields):
    """What completions and chats share."""

    # The fields with the prompt, the limit and the number of logprobs, for error messages.
    prompt_field: ClassVar[str] = "prompt"
    usual_limit: ClassVar[str] = "max_completion_tokens"
    logprobs_field: ClassVar[str] = "logprobs"
    streams_logprobs_once: ClassVar[bool] = (
        True  # the end of a stream does not repeat them
    )

    max_tokens: int | None = integer(None, 1, MAX_INT31)
    max_completion_tokens: int | None = integer(None, 1, MAX_INT31)
    stream_options: StreamOptions = Field(
        StreamOptions(), description="an object with `include_usage`: true or false"
    )
    n: int = integer(1, 1, MAX_CHOICES)
    prompt_logprobs: int | None = integer(None, 0, MAX_LOGPROBS)
    return_tokens_as_token_ids: Switch = False
    return_token_ids: Switch = False

    best_of: Any = neutral(1)
    echo: Any = neutral(False)
    length_penalty: Any = neutral(1.0)
    typical_p: Any = neutral(1.0)
    top_a: Any = neutral(0.0)
    use_beam_search: Any = neutral(False)
    early_stopping: Any = neutral(False)
    return_hidden_states: Any = neutral(False)
    no_stop_trim: Any = neutral(False)
    spaces_between_special_tokens: Any = neutral(True)
    detokenize: Any = neutral(True)
    metadata: Annotated[None, Read(dict[str, Any], lambda _: None)] = Field(
        None, exclude=True, description="an object of strings; it changes nothing here"
    )
    include_reasoning: Any = neutral(True)
    separate_reasoning: Any = neutral(True)
    stream_reasoning: Any = neutral(True)

    @property
    def include_usage(self) -> bool:
        return self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.include_usage and self.stream_options.continuous_usage_stats

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer shows its tokens' log-probabilities."""
        return self.num_logprobs is not None

    @property
    def wants_echo(self) -> bool:
        """Whether the prompt is a part of the answer's text."""
        return bool(self.echo) and not self.is_prefill

    @property
    def num_candidates(self) -> int:
        """How many continuations of each prompt are drawn; the best `n` of them are returned."""
        return self.best_of or self.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens are wanted at each position of the prompt."""
        return self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """The tokens that the client allows, or None when it named no limit."""
        given = [
            n for n in (self.max_tokens, self.max_completion_tokens) if n is not None
        ]
        return min(given, default=None)

    @property
    def drops_oldest_messages(self) -> bool:
        """Whether a prompt that is too long loses messages rather than tokens."""
        return False

    def max_prompt_tokens(self, max_model_len: int) -> int | None:
        """The tokens that each prompt is cut to, in a context of `max_model_len` tokens; None if it
        is not to be cut."""
        limit = self.truncate_prompt_tokens
        if limit is None and not self.drops_oldest_messages:
            return None
        if limit is None or limit < 0:
            return max_prompt_tokens(max_model_len, self.token_limit)
        return limit

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` came in, for error messages."""
        is_of_old_name = (
            self.max_tokens is not None and self.max_tokens == self.token_limit
        )
        return "max_tokens" if is_of_old_name else self.usual_limit

    def without_inputs(self) -> Self:
        """This request once its prompts are token ids, without what only they depended on: an
        answer may take minutes, and some of that takes far more memory than its text."""
        return self

    def with_defaults(self, config: GenerationConfig) -> Self:
        """This request with the model's own values for what the client left out."""
        own = config.model_fields_set & SamplingFields.model_fields.keys()
        left_out = own - self.model_fields_set
        return self.model_copy(
            update={name: getattr(config, name) for name in left_out}
        )

    def check(self) -> None:
        """As of any body; a subclass calls this first."""
        super().check()
        _ = self.guided
        if self.stream and self.prompt_logprobs is not None:
            refuse(
                "prompt_logprobs",
                "cannot be streamed; set `stream` to false or leave it out",
            )
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit and not self.is_prefill:
            problem = (
                f"is {self.min_tokens}, above `{self.limit_field}`, which is {limit}"
            )
            refuse("min_tokens", problem)

    def sampling(self, seed: int) -> SamplingParams:
        """How to draw the tokens; `seed` is the client's or one that the server drew."""
        shared = type(self).model_fields.keys() & set(SamplingParams.__struct_fields__)
        own = {
            "temperature": self.temperature
            if self.temperature >= GREEDY_BELOW
            else 0.0,
            "top_p": self.top_p or MIN_TOP_P,
            "top_k": max(self.top_k, 0),
            "seed": seed,
            "num_logprobs": self.num_logprobs,
            "grammar": self.guided.grammar if self.guided else None,
        }
        return SamplingParams(**{name: getattr(self, name) for name in shared} | own)

"""The request fields that the generating endpoints share.

The fields set limits, sampling, stop conditions and streaming. If a request has both
`max_tokens` and `max_completion_tokens`, the smaller value counts. Every 64-bit seed,
positive or negative, identifies a reproducible sequence of samples. If a request has no
seed, the server chooses a random seed.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from protocol.cache_salt import MAX_CHARS
from protocol.messages import SamplingParams
from protocol.openai.prediction import PredictionField
from protocol.openai.prompt_cache import (
    RETENTION_S,
    KVHints,
    PromptCacheKey,
    PromptCacheRetention,
)
from protocol.openai.requests import ModelName, ReadFrom, Strict, fault, neutral, refuse
from protocol.openai.structured import StructuredFields
from protocol.openai.truncation import max_prompt_tokens

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
# Sampling is greedy if the temperature is below this value. Logits divided by such a
# temperature could overflow float32, and the samples would be greedy anyway.
GREEDY_BELOW = 1e-5
MAX_INT31 = 2**31 - 1
MIN_TOP_P = 1e-9  # replaces a `top_p` of 0, so that only the most likely token remains

_THRESHOLD = (
    "a number from 0 to 1: the share of the prompt that must be cached or pulled, else "
    "the answer is empty with the finish_reason cache_threshold"
)


def integer(default: int | None, low: int, high: int) -> Any:
    """Returns a field for an integer from `low` to `high`."""
    return Field(
        default, ge=low, le=high, description=f"an integer from {low} to {high}"
    )


def _tuple_from_list(item: Any, min_length: int, max_length: int) -> ReadFrom:
    """Returns the annotation of a field that is a list in requests and a tuple in
    Python.
    """
    size = Field(fail_fast=True, min_length=min_length, max_length=max_length)
    return ReadFrom(Annotated[list[item], size], tuple)


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_INT31)]
# A token id as the key of a JSON object, which must be a string.
_TokenIdKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_BiasesField = Field(
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
# Fields that change nothing in Baton, such as those that only OpenAI's servers use.
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
    ReadFrom(
        _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)],
        lambda stop: (stop,) if isinstance(stop, str) else tuple(stop),
    ),
    Field(
        description=f"a string or a list of at most {MAX_STOPS} strings, none of them "
        f"empty or longer than {MAX_STOP_CHARS} characters"
    ),
]
StopTokenIds = Annotated[
    tuple[int, ...],
    _tuple_from_list(_TokenId, 0, MAX_STOP_TOKEN_IDS),
    Field(description=f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"),
]
AllowedTokenIds = Annotated[
    tuple[int, ...],
    _tuple_from_list(_TokenId, 1, MAX_ALLOWED_TOKEN_IDS),
    Field(description=f"a list of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids"),
]
BadWords = Annotated[
    tuple[str, ...],
    _tuple_from_list(_BadWord, 0, MAX_BAD_WORDS),
    Field(
        description=f"a list of at most {MAX_BAD_WORDS} strings, none of them empty or "
        f"longer than {MAX_BAD_WORD_CHARS} characters"
    ),
]
Biases = Annotated[
    dict[int, float],
    ReadFrom(
        Annotated[dict[_TokenIdKey, _Bias], _BiasesField],
        lambda biases: {int(token): bias for token, bias in biases.items()},
    ),
    Field(
        description=f"an object of at most {MAX_BIASES} members, each a token id (as "
        "text) with a number from -100 to 100"
    ),
]


class StreamOptions(Strict):
    include_usage: Switch = False
    continuous_usage_stats: Switch = False
    include_obfuscation: Switch = False  # accepted, but responses are not obfuscated

    @model_validator(mode="after")
    def _check_includes_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise fault(
                "continuous_usage_stats", "is true; it needs `include_usage`: true."
            )
        return self


class SamplingFields(Strict):
    """The fields with defaults that may come from the model's
    generation_config.json.
    """

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


class SamplingAndStopFields(SamplingFields):
    """Fields for sampling and stopping. /v1/messages does not have all of them."""

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
    """The values of generation_config.json.

    `model_fields_set` has the names of the values that the file contains.
    """

    max_new_tokens: int | None = integer(None, 1, MAX_INT31)


class CommonFields(Strict):
    """Fields that all generating endpoints have in addition to SamplingFields."""

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
        description=f"an integer from 1 to {MAX_INT31}, or -1 for as many tokens as "
        "fit into the context",
    )
    priority: int = integer(0, -MAX_INT31 - 1, MAX_INT31)
    user: Text = None
    store: Switch = False  # responses are never stored
    service_tier: UnreadText = None
    safety_identifier: UnreadText = None
    prompt_cache_key: PromptCacheKey = None
    prompt_cache_retention: PromptCacheRetention = None
    prompt_cache_options: Any = UNREAD
    cache_salt: CacheSalt = None
    kv_hints: KVHints = None
    kv_transfer_params: dict[str, Any] | list[Any] | None = Field(
        None, description="an object, or a list of objects for several prompts"
    )

    @property
    def is_prefill(self) -> bool:
        """Whether this request is a prefill leg.

        A proxy changes fields of a prefill leg, such as the token limit. Therefore a
        prefill leg may have fields that contradict each other.
        """
        params = self.kv_transfer_params
        return isinstance(params, dict) and params.get("do_remote_decode") is True

    @property
    def prompt_retention_s(self) -> int | None:
        """Seconds for which the client asks to keep the whole prompt, or None."""
        retention = self.prompt_cache_retention
        return None if retention is None else RETENTION_S[retention]

    def check(self) -> None:
        is_given = "stream_options" in self.model_fields_set
        if is_given and not self.stream and not self.is_prefill:
            refuse(
                "stream_options",
                "needs `stream`: true; set `stream`, or leave `stream_options` out",
            )


class GenerationRequest(SamplingAndStopFields, StructuredFields, CommonFields):
    """The fields that completions and chats share."""

    # Names, for error messages, of the fields with the prompt, the token limit and the
    # number of logprobs.
    prompt_field: ClassVar[str] = "prompt"
    usual_limit_field: ClassVar[str] = "max_completion_tokens"
    logprobs_field: ClassVar[str] = "logprobs"
    # False if events at the end of a stream repeat the logprobs of earlier events.
    streams_logprobs_once: ClassVar[bool] = True
    # True if a token limit that does not fit the context is lowered, not refused.
    limit_may_exceed_context: ClassVar[bool] = False

    max_tokens: int | None = integer(None, 1, MAX_INT31)
    max_completion_tokens: int | None = integer(None, 1, MAX_INT31)
    stream_options: StreamOptions = Field(
        StreamOptions(), description="an object with `include_usage`: true or false"
    )
    n: int = integer(1, 1, MAX_CHOICES)
    prediction: PredictionField = None
    prompt_logprobs: int | None = integer(None, 0, MAX_TOP_LOGPROBS)
    cache_hit_threshold: float = Field(0.0, ge=0, le=1, description=_THRESHOLD)
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
    metadata: Annotated[None, ReadFrom(dict[str, Any], lambda _: None)] = Field(
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
        """Whether every chunk of a stream must have the usage so far."""
        return self.include_usage and self.stream_options.continuous_usage_stats

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client requested the logprobs of the answer's tokens."""
        return self.num_logprobs is not None

    @property
    def wants_echo(self) -> bool:
        """Whether the text of the response must begin with the prompt."""
        return bool(self.echo) and not self.is_prefill

    @property
    def num_candidates(self) -> int:
        """Number of choices to generate per prompt; the best `n` are returned."""
        return self.best_of or self.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of top logprobs to return at each position of the prompt; None: no
        prompt logprobs.
        """
        return self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """The client's limit on output tokens, or None."""
        limits = (self.max_tokens, self.max_completion_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def drops_oldest_messages(self) -> bool:
        """Whether a prompt that is too long loses its oldest messages.

        If False, a prompt that is too long loses its first tokens if the request sets
        `truncate_prompt_tokens`. Without this field, the request is refused.
        """
        return False

    def truncation_length(self, max_model_len: int) -> int | None:
        """Returns the length that prompts are truncated to, in tokens.

        Args:
            max_model_len: Length of the context in tokens.

        Returns:
            None if prompts are not truncated.
        """
        limit = self.truncate_prompt_tokens
        if limit is None and not self.drops_oldest_messages:
            return None
        if limit is None or limit < 0:
            return max_prompt_tokens(max_model_len, self.token_limit)
        return limit

    @property
    def limit_field(self) -> str:
        """Name, for error messages, of the field that sets the `token_limit`.

        If the request has no limit, this is the field in which clients usually set it.
        """
        if self.max_tokens is not None and self.max_tokens == self.token_limit:
            return "max_tokens"
        return self.usual_limit_field

    def without_prompt_fields(self) -> Self:
        """Returns this request without its `prediction`.

        In a chat, `chat_template_kwargs` and most messages are left out, too. Parsed
        messages take much more memory than their text, and generating the response may
        take minutes.
        """
        return self.model_copy(update={"prediction": None})

    def with_defaults(self, config: GenerationConfig) -> Self:
        """Returns this request with the model's defaults for absent fields."""
        defaults = config.model_fields_set & SamplingFields.model_fields.keys()
        left_out = defaults - self.model_fields_set
        return self.model_copy(
            update={name: getattr(config, name) for name in left_out}
        )

    def check(self) -> None:
        """Raises InvalidRequest if fields contradict each other.

        A subclass calls this method before its own checks.
        """
        super().check()
        # This property raises InvalidRequest if several fields set a grammar.
        _ = self.guided_decoding
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

    def sampling_params(self, seed: int) -> SamplingParams:
        """Returns the engine's sampling parameters.

        Args:
            seed: The seed of the client, or a random seed that the server has chosen.
        """
        shared = type(self).model_fields.keys() & set(SamplingParams.__struct_fields__)
        is_greedy = self.temperature < GREEDY_BELOW
        values = {
            "temperature": 0.0 if is_greedy else self.temperature,
            "top_p": self.top_p or MIN_TOP_P,
            "top_k": max(self.top_k, 0),
            "seed": seed,
            "num_logprobs": self.num_logprobs,
            "grammar": self.guided_decoding.grammar if self.guided_decoding else None,
        }
        return SamplingParams(**{name: getattr(self, name) for name in shared} | values)

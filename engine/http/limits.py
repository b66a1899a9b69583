"""Checks whether a request fits this server's model, vocabulary, context and batch."""

from collections.abc import Collection, Sequence
from typing import Any

from engine.text.grammar_compile import MAX_GRAMMAR_CHARS
from protocol.errors import ContextLengthExceeded, ModelNotFound
from protocol.messages import Grammar
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import DEFAULT_COMPLETION_TOKENS
from protocol.openai.requests import refuse
from protocol.openai.sampling import GenerationRequest
from protocol.openai.structured import GuidedDecoding
from protocol.openai.tools import schema_text
from protocol.short_repr import short_repr

# Maximum total number of tokens in the sequences of one request, including the prompts.
# The limit is higher if --max-num-seqs sequences of full context length have more
# tokens than this number.
MAX_REQUEST_TOKENS = 1 << 22
# A shorter choice counts as this many tokens, because even a short choice takes memory.
MIN_CHOICE_TOKENS = 256
# Maximum numbers of prompt-token logprobs in one response. Each takes 100 bytes.
# Streams have a lower limit, because the event loop encodes their logprobs, at a few
# microseconds each. A thread encodes the logprobs of other responses, except those in
# kv_transfer_params.
MAX_PROMPT_LOGPROBS = 1 << 19
MAX_STREAMED_LOGPROBS = 1 << 15
# Maximum number of output-token logprobs in one response. This many take
# about 0.3 GB.
MAX_OUTPUT_LOGPROBS = 1 << 23


def set_default_model(members: dict[str, Any], served: str) -> None:
    """Set `model` in a body that lacks it; otherwise check the body's `model`.

    Args:
        members: the members of the body.
        served: the name of the model that this server serves.

    Raises:
        ModelNotFound: the body names a model that this server does not serve.
    """
    name = members.get("model")
    if name is None:
        members["model"] = served
    elif isinstance(name, str) and name not in ("", served):
        raise ModelNotFound(
            f"`model` is {short_repr(name, 200)}; this server serves "
            f"{short_repr(served, 200)}.",
            param="model",
        )


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if there are no ids or an id is not in the vocabulary."""
    if not ids:
        refuse(param, "has no tokens; send some text")
    smallest = min(ids)
    extreme = smallest if smallest < 0 else max(ids)
    if not 0 <= extreme < vocab_size:
        refuse(param, f"has the token id {extreme}; ids are from 0 to {vocab_size - 1}")


def check_against_server(
    parsed: GenerationRequest, vocab_size: int, max_num_seqs: int
) -> None:
    """Raise InvalidRequest for unknown token ids and for too many choices.

    Args:
        vocab_size: the number of token ids that the model has.
        max_num_seqs: the number of sequences that the server runs at once.
    """
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if ids := getattr(parsed, name):
            check_token_ids(ids, vocab_size, name)
    if parsed.num_candidates > max_num_seqs:
        refuse(
            "n" if parsed.n > max_num_seqs else "best_of",
            f"is {parsed.num_candidates} and this server runs {max_num_seqs} sequences "
            f"at once (--max-num-seqs); ask for at most {max_num_seqs}",
        )


def guided_decodings(parsed: GenerationRequest) -> list[GuidedDecoding]:
    """Return the grammars that the server must compile before it accepts a request.

    The last grammar is that of the output. If `tool_choice` is "required", the schemas
    of all tools precede it, so that an error names the tool with the wrong schema. If
    the model need not call a tool, the schemas are not enforced, so they are left out.

    Raises:
        InvalidRequest: the schemas of the tools are too long.
    """
    guided = [] if parsed.guided_decoding is None else [parsed.guided_decoding]
    if not isinstance(parsed, ChatRequest) or parsed.toolset.mode != "required":
        return guided
    tools = parsed.toolset
    schemas = [
        GuidedDecoding(
            Grammar("json_schema", schema_text(tool)), tools.schema_path(index)
        )
        for index, tool in enumerate(tools.offered)
    ]
    num_chars = sum(len(schema.grammar.text) for schema in schemas)
    if num_chars > MAX_GRAMMAR_CHARS:
        refuse(
            "tools",
            f"have {num_chars} characters of schemas, the limit is "
            f"{MAX_GRAMMAR_CHARS}; send fewer or simpler tools",
        )
    return schemas + guided


def context_length_error(
    num_tokens: int, max_model_len: int, param: str, qualifier: str = ""
) -> Exception:
    """Return the error for a prompt that does not fit the context.

    The message begins like OpenAI's message, because client libraries search for that
    beginning.

    Args:
        param: the request's field that has the prompt.
        qualifier: text before the number of tokens, such as "at least ".
    """
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens and the prompt "
        f"is too long: it has {qualifier}{num_tokens}. Shorten it to at most "
        f"{max_model_len - 1} tokens.",
        param=param,
    )


def output_token_limit(
    parsed: GenerationRequest,
    num_prompt_tokens: int,
    max_model_len: int,
    model_limit: int | None = None,
) -> int:
    """Return how many tokens may be generated after a prompt.

    Args:
        model_limit: `max_new_tokens` in the model's generation_config.json, which
            applies to requests without a limit; None if the file does not set it.

    Raises:
        ContextLengthExceeded: the context is too short for the prompt, or for the
            prompt and the request's `max_tokens`.
        InvalidRequest: the request has no `max_tokens`, and its `min_tokens` exceeds
            the default limit.
    """
    free_tokens = max_model_len - num_prompt_tokens
    requested = parsed.token_limit
    # A prompt may fill the context only if no token is generated after it.
    if free_tokens < 0 or (free_tokens == 0 and requested != 0):
        raise context_length_error(
            num_prompt_tokens, max_model_len, parsed.prompt_field
        )
    if requested is None:
        is_chat = isinstance(parsed, ChatRequest)
        default = free_tokens if is_chat else DEFAULT_COMPLETION_TOKENS
        limit = min(model_limit or default, free_tokens)
        if parsed.min_tokens > limit:
            field = parsed.limit_field
            refuse(
                "min_tokens",
                f"is {parsed.min_tokens}, but without `{field}` at most {limit} tokens "
                f"are generated; lower `min_tokens` or set `{field}`",
            )
        return limit
    if requested > free_tokens and parsed.limit_may_exceed_context:
        return free_tokens
    if requested > free_tokens:
        field = parsed.limit_field
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. The "
            f"prompt has {num_prompt_tokens} tokens and `{field}` asks for {requested} "
            f"more; lower `{field}` to at most {free_tokens} or shorten the prompt.",
            param=field,
        )
    return requested


def check_logprobs(
    parsed: GenerationRequest, num_prompt_tokens: int, num_output_tokens: int
) -> None:
    """Raise InvalidRequest if a response could have too many logprobs.

    Args:
        num_prompt_tokens: the sum of the lengths of all prompts, in tokens.
        num_output_tokens: the maximum number of generated tokens of all choices.
    """
    _check_prompt_logprobs(parsed, num_prompt_tokens)
    if parsed.num_logprobs is None:
        return
    num_logprobs = num_output_tokens * (1 + parsed.num_logprobs)
    is_streamed_once = parsed.stream and parsed.streams_logprobs_once
    if num_logprobs > MAX_OUTPUT_LOGPROBS and not is_streamed_once:
        alternative = ", or stream it" if parsed.streams_logprobs_once else ""
        refuse(
            parsed.logprobs_field,
            f"asks for up to {num_logprobs} logprobs of generated tokens; the limit is "
            f"{MAX_OUTPUT_LOGPROBS} in a response; lower `n` or `{parsed.limit_field}`"
            f"{alternative}",
        )


def _check_prompt_logprobs(parsed: GenerationRequest, num_prompt_tokens: int) -> None:
    num_per_token = parsed.num_prompt_logprobs
    if num_per_token is None:
        return
    num_logprobs = num_prompt_tokens * (1 + num_per_token) * parsed.num_candidates
    limit = MAX_STREAMED_LOGPROBS if parsed.stream else MAX_PROMPT_LOGPROBS
    if num_logprobs > limit:
        field = "prompt_logprobs"
        if parsed.prompt_logprobs is None:
            field = parsed.logprobs_field
        response = "a stream" if parsed.stream else "a response"
        refuse(
            field,
            f"asks for {num_logprobs} logprobs of prompt tokens; the limit is {limit} "
            f"in {response}; send fewer or shorter prompts at once",
        )


def check_num_tokens(
    parsed: GenerationRequest,
    lengths: Sequence[int],
    max_model_len: int,
    max_num_seqs: int,
) -> None:
    """Raise InvalidRequest if a request could have too many tokens.

    The limit is MAX_REQUEST_TOKENS, or the tokens of `max_num_seqs` sequences of full
    length, whichever is larger.

    Args:
        lengths: for each prompt, its number of tokens plus the maximum number of tokens
            in one choice.
    """
    num_choices = parsed.num_candidates
    size = num_choices * sum(max(length, MIN_CHOICE_TOKENS) for length in lengths)
    batch_tokens = max_num_seqs * max(max_model_len, MIN_CHOICE_TOKENS)
    limit = max(MAX_REQUEST_TOKENS, batch_tokens)
    if size > limit:
        field = parsed.prompt_field
        if num_choices > parsed.n:
            field = "best_of"
        elif num_choices > 1:
            field = "n"
        refuse(
            field,
            f"asks for too many tokens: {len(lengths)} prompts with {num_choices} "
            f"choices each may have {size} tokens in all, where a choice counts as "
            f"{MIN_CHOICE_TOKENS} tokens at least; the limit is {limit} tokens; send "
            "fewer prompts or ask for fewer choices",
        )

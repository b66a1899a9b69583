"""Checks a request against this server's model, vocabulary, context and batch."""

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

# Tokens of all sequences of one request, prompts and outputs. As many tokens as
# --max-num-seqs sequences of the whole context have are always accepted.
MAX_REQUEST_TOKENS = 1 << 22
# A choice counts as so many tokens at least: it takes some memory even if it is short.
MIN_CHOICE_TOKENS = 256
# Logprobs of prompt tokens in one answer. Each takes 100 bytes, and in a stream or in a
# reference to KV a few microseconds of the event loop. Another thread writes an answer
# that is no stream.
MAX_PROMPT_LOGPROBS = 1 << 19
MAX_STREAMED_LOGPROBS = 1 << 15
MAX_LOGPROBS = 1 << 23  # of output tokens in one answer: about 0.3 GB


def set_default_model(members: dict[str, Any], served: str) -> None:
    """Set `model` in a body that leaves it out.

    Raises:
        ModelNotFound: the body names another model.
    """
    name = members.get("model")
    if name is None:
        members["model"] = served
    elif isinstance(name, str) and name not in ("", served):
        raise ModelNotFound(
            f"`model` is {short_repr(name, 200)}; this server has "
            f"{short_repr(served, 200)}.",
            param="model",
        )


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest for an empty prompt and for ids beyond the vocabulary."""
    if not ids:
        refuse(param, "has no tokens; send some text")
    smallest = min(ids)
    extreme = smallest if smallest < 0 else max(ids)
    if not 0 <= extreme < vocab_size:
        refuse(param, f"has the token id {extreme}; ids are from 0 to {vocab_size - 1}")


def check_against_server(
    parsed: GenerationRequest, vocab_size: int, max_num_seqs: int
) -> None:
    """Raise InvalidRequest for what this model or this server cannot do."""
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
    """Return the grammars of a request that the server must try.

    They are the grammar of the output and, before it, the schema of each tool that must
    be called, so that an error names the tool. Other tools' schemas are not enforced,
    so they are not tried.

    Raises:
        InvalidRequest: the schemas of the tools are too long.
    """
    guided = [] if parsed.guided is None else [parsed.guided]
    if not isinstance(parsed, ChatRequest) or parsed.toolset.mode != "required":
        return guided
    tools = parsed.toolset
    schemas = [
        GuidedDecoding(Grammar("json_schema", schema_text(tool)), tools.field(at))
        for at, tool in enumerate(tools.offered)
    ]
    num_chars = sum(len(schema.grammar.text) for schema in schemas)
    if num_chars > MAX_GRAMMAR_CHARS:
        refuse(
            "tools",
            f"have {num_chars} characters of schemas, at most {MAX_GRAMMAR_CHARS} are "
            "taken; send fewer or simpler ones",
        )
    return schemas + guided


def context_length_error(
    num_tokens: int, max_model_len: int, param: str, qualifier: str = ""
) -> Exception:
    """Return the error for a prompt beyond the context.

    Client libraries look for its words.

    Args:
        qualifier: text before the number of tokens, such as "at least ".
    """
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens and the prompt "
        f"is too long: it has {qualifier}{num_tokens}. Shorten it to at most "
        f"{max_model_len - 1} tokens.",
        param=param,
    )


def token_limit(
    parsed: GenerationRequest,
    num_prompt_tokens: int,
    max_model_len: int,
    model_limit: int | None = None,
) -> int:
    """Return how many tokens a prompt may generate.

    Args:
        model_limit: the model's own limit for a request without one.

    Raises:
        ContextLengthExceeded: the prompt does not fit the context, or not together with
            the request's limit.
        InvalidRequest: `min_tokens` is above the limit that the request leaves out.
    """
    free_tokens = max_model_len - num_prompt_tokens
    requested = parsed.token_limit
    # A prompt that is only scored may fill the context.
    if free_tokens < 0 or (free_tokens == 0 and requested != 0):
        raise context_length_error(
            num_prompt_tokens, max_model_len, parsed.prompt_field
        )
    if requested is None:
        is_chat = isinstance(parsed, ChatRequest)
        default = free_tokens if is_chat else DEFAULT_COMPLETION_TOKENS
        limit = min(model_limit or default, free_tokens)
        if parsed.min_tokens > limit:
            refuse(
                "min_tokens",
                f"is {parsed.min_tokens}, and without `max_tokens` at most {limit} "
                "tokens are generated here; lower the one or set the other",
            )
        return limit
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
    """Raise InvalidRequest for more logprobs than one answer may have.

    Args:
        num_prompt_tokens: tokens of all prompts.
        num_output_tokens: the most tokens that the answer may have.
    """
    _check_prompt_logprobs(parsed, num_prompt_tokens)
    if parsed.num_logprobs is None:
        return
    num_logprobs = num_output_tokens * (1 + parsed.num_logprobs)
    is_streamed_once = parsed.stream and parsed.streams_logprobs_once
    if num_logprobs > MAX_LOGPROBS and not is_streamed_once:
        alternative = ", or stream it" if parsed.streams_logprobs_once else ""
        refuse(
            parsed.logprobs_field,
            f"asks for up to {num_logprobs} logprobs of drawn tokens, an answer has "
            f"{MAX_LOGPROBS} at most; lower `n` or `{parsed.limit_field}`{alternative}",
        )


def _check_prompt_logprobs(parsed: GenerationRequest, num_prompt_tokens: int) -> None:
    per_token = parsed.num_prompt_logprobs
    if per_token is None:
        return
    num_logprobs = num_prompt_tokens * (1 + per_token) * parsed.num_candidates
    limit = MAX_STREAMED_LOGPROBS if parsed.stream else MAX_PROMPT_LOGPROBS
    if num_logprobs > limit:
        field = "prompt_logprobs"
        if parsed.prompt_logprobs is None:
            field = parsed.logprobs_field
        answer = "a stream" if parsed.stream else "an answer"
        refuse(
            field,
            f"asks for {num_logprobs} logprobs of prompt tokens, {answer} has {limit} "
            "at most; send less at once",
        )


def check_size(
    parsed: GenerationRequest,
    lengths: Sequence[int],
    max_model_len: int,
    max_num_seqs: int,
) -> None:
    """Raise InvalidRequest for more tokens than one request may have.

    Args:
        lengths: the tokens of each prompt with one output.
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
            f"is too much: {len(lengths)} prompts with {num_choices} choices each may "
            f"have {size} tokens in all, and a choice counts as {MIN_CHOICE_TOKENS} at "
            f"least; ask for at most {limit} at once",
        )

"""What a request may ask of this server: its model, vocabulary, context and batch."""

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

# Of all sequences of one request, prompts and outputs. What --max-num-seqs sequences of the whole
# context have is never too much.
MAX_REQUEST_TOKENS = 1 << 22
MIN_CHOICE_TOKENS = (
    256  # which a choice counts as: it takes some memory however short it is
)
# Of prompts' tokens, in one answer: each takes 100 bytes, and a few microseconds of the event loop
# in a stream, or in a reference. What is told whole, another thread writes.
MAX_PROMPT_LOGPROBS = 1 << 19
MAX_STREAMED_LOGPROBS = 1 << 15
MAX_LOGPROBS = 1 << 23  # of drawn tokens, in one answer: some 0.3 GB


def settle_model(members: dict[str, Any], served: str) -> None:
    """Names the model in a body that leaves it out. Raises ModelNotFound for another one."""
    name = members.get("model")
    if name is None:
        members["model"] = served
    elif isinstance(name, str) and name not in ("", served):
        raise ModelNotFound(
            f"`model` is {short_repr(name, 200)}; this server has {short_repr(served, 200)}.",
            param="model",
        )


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for an empty prompt and for ids that the model does not have."""
    if not ids:
        refuse(param, "has no tokens; send some text")
    wrong = least if (least := min(ids)) < 0 else max(ids)
    if not 0 <= wrong < vocab_size:
        refuse(param, f"has the token id {wrong}; ids are from 0 to {vocab_size - 1}")


def check_against_server(
    parsed: GenerationRequest, vocab_size: int, max_num_seqs: int
) -> None:
    """Raises InvalidRequest for what this model or this server cannot do."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if ids := getattr(parsed, name):
            check_token_ids(ids, vocab_size, name)
    if parsed.num_candidates > max_num_seqs:
        param = "n" if parsed.n > max_num_seqs else "best_of"
        told = f"is {parsed.num_candidates} and this server runs {max_num_seqs} sequences at once"
        refuse(param, f"{told} (--max-num-seqs); ask for at most {max_num_seqs}")


def guided_decodings(parsed: GenerationRequest) -> list[GuidedDecoding]:
    """What the output must match, and before it the schema of each tool that must be called, so
    that an error names the tool. Other tools' schemas are not looked at: nothing enforces them.

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
        told = f"have {num_chars} characters of schemas, at most {MAX_GRAMMAR_CHARS} are taken"
        refuse("tools", f"{told}; send fewer or simpler ones")
    return schemas + guided


def too_long(
    num_tokens: int, max_model_len: int, param: str, more: str = ""
) -> Exception:
    """The error for a prompt beyond the context, in words that client libraries look for."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens and the prompt is too "
        f"long: it has {more}{num_tokens}. Shorten it to at most {max_model_len - 1} tokens.",
        param=param,
    )


def token_limit(
    parsed: GenerationRequest,
    num_prompt_tokens: int,
    max_model_len: int,
    unasked: int | None = None,
) -> int:
    """How many tokens a prompt may generate.

    Args:
        unasked: the model's own limit for a request without one.

    Raises:
        ContextLengthExceeded: the prompt, or it and the limit the client asked for, do not fit.
        InvalidRequest: `min_tokens` is above the limit that the client did not ask for.
    """
    room = max_model_len - num_prompt_tokens
    asked = parsed.token_limit
    if room < 1 and (
        asked != 0 or room < 0
    ):  # to be scored only, a prompt may fill the context
        raise too_long(num_prompt_tokens, max_model_len, parsed.prompt_field)
    if asked is None:
        usual = room if isinstance(parsed, ChatRequest) else DEFAULT_COMPLETION_TOKENS
        limit = min(unasked or usual, room)
        if parsed.min_tokens > limit:
            told = f"is {parsed.min_tokens}, and without `max_tokens` at most {limit} tokens are"
            refuse(
                "min_tokens", f"{told} generated here; lower the one or set the other"
            )
        return limit
    if asked > room:
        field = parsed.limit_field
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. The prompt has "
            f"{num_prompt_tokens} tokens and `{field}` asks for {asked} more; lower "
            f"`{field}` to at most {room} or shorten the prompt.",
            param=field,
        )
    return asked


def check_logprobs(parsed: GenerationRequest, num_tokens: int, num_drawn: int) -> None:
    """Raises InvalidRequest for more logprobs than one answer has, of prompts of so many tokens, or
    of so many drawn ones where it is told whole."""
    wanted = parsed.num_prompt_logprobs
    size = 0 if wanted is None else num_tokens * (1 + wanted) * parsed.num_candidates
    limit, where = MAX_PROMPT_LOGPROBS, "an answer"
    if parsed.stream:
        limit, where = MAX_STREAMED_LOGPROBS, "a stream"
    if size > limit:
        param = (
            parsed.logprobs_field
            if parsed.prompt_logprobs is None
            else "prompt_logprobs"
        )
        told = f"asks for {size} logprobs of prompt tokens, {where} has {limit} at most"
        refuse(param, f"{told}; send less at once")
    size = 0 if parsed.num_logprobs is None else num_drawn * (1 + parsed.num_logprobs)
    if size > MAX_LOGPROBS and not (parsed.stream and parsed.streams_logprobs_once):
        other = ", or stream it" if parsed.streams_logprobs_once else ""
        most = f"an answer has {MAX_LOGPROBS} at most; lower `n` or `{parsed.limit_field}`{other}"
        refuse(
            parsed.logprobs_field,
            f"asks for up to {size} logprobs of drawn tokens, {most}",
        )


def check_size(
    parsed: GenerationRequest,
    lengths: Sequence[int],
    max_model_len: int,
    max_num_seqs: int,
) -> None:
    """Raises InvalidRequest for more tokens than one request may have.

    Args:
        lengths: of each prompt with one output.
    """
    choices = parsed.num_candidates
    size = choices * sum(max(length, MIN_CHOICE_TOKENS) for length in lengths)
    limit = max(
        MAX_REQUEST_TOKENS, max_num_seqs * max(max_model_len, MIN_CHOICE_TOKENS)
    )
    if size > limit:
        param = (
            "best_of"
            if choices > parsed.n
            else "n"
            if choices > 1
            else parsed.prompt_field
        )
        told = f"is too much: {len(lengths)} prompts with {choices} choices each may have {size}"
        told += f" tokens in all, and a choice counts as {MIN_CHOICE_TOKENS} at least"
        refuse(param, f"{told}; ask for at most {limit} at once")

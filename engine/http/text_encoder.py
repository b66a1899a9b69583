"""Tokenizes a call's prompts in threads, so that no stream has to wait.

text_workers.py has the threads. prompt_bounds.py checks the members of a request's
body, before this file checks the lengths of the prompts.

A text that cannot fit the model's context is refused before all of it is tokenized:
tokenizing a megabyte takes a second and some hundreds of megabytes of memory. This file
checks the text that the chat template renders, not the messages, because a template may
leave messages out and may add tools and variables.

Text in a message that looks like a control token is tokenized as ordinary text
(engine/text/special_splitter.py).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from engine.http.limits import context_length_error
from engine.http.prompt_bounds import check_num_chars, check_num_items
from engine.http.text_workers import (
    INLINE_CHARS,
    LONG_CHARS,
    TextWorkers,
    raise_if_abandoned,
)
from engine.http.truncation import (
    first_that_fits,
    first_tokens,
    last_tokens,
    possible_starts,
)
from engine.text.harmony import messages_for_gpt_oss, tag_characters
from engine.text.special_splitter import SpecialTokenSplitter, create_splitter
from engine.text.tokenizer import Tokenizer
from engine.text.tool_messages import add_tools
from protocol.errors import ContextLengthExceeded, InvalidRequest
from protocol.messages import Retention
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.prompt_cache import CacheMark
from protocol.openai.sampling import GenerationRequest
from protocol.settings.settings import EngineSettings

# A text of at most this many characters per token of the context is tokenized without
# a check of its length. Few texts have longer tokens on average.
_LIKELY_CHARS_PER_TOKEN = 16
# A prediction may have this number of tokens more than the answer, because the answer
# may leave out parts of the prediction.
PREDICTION_MARGIN_TOKENS = 1024
# Maximum number of predicted tokens for all prompts of a request together. Each prompt
# has a copy of the prediction, so a short body with many prompts could otherwise fill
# the memory.
MAX_PREDICTED_TOKENS = 1 << 20

_T = TypeVar("_T")


def check_parsers(settings: EngineSettings, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a configured parser needs a token that the model lacks."""
    parsers = (settings.reasoning_parser, settings.tool_call_parser)
    if "harmony" in parsers and not tag_characters(tokenizer):
        raise ValueError(
            "the parser harmony needs the token <|channel|>, which this model lacks; "
            "choose another --reasoning-parser or --tool-call-parser"
        )


def client_texts(parsed: GenerationRequest) -> list[str | None]:
    """Return each prompt's text as the client sent it; None for token ids and chats."""
    if not isinstance(parsed, CompletionRequest):
        return [None]
    return [prompt if isinstance(prompt, str) else None for prompt in parsed.prompts]


class TextEncoder:
    """Tokenizes the texts of one application. Use it from a single event loop.

    Threads do the work, so that a long text does not delay the loop's streams. The
    number and size of concurrent texts are limited, to limit the memory.

    Args:
        tool_call_parser: the option --tool-call-parser.
        split_special_tokens: whether message text that looks like a control token is
            tokenized as ordinary text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_call_parser: str = "auto",
        *,
        split_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser
        # If None, message text that looks like a control token becomes that token.
        self._splitter = create_splitter(tokenizer) if split_special_tokens else None
        self._workers = TextWorkers()

    def check_num_items(self, members: dict[str, Any], max_model_len: int) -> None:
        """Refuse a body with too many items; see prompt_bounds.check_num_items."""
        check_num_items(members, max_model_len)

    def check_num_chars(self, members: dict[str, Any], max_model_len: int) -> None:
        """Refuse a body with overlong prompts; see prompt_bounds.check_num_chars."""
        check_num_chars(members, max_model_len, self._tokenizer.longest_token_chars)

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Run `work`, in a thread unless it is small; see TextWorkers.run."""
        return await self._workers.run(size, work)

    async def run_python(self, size: int, work: Callable[[], _T]) -> _T:
        """Run `work`, which is mostly Python code; see TextWorkers.run_python."""
        return await self._workers.run_python(size, work)

    async def tokenize(
        self,
        parsed: GenerationRequest,
        num_bytes: int,
        max_model_len: int,
        *,
        unchecked_chars: int = INLINE_CHARS,
    ) -> list[list[int]]:
        """Return the token ids of each prompt, truncated if the request asks for it.

        The result for a short text may exceed `max_model_len` ids, because only the
        lengths of long texts are checked.

        Args:
            num_bytes: the size of the request's body.
            unchecked_chars: texts of at most this number of characters are tokenized
                without a check of their length.

        Raises:
            InvalidRequest: the chat template refuses the messages.
            ContextLengthExceeded: a text with more than `unchecked_chars` characters
                has far more than `max_model_len` tokens.
        """
        limit = parsed.truncation_length(max_model_len)
        if (
            limit is not None
            and isinstance(parsed, ChatRequest)
            and parsed.drops_oldest_messages
        ):
            ids = await self._without_oldest(parsed, num_bytes, max_model_len, limit)
            return [ids]
        return await self._tokenize(
            parsed, num_bytes, max_model_len, unchecked_chars, limit
        )

    def predictions(
        self, parsed: GenerationRequest, limits: Sequence[int], vocab_size: int
    ) -> list[list[int]]:
        """Return the token ids of the request's `prediction` for each prompt.

        The ids include no special tokens. They are empty for a prefill leg, which
        generates only one token. The caller runs this function in a thread if the
        prediction is long.

        Args:
            limits: for each prompt, how many tokens each of its choices may have.
            vocab_size: the number of token ids that the model has. Larger ids of the
                tokenizer are left out.
        """
        if parsed.prediction is None or parsed.is_prefill:
            return [[] for _ in limits]
        max_size = MAX_PREDICTED_TOKENS // len(limits)
        sizes = [
            min(limit + PREDICTION_MARGIN_TOKENS, max_size) if limit else 0
            for limit in limits
        ]
        text = parsed.prediction.text
        ids = first_tokens(text, max(sizes), self._encode_prediction)
        ids = [token_id for token_id in ids if token_id < vocab_size]
        return [ids[:size] for size in sizes]

    def _encode_prediction(self, text: str) -> list[int]:
        raise_if_abandoned()
        encoder: Tokenizer | SpecialTokenSplitter = self._tokenizer
        if self._splitter is not None:
            encoder = self._splitter
            turn = {"role": "assistant", "content": text}
            text = self._splitter.mark_messages([turn])[0]["content"]
        ids = encoder.encode(text, add_special_tokens=False)
        return [i for i in ids if i not in self._tokenizer.special_ids]

    async def retentions(
        self, parsed: GenerationRequest, prompts: list[list[int]], num_bytes: int
    ) -> list[list[Retention]]:
        """Return the parts of each prompt that the request asks the engine to keep.

        Args:
            prompts: the token ids of each prompt.
            num_bytes: the size of the request's body.
        """
        all_retentions: list[list[Retention]] = [[] for _ in prompts]
        if parsed.prompt_retention_s is not None:
            for ids, retentions in zip(prompts, all_retentions, strict=True):
                retentions.append(Retention(len(ids), parsed.prompt_retention_s))
        if not isinstance(parsed, ChatRequest):
            return all_retentions
        (ids,) = prompts
        marks = parsed.cache_marks
        inner_marks = [mark for mark in marks if not parsed.ends_at(mark)]
        all_retentions[0] += [
            Retention(len(ids), mark.seconds)
            for mark in marks
            if mark not in inner_marks
        ]
        # Truncation removes the beginning of a prompt, so the next request could not
        # reuse the part before a mark.
        if inner_marks and parsed.truncate_prompt_tokens is None:
            find = partial(self._find_marks, parsed, inner_marks, len(ids))
            all_retentions[0] += await self.run_python(num_bytes, find)
        return all_retentions

    def _find_marks(
        self, parsed: ChatRequest, marks: list[CacheMark], num_ids: int
    ) -> list[Retention]:
        """Return the parts of a prompt that end at marks.

        To locate a mark in the text, the messages up to the mark are rendered alone.
        The mark is where this text and the complete text begin to differ. Only the
        shorter side of the mark is tokenized, so the result may be wrong by the token
        at the mark. A mark is left out if the template refuses the messages up to it.

        Args:
            num_ids: the number of tokens of the whole prompt.
        """
        (text,) = self._render(parsed)
        encode_text = self._encode_function(parsed)
        retentions = []
        for mark in marks:
            raise_if_abandoned()
            try:
                (marked,) = self._render(parsed.up_to(mark))
            except InvalidRequest:
                continue
            assert isinstance(text, str) and isinstance(marked, str)
            num_chars = _common_length(text, marked)
            if 2 * num_chars < len(text):
                num_tokens = len(encode_text(text[:num_chars]))
            else:
                num_tokens = num_ids - len(encode_text(text[num_chars:]))
            retentions.append(Retention(max(num_tokens, 0), mark.seconds))
        return retentions

    def _encode_function(
        self, parsed: ChatRequest | CompletionRequest
    ) -> Callable[[str], list[int]]:
        encoder: Tokenizer | SpecialTokenSplitter = self._tokenizer
        if isinstance(parsed, ChatRequest) and self._splitter is not None:
            encoder = self._splitter
        return partial(encoder.encode, add_special_tokens=parsed.add_special_tokens)

    async def _without_oldest(
        self, parsed: ChatRequest, num_bytes: int, max_model_len: int, limit: int
    ) -> list[int]:
        """Return the token ids of a conversation after dropping its oldest messages.

        Drops only as many messages as needed to get at most `limit` ids. The result has
        more ids only if the last messages, which are never dropped, are too long.
        Raises the errors of `tokenize`.
        """
        num_instructions, starts = possible_starts(parsed.messages)
        # Each message has at least one token, so more than `limit` messages never fit.
        first_possible = len(parsed.messages) - limit
        starts = [start for start in starts if start >= first_possible] or starts[-1:]
        ids_by_start: dict[int, list[int]] = {}

        async def ids_from(start: int, max_tokens: int) -> list[int]:
            instructions = parsed.messages[:num_instructions]
            messages = [*instructions, *parsed.messages[start:]]
            shorter = parsed.model_copy(update={"messages": messages})
            (ids,) = await self._tokenize(shorter, num_bytes, max_tokens, INLINE_CHARS)
            return ids

        async def fits(start: int) -> bool:
            try:
                ids_by_start[start] = await ids_from(start, limit)
            except ContextLengthExceeded:
                return False
            # The chat template refuses the messages from `start` on, but might accept
            # them with more messages before them. True makes the search try only
            # earlier starts.
            except InvalidRequest:
                return True
            return len(ids_by_start[start]) <= limit

        start = await first_that_fits(starts, fits)
        if start in ids_by_start:
            return ids_by_start[start]
        return await ids_from(start, max_model_len)

    async def _tokenize(
        self,
        parsed: GenerationRequest,
        num_bytes: int,
        max_model_len: int,
        unchecked_chars: int,
        limit: int | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each prompt; see `tokenize`.

        Args:
            limit: return only the last `limit` tokens of each prompt; None: all tokens.
        """
        assert isinstance(parsed, ChatRequest | CompletionRequest)
        if isinstance(parsed, CompletionRequest) and not any(client_texts(parsed)):
            num_bytes = 0  # token ids need no rendering
        max_chars = max(unchecked_chars, _LIKELY_CHARS_PER_TOKEN * max_model_len)
        encode_text = self._encode_function(parsed)

        def render() -> Sequence[str | list[int]]:
            prompts = self._render(parsed)
            if limit is not None:
                return _truncated(prompts, limit, encode_text)
            self._check_lengths(prompts, parsed.prompt_field, max_model_len, max_chars)
            return prompts

        # Work with a size above LONG_CHARS runs one at a time. `render` needs this only
        # if it truncates, because truncating tokenizes the prompts.
        size = min(num_bytes, LONG_CHARS) if limit is None else num_bytes
        rendered = await self.run_python(size, render)
        num_chars = sum(len(p) for p in rendered if isinstance(p, str))
        return await self.run(num_chars, partial(_encode, rendered, encode_text))

    def _render(
        self, parsed: ChatRequest | CompletionRequest
    ) -> Sequence[str | list[int]]:
        """Return the prompts as texts or token ids.

        The text of a chat contains the splitter's markers.

        Raises:
            InvalidRequest: the chat template refuses the messages.
        """
        if isinstance(parsed, CompletionRequest):
            return parsed.prompts
        options = _render_options(
            parsed, self._tokenizer, self._tool_call_parser, self._splitter
        )
        try:
            return [self._tokenizer.render_chat(**options, on_piece=raise_if_abandoned)]
        except InvalidRequest as error:
            # The error may quote a text with the splitter's markers.
            message = self._without_marks(error.message)
            raise InvalidRequest(message, param=error.param) from None

    def _check_lengths(
        self,
        prompts: Sequence[str | list[int]],
        field: str,
        max_model_len: int,
        max_chars: int,
    ) -> None:
        """Refuse texts that cannot fit the context, without tokenizing them completely.

        Texts of at most `max_chars` characters are not checked.

        Args:
            field: the request's field that has the prompts.

        Raises:
            ContextLengthExceeded: a text has far more than `max_model_len` tokens.
        """
        for prompt in prompts:
            if not isinstance(prompt, str) or len(prompt) <= max_chars:
                continue
            num_tokens = self._tokenizer.min_num_tokens(
                self._without_marks(prompt), max_model_len, on_piece=raise_if_abandoned
            )
            if num_tokens:
                raise context_length_error(
                    num_tokens, max_model_len, field, "at least "
                )

    def _without_marks(self, text: str) -> str:
        return text if self._splitter is None else self._splitter.without_marks(text)


def _common_length(first: str, second: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    lengths = range(min(len(first), len(second)) + 1)
    return bisect_right(lengths, False, key=lambda n: first[:n] != second[:n]) - 1


def _truncated(
    prompts: Sequence[str | list[int]],
    limit: int,
    encode_text: Callable[[str], list[int]],
) -> list[list[int]]:
    """Return the last `limit` token ids of each prompt.

    Raises:
        WorkAbandoned: the client has disconnected.
    """
    all_ids = []
    for prompt in prompts:
        raise_if_abandoned()
        if isinstance(prompt, str):
            all_ids.append(last_tokens(prompt, limit, encode_text))
        else:
            all_ids.append(prompt[-limit:])
    return all_ids


def _encode(
    prompts: Sequence[str | list[int]], encode_text: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises:
        WorkAbandoned: the client has disconnected.
    """
    all_ids = []
    for prompt in prompts:
        raise_if_abandoned()
        all_ids.append(encode_text(prompt) if isinstance(prompt, str) else prompt)
    return all_ids


def _render_options(
    parsed: ChatRequest,
    tokenizer: Tokenizer,
    tool_call_parser: str,
    splitter: SpecialTokenSplitter | None,
) -> dict[str, Any]:
    """Return the keyword arguments with which Tokenizer.render_chat renders a chat."""
    messages = [turn.template_message for turn in parsed.messages]
    toolset = parsed.toolset
    if splitter is not None:
        messages = splitter.mark_messages(messages)
        toolset = replace(toolset, offered=splitter.mark_tools(toolset.offered))
    if tokenizer.chat_template is not None and tokenizer.chat_template.is_harmony:
        messages = messages_for_gpt_oss(messages)
    messages, tools = add_tools(messages, toolset, tokenizer, tool_call_parser)
    return {
        "messages": messages,
        "field": parsed.prompt_field,
        **parsed.template_options,
        "tools": tools,
    }

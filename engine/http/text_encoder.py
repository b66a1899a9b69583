"""A call's prompts as token ids: tokenized off the event loop, as no stream may wait for that.
See text_workers.py for the threads, and prompt_bounds.py for what is refused before.

What cannot fit the model's context is refused before all of it is tokenized, as that takes a
second for a megabyte and hundreds of times a text's memory. What looks like a control token in a
message is text (engine/text/special_splitter.py). The rendered chat template is looked at
for that rather than the messages: it may leave some out, and write tools and variables as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from engine.http.limits import too_long
from engine.http.prompt_bounds import check_num_chars, check_num_items
from engine.http.text_workers import INLINE_CHARS, LONG_CHARS, TextWorkers, check_wanted
from engine.http.truncation import first_that_fits, last_tokens, possible_starts
from engine.text.harmony import one_call_each, tags_of
from engine.text.special_splitter import SpecialTokenSplitter, splitter_of
from engine.text.tokenizer import Tokenizer
from engine.text.tool_messages import with_tools
from protocol.errors import ContextLengthExceeded, InvalidRequest
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.sampling import GenerationRequest
from protocol.settings.settings import EngineSettings

_LIKELY_CHARS = (
    16  # of a token: only texts of longer ones are looked at before they are tokenized
)

_T = TypeVar("_T")


def check_parsers(settings: EngineSettings, tokenizer: Tokenizer) -> None:
    """Raises ValueError where the options name what the model cannot write."""
    named = settings.reasoning_parser, settings.tool_call_parser
    if "harmony" in named and not tags_of(tokenizer):
        raise ValueError(
            "harmony as parser: the model has no token <|channel|>; take another"
        )


def given_texts(parsed: GenerationRequest) -> list[str | None]:
    """Each prompt as the client wrote it; None where it is ids, or a chat's."""
    if not isinstance(parsed, CompletionRequest):
        return [None]
    return [prompt if isinstance(prompt, str) else None for prompt in parsed.prompts]


class TextEncoder:
    """Tokenizes the texts of one application, on one event loop: none holds up its streams, nor
    do several at once fill its memory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_call_parser: str = "auto",
        *,
        split_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._option = tokenizer, tool_call_parser
        # None: text of messages may become control tokens.
        self._splitter = splitter_of(tokenizer) if split_special_tokens else None
        self._workers = TextWorkers()

    def check_num_items(self, members: dict[str, Any], max_model_len: int) -> None:
        """See prompt_bounds.check_num_items."""
        check_num_items(members, max_model_len)

    def check_num_chars(self, members: dict[str, Any], max_model_len: int) -> None:
        """See prompt_bounds.check_num_chars."""
        check_num_chars(members, max_model_len, self._tokenizer.longest_token_chars)

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """See TextWorkers.run."""
        return await self._workers.run(size, work)

    async def run_python(self, size: int, work: Callable[[], _T]) -> _T:
        """See TextWorkers.run_python."""
        return await self._workers.run_python(size, work)

    async def tokenize(
        self,
        parsed: GenerationRequest,
        num_bytes: int,
        max_model_len: int,
        *,
        sure_to: int = INLINE_CHARS,
    ) -> list[list[int]]:
        """The token ids of each prompt, cut if the request says so.

        Args:
            num_bytes: of the request's body.
            sure_to: a text of so many characters is tokenized, however many tokens it has.

        Raises:
            InvalidRequest: the chat template refuses the messages.
            ContextLengthExceeded: a longer text has more than `max_model_len` tokens by far.
        """
        limit = parsed.max_prompt_tokens(max_model_len)
        if (
            limit is not None
            and isinstance(parsed, ChatRequest)
            and parsed.drops_oldest_messages
        ):
            return [await self._without_oldest(parsed, num_bytes, max_model_len, limit)]
        return await self._tokenize(parsed, num_bytes, max_model_len, sure_to, limit)

    async def _without_oldest(
        self, parsed: ChatRequest, num_bytes: int, max_model_len: int, limit: int
    ) -> list[int]:
        """The token ids of a conversation without its oldest messages: at most `limit`, if its last
        message allows that. Raises as `tokenize`."""
        num_kept, starts = possible_starts(parsed.messages)
        # A message has at least one token, so more messages than `limit` never fit.
        first_possible = len(parsed.messages) - limit
        starts = [start for start in starts if start >= first_possible] or starts[-1:]
        known: dict[int, list[int]] = {}  # token ids, by where the conversation begins

        async def ids_from(start: int, max_tokens: int) -> list[int]:
            messages = [*parsed.messages[:num_kept], *parsed.messages[start:]]
            shorter = parsed.model_copy(update={"messages": messages})
            (ids,) = await self._tokenize(shorter, num_bytes, max_tokens, INLINE_CHARS)
            return ids

        async def fits(start: int) -> bool:
            try:
                known[start] = await ids_from(start, limit)
            except ContextLengthExceeded:
                return False
            except (
                InvalidRequest
            ):  # of the chat template: one that begins earlier may be taken
                return True
            return len(known[start]) <= limit

        start = await first_that_fits(starts, fits)
        return known[start] if start in known else await ids_from(start, max_model_len)

    async def _tokenize(
        self,
        parsed: GenerationRequest,
        num_bytes: int,
        max_model_len: int,
        sure_to: int,
        limit: int | None = None,
    ) -> list[list[int]]:
        """See `tokenize`; of each prompt the last `limit` tokens."""
        assert isinstance(parsed, ChatRequest | CompletionRequest)
        if isinstance(parsed, CompletionRequest) and not any(given_texts(parsed)):
            num_bytes = 0  # token ids need no rendering
        max_chars = max(sure_to, _LIKELY_CHARS * max_model_len)
        coder: Tokenizer | SpecialTokenSplitter = self._tokenizer
        if isinstance(parsed, ChatRequest) and self._splitter is not None:
            coder = self._splitter
        encode_text = partial(
            coder.encode, add_special_tokens=parsed.add_special_tokens
        )

        def render() -> Sequence[str | list[int]]:
            prompts = self._render(parsed)
            if limit is not None:
                return _truncated(prompts, limit, encode_text)
            self._check_lengths(prompts, parsed.prompt_field, max_model_len, max_chars)
            return prompts

        # Prompts that are truncated are also tokenized there.
        size = min(num_bytes, LONG_CHARS) if limit is None else num_bytes
        rendered = await self.run_python(size, render)
        encode = partial(_encode, rendered, encode_text)
        return await self.run(
            sum(len(p) for p in rendered if isinstance(p, str)), encode
        )

    def _render(
        self, parsed: ChatRequest | CompletionRequest
    ) -> Sequence[str | list[int]]:
        """The prompts as texts or ids; a chat's text is marked for the splitter.

        Raises:
            InvalidRequest: the chat template refuses the messages.
        """
        if isinstance(parsed, CompletionRequest):
            return parsed.prompts
        chat = _chat(parsed, self._tokenizer, self._option, self._splitter)
        try:
            return [self._tokenizer.render_chat(**chat, on_piece=check_wanted)]
        except InvalidRequest as error:  # its message may quote a marked text
            raise InvalidRequest(
                self._unmarked(error.message), param=error.param
            ) from None

    def _check_lengths(
        self,
        prompts: Sequence[str | list[int]],
        field: str,
        max_model_len: int,
        max_chars: int,
    ) -> None:
        """Refuse texts that cannot fit the context, before all of them is tokenized.

        Raises:
            ContextLengthExceeded: a text of more than `max_chars` characters surely has more than
                `max_model_len` tokens.
        """
        for prompt in prompts:
            if not isinstance(prompt, str) or len(prompt) <= max_chars:
                continue
            text = self._unmarked(prompt)
            num_tokens = self._tokenizer.at_least(
                text, max_model_len, on_piece=check_wanted
            )
            if num_tokens:
                raise too_long(num_tokens, max_model_len, field, "at least ")

    def _unmarked(self, text: str) -> str:
        return text if self._splitter is None else self._splitter.without_marks(text)


def _truncated(
    prompts: Sequence[str | list[int]],
    limit: int,
    encode_text: Callable[[str], list[int]],
) -> list[list[int]]:
    """The last `limit` token ids of each prompt."""
    all_ids = []
    for prompt in prompts:
        check_wanted()
        if isinstance(prompt, str):
            all_ids.append(last_tokens(prompt, limit, encode_text))
        else:
            all_ids.append(prompt[-limit:])
    return all_ids


def _encode(
    prompts: Sequence[str | list[int]], encode_text: Callable[[str], list[int]]
) -> list[list[int]]:
    """The token ids of each prompt."""
    all_ids = []
    for prompt in prompts:
        check_wanted()
        all_ids.append(encode_text(prompt) if isinstance(prompt, str) else prompt)
    return all_ids


def _chat(
    parsed: ChatRequest,
    tokenizer: Tokenizer,
    option: str,
    splitter: SpecialTokenSplitter | None,
) -> dict[str, Any]:
    """The keyword arguments of Tokenizer.render_chat."""
    messages = [turn.template_message for turn in parsed.messages]
    toolset = parsed.toolset
    if splitter is not None:
        messages = splitter.mark_messages(messages)
        toolset = replace(toolset, offered=splitter.mark_tools(toolset.offered))
    if tokenizer.chat_template is not None and tokenizer.chat_template.is_harmony:
        messages = one_call_each(messages)
    messages, tools = with_tools(messages, toolset, tokenizer, option)
    told = {"messages": messages, "field": parsed.prompt_field}
    return {**told, **parsed.template_options, "tools": tools}

"""The prompts and choices of one call. Pure, no I/O.

The classes turn deltas of token ids into text, log-probabilities and tool calls.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from engine.text.detokenizer import StopFinder, create_detokenizer
from engine.text.harmony import HarmonyParser, answer_head, tag_characters
from engine.text.reasoning import SPECIAL_TAGS as THINK_TAGS
from engine.text.reasoning import ReasoningParser, reasoning_start
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls.registry import SPECIAL_TAGS
from engine.text.tool_formats import CallOpenings
from engine.text.tool_parser import ToolParser, create_tool_parser
from protocol.errors import InternalError
from protocol.messages import AddRequest, KVUsage, TokenDelta, TokenLogprobs
from protocol.openai.chat import ChatRequest
from protocol.openai.responses import ChoicePiece, TokenReport, TokenText
from protocol.openai.sampling import GenerationRequest
from protocol.openai.tools import Tools
from protocol.settings.options import ModelOptions

# Maximum number of logprobs that the event loop converts to JSON. A thread converts
# larger numbers. Converting a logprob takes 4 us.
INLINE_LOGPROBS = 1 << 12
# An Encoder reuses its buffer, so it needs a fifth of the memory that
# msgspec.json.encode needs.
_encode = msgspec.json.Encoder().encode
_LOWEST_LOGPROB = -9999.0  # replaces -inf, which JSON cannot represent
# Number of characters at the beginning of the client's text that are searched for in
# the decoded prompt, if the decoded prompt does not end with the client's text.
_SEARCHED_CHARS = 4


class PromptReport(NamedTuple):
    """The parts of a response that describe one prompt.

    Attributes:
        logprobs: the response's `prompt_logprobs`, if requested.
        text: the prompt's text if an echo is requested, else "".
        tokens: the tokens of the echo; None unless an echo and logprobs are requested.
    """

    logprobs: list[Any] | None
    text: str
    tokens: list[TokenReport] | None


class PromptGeneration:
    """The state of one prompt: its choices, its echo and the reports on its tokens.

    Args:
        add: the request to the engine for this prompt.
        client_text: the prompt's text as the client sent it; None if the client sent
            token ids or a chat.
        options: the options that choose the formats of tool calls and reasoning; see
            tool_formats.tool_syntax and reasoning.reasoning_start.
        first_index: the index of the prompt's first choice in the response.
        answer_id: the id of the response, from which the ids of tool calls are derived.
    """

    def __init__(
        self,
        request: GenerationRequest,
        add: AddRequest,
        client_text: str | None,
        tokenizer: Tokenizer,
        options: ModelOptions,
        first_index: int = 0,
        answer_id: str = "",
    ) -> None:
        self.token_ids = add.token_ids
        # Whether another server began the response.
        self.is_resumed = bool(add.resumed_choices)
        # The usage in the latest delta of the first choice that contains usage. In a
        # resumed response, the last delta does not replace this value.
        self.latest_usage: KVUsage | None = None
        self.request = request
        self._client_text = client_text
        self._tokenizer = tokenizer
        self._logprobs: list[TokenLogprobs | None] = []
        self._report: PromptReport | None = None
        tools = request.toolset if isinstance(request, ChatRequest) else Tools()
        start = reasoning_start(options, request, add.token_ids, tokenizer)
        parser_name = start if start == "harmony" else options.tool_call_parser
        template = tokenizer.chat_template
        openings = CallOpenings(tools, parser_name, template)
        head = ""
        tags: dict[int, str] = {}
        if start == "harmony":
            head = answer_head(add.token_ids, tokenizer)
            tags = tag_characters(tokenizer)
        self.choices = []
        for index in range(first_index, first_index + add.num_choices):
            tool_parser = create_tool_parser(
                tools, parser_name, template, f"{answer_id}-{index}"
            )
            if start == "harmony":
                reasoning: ReasoningParser = HarmonyParser(
                    head, tags, emits_calls=tools.mode == "auto"
                )
            else:
                reasoning = ReasoningParser(start, openings)
            self.choices.append(
                ChoiceStream(index, self, add, tokenizer, tool_parser, reasoning)
            )

    def add_logprobs(self, logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Append the logprobs of the prompt's next tokens."""
        self._logprobs += logprobs

    def record_usage(self, delta: TokenDelta) -> TokenDelta:
        """Store the usage of a delta of the first choice, and return the delta.

        If the response resumed at this server, the usage of the last delta is not
        stored. The returned last delta has the number of cached tokens that was stored
        before. So the client does not see that this server computed tokens again.
        """
        stored = self.latest_usage
        usage = delta.usage
        if stored and usage and self.is_resumed and delta.finish_reason:
            usage = replace(usage, cached_tokens=stored.cached_tokens)
            return replace(delta, usage=usage)
        self.latest_usage = usage
        return delta

    @property
    def usage(self) -> KVUsage | None:
        """The usage of the first choice's last delta. Until that delta arrives, this is
        the preliminary usage, or None if no usage has arrived.
        """
        last_delta = self.choices[0].last_delta
        return self.latest_usage if last_delta is None else last_delta.usage

    def token_report(
        self, token_id: int, logprobs: TokenLogprobs | None, num_top: int, offset: int
    ) -> TokenReport:
        """Return the report of one token of the prompt or the answer.

        Args:
            logprobs: None for the prompt's first token, which has no logprob.
            num_top: the maximum number of alternatives to report.
            offset: the position of the token's text in the answer, in characters.
        """
        token = self._token_text(token_id)
        if logprobs is None:
            return TokenReport(token, None, offset=offset)
        top = []
        id_by_text = {token.text: token_id}
        pairs = zip(
            logprobs.top_ids[:num_top], logprobs.top_logprobs[:num_top], strict=True
        )
        for top_id, logprob in pairs:
            text = self._token_text(top_id)
            if id_by_text.setdefault(text.text, top_id) != top_id:
                # Another token has the same text.
                text = TokenText(f"token_id:{top_id}", text.raw)
            top.append((text, _finite(logprob)))
        return TokenReport(token, _finite(logprobs.logprob), top, offset)

    def _token_text(self, token_id: int) -> TokenText:
        text = self._tokenizer.token_text(token_id)
        if self.request.return_tokens_as_token_ids:
            return TokenText(f"token_id:{token_id}", text.raw)
        return text

    @property
    def is_slow_to_report(self) -> bool:
        """Whether the next call of `prompt_report` takes long and so needs a thread.

        False until all of the prompt's logprobs have arrived, and after the first call
        of `prompt_report`.
        """
        num_logprobs = self.request.num_prompt_logprobs
        num_tokens = len(self.token_ids)
        has_logprobs = num_logprobs is None or len(self._logprobs) == num_tokens
        if self._report is not None or not has_logprobs:
            return False
        reports_per_token = int(self.request.wants_echo)
        if num_logprobs is not None:
            reports_per_token += 1 + num_logprobs
        return reports_per_token * num_tokens > INLINE_LOGPROBS

    def prompt_report(self) -> PromptReport:
        """Return the parts of the response that describe the prompt.

        Call this only after all of the prompt's logprobs have arrived. The first call
        makes the report, and may run in any thread. Later calls return the same report.
        """
        if self._report is None:
            text = ""
            tokens = None
            if self.request.wants_echo:
                text, tokens = self._echo()
            self._report = PromptReport(self._prompt_logprobs(), text, tokens)
        return self._report

    def _echo(self) -> tuple[str, list[TokenReport] | None]:
        """Return the prompt's text, and its tokens if logprobs are requested."""
        text, offsets = self._text_and_offsets()
        if not self.request.wants_logprobs:
            return text, None
        num_top = self.request.num_logprobs or 0
        entries = zip(
            self.token_ids, self._require_all_logprobs(), offsets, strict=True
        )
        tokens = [
            self.token_report(token_id, logprobs, num_top, offset)
            for token_id, logprobs, offset in entries
        ]
        return text, tokens

    def _prompt_logprobs(self) -> list[Any] | None:
        """Return `prompt_logprobs` in vLLM's format, or None if they are not requested.

        For a prefill leg, the result is also None: the response has these logprobs in
        its `kv_transfer_params`.

        The list has an entry for each token of the prompt: null for the first token,
        and for all others an object that maps token ids to logprobs.
        """
        num_top = self.request.prompt_logprobs
        if num_top is None or self.request.is_prefill:
            return None
        entries = zip(self.token_ids, self._require_all_logprobs(), strict=True)
        return [
            logprobs and Raw(_encode(self._logprobs_by_id(token_id, logprobs, num_top)))
            for token_id, logprobs in entries
        ]

    def _logprobs_by_id(
        self, token_id: int, logprobs: TokenLogprobs, num_top: int
    ) -> dict[str, Any]:
        """Return the logprobs of a prompt token and its alternatives, by token id."""
        ranked = enumerate(logprobs.top_logprobs, 1)
        top = zip(logprobs.top_ids[:num_top], ranked, strict=False)
        entries = {token_id: (logprobs.rank or None, logprobs.logprob), **dict(top)}
        return {
            str(key): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._token_text(key).text,
            }
            for key, (rank, logprob) in entries.items()
        }

    def _require_all_logprobs(self) -> list[TokenLogprobs | None]:
        if len(self._logprobs) != len(self.token_ids):
            raise InternalError(
                f"The engine returned logprobs for {len(self._logprobs)} of the "
                f"prompt's {len(self.token_ids)} tokens."
            )
        return self._logprobs

    def _text_and_offsets(self) -> tuple[str, list[int]]:
        """Return the text to echo, and the offset of each token in that text.

        A text is echoed as the client sent it. Tokens that the tokenizer put before the
        client's text, such as BOS, have no characters in the echo. If the client sent
        token ids that end within a character, the answer contains that character, and
        the echo does not.
        """
        skips_special = self._client_text is None and self.request.skip_special_tokens
        detokenizer = create_detokenizer(
            self._tokenizer, self.token_ids, skip_special_tokens=skips_special
        )
        text, offsets = detokenizer.echo(self.token_ids)
        if self._client_text is None:
            return text, offsets
        size = len(self._client_text)
        num_surplus_chars = len(text) - size
        if not text.endswith(self._client_text):
            # The client's text contains special tokens, and tokenizing dropped the
            # spaces around these tokens.
            num_surplus_chars = max(text.find(self._client_text[:_SEARCHED_CHARS]), 0)
        offsets = [min(max(offset - num_surplus_chars, 0), size) for offset in offsets]
        return self._client_text, offsets


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class ChoiceStream:
    """Detokenizes one sequence, finds its stop strings and counts its tokens.

    Args:
        index: the choice's index in the response.
        prompt: the prompt that the choice continues.
        add: the request to the engine for the prompt.
        tool_parser: separates tool calls from the text; None if the choice cannot have
            tool calls.
        reasoning: separates the model's reasoning from the text.

    Attributes:
        num_tokens: the number of generated tokens. Tokens after a stop string do not
            count.
        num_reasoning_tokens: how many of the `num_tokens` belong to the reasoning.
        num_accepted_tokens: how many of the `num_tokens` drafters had proposed. Until
            the last delta, this may also count tokens after a stop string.
        num_rejected_tokens: the number of tokens that drafters proposed and that are
            not among the `num_tokens`.
        last_delta: the choice's last delta; None until it arrives.
        hit_stop_string: whether a stop string has ended the text.
    """

    def __init__(
        self,
        index: int,
        prompt: PromptGeneration,
        add: AddRequest,
        tokenizer: Tokenizer,
        tool_parser: ToolParser | None,
        reasoning: ReasoningParser,
    ) -> None:
        request = prompt.request
        self.index = index
        self.num_tokens = 0
        self.last_delta: TokenDelta | None = None
        self.hit_stop_string = False
        self._last_token_id: int | None = None
        self._sum_logprobs = 0.0
        self._request = request
        self._prompt = prompt
        self._max_tokens = add.max_tokens
        # The text of a stop token is shown only with `include_stop_str_in_output`.
        keeps_stop = request.include_stop_str_in_output
        self._hidden_stop_ids = frozenset(() if keeps_stop else add.stop_token_ids)
        # Tags that the parsers must see, even if the tags are special tokens, which the
        # detokenizer otherwise skips.
        visible_tags: tuple[str, ...] = () if reasoning.is_over else THINK_TAGS
        if tool_parser:
            visible_tags += SPECIAL_TAGS
        self._detokenizer = create_detokenizer(
            tokenizer,
            add.token_ids,
            skip_special_tokens=request.skip_special_tokens,
            visible_tags=visible_tags,
            echoes_prompt=request.wants_echo,
        )
        self._stop_finder = StopFinder(request.stop, keeps_stop=keeps_stop)
        # The text offset that is reported with the next token's logprobs. It counts all
        # characters so far: an echoed prompt, reasoning, and text that is held back.
        self._num_chars = 0
        self._is_first_piece = True
        self._tool_parser = tool_parser
        self.num_reasoning_tokens = 0
        self.num_accepted_tokens = 0
        self.num_rejected_tokens = 0
        # Number of the latest tokens with text that the reasoning parser holds back.
        # These tokens count as reasoning unless `_finish` assigns them to the answer.
        self._num_held_back = 0
        self._reasoning_parser = reasoning

    @property
    def needs_abort(self) -> bool:
        """Whether the engine would generate more tokens after a stop string."""
        return (
            self.hit_stop_string
            and self.last_delta is None
            and self.num_tokens < self._max_tokens
        )

    @property
    def mean_logprob(self) -> float:
        """Mean logprob per token, for ranking candidates; 0 if there are no tokens."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    def feed(self, delta: TokenDelta) -> ChoicePiece | None:
        """Return the piece that a delta adds. The delta must not have an error.

        Returns None for a delta that describes only the prompt. The last piece has the
        finish reason. Even if a stop string has ended the text, the last piece is made
        from the engine's last delta, because only the last delta has the final usage.
        """
        self.num_accepted_tokens += delta.accepted_tokens
        self.num_rejected_tokens += delta.rejected_tokens
        if not delta.token_ids and delta.finish_reason is None:
            return None
        piece = self._new_piece()
        for position, token_id in enumerate(delta.token_ids):
            if self.hit_stop_string:
                break
            logprobs = delta.logprobs[position] if delta.logprobs else None
            self._add_token(piece, token_id, logprobs)
        if delta.finish_reason is not None:
            self._finish(piece, delta)
        if self._tool_parser is not None and self._reasoning_parser.is_over:
            _separate_calls(piece, self._tool_parser)
        return piece

    def _add_text(self, piece: ChoicePiece, reasoning: str, text: str) -> None:
        if getattr(self._request, "include_reasoning", False):
            piece.reasoning += reasoning
        piece.text += text

    def _new_piece(self) -> ChoicePiece:
        request = self._request
        piece = ChoicePiece(self.index, token_ids=[])
        piece.logprobs = [] if request.wants_logprobs else None
        if self._is_first_piece:
            self._is_first_piece = False
            piece.is_first = True
            report = self._prompt.prompt_report()
            piece.prompt_logprobs = report.logprobs
            if request.return_token_ids:
                piece.prompt_token_ids = list(self._prompt.token_ids)
            if request.wants_echo:
                piece.text = report.text
                piece.logprobs = None if report.tokens is None else [*report.tokens]
                self._num_chars = len(report.text)
        return piece

    def _add_token(
        self, piece: ChoicePiece, token_id: int, logprobs: TokenLogprobs | None
    ) -> None:
        reasoning = self._reasoning_parser
        self.num_tokens += 1
        self._last_token_id = token_id
        piece.token_ids.append(token_id)
        if tag := reasoning.tags.get(token_id):
            text = self._detokenizer.flush() + tag
        elif token_id in self._hidden_stop_ids:
            text = ""
        else:
            text = self._detokenizer.push(token_id)
        offset = self._num_chars
        self._num_chars += len(text)
        is_head_text = bool(tag) or reasoning.is_in_head
        may_think = reasoning.may_think
        # Stop strings are searched for only after min_tokens, and never in the head of
        # a harmony message, because the client does not see the head.
        if self.num_tokens > self._request.min_tokens and not reasoning.is_in_head:
            text, self.hit_stop_string = self._stop_finder.push(text)
        self._add_text(piece, *reasoning.feed(text))
        is_thought = may_think and reasoning.is_inside
        self.num_reasoning_tokens += is_thought
        self._num_held_back = (
            self._num_held_back + 1 if reasoning.holds_text_back else 0
        )
        if logprobs is not None:
            self._sum_logprobs += logprobs.logprob
            if piece.logprobs is not None:
                num_top = self._request.num_logprobs or 0
                report = self._prompt.token_report(token_id, logprobs, num_top, offset)
                is_of_text = not (is_thought or is_head_text)
                piece.logprobs.append(replace(report, is_of_text=is_of_text))

    def _finish(self, piece: ChoicePiece, delta: TokenDelta) -> None:
        self.last_delta = delta
        # The engine also counts accepted tokens that follow a stop string. These tokens
        # count as rejected here, because they are not part of the answer.
        surplus = max(0, self.num_accepted_tokens - self.num_tokens)
        self.num_accepted_tokens -= surplus
        self.num_rejected_tokens += surplus
        if not self.hit_stop_string:
            text, self.hit_stop_string = self._stop_finder.push(
                self._detokenizer.flush()
            )
            text += self._stop_finder.flush()
            self._add_text(piece, *self._reasoning_parser.feed(text))
        was_over = self._reasoning_parser.is_over
        is_truncated = delta.finish_reason != "stop" and not self.hit_stop_string
        reasoning, text = self._reasoning_parser.finish(is_truncated=is_truncated)
        self._add_text(piece, reasoning, text)
        if text and not was_over:
            self.num_reasoning_tokens = max(
                0, self.num_reasoning_tokens - self._num_held_back
            )
        piece.finish_reason = "stop" if self.hit_stop_string else delta.finish_reason
        piece.stop_reason = self._stop_finder.matched_stop
        is_stop_token = self._last_token_id in self._request.stop_token_ids
        if piece.finish_reason == "stop" and is_stop_token:
            piece.stop_reason = piece.stop_reason or self._last_token_id


def _separate_calls(piece: ChoicePiece, parser: ToolParser) -> None:
    """Move the calls in a piece's text to its `tool_calls`.

    Changes the finish reason of the last piece from "stop" to "tool_calls" if the
    answer has calls and all of them are complete.
    """
    parsed = parser.feed(piece.text)
    piece.text = parsed.content
    piece.tool_calls = parsed.calls
    if piece.finish_reason is not None:
        rest = parser.finish()
        piece.text += rest.content
        piece.tool_calls += rest.calls
        # The finish reason "tool_calls" means that no call's arguments are cut off.
        if piece.finish_reason == "stop" and parser.has_complete_calls:
            piece.finish_reason = "tool_calls"

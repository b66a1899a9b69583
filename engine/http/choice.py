"""The prompts and choices of one call: deltas of token ids in; text, log-probabilities and tool
calls out. Pure, no I/O."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from engine.text.detokenizer import StopFinder, create_detokenizer
from engine.text.harmony import HarmonyParser, head_of, tags_of
from engine.text.reasoning import SPECIAL_TAGS as THINK_TAGS
from engine.text.reasoning import ReasoningParser, reasoning_begins
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

INLINE_LOGPROBS = 1 << 12  # more are written off the event loop: 4 us for each
_encode = msgspec.json.Encoder().encode  # a fifth of the memory of what it writes
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
_HEAD_CHARS = (
    4  # of a text, by which its beginning is found behind what was put before it
)


class PromptGeneration:
    """One prompt: its choices, its echo, and how tokens are shown.

    Args:
        add: the engine's request.
        given: the text that the client sent, or None where it sent token ids.
        options: how the model writes calls and what it thinks; see tool_formats.tool_syntax and
            reasoning.reasoning_begins.
        first: index in the answer of the first of the choices.
        answer_id: from which the ids of calls follow.
    """

    def __init__(
        self,
        request: GenerationRequest,
        add: AddRequest,
        given: str | None,
        tokenizer: Tokenizer,
        options: ModelOptions,
        first: int = 0,
        answer_id: str = "",
    ) -> None:
        self.ids = add.token_ids
        self.is_known = bool(
            add.resumed_choices
        )  # its answer goes on from another server
        self.first_usage: KVUsage | None = None  # as told with the first token
        self.request = request
        self._given = given
        self._tokenizer = tokenizer
        self._found: list[TokenLogprobs | None] = []
        self._told: tuple[list[Any] | None, str, list[TokenReport] | None] | None = None
        tools = request.toolset if isinstance(request, ChatRequest) else Tools()
        begins = reasoning_begins(options, request, add.token_ids, tokenizer)
        option = begins if begins == "harmony" else options.tool_call_parser
        if begins == "harmony":
            head = head_of(add.token_ids, tokenizer)
            how_told = head, tags_of(tokenizer), tools.mode == "auto"
        openings = CallOpenings(tools, option, tokenizer.chat_template)
        self.choices = []
        for index in range(first, first + add.num_choices):
            how = option, tokenizer.chat_template, f"{answer_id}-{index}"
            parser = create_tool_parser(tools, *how)
            if begins == "harmony":
                thinks: ReasoningParser = HarmonyParser(*how_told)
            else:
                thinks = ReasoningParser(begins, openings)
            self.choices.append(
                ChoiceStream(index, self, add, tokenizer, parser, thinks)
            )

    def add_logprobs(self, found: Sequence[TokenLogprobs | None]) -> None:
        """The next of the prompt's tokens, in order."""
        self._found += found

    def with_first_usage(self, delta: TokenDelta) -> TokenDelta:
        """Its first choice's first or last delta; in the last one of an answer that was moved as
        many tokens were cached as in the first: what was computed again nobody asked for."""
        first, usage = self.first_usage, delta.usage
        if first and usage and self.is_known and delta.finish_reason:
            return replace(
                delta, usage=replace(usage, cached_tokens=first.cached_tokens)
            )
        self.first_usage = usage
        return delta

    def report(
        self, token_id: int, found: TokenLogprobs | None, num_top: int, offset: int
    ) -> TokenReport:
        """One token of prompt or answer; of the likeliest ones `num_top` at most."""
        token = self._text(token_id)
        if found is None:
            return TokenReport(token, None, offset=offset)
        top = []
        owners = {token.text: token_id}
        pairs = zip(found.top_ids[:num_top], found.top_logprobs[:num_top], strict=True)
        for top_id, logprob in pairs:
            shown = self._text(top_id)
            if (
                owners.setdefault(shown.text, top_id) != top_id
            ):  # two tokens of the same text
                shown = TokenText(f"token_id:{top_id}", shown.raw)
            top.append((shown, _finite(logprob)))
        return TokenReport(token, _finite(found.logprob), top, offset)

    def _text(self, token_id: int) -> TokenText:
        plain = self._tokenizer.token_text(token_id)
        as_id = self.request.return_tokens_as_token_ids
        return TokenText(f"token_id:{token_id}", plain.raw) if as_id else plain

    @property
    def takes_long(self) -> bool:
        """Whether `tell` does, and could begin."""
        wanted = self.request.num_prompt_logprobs
        is_due = self._told is None and (
            wanted is None or len(self._found) == len(self.ids)
        )
        each = self.request.wants_echo + (0 if wanted is None else 1 + wanted)
        return is_due and each * len(self.ids) > INLINE_LOGPROBS

    def tell(self) -> tuple[list[Any] | None, str, list[TokenReport] | None]:
        """What an answer says of it: `prompt_logprobs`, and the text and tokens of the echo. It is
        made once; any thread may do that, once all of the prompt's logprobs are there."""
        if self._told is None:
            text, reports = self._echo() if self.request.wants_echo else ("", None)
            self._told = self._logprobs(), text, reports
        return self._told

    def _echo(self) -> tuple[str, list[TokenReport] | None]:
        """The prompt's text, and its tokens where log-probabilities are wanted."""
        text, offsets = self._text_and_offsets()
        if not self.request.wants_logprobs:
            return text, None
        num_top = self.request.num_logprobs or 0
        entries = zip(self.ids, self._complete(), offsets, strict=True)
        return text, [self.report(i, found, num_top, at) for i, found, at in entries]

    def _logprobs(self) -> list[Any] | None:
        """`prompt_logprobs` as vLLM has it: per token an object by token id, null for the first."""
        num_top = self.request.prompt_logprobs
        if num_top is None or self.request.is_prefill:
            return None
        found = zip(self.ids, self._complete(), strict=True)
        return [one and Raw(_encode(self._by_id(i, one, num_top))) for i, one in found]

    def _by_id(
        self, token_id: int, found: TokenLogprobs, num_top: int
    ) -> dict[str, Any]:
        top = zip(
            found.top_ids[:num_top], enumerate(found.top_logprobs, 1), strict=False
        )
        entries = {token_id: (found.rank or None, found.logprob), **dict(top)}
        return {
            str(key): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._text(key).text,
            }
            for key, (rank, logprob) in entries.items()
        }

    def _complete(self) -> list[TokenLogprobs | None]:
        if len(self._found) != len(self.ids):
            raise InternalError(
                f"The engine scored {len(self._found)} of the prompt's {len(self.ids)} tokens."
            )
        return self._found

    def _text_and_offsets(self) -> tuple[str, list[int]]:
        """The text to echo, and where in it each token begins. The beginning of a character, which
        may end the ids that a client sends, is in the text of the choice.

        A text is echoed as it came; what the tokenizer put before it (a BOS) takes no room there.
        """
        skips = self._given is None and self.request.skip_special_tokens
        detokenizer = create_detokenizer(
            self._tokenizer, self.ids, skip_special_tokens=skips
        )
        text, offsets = detokenizer.echo(self.ids)
        if self._given is None:
            return text, offsets
        size = len(self._given)
        surplus = len(text) - size
        if not text.endswith(
            self._given
        ):  # it names special tokens: their spaces are lost
            surplus = max(text.find(self._given[:_HEAD_CHARS]), 0)
        return self._given, [min(max(at - surplus, 0), size) for at in offsets]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class ChoiceStream:
    """Detokenizes one sequence, finds its stop strings and counts its tokens.

    Args:
        index: of the choice in the answer.
        prompt: that it continues.
        add: the engine's request.
        tool_parser: reads the tool calls out of the text, where there can be some.
        reasoning: reads out of it what the model thinks before.
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
        self.num_tokens = (
            0  # generated, up to and including what completed a stop string
        )
        self.final: TokenDelta | None = None
        self.stop_found = False
        self._last_id: int | None = None
        self._sum_logprobs = 0.0
        self._request = request
        self._prompt = prompt
        self._max_tokens = add.max_tokens
        # The text of what ended the sequence, where it is wanted, is what the tokenizer says.
        keeps_stop = request.include_stop_str_in_output
        self._end_ids = frozenset(() if keeps_stop else add.stop_token_ids)
        skips = request.skip_special_tokens
        shown: tuple[str, ...] = () if reasoning.is_over else THINK_TAGS
        shown += SPECIAL_TAGS if tool_parser else ()
        self._detokenizer = create_detokenizer(
            tokenizer,
            add.token_ids,
            skip_special_tokens=skips,
            shown=shown,
            echoes_prompt=request.wants_echo,
        )
        self._stops = StopFinder(request.stop, keeps_stop=keeps_stop)
        self._offset = 0  # characters of the answer so far, held ones included
        self._first = True
        self._tool_parser = tool_parser
        self.num_reasoning = 0  # of the tokens
        self._num_waiting = (
            0  # of the last tokens, that are reasoning unless it ends before them
        )
        self._reasoning = reasoning

    @property
    def needs_abort(self) -> bool:
        """Whether the engine would go on although the text is complete."""
        return (
            self.stop_found
            and self.final is None
            and self.num_tokens < self._max_tokens
        )

    @property
    def mean_logprob(self) -> float:
        """Per token, what candidates are ranked by; 0 for an answer without tokens."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    def feed(self, delta: TokenDelta) -> ChoicePiece | None:
        """The piece that a delta without error adds; the last one has the finish reason.

        None for a delta that says something about the prompt alone.

        After a stop string the text is complete, but the piece with the finish reason follows
        only when the engine has confirmed the end: it brings the usage.
        """
        if not delta.token_ids and delta.finish_reason is None:
            return None
        piece = self._new_piece()
        for position, token_id in enumerate(delta.token_ids):
            if self.stop_found:
                break
            logprobs = delta.logprobs[position] if delta.logprobs else None
            self._take(piece, token_id, logprobs)
        if delta.finish_reason is not None:
            self._finish(piece, delta)
        if self._tool_parser is not None and self._reasoning.is_over:
            _take_calls_out(piece, self._tool_parser)
        return piece

    def _tell(self, piece: ChoicePiece, reasoning: str, text: str) -> None:
        if getattr(self._request, "include_reasoning", False):
            piece.reasoning += reasoning
        piece.text += text

    def _new_piece(self) -> ChoicePiece:
        request = self._request
        piece = ChoicePiece(self.index, token_ids=[])
        piece.logprobs = [] if request.wants_logprobs else None
        if self._first:
            self._first = False
            piece.first = True
            piece.prompt_logprobs, text, reports = self._prompt.tell()
            if request.return_token_ids:
                piece.prompt_token_ids = list(self._prompt.ids)
            if request.wants_echo:
                piece.text, piece.logprobs = (
                    text,
                    None if reports is None else [*reports],
                )
                self._offset = len(text)
        return piece

    def _take(
        self, piece: ChoicePiece, token_id: int, logprobs: TokenLogprobs | None
    ) -> None:
        self.num_tokens += 1
        self._last_id = token_id
        piece.token_ids.append(token_id)
        if tag := self._reasoning.tags.get(token_id):
            text = self._detokenizer.flush() + tag
        else:
            text = "" if token_id in self._end_ids else self._detokenizer.push(token_id)
        offset = self._offset
        self._offset += len(text)
        is_of_frame = bool(tag) or self._reasoning.is_in_head
        thinks = self._reasoning.may_think
        # Before min_tokens no stop string begins or ends, nor in what the client does not see.
        if (
            self.num_tokens > self._request.min_tokens
            and not self._reasoning.is_in_head
        ):
            text, self.stop_found = self._stops.push(text)
        self._tell(piece, *self._reasoning.feed(text))
        is_thought = thinks and self._reasoning.is_inside
        self.num_reasoning += is_thought
        self._num_waiting = self._num_waiting + 1 if self._reasoning.is_waiting else 0
        if logprobs is not None:
            self._sum_logprobs += logprobs.logprob
            if piece.logprobs is not None:
                num_top = self._request.num_logprobs or 0
                report = self._prompt.report(token_id, logprobs, num_top, offset)
                is_of_text = not (is_thought or is_of_frame)
                piece.logprobs.append(replace(report, is_of_text=is_of_text))

    def _finish(self, piece: ChoicePiece, delta: TokenDelta) -> None:
        self.final = delta
        if not self.stop_found:
            text, self.stop_found = self._stops.push(self._detokenizer.flush())
            self._tell(piece, *self._reasoning.feed(text + self._stops.flush()))
        was_over = self._reasoning.is_over
        is_cut = delta.finish_reason != "stop" and not self.stop_found
        reasoning, text = self._reasoning.finish(is_cut=is_cut)
        self._tell(piece, reasoning, text)
        if text and not was_over:
            self.num_reasoning = max(0, self.num_reasoning - self._num_waiting)
        piece.finish_reason = "stop" if self.stop_found else delta.finish_reason
        piece.stop_reason = self._stops.found
        if (
            piece.finish_reason == "stop"
            and self._last_id in self._request.stop_token_ids
        ):
            piece.stop_reason = piece.stop_reason or self._last_id


def _take_calls_out(piece: ChoicePiece, parser: ToolParser) -> None:
    """Moves the calls in a piece's text to its `tool_calls`."""
    parsed = parser.feed(piece.text)
    piece.text, piece.tool_calls = parsed.content, parsed.calls
    if piece.finish_reason is not None:
        rest = parser.finish()
        piece.text += rest.content
        piece.tool_calls += rest.calls
        if piece.finish_reason == "stop" and parser.has_complete_calls:
            piece.finish_reason = (
                "tool_calls"  # which says that no arguments are cut off
            )

"""One choice's answer: deltas of token ids in, pieces of text out. Pure, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.http.prompt import Namer, Prompt
from engine.http.text_encoder import given_texts
from engine.http.tools import new_tool_parser
from engine.text.detokenizer import StopFinder, create_detokenizer
from engine.text.tokenizer import Tokenizer
from engine.text.tool_parser import ToolParser
from protocol.messages import AddRequest, TokenDelta, TokenLogprobs
from protocol.openai.responses import ChoicePiece
from protocol.openai.sampling import GenerationRequest


class ChoiceStream:
    """Detokenizes one sequence, finds its stop strings and counts its tokens.

    Args:
        index: of the choice in the answer.
        max_tokens: after which the engine ends the sequence by itself.
        end_ids: token ids that end the sequence; they have no text.
        tool_parser: reads the tool calls out of the text, where there can be some.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        prompt: Prompt,
        tokenizer: Tokenizer,
        namer: Namer,
        *,
        max_tokens: int,
        end_ids: Sequence[int] = (),
        tool_parser: ToolParser | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0  # generated, up to and including what completed a stop string
        self.final: TokenDelta | None = None
        self.stop_found = False
        self._last_id: int | None = None
        self._sum_logprobs = 0.0
        self._request = request
        self._prompt = prompt
        self._namer = namer
        self._max_tokens = max_tokens
        # The text of what ended the sequence, where it is wanted, is what the tokenizer says.
        self._end_ids = frozenset(() if request.include_stop_str_in_output else end_ids)
        self._detokenizer = create_detokenizer(
            tokenizer, prompt.ids, skip_special_tokens=request.skip_special_tokens
        )
        self._stops = StopFinder(request.stop, keeps_stop=request.include_stop_str_in_output)
        self._offset = 0  # characters of the answer so far, held ones included
        self._first = True
        self._tool_parser = tool_parser

    @property
    def needs_abort(self) -> bool:
        """Whether the engine would go on although the text is complete."""
        return self.stop_found and self.final is None and self.num_tokens < self._max_tokens

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
        if self._tool_parser is not None:
            _take_calls_out(piece, self._tool_parser)
        return piece

    def _new_piece(self) -> ChoicePiece:
        piece = ChoicePiece(self.index, token_ids=[])
        if self._request.wants_logprobs:
            piece.logprobs = []
        if self._first:
            self._first = False
            piece.first = True
            piece.prompt_logprobs = self._prompt.logprobs()
            if self._request.return_token_ids:
                piece.prompt_token_ids = list(self._prompt.ids)
            if self._request.wants_echo:
                piece.text, reports = self._prompt.echo()
                piece.logprobs = reports
                self._offset = len(piece.text)
        return piece

    def _take(self, piece: ChoicePiece, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.num_tokens += 1
        self._last_id = token_id
        piece.token_ids.append(token_id)
        text = "" if token_id in self._end_ids else self._detokenizer.push(token_id)
        if logprobs is not None:
            self._sum_logprobs += logprobs.logprob
            if piece.logprobs is not None:
                num_top = self._request.num_logprobs or 0
                piece.logprobs.append(self._namer.report(token_id, logprobs, num_top, self._offset))
        self._offset += len(text)
        if self.num_tokens <= self._request.min_tokens:
            piece.text += text  # no stop string begins or ends in it
            return
        emitted, self.stop_found = self._stops.push(text)
        piece.text += emitted

    def _finish(self, piece: ChoicePiece, delta: TokenDelta) -> None:
        self.final = delta
        if not self.stop_found:
            emitted, self.stop_found = self._stops.push(self._detokenizer.flush())
            piece.text += emitted
        if not self.stop_found:
            piece.text += self._stops.flush()
        piece.finish_reason = "stop" if self.stop_found else delta.finish_reason
        piece.stop_reason = self._stops.found
        if piece.finish_reason == "stop" and self._last_id in self._request.stop_token_ids:
            piece.stop_reason = piece.stop_reason or self._last_id


def _take_calls_out(piece: ChoicePiece, parser: ToolParser) -> None:
    """Moves the calls in a piece's text to its `tool_calls`."""
    parsed = parser.feed(piece.text)
    piece.text, piece.tool_calls = parsed.content, parser.wanted(parsed.calls)
    if piece.finish_reason is not None:
        rest = parser.finish()
        piece.text += rest.content
        piece.tool_calls += parser.wanted(rest.calls)
        if piece.finish_reason == "stop" and parser.num_calls:
            piece.finish_reason = "tool_calls"


@dataclass(frozen=True)
class ChoiceGroup:
    """One prompt and the choices drawn for it."""

    prompt: Prompt
    choices: list[ChoiceStream]


def choice_groups(
    parsed: GenerationRequest,
    adds: Sequence[AddRequest],
    tokenizer: Tokenizer,
    tool_call_parser: str,
) -> dict[str, ChoiceGroup]:
    """The choices of each prompt of a request, by the id of what the engine was asked."""
    namer = Namer(tokenizer, as_ids=parsed.return_tokens_as_token_ids)
    groups: dict[str, ChoiceGroup] = {}
    for number, (add, given) in enumerate(zip(adds, given_texts(parsed), strict=True)):
        prompt = Prompt(parsed, add.token_ids, given, tokenizer, namer)
        choices = [
            ChoiceStream(
                number * add.num_choices + choice,
                parsed,
                prompt,
                tokenizer,
                namer,
                max_tokens=add.max_tokens,
                end_ids=add.stop_token_ids,
                tool_parser=new_tool_parser(parsed, tool_call_parser, tokenizer),
            )
            for choice in range(add.num_choices)
        ]
        groups[add.request_id] = ChoiceGroup(prompt, choices)
    return groups

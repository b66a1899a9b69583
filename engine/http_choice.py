"""One prompt's answer: deltas of token ids in, pieces of text out. Pure, no I/O."""

from collections.abc import Sequence

from engine.detokenizer import StopFinder, create_detokenizer
from engine.tokenizer import Tokenizer
from protocol.messages import KVUsage, TokenDelta, TokenLogprobs
from protocol.openai import ChoicePiece, GenerationRequest, LogprobsPiece

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class Choice:
    """Detokenizes one sequence, finds its stop strings and counts its tokens.

    Args:
        index: of the prompt in the request.
        max_tokens: after which the engine ends the sequence by itself.
        end_ids: token ids that end the sequence; they have no text.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.num_prompt_tokens = len(prompt_ids)
        self.num_tokens = 0  # generated, up to and including what completed a stop string
        self.final: TokenDelta | None = None
        self.stop_found = False
        self._prompt_ids = list(prompt_ids) if request.return_token_ids else None
        self._with_logprobs = request.num_logprobs is not None
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._detokenizer = create_detokenizer(tokenizer, prompt_ids)
        self._stops = StopFinder(request.stop)
        self._offset = 0  # characters of the generated text so far, held ones included
        self._first = True

    @property
    def needs_abort(self) -> bool:
        """Whether the engine would go on although the text is complete."""
        return self.stop_found and self.final is None and self.num_tokens < self._max_tokens

    @property
    def kv(self) -> KVUsage:
        """Where the prompt's KV came from; zeros until the last delta."""
        return (self.final and self.final.usage) or KVUsage()

    def feed(self, delta: TokenDelta) -> ChoicePiece:
        """The piece that a delta without error adds; the last one has the finish reason.

        After a stop string the text is complete, but the piece with the finish reason follows
        only when the engine has confirmed the end: it brings the usage.
        """
        piece = self._new_piece()
        for position, token_id in enumerate(delta.token_ids):
            if self.stop_found:
                break
            logprobs = delta.logprobs[position] if delta.logprobs else None
            self._take(piece, token_id, logprobs)
        if delta.finish_reason is not None:
            self._finish(piece, delta)
        return piece

    def _new_piece(self) -> ChoicePiece:
        piece = ChoicePiece(self.index, token_ids=[])
        if self._with_logprobs:
            piece.logprobs = LogprobsPiece([], [], [], [])
        if self._first:
            self._first = False
            piece.first = True
            piece.prompt_token_ids = self._prompt_ids
        return piece

    def _take(self, piece: ChoicePiece, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.num_tokens += 1
        piece.token_ids.append(token_id)
        text = "" if token_id in self._end_ids else self._detokenizer.push(token_id)
        if piece.logprobs is not None and logprobs is not None:
            self._add_logprobs(piece.logprobs, token_id, text, logprobs)
        self._offset += len(text)
        emitted, self.stop_found = self._stops.push(text)
        piece.text += emitted

    def _add_logprobs(
        self, piece: LogprobsPiece, token_id: int, text: str, logprobs: TokenLogprobs
    ) -> None:
        chosen = max(logprobs.logprob, _LOWEST_LOGPROB)
        token_text = self._tokenizer.token_text
        top = {token_text(token_id): chosen}
        for top_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            top.setdefault(token_text(top_id), max(logprob, _LOWEST_LOGPROB))
        piece.tokens.append(text)
        piece.token_logprobs.append(chosen)
        piece.top_logprobs.append(top)
        piece.text_offset.append(self._offset)

    def _finish(self, piece: ChoicePiece, delta: TokenDelta) -> None:
        self.final = delta
        if not self.stop_found:
            emitted, self.stop_found = self._stops.push(self._detokenizer.flush())
            piece.text += emitted
        if not self.stop_found:
            piece.text += self._stops.flush()
        piece.finish_reason = "stop" if self.stop_found else delta.finish_reason

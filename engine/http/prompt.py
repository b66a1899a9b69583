"""One prompt of a call: its echo, and the log-probabilities of its tokens. Pure, no I/O."""

from collections.abc import Sequence
from typing import Any

from engine.text.detokenizer import create_detokenizer
from engine.text.tokenizer import Tokenizer
from protocol.errors import InternalError
from protocol.messages import TokenLogprobs
from protocol.openai.logprobs import TokenReport, TokenText
from protocol.openai.sampling import GenerationRequest

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
_HEAD_CHARS = 4  # of a text, by which its beginning is found behind what was put before it


class Namer:
    """Shows tokens as a client asked for them.

    Args:
        as_ids: a token is "token_id:5", not its text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> TokenText:
        plain = self._tokenizer.token_text(token_id)
        return TokenText(f"token_id:{token_id}", plain.raw) if self._as_ids else plain

    def report(
        self, token_id: int, found: TokenLogprobs | None, num_top: int, offset: int
    ) -> TokenReport:
        """One token; of the likeliest ones `num_top` at most."""
        token = self.text(token_id)
        if found is None:
            return TokenReport(token, None, offset=offset)
        top = []
        owners = {token.text: token_id}
        pairs = zip(found.top_ids[:num_top], found.top_logprobs[:num_top], strict=True)
        for top_id, logprob in pairs:
            shown = self.text(top_id)
            if owners.setdefault(shown.text, top_id) != top_id:  # two tokens of the same text
                shown = TokenText(f"token_id:{top_id}", shown.raw)
            top.append((shown, _finite(logprob)))
        return TokenReport(token, _finite(found.logprob), top, offset)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class Prompt:
    """What the choices of one prompt share.

    Args:
        given: the text that the client sent, or None where it sent token ids.
    """

    def __init__(
        self,
        request: GenerationRequest,
        ids: Sequence[int],
        given: str | None,
        tokenizer: Tokenizer,
        namer: Namer,
    ) -> None:
        self.ids = ids
        self._request = request
        self._given = given
        self._tokenizer = tokenizer
        self._namer = namer
        self._found: list[TokenLogprobs | None] = []

    def add_logprobs(self, found: Sequence[TokenLogprobs | None]) -> None:
        """The next of the prompt's tokens, in order."""
        self._found += found

    def echo(self) -> tuple[str, list[TokenReport] | None]:
        """The prompt's text, and its tokens where log-probabilities are wanted."""
        text, offsets = self._text_and_offsets()
        num_top = self._request.num_logprobs
        if num_top is None or not self._request.wants_logprobs:
            return text, None
        entries = zip(self.ids, self._complete(), offsets, strict=True)
        return text, [self._namer.report(i, found, num_top, at) for i, found, at in entries]

    def logprobs(self) -> list[Any] | None:
        """`prompt_logprobs` as vLLM has it: per token an object by token id, null for the first."""
        num_top = self._request.prompt_logprobs
        if num_top is None or self._request.is_prefill:
            return None
        found = zip(self.ids, self._complete(), strict=True)
        return [one and self._by_id(token_id, one, num_top) for token_id, one in found]

    def _by_id(self, token_id: int, found: TokenLogprobs, num_top: int) -> dict[str, Any]:
        entries = list(zip(found.top_ids, found.top_logprobs, strict=True))[:num_top]
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(entries, 1)}
        everything = {token_id: found.logprob, **dict(entries)}
        return {
            str(key): {
                "logprob": _finite(logprob),
                "rank": ranks.get(key),
                "decoded_token": self._namer.text(key).text,
            }
            for key, logprob in everything.items()
        }

    def _complete(self) -> list[TokenLogprobs | None]:
        if len(self._found) != len(self.ids):
            raise InternalError(
                f"The engine scored {len(self._found)} of the prompt's {len(self.ids)} tokens."
            )
        return self._found

    def _text_and_offsets(self) -> tuple[str, list[int]]:
        """The text to echo, and where in it each token begins.

        A text is echoed as it came; what the tokenizer put before it (a BOS) takes no room there.
        """
        skips = self._given is None and self._request.skip_special_tokens
        detokenizer = create_detokenizer(self._tokenizer, skip_special_tokens=skips)
        offsets, text = [], ""
        for token_id in self.ids:
            offsets.append(len(text))
            text += detokenizer.push(token_id)
        text += detokenizer.flush()
        if self._given is None:
            return text, offsets
        size = len(self._given)
        surplus = len(text) - size
        if not text.endswith(self._given):  # it names special tokens: their spaces are lost
            surplus = max(text.find(self._given[:_HEAD_CHARS]), 0)
        return self._given, [min(max(at - surplus, 0), size) for at in offsets]

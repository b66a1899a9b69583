"""Log-probabilities in the shapes of the API: completions, chat, and a prompt's."""

from collections.abc import Sequence
from typing import Any

import msgspec


class TokenText(msgspec.Struct, frozen=True):
    """How a token is shown. `text` names one token alone, so that answers can be keyed by it."""

    text: str
    raw: bytes  # one token may be a part of a character


class TokenReport(msgspec.Struct, frozen=True):
    """One token of an answer, or of an echoed prompt, with its log-probabilities."""

    token: TokenText
    logprob: float | None  # None: the prompt's first token, which nothing predicts
    top: Sequence[tuple[TokenText, float]] = ()  # the likeliest tokens, most likely first
    offset: int = 0  # characters of the answer before it


def completion_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """The `logprobs` of a completion's choice: parallel lists, one entry per token."""
    return {
        "tokens": [report.token.text for report in reports],
        "token_logprobs": [report.logprob for report in reports],
        "top_logprobs": [_by_text(report) for report in reports],
        "text_offset": [report.offset for report in reports],
    }


def _by_text(report: TokenReport) -> dict[str, float] | None:
    """The token itself is always there, as in OpenAI's API."""
    if report.logprob is None:
        return None
    found = {report.token.text: report.logprob}
    for token, logprob in report.top:
        found.setdefault(token.text, logprob)
    return found


def chat_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice: one object per token."""
    content = []
    for report in reports:
        tops = [_entry(token, logprob) for token, logprob in report.top]
        content.append({**_entry(report.token, report.logprob), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _entry(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}

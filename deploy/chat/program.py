"""The command `baton chat`: its options, and answers to questions from a pipe."""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from rich.console import Console

from deploy.chat.conversation import Conversation
from deploy.chat.endpoint import Answer, ChatError, Endpoint, choose_model
from protocol.settings import sources
from protocol.settings.options import ApiKey, Seconds
from protocol.settings.settings import BatonSettings, parse

_MAX_QUESTION_CHARS = 10_000_000


def _without_version(url: str) -> str:
    """Return a URL without the /v1 that OpenAI clients need."""
    return url.rstrip("/").removesuffix("/v1")


class ChatSettings(BatonSettings):
    """Chats with a model in the terminal, or answers a question from a pipe."""

    url: Annotated[sources.Url, BeforeValidator(_without_version)] = (
        "http://127.0.0.1:8000"
    )
    """URL of a proxy, a server or another OpenAI-compatible endpoint"""
    model: str | None = Field(None, min_length=1)
    """name of the model (None: the first that the endpoint lists)"""
    system: str | None = None
    """system prompt (None: no system prompt)"""
    max_tokens: int | None = Field(None, ge=1)
    """maximum length of an answer (tokens; None: the endpoint's limit)"""
    temperature: float | None = Field(None, ge=0, le=2)
    """sampling temperature (None: the model's)"""
    api_key: sources.Listed[ApiKey] = ()
    """API key; of several, the first is used. Prefer the variable BATON_API_KEY"""
    tls_ca: str | None = Field(None, min_length=1)
    """PEM file with the certificate authorities of an https:// endpoint (None: the
    authorities of the system)
    """
    timeout_s: Seconds = 600.0
    """timeout of waiting for the next bytes of an answer (s)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the user leaves, or answer a question from a pipe.

    Returns the exit status: 1 after an error, or if the reader of the output has ended;
    otherwise 0. Ctrl-C outside a conversation raises KeyboardInterrupt.
    """
    settings = parse(ChatSettings, argv, prog="baton chat")
    try:
        endpoint = Endpoint(
            settings.url,
            key=settings.api_key[0].get_secret_value() if settings.api_key else None,
            ca_file=settings.tls_ca,
            timeout_s=settings.timeout_s,
        )
        return _chat(settings, endpoint)
    except (ChatError, ValueError) as error:  # ValueError: an unusable --tls-ca
        print(f"baton chat: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _chat(settings: ChatSettings, endpoint: Endpoint) -> int:
    """Chat in a terminal, or answer the question on standard input. Raises ChatError.

    Returns the exit status.
    """
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    question = "" if is_interactive else _read_question()
    names = asyncio.run(endpoint.models())
    options: dict[str, Any] = {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
    }
    conversation = Conversation(
        model=choose_model(endpoint.url, settings.model, names),
        system=settings.system or "",
        options={name: value for name, value in options.items() if value is not None},
    )
    if is_interactive:
        from deploy.chat.terminal import Session  # loads prompt_toolkit

        Session(endpoint, conversation, Console()).run()
    else:
        asyncio.run(_print_answer(endpoint, conversation.request(question)))
    return 0


def _read_question() -> str:
    """Return the text on standard input. Raises ChatError if it is unusable."""
    try:
        question = sys.stdin.read(_MAX_QUESTION_CHARS + 1).strip()
    except UnicodeDecodeError:
        raise ChatError("the question on standard input is not UTF-8 text") from None
    if not question:
        raise ChatError(
            "standard input is empty; pipe a question (echo Hello | baton chat), or "
            "run the command in a terminal"
        )
    if len(question) > _MAX_QUESTION_CHARS:
        raise ChatError(
            f"the question has more than {_MAX_QUESTION_CHARS} characters; shorten it"
        )
    return question


async def _print_answer(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """Print the answer as plain text while it arrives, without its reasoning."""
    answer = Answer()
    num_printed = 0
    try:
        async for event in endpoint.stream(body):
            answer.add(event)
            print(answer.content[num_printed:], end="", flush=True)
            num_printed = len(answer.content)
    finally:
        if num_printed:
            print(flush=True)

"""The grammar of an answer's tokens: the request's own, and what may come before it or instead."""

import msgspec

from engine.text.harmony import head_of
from engine.text.harmony_tags import MESSAGE
from engine.text.reasoning import reasoning_begins
from engine.text.tokenizer import Tokenizer
from engine.text.tool_formats import call_beginnings
from protocol.messages import Grammar
from protocol.openai.chat import ChatRequest
from protocol.openai.sampling import GenerationRequest
from protocol.openai.tools import Tools
from protocol.settings.settings import EngineSettings


def grammar_of(
    grammar: Grammar | None,
    parsed: GenerationRequest,
    prompt_ids: list[int],
    tokenizer: Tokenizer,
    settings: EngineSettings,
) -> Grammar | None:
    """`grammar` with the reasoning that may go before it and the calls that may take its place, and
    with what the request says of single tokens and words."""
    if grammar is not None:
        begins = reasoning_begins(settings, parsed, prompt_ids, tokenizer)
        tools = parsed.toolset if isinstance(parsed, ChatRequest) else Tools()
        option = begins if begins == "harmony" else settings.tool_call_parser
        calls = call_beginnings(tools, option, tokenizer)
        if option == "harmony" and MESSAGE in head_of(prompt_ids, tokenizer):
            begins, calls = None, ()  # the final message has begun
        grammar = msgspec.structs.replace(grammar, reasoning=begins or "", calls=calls)
    banned = tuple(
        ids for word in parsed.bad_words for ids in _spellings(word, tokenizer)
    )
    if not (parsed.allowed_token_ids or banned):
        return grammar
    found = grammar or Grammar("any")
    return msgspec.structs.replace(
        found, allowed=parsed.allowed_token_ids, banned=banned
    )


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of a word at the start of a text, and as vLLM has it, of one after a space that is
    as long: a space that is a token alone leaves the word as it was."""
    start, inner = (
        tuple(tokenizer.encode(before + word.lstrip(), add_special_tokens=False))
        for before in ("", " ")
    )
    is_other = start[:1] != inner[:1] and len(start) == len(inner)
    return [ids for ids in ([start, inner] if is_other else [start]) if ids]

"""Extends a request's grammar to allow reasoning and tool calls in the answer."""

import msgspec

from engine.text.harmony import answer_head
from engine.text.harmony_tags import MESSAGE
from engine.text.reasoning import reasoning_start
from engine.text.tokenizer import Tokenizer
from engine.text.tool_formats import call_beginnings
from protocol.messages import Grammar
from protocol.openai.chat import ChatRequest
from protocol.openai.sampling import GenerationRequest
from protocol.openai.tools import Tools
from protocol.settings.settings import EngineSettings


def answer_grammar(
    grammar: Grammar | None,
    parsed: GenerationRequest,
    prompt_ids: list[int],
    tokenizer: Tokenizer,
    settings: EngineSettings,
) -> Grammar | None:
    """Return the grammar that an answer's tokens must follow; None: all are allowed.

    The result extends `grammar` by the reasoning that may precede the text, the tool
    calls that may replace the text, and the request's allowed tokens and banned words.

    Args:
        grammar: the grammar of the answer's text, or None.
        prompt_ids: the prompt, which may already contain the beginning of the answer.
    """
    if grammar is not None:
        start = reasoning_start(settings, parsed, prompt_ids, tokenizer)
        tools = parsed.toolset if isinstance(parsed, ChatRequest) else Tools()
        parser_name = start if start == "harmony" else settings.tool_call_parser
        calls = call_beginnings(tools, parser_name, tokenizer)
        if parser_name == "harmony" and MESSAGE in answer_head(prompt_ids, tokenizer):
            # The prompt already begins the final message, so neither reasoning nor
            # calls can follow.
            start = None
            calls = ()
        grammar = msgspec.structs.replace(grammar, reasoning=start or "", calls=calls)
    banned = tuple(
        ids for word in parsed.bad_words for ids in _spellings(word, tokenizer)
    )
    if not (parsed.allowed_token_ids or banned):
        return grammar
    return msgspec.structs.replace(
        grammar or Grammar("any"), allowed=parsed.allowed_token_ids, banned=banned
    )


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token ids of a banned word at the start of a text, and after a space.

    As in vLLM, the spelling after a space is banned only if it has as many tokens as
    the spelling at the start, and a different first token.
    """
    bare_word = word.lstrip()
    at_start = tuple(tokenizer.encode(bare_word, add_special_tokens=False))
    after_space = tuple(tokenizer.encode(" " + bare_word, add_special_tokens=False))
    spellings = [at_start]
    if at_start[:1] != after_space[:1] and len(at_start) == len(after_space):
        spellings.append(after_space)
    return [ids for ids in spellings if ids]

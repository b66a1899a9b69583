"""What an output must match, as llguidance reads it. Used where requests are validated and where
masks are made; no torch here.

JSON may have whitespace between its tokens, but only so much of it at a place: a model that has
begun to write blanks would otherwise go on until `max_tokens`.
"""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from protocol.messages import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 128 * 1024
MAX_GBNF_CHARS = 16 * 1024  # turned into Lark's form in quadratic time, at this size 0.7 s

_MAX_WHITESPACE = 12
_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{_MAX_WHITESPACE}}}"
}

# A state of the lexer takes 1 to 2 kB and is made as outputs reach it. Errors go to clients.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


# What llguidance takes for Lark's form. Its own pattern takes minutes over 100,000 empty lines.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)

# Rules that refer to one another in a row of thousands are followed by recursion, in Rust, where
# an overflow ends the process. A text of the largest size takes a third of this.
_STACK_BYTES = 64 * 2**20


def compiling_thread(name: str) -> ThreadPoolExecutor:
    """One thread that may call `make_matcher` and `find_mistake`."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    usual = threading.stack_size(_STACK_BYTES)
    pool.submit(int).result()  # the thread is there
    threading.stack_size(usual)
    return pool


class GrammarError(ValueError):
    """A schema, regex, list of choices or grammar that cannot be used; says why in one line."""


def make_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of `grammar`, made on a `compiling_thread`. Other threads may run
    meanwhile.

    Raises:
        GrammarError: it has a mistake or is too large.
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(grammar.text)} characters, at most {MAX_GRAMMAR_CHARS}")
    matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(_one_line(matcher.get_error()))
    return matcher


@lru_cache(maxsize=256)
def find_mistake(grammar: Grammar) -> str | None:
    """Why `grammar` cannot be used, whatever the vocabulary, or None. On a `compiling_thread`;
    takes milliseconds, for one of the largest allowed size a second or two."""
    try:
        matcher = make_matcher(_byte_tokenizer(), grammar)
    except GrammarError as error:
        return str(error)
    can_begin = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error():
        return "no text matches it"
    if can_begin == 1 << _byte_tokenizer().eos_token:
        return "no text but the empty one matches it"
    return None


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _source(grammar: Grammar) -> str:
    try:
        return _to_llguidance(grammar)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except GrammarError:
        raise
    except Exception as error:  # the converters raise several kinds, all about the text
        raise GrammarError(_one_line(str(error))) from None


def _to_llguidance(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', _JSON_OPTIONS)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, _JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices = json.loads(grammar.text)
            # Lark takes every character as JSON writes it, but for this one.
            quoted = (
                json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f")
                for choice in choices
            )
            return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
        case "grammar" if _LARK.search(grammar.text):
            return LLMatcher.grammar_from_lark(grammar.text)
        case "grammar" if len(grammar.text) > MAX_GBNF_CHARS:
            raise GrammarError(
                f"it has no rule `start:`, so it is GBNF, and has {len(grammar.text)} characters, "
                f"at most {MAX_GBNF_CHARS}"
            )
        case "grammar":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))


def _one_line(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."

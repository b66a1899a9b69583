"""What an output must match, as llguidance reads it. Used where grammars are tried
(grammar_process.py) and where masks are made; no torch here.

JSON may have whitespace between its tokens, but only so much of it at a place: a model that has
begun to write blanks would otherwise go on until `max_tokens`.
"""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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

# A state of the lexer takes 1 to 2 kB and is made as outputs reach it. A mask's time grows with the
# square of its items: a choice of 1,024 texts has fewer than these. Errors go to clients.
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_max_items=10_000, verbose_errors=False)

MAX_MASK_S = 0.5  # of a core, for the tokens that may be drawn at one place


# What llguidance takes for Lark's form. Its own pattern takes minutes over 100,000 empty lines.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)

# Rules that refer to one another in a row of thousands are followed by recursion, in Rust, where
# an overflow ends the process. A text of the largest size takes a third of this.
STACK_BYTES = 64 * 2**20


def compiling_threads(name: str, count: int) -> ThreadPoolExecutor:
    """Threads that may call `make_matcher`."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_there = threading.Barrier(count)
    usual = threading.stack_size(STACK_BYTES)
    for made in [pool.submit(all_there.wait) for _ in range(count)]:
        made.result()
    threading.stack_size(usual)
    return pool


class GrammarError(ValueError):
    """A schema, regex, list of choices or grammar that cannot be used; says why in one line."""


def make_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of `grammar`, made on one of `compiling_threads`, or on one
    with as large a stack. Other threads may run
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


def check_matcher(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Raises GrammarError where a matcher at the beginning says that nothing, or nothing in time,
    can be drawn."""
    began_s = time.thread_time()
    can_begin = int.from_bytes(matcher.compute_bitmask(), "little")
    seconds = time.thread_time() - began_s
    if matcher.is_error():
        reason = _one_line(matcher.get_error().partition("\n")[0])
        too_much = "too many" in reason.lower() or "too complex" in reason.lower()
        raise GrammarError(reason if too_much else "no text matches it")
    if seconds > MAX_MASK_S:
        raise GrammarError(
            f"it is too ambiguous: finding what its first token may be takes {seconds:.2f} s, at "
            f"most {MAX_MASK_S:g}"
        )
    if can_begin == 1 << tokenizer.eos_token:
        raise GrammarError("no text but the empty one matches it")


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

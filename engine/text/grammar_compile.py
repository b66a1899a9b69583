"""From a grammar's text to a matcher, and the process that a server tries grammars in before it
takes a request on. No torch here.

    HTTP process --a socket pair per try--> this process --fork--> child: compiles, tells, ends

The kernel bounds a child's memory and time, and a child ends when the other end of its socket is
closed. A grammar that exhausts the memory, overflows the stack or never ends compiling does so
here, where nobody else is served.

JSON may have whitespace between its tokens, but only so much of it at a place: a model that has
begun to write blanks would otherwise go on until `max_tokens`.
"""

import contextlib
import gc
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.text.schema.compile import calls_source, schema_source, with_checked_schemas
from engine.text.schema.errors import TOO_COMPLEX, GrammarError, reworded
from engine.text.schema.locate import located_problem
from engine.text.tokenizer import NO_TEMPLATE, Tokenizer
from protocol.messages import Grammar

MAX_GRAMMAR_CHARS = 128 * 1024
MAX_GBNF_CHARS = (
    16 * 1024
)  # turned into Lark's form in quadratic time, at this size 0.7 s
MAX_MASK_S = 0.5  # of a core, for the tokens that may be drawn at one place

# A state of the lexer takes 1 to 2 kB and is made as outputs reach it. A mask's time grows with the
# square of its items: a choice of 1,024 texts has fewer than these. Errors go to clients.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000, step_max_items=10_000, verbose_errors=False
)

# What llguidance takes for Lark's form. Its own pattern takes minutes over 100,000 empty lines.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)

# Rules that refer to one another in a row of thousands are followed by recursion, in Rust, where
# an overflow ends the process. A text of the largest size takes a third of this.
STACK_BYTES = 64 * 2**20

_PAGE_BYTES = resource.getpagesize()


def compiling_threads(name: str, count: int) -> ThreadPoolExecutor:
    """Threads that may call `make_matcher`."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_there = threading.Barrier(count)
    usual = threading.stack_size(STACK_BYTES)
    for made in [pool.submit(all_there.wait) for _ in range(count)]:
        made.result()
    threading.stack_size(usual)
    return pool


def vocabulary_of(tokenizer: Tokenizer, num_tokens: int | None = None) -> LLTokenizer:
    """What matchers are made for; takes about a second if it is large."""
    # An end token may be of the model's padding, which the tokenizer does not have.
    end_ids = [end_id for end_id in tokenizer.eos_ids if end_id < tokenizer.vocab_size]
    num_tokens = num_tokens or tokenizer.vocab_size
    return LLTokenizer(
        tokenizer.to_json(), n_vocab=num_tokens, eos_token=end_ids or None
    )


def make_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of `grammar`, made on a thread with a stack of STACK_BYTES. Other
    threads may run meanwhile.

    Raises:
        GrammarError: it has a mistake or is too large.
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(
            f"it has {len(grammar.text)} characters, at most {MAX_GRAMMAR_CHARS}"
        )
    try:
        source = _with_others(_to_llguidance(grammar), grammar)
    except RecursionError:
        raise GrammarError("it is nested too deeply; send a flatter one") from None
    except GrammarError:
        raise
    except Exception as error:  # the converters raise several kinds, all about the text
        raise GrammarError(_one_line(reworded(str(error)))) from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        problem = reworded(matcher.get_error())
        if grammar.kind == "json_schema":
            problem = located_problem(grammar.text, problem)
        raise GrammarError(_one_line(problem))
    return matcher


def _to_llguidance(grammar: Grammar) -> str:
    match grammar.kind:
        case "any":
            return LLMatcher.grammar_from_regex(r"(.|\n)*")
        case "json_object":
            return schema_source('{"type": "object"}')
        case "json_schema":
            return schema_source(grammar.text)
        case "calls":
            return calls_source(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            texts = (
                json.dumps(choice, ensure_ascii=False)
                for choice in json.loads(grammar.text)
            )
            # Lark takes every character as JSON writes it, but for this one.
            quoted = " | ".join(text.replace("\x7f", r"\u007f") for text in texts)
            return LLMatcher.grammar_from_lark(f"start: {quoted}")
        case "grammar" if _LARK.search(grammar.text):
            return LLMatcher.grammar_from_lark(with_checked_schemas(grammar.text))
        case "grammar" if len(grammar.text) > MAX_GBNF_CHARS:
            raise GrammarError(
                f"it has no rule `start:`, so it is GBNF, and has {len(grammar.text)} characters, "
                f"at most {MAX_GBNF_CHARS}"
            )
        case "grammar":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))


_BLANKS = r"/[ \n\r\t]{0,4}/"
_THOUGHTS = {
    "": "",
    "open": "thoughts ",
    "perhaps": f'{_BLANKS} ("<think>" thoughts)? ',
}
# Of gpt-oss: tags are tokens, and a call's recipient stands before its channel or behind it.
_HARMONY = r"""start: (<|start|> "assistant")? thought* said
thought: <|channel|> "analysis" <|message|> /(.|\n)*/ <|end|> <|start|> "assistant"
said: <|channel|> "final" type <|message|> @answer%s
type: (" "? <|constrain|> /[a-z]+/)?
"""
_HARMONY_CALL = r"""
call: (to channel | channel to) /( [a-z]+)?/ type <|message|> /(.|\n)*/
channel: <|channel|> /analysis|commentary/
to: """


def _with_others(source: str, grammar: Grammar) -> str:
    """What a grammar became, with anything before it up to </think>, and calls in its place."""
    if not (grammar.reasoning or grammar.calls):
        return source
    tags = [
        json.dumps(tag) if isinstance(tag, str) else f"<[{tag}]>"
        for tag in grammar.calls
    ]
    is_lark = not source.lstrip().startswith("{")
    first, *others = (
        [{"lark_grammar": source}] if is_lark else json.loads(source)["grammars"]
    )
    if grammar.reasoning == "harmony":
        lark = _HARMONY % (" | call" + _HARMONY_CALL + " | ".join(tags) if tags else "")
    else:
        calls = f" | {_BLANKS} ({' | '.join(tags)}) /(.|\\n)*/" if tags else ""
        lark = f"start: {_THOUGHTS[grammar.reasoning]}said\nsaid: @answer{calls}\n" + (
            'thoughts: until_end /[ \\n\\r\\t]{0,8}/\nuntil_end[suffix="</think>"]: /(.|\\n)*/'
        )
    return json.dumps(
        {"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]}
    )


def _check(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Raises GrammarError where a matcher at the beginning says that nothing, or nothing in time,
    can be drawn."""
    began_s = time.thread_time()
    can_begin = int.from_bytes(matcher.compute_bitmask(), "little")
    seconds = time.thread_time() - began_s
    if matcher.is_error():
        reason = matcher.get_error().lower()
        is_too_complex = "too many" in reason or "too complex" in reason
        raise GrammarError(
            TOO_COMPLEX if is_too_complex else "no text matches it; correct it"
        )
    if seconds > MAX_MASK_S:
        raise GrammarError(
            f"it is too ambiguous: finding what its first token may be takes {seconds:.2f} s, at "
            f"most {MAX_MASK_S:g}"
        )
    if can_begin == 1 << tokenizer.eos_token:
        raise GrammarError("no text but the empty one matches it")


def _one_line(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# -- the process -----------------------------------------------------------------------------------


class Try(msgspec.Struct, frozen=True):
    """The one message to a child, which says that it begins, and then of each grammar a Verdict.
    All messages are lines of JSON."""

    grammars: list[Grammar]
    memory_bytes: int  # that a child may take beyond what it is born with
    cpu_s: float  # after which the kernel ends a child
    limit_s: float


class Verdict(msgspec.Struct, frozen=True):
    mistake: str | None  # why the grammar cannot be used
    nbytes: int = 0  # of memory that it takes, compiled


def line_of(message: Try | Verdict) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def main() -> None:
    """Serves a socket until its other end is closed. Arguments: its number, and the folder of the
    model whose vocabulary grammars are tried with."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    tokenizer = vocabulary_of(Tokenizer(sys.argv[2], NO_TEMPLATE))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    judge(
        tokenizer, Grammar("json_object")
    )  # what all grammars need is there from now on
    gc.freeze()
    control.send(b"!")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with contextlib.suppress(
            OSError
        ):  # no child for now: its socket is closed, and that tells
            if os.fork() == 0:
                control.close()
                _try(socket.socket(fileno=descriptors[0]), tokenizer)
        os.close(descriptors[0])


def _try(connection: socket.socket, tokenizer: LLTokenizer) -> NoReturn:
    try:
        asked = msgspec.json.decode(connection.makefile("rb").readline(), type=Try)
        signal.setitimer(signal.ITIMER_PROF, asked.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, asked.limit_s)
        # What Rust says of a panic or of memory that ran out is no news for the server's log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        most = _memory_bytes(0) + STACK_BYTES + asked.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        threading.stack_size(STACK_BYTES)
        threading.Thread(
            target=_judge_all, args=(connection, tokenizer, asked.grammars)
        ).start()
        connection.recv(
            1
        )  # nothing, once the answer is there, or nobody wants it any more
    finally:
        os._exit(0)


def _judge_all(
    connection: socket.socket, tokenizer: LLTokenizer, grammars: list[Grammar]
) -> None:
    try:
        connection.sendall(b"{}\n")
        for grammar in grammars:
            connection.sendall(line_of(judge(tokenizer, grammar)))
    except BaseException:  # Rust's panics are none of Python's exceptions
        os._exit(1)


def judge(tokenizer: LLTokenizer, grammar: Grammar) -> Verdict:
    """Compiles a grammar and finds the first mask."""
    before = _memory_bytes(1)
    try:
        _check(make_matcher(tokenizer, grammar), tokenizer)
    except GrammarError as error:
        return Verdict(str(error))
    return Verdict(None, max(_PAGE_BYTES, _memory_bytes(1) - before))


def _memory_bytes(column: int) -> int:
    """Of this process: 0, its address space; 1, what of it is resident."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * _PAGE_BYTES


if __name__ == "__main__":
    main()

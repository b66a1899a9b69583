"""Compiles a grammar's text to a matcher, and tries grammars in a process of their own.

    HTTP process --one socket pair per trial--> this process --fork--> child:
                                                compiles, sends verdicts, exits

No torch here. The kernel bounds a child's memory and time, and a child ends when the
other end of its socket is closed. A grammar that exhausts the memory, overflows the
stack or never finishes compiling does so in a child, which serves no other request.

JSON may have whitespace between its tokens, but only a bounded run of it. A model that
has begun to write blanks could otherwise continue until `max_tokens`.
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
# The conversion to Lark's form takes quadratic time: 0.7 s for this size.
MAX_GBNF_CHARS = 16 * 1024
MAX_MASK_S = 0.5  # seconds of a core for the mask at one position

# A lexer state takes 1 to 2 kB and is made when an output reaches it. A mask's time
# grows with the square of its items; a choice of 1,024 texts has fewer items than this
# limit. Errors go to clients, so they are not verbose.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000, step_max_items=10_000, verbose_errors=False
)

# The texts that llguidance takes for Lark's form. Its own pattern needs minutes for
# 100,000 empty lines.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)

# The library follows chains of rules by recursion in Rust, where an overflow ends the
# process. A chain in a text of the largest size takes a third of this.
STACK_BYTES = 64 * 2**20

_PAGE_BYTES = resource.getpagesize()


def compiling_threads(name: str, count: int) -> ThreadPoolExecutor:
    """Return a pool of threads that may call `make_matcher`."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    default_size = threading.stack_size(STACK_BYTES)
    # The barrier makes the pool start all of its threads while the size is in effect.
    all_started = threading.Barrier(count)
    for future in [pool.submit(all_started.wait) for _ in range(count)]:
        future.result()
    threading.stack_size(default_size)
    return pool


def vocabulary_of(tokenizer: Tokenizer, num_tokens: int | None = None) -> LLTokenizer:
    """Return the vocabulary that matchers need; takes a second for a large one.

    Args:
        num_tokens: the size of the model's logits; None: that of the tokenizer.
    """
    # An end token may lie in the model's padding, which the tokenizer does not have.
    end_ids = [end_id for end_id in tokenizer.eos_ids if end_id < tokenizer.vocab_size]
    num_tokens = num_tokens or tokenizer.vocab_size
    return LLTokenizer(
        tokenizer.to_json(), n_vocab=num_tokens, eos_token=end_ids or None
    )


def make_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return a matcher at the beginning of `grammar`.

    The calling thread needs a stack of STACK_BYTES. Other threads run while it works.

    Raises:
        GrammarError: the grammar has a mistake or is too large.
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
    # The converters raise several kinds of exceptions, all about the text.
    except Exception as error:
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
            # Lark takes every character as JSON writes it, except DEL.
            quoted = " | ".join(text.replace("\x7f", r"\u007f") for text in texts)
            return LLMatcher.grammar_from_lark(f"start: {quoted}")
        case "grammar" if _LARK.search(grammar.text):
            return LLMatcher.grammar_from_lark(with_checked_schemas(grammar.text))
        case "grammar" if len(grammar.text) > MAX_GBNF_CHARS:
            raise GrammarError(
                f"it has no rule `start:`, so it is GBNF, and has {len(grammar.text)} "
                f"characters, at most {MAX_GBNF_CHARS}"
            )
        case "grammar":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))


_BLANKS = r"/[ \n\r\t]{0,4}/"
_THOUGHTS = {
    "": "",
    "open": "thoughts ",
    "perhaps": f'{_BLANKS} ("<think>" thoughts)? ',
}
# gpt-oss: tags are tokens, and a call's recipient comes before or after its channel.
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
    """Allow reasoning before a grammar's answer, and calls instead of the answer.

    Args:
        source: the grammar of the answer, as llguidance reads it.
        grammar: which reasoning and which calls are allowed.
    """
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
        lark = (
            f"start: {_THOUGHTS[grammar.reasoning]}said\nsaid: @answer{calls}\n"
            "thoughts: until_end /[ \\n\\r\\t]{0,8}/\n"
            'until_end[suffix="</think>"]: /(.|\\n)*/'
        )
    return json.dumps(
        {"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]}
    )


def _check(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Compute the first mask of a matcher.

    Raises:
        GrammarError: no token can be drawn, or the mask takes too long.
    """
    start_s = time.thread_time()
    first_mask = int.from_bytes(matcher.compute_bitmask(), "little")
    seconds = time.thread_time() - start_s
    if matcher.is_error():
        reason = matcher.get_error().lower()
        is_too_complex = "too many" in reason or "too complex" in reason
        raise GrammarError(
            TOO_COMPLEX if is_too_complex else "no text matches it; correct it"
        )
    if seconds > MAX_MASK_S:
        raise GrammarError(
            f"it is too ambiguous: finding its possible first tokens takes "
            f"{seconds:.2f} s, at most {MAX_MASK_S:g} s"
        )
    if first_mask == 1 << tokenizer.eos_token:
        raise GrammarError("no text but the empty one matches it")


def _one_line(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# -- The process that tries grammars -------------------------------------------------


class Try(msgspec.Struct, frozen=True):
    """The only message to a child. All messages are lines of JSON.

    The child answers with an empty object when it begins, then with one Verdict for
    each grammar.

    Attributes:
        memory_bytes: memory that the child may take beyond what it starts with.
        cpu_s: CPU seconds after which the kernel ends the child.
        limit_s: seconds after which the kernel ends the child.
    """

    grammars: list[Grammar]
    memory_bytes: int
    cpu_s: float
    limit_s: float


class Verdict(msgspec.Struct, frozen=True):
    """The result of a trial.

    Attributes:
        mistake: why the grammar cannot be used; None: it can.
        nbytes: the memory of the compiled grammar.
    """

    mistake: str | None
    nbytes: int = 0


def line_of(message: Try | Verdict) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def main() -> None:
    """Serve a socket until its other end is closed.

    Arguments: the socket's file descriptor, and the folder of the model whose
    vocabulary the grammars are tried with.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    tokenizer = vocabulary_of(Tokenizer(sys.argv[2], NO_TEMPLATE))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A first trial loads what all grammars need, so that children inherit it.
    judge(tokenizer, Grammar("json_object"))
    gc.freeze()
    control.send(b"!")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        # If the fork fails, the closed socket reports it.
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                control.close()
                _run_trial(socket.socket(fileno=descriptors[0]), tokenizer)
        os.close(descriptors[0])


def _run_trial(connection: socket.socket, tokenizer: LLTokenizer) -> NoReturn:
    """Run a trial in a child, which exits at its end."""
    try:
        trial = msgspec.json.decode(connection.makefile("rb").readline(), type=Try)
        signal.setitimer(signal.ITIMER_PROF, trial.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, trial.limit_s)
        # Rust's messages about panics and exhausted memory do not belong in the log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        max_bytes = _memory_bytes(0) + STACK_BYTES + trial.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        threading.stack_size(STACK_BYTES)
        threading.Thread(
            target=_judge_all, args=(connection, tokenizer, trial.grammars)
        ).start()
        # The server closes the socket when it has all verdicts, or needs none any more.
        connection.recv(1)
    finally:
        os._exit(0)


def _judge_all(
    connection: socket.socket, tokenizer: LLTokenizer, grammars: list[Grammar]
) -> None:
    try:
        connection.sendall(b"{}\n")
        for grammar in grammars:
            connection.sendall(line_of(judge(tokenizer, grammar)))
    except BaseException:  # Rust's panics do not derive from Exception
        os._exit(1)


def judge(tokenizer: LLTokenizer, grammar: Grammar) -> Verdict:
    """Compile a grammar and compute its first mask."""
    bytes_before = _memory_bytes(1)
    try:
        _check(make_matcher(tokenizer, grammar), tokenizer)
    except GrammarError as error:
        return Verdict(str(error))
    return Verdict(None, max(_PAGE_BYTES, _memory_bytes(1) - bytes_before))


def _memory_bytes(column: int) -> int:
    """Return this process's memory: its address space (column 0) or RSS (1)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * _PAGE_BYTES


if __name__ == "__main__":
    main()

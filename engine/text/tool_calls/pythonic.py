"""Llama 4 and others: an answer with calls consists only of a list of Python calls.

[f(a=1), g()]
"""

import re

from engine.text.tool_arguments import python_arguments_to_json
from engine.text.tool_calls.answer_reader import Reader
from engine.text.tool_calls.format import NAME, ToolCallFormat
from engine.text.tool_calls.json_calls import BracketScanner

_START = "<|python_start|>"
_END = "<|python_end|>"
_HEAD = re.compile(rf"[\s,]*{NAME}\(")


class PythonicFormat(ToolCallFormat):
    name = "pythonic"
    template_pattern = r"func_name1\("
    answer_starts = (_START, "[{}(")
    openings = (_START + "[{}(",)
    start_tags = (_START,)
    requires_offered_name = True

    def read(self) -> Reader[None]:
        """Read a list of Python calls at the start. All later text is content."""
        answer = self.answer
        scanner = BracketScanner(answer, quotes="\"'", opening="([{", closing=")]}")
        yield from answer.match_tag(_START)
        is_list = yield from answer.match_tag("[")
        while is_list and (name := (yield from answer.read_name(_HEAD, "("))):
            start = len(answer.held)
            scanner.depth = 1
            yield from scanner.read_until((0,), answer.held.append)
            arguments = python_arguments_to_json("".join(answer.held[start:]))
            if arguments is None or not answer.begin_call(name):
                break
            answer.add_arguments(arguments)
            answer.end_call()
            if (yield from answer.skip_tag("]")):
                yield from answer.skip_tag(_END)
                yield from answer.peek()
                break
        yield from answer.read_rest_as_content()

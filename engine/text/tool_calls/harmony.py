"""gpt-oss: calls in the form that engine/text/harmony.py writes.

START name MESSAGE arguments END
"""

from engine.text.harmony_tags import END, MESSAGE, START
from engine.text.tool_calls.answer_reader import Reader
from engine.text.tool_calls.format import ToolCallFormat


class HarmonyFormat(ToolCallFormat):
    name = "harmony"
    answer_starts = (" to=functions.{}",)

    def read(self) -> Reader[None]:
        """Read calls between tags. The text around the calls is content."""
        answer = self.answer
        is_call = False
        while True:
            text, tag, answer.text = answer.text.partition(END if is_call else START)
            if is_call:
                answer.add_arguments(text)
            else:
                answer.parsed.content += text
            if not tag:
                answer.text = yield
                continue
            is_call = not is_call
            if is_call:
                name = yield from answer.read_through(MESSAGE)
                answer.begin_call(name[:-1])
            else:
                answer.end_call()

"""Shows a growing Markdown text in the terminal.

Complete blocks, such as paragraphs and lists, are printed once. Only the last block is
drawn again while it grows. If that block is taller than the terminal, only its end is
drawn. So even a long answer neither flickers nor is printed twice.
"""

import time
from types import TracebackType

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

_REFRESHES_PER_S = 12
_parser = MarkdownIt("commonmark").enable("table")


def end_of_complete_blocks(text: str) -> int:
    """Return the number of characters before the last block of a Markdown text.

    The result is 0 if the text has only one block.
    """
    blocks = [
        token.map for token in _parser.parse(text) if token.level == 0 and token.map
    ]
    starts = sorted({first_line for first_line, _ in blocks})
    if len(starts) < 2:
        return 0
    lines = text.splitlines(keepends=True)
    return sum(len(line) for line in lines[: starts[-1]])


class _Tail:
    """The last lines of a Markdown block, as many as fit into the terminal."""

    def __init__(self, text: str) -> None:
        self._markdown = Markdown(text)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        lines = console.render_lines(self._markdown, options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


class AnswerView:
    """Shows one answer while it arrives. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_printed = 0  # printed characters of the content
        self._num_reasoning = 0  # printed characters of the reasoning
        self._content = ""
        self._drawn_at = float("-inf")
        self._pending: tuple[str, str] | None = None  # latest update, if not drawn
        self._live = Live(
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            vertical_overflow="crop",
        )

    def __enter__(self) -> "AnswerView":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pending is not None:
            self._draw(*self._pending)
        self._live.update(Text(""))
        self._live.stop()
        rest = self._content[self._num_printed :]
        if rest.strip():
            self._console.print(Markdown(rest))

    def update(self, reasoning: str, content: str) -> None:
        """Show the reasoning and the content that have arrived so far.

        Parsing the text takes longer than a fast model needs for a token. Therefore the
        text is drawn at most _REFRESHES_PER_S times per second. At the end of the
        `with` block, the latest text is drawn in any case.
        """
        now = time.monotonic()
        if now - self._drawn_at < 1 / _REFRESHES_PER_S:
            self._pending = (reasoning, content)
            return
        self._drawn_at = now
        self._pending = None
        self._draw(reasoning, content)

    def _draw(self, reasoning: str, content: str) -> None:
        if len(reasoning) > self._num_reasoning:
            self._show_reasoning(reasoning, is_complete=bool(content))
        if content == self._content:
            return
        self._content = content
        tail = content[self._num_printed :]
        end = end_of_complete_blocks(tail)
        if end:
            self._console.print(Markdown(tail[:end]))
            self._console.print()
            self._num_printed += end
            tail = tail[end:]
        self._live.update(_Tail(tail))

    def _show_reasoning(self, reasoning: str, *, is_complete: bool) -> None:
        """Print the complete new lines of the reasoning, and draw an incomplete one.

        Args:
            is_complete: no more reasoning follows, so that its last line is complete.
        """
        end = len(reasoning) if is_complete else reasoning.rfind("\n") + 1
        new_lines = reasoning[self._num_reasoning : end].strip("\n")
        if new_lines:
            self._console.print(Text(new_lines, style="dim italic"))
            self._num_reasoning = end
        if not is_complete:
            last_line = reasoning[self._num_reasoning :]
            self._live.update(Text(last_line, style="dim italic"))

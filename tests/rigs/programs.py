"""Programs started as a user starts them: in a directory, by a command, with their
output read.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
BATON = (sys.executable, "-m", "deploy.cli")


def environment() -> dict[str, str]:
    """That of a user who has this checkout's Baton installed and has set no option."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("BATON_")
    }
    kept.pop("PYTHONSAFEPATH", None)
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass
class Program:
    """A running program and the lines that it has written so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> str:
        """The next line that contains `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError("\n".join(self.lines[-20:]))

    def end(self) -> int:
        """Reads the rest of its output; returns its exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Ends it by SIGTERM, in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.end() == 0, "\n".join(self.lines[-20:])


@contextmanager
def launched(argv: Sequence[str], cwd: Path = ROOT) -> Iterator[Program]:
    """A program that is killed afterwards, whatever happens in between."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def children(pid: int) -> dict[int, str]:
    """The command lines of a process's children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    pids = [
        int(word) for task in tasks for word in (task / "children").read_text().split()
    ]
    commands = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in pids}
    return {
        each: command.decode().replace("\0", " ") for each, command in commands.items()
    }


def child(pid: int, *words: str) -> int:
    """The only child of a process whose command line has these words."""
    (found,) = (
        each
        for each, command in children(pid).items()
        if all(f" {word} " in f" {command} " for word in words)
    )
    return found

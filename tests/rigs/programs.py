"""Programs that tests start from the command line, as a user does.

Tests read the programs' output.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
BATON = (sys.executable, "-m", "deploy.cli")


def environment() -> dict[str, str]:
    """Return environment variables with which this checkout is importable and no option
    of Baton is set.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("BATON_")
    }
    variables.pop("PYTHONSAFEPATH", None)
    return {**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass
class Program:
    """A running program and the lines that it has written so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> str:
        """Read output up to and including a line that contains `text`. Return that
        line.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError("\n".join(self.lines[-20:]))

    def end(self) -> int:
        """Read the rest of the output and return the exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(TIMEOUT_S)

    def stop(self) -> None:
        """End the program by SIGTERM. Its exit status must be 0."""
        self.process.send_signal(signal.SIGTERM)
        assert self.end() == 0, "\n".join(self.lines[-20:])


@contextmanager
def launched(
    argv: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """Start a program, and kill it when the block ends.

    Args:
        env: Environment of the program; None: `environment()`.
    """
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment() if env is None else env,
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
    """Return the command lines of a process's children, by pid."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    pids = [
        int(word) for task in tasks for word in (task / "children").read_text().split()
    ]
    commands = {
        child_pid: Path(f"/proc/{child_pid}/cmdline").read_bytes() for child_pid in pids
    }
    return {
        child_pid: command.decode().replace("\0", " ")
        for child_pid, command in commands.items()
    }


def child_pid(pid: int, *words: str) -> int:
    """Return the pid of the only child with these words in its command line."""
    (child_pid,) = (
        child_pid
        for child_pid, command in children(pid).items()
        if all(f" {word} " in f" {command} " for word in words)
    )
    return child_pid

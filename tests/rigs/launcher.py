"""`baton up` with fake programs, for tests of how it starts, restarts and ends them."""

import json
import os
import re
import select
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "deploy" / "fake_program.py"
DEADLINE_S = 60.0

LAUNCH = """
import os, sys
from deploy.commands import PROGRAMS
from deploy import local
from deploy.cluster import supervisor
from protocol.settings.settings import UpSettings, load
modes, argv = sys.argv[1].split(","), sys.argv[2:]
for kind, mode in zip(PROGRAMS, modes, strict=True):
    PROGRAMS[kind] = (sys.executable, {fake!r}, kind, mode)
supervisor.NOTE_INTERVAL_S = 0.2
sys.exit(local.up(load(UpSettings, argv), only_warm="ONLY_WARM" in os.environ))
"""


class Launcher:
    """A running `baton up`, and the lines that it has printed."""

    def __init__(self, modes: str, *argv: str) -> None:
        program = textwrap.dedent(LAUNCH).format(fake=str(FAKE))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, modes, "--port=0", *argv], cwd=ROOT,
            env={**environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []

    def until(self, start: str) -> str:
        """Reads output up to the first line that begins with `start`. Returns that
        line.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return self.lines[-1]
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(DEADLINE_S)

    def endpoint(self) -> str:
        return self.until("ready ").split()[1].removesuffix("/")


@contextmanager
def launched(modes: str, *argv: str) -> Iterator[Launcher]:
    launcher = Launcher(modes, *argv)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.process.wait()
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def has_ended(pid: int) -> bool:
    """Waits for the end of a process. Returns whether it ended within DEADLINE_S.

    The process need not be a child of the calling process.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], DEADLINE_S)[0])
    finally:
        os.close(fd)


def query_processes(endpoint: str) -> dict[str, Any]:
    """Returns, by URL, the reports of the proxy and of every server about their own
    processes: pid, arguments and environment.
    """
    proxy = get(endpoint)
    urls = [
        arg.split("=", 1)[1]
        for arg in proxy["argv"]
        if re.match("--(prefill|decode)=", arg)
    ]
    return {endpoint: proxy, **{url: get(url) for url in urls}}

"""The command `baton`: one subcommand per program."""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial

from protocol.process.logging import open_standard_streams

USAGE = """usage: baton <command> [options]

  up       a local cluster: prefill servers, decode servers and the proxy on this machine
  warm     compile and keep what `up` with the same options needs, then end
  prefill  a prefill server
  decode   a decode server
  proxy    one endpoint in front of prefill and decode servers
  plan     what would move between two KV geometries, how, and why
  doctor   how KV would move between servers of this machine, how fast, and what is missing

baton <command> --help explains every option; each may also be given as BATON_* variable or in
the file named by --config. baton --version prints the version."""


def _run(module: str, argv: Sequence[str], function: str = "main") -> int:
    """A program: its main(argv) returns the exit status. What takes time to import is imported
    here: a Ctrl-C until then is answered by `main`."""
    return getattr(importlib.import_module(module), function)(argv) or 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "up": partial(_run, "deploy.local"),
    "warm": partial(_run, "deploy.local", function="warm"),
    "prefill": partial(_run, "prefill_server.__main__"),
    "decode": partial(_run, "decode_server.__main__"),
    "proxy": partial(_run, "proxy.__main__"),
    "plan": partial(_run, "deploy.plan"),
    "doctor": partial(_run, "deploy.doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns its exit status; 2 for a wrong command line."""
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case [] | ["-h" | "--help", *_]:
            print(USAGE)
            return 0 if words else 2
        case ["--version", *_]:
            from protocol.version import VERSION

            print(f"baton {VERSION}")
            return 0
        case [name, *rest] if name in COMMANDS:
            try:
                return COMMANDS[name](rest)
            except KeyboardInterrupt:  # before the program listens to signals itself
                return 130
    from protocol.near_names import suggestion

    print(f"baton: unknown command {words[0]}{suggestion(words[0], COMMANDS)}", file=sys.stderr)
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

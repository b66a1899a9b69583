"""The command `baton`: one subcommand per program."""

import os
import sys

# `python -m` puts the working directory first in sys.path. A model.py there would hide
# Baton's own package `model`.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

from collections.abc import Sequence
from pkgutil import resolve_name

from protocol.process.logging import open_standard_streams

USAGE = """usage: baton <command> [options]

  up       a local cluster on this machine: prefill and decode servers, and the proxy
  warm     download and compile what `up` needs with the same options, then exit
  prefill  a prefill server
  decode   a decode server
  proxy    one endpoint in front of prefill and decode servers
  plan     which transfer moves KV between two geometries, and why
  models   the supported architectures, or whether a model is supported
  doctor   how fast KV moves between servers on this machine, and what needs fixing

baton <command> --help explains every option. An option may also be given as a BATON_*
variable, or in the file named by --config. baton --version prints the version."""


# The module and the function of each program. `main` imports a program only when its
# subcommand is called, and so can handle Ctrl-C during the import.
COMMANDS = {
    "up": "deploy.local:main",
    "warm": "deploy.local:warm",
    "prefill": "prefill_server.__main__:main",
    "decode": "decode_server.__main__:main",
    "proxy": "proxy.__main__:main",
    "plan": "deploy.plan:main",
    "models": "deploy.models:main",
    "doctor": "deploy.doctor:main",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns its exit status, or 2 for a wrong command line."""
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
                return resolve_name(COMMANDS[name])(rest) or 0
            except KeyboardInterrupt:  # Ctrl-C came before the program handled signals
                return 130
    from protocol.near_names import suggestion

    print(
        f"baton: unknown command {words[0]}{suggestion(words[0], COMMANDS)}",
        file=sys.stderr,
    )
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

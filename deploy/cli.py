"""The command `baton`: one subcommand per program."""

import os
import sys

# `python -m` puts the working directory first in sys.path. The directory is removed,
# because a model.py in it would hide Baton's own package `model`.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import NamedTuple

from protocol.process.logging import open_standard_streams


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        summary: One line for `baton --help`.
        program: The module and the function that run the subcommand. `main` imports the
            module only when the subcommand is called, so it can handle Ctrl-C during
            the import.
        options: The module and the name of the subcommand's settings class, or of a
            function that returns its argparse parser. `baton completion` reads them.
    """

    summary: str
    program: str
    options: str


_SETTINGS = "protocol.settings.settings"
# The subcommands, by the headings of `baton --help`.
GROUPS = {
    "serve a model on this machine": {
        "serve": Command(
            "complete servers, each for prompts and answers, behind one endpoint",
            program="deploy.local:serve",
            options=f"{_SETTINGS}:ServeSettings",
        ),
        "up": Command(
            "a local cluster: prefill servers, decode servers and the proxy",
            program="deploy.local:main",
            options=f"{_SETTINGS}:UpSettings",
        ),
        "scale": Command(
            "change the number of servers of a running `up`",
            program="deploy.scale:main",
            options="deploy.scale:ScaleSettings",
        ),
        "warm": Command(
            "download and compile what `up` needs with the same options, then exit",
            program="deploy.local:warm",
            options=f"{_SETTINGS}:UpSettings",
        ),
    },
    "the parts of a cluster": {
        "prefill": Command(
            "a prefill server",
            program="prefill_server.__main__:main",
            options=f"{_SETTINGS}:PrefillSettings",
        ),
        "decode": Command(
            "a decode server",
            program="decode_server.__main__:main",
            options=f"{_SETTINGS}:DecodeSettings",
        ),
        "proxy": Command(
            "one endpoint in front of prefill and decode servers",
            program="proxy.__main__:main",
            options=f"{_SETTINGS}:ProxySettings",
        ),
        "kv": Command(
            "the KV store of a host, whose KV outlives the servers",
            program="engine.store.__main__:main",
            options=f"{_SETTINGS}:StoreSettings",
        ),
    },
    "use and check an endpoint": {
        "chat": Command(
            "a conversation in the terminal, or the answer to a piped question",
            program="deploy.chat.program:main",
            options="deploy.chat.program:ChatSettings",
        ),
    },
    "look into models and hosts": {
        "models": Command(
            "the supported architectures, or whether a model is supported",
            program="deploy.models:main",
            options="deploy.models:ModelsSettings",
        ),
        "plan": Command(
            "which transfer moves KV between two geometries, and why",
            program="deploy.plan:main",
            options="deploy.plan:PlanSettings",
        ),
        "doctor": Command(
            "check running servers, or how fast KV moves on this machine",
            program="deploy.doctor:main",
            options="deploy.doctor:DoctorSettings",
        ),
        "health": Command(
            "whether the process at BATON_HOST and BATON_PORT is healthy",
            program="deploy.healthcheck:main",
            options="deploy.healthcheck:make_parser",
        ),
        "bench": Command(
            "load on endpoints, with a report; compare two; advise a deployment",
            program="benchmarks.bench.cli:main",
            options="benchmarks.bench.cli:make_parser",
        ),
    },
    "set up": {
        "files": Command(
            "write the container files, manifests, dashboards, alerts and examples",
            program="deploy.files:main",
            options="deploy.files:FilesSettings",
        ),
        "completion": Command(
            "a script that completes commands and options in your shell",
            program="deploy.completion:main",
            options="deploy.completion:completion_parser",
        ),
    },
}
COMMANDS = {
    name: command for group in GROUPS.values() for name, command in group.items()
}


def usage() -> str:
    """Returns the text of `baton --help`."""
    lines = ["usage: baton COMMAND [options]"]
    for heading, commands in GROUPS.items():
        lines += ["", f"{heading}:"]
        lines += [
            f"  {name:<11} {command.summary}" for name, command in commands.items()
        ]
    lines += [
        "",
        "baton COMMAND --help explains the options. If these are only the common ones,",
        "--help=all explains all. Most commands also read options from BATON_*",
        "variables and the file named by --config. baton --version prints the version.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand, or prints the help or the version. Returns the exit status.

    The exit status is that of the subcommand; 2 if no known subcommand is given; 130
    if the subcommand does not handle Ctrl-C itself.
    """
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case [] | ["-h" | "--help", *_]:
            print(usage())
            return 0 if words else 2
        case ["--version", *_]:
            from protocol.version import VERSION

            print(f"baton {VERSION}")
            return 0
        case [name, *rest] if name in COMMANDS:
            try:
                return resolve_name(COMMANDS[name].program)(rest) or 0
            except KeyboardInterrupt:  # the program did not handle Ctrl-C
                return 130
    from protocol.settings.near_names import suggestion

    print(
        f"baton: unknown command {words[0]}{suggestion(words[0], COMMANDS)}",
        file=sys.stderr,
    )
    print(usage(), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

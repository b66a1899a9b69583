"""`python -m decode_server`, also `baton decode`."""

import sys
from collections.abc import Sequence

from decode_server.server import DecodeHooks
from engine.serve import run_server
from protocol.settings.settings import DecodeSettings, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode server until it is told to end; returns the exit status."""
    settings = parse(DecodeSettings, argv, prog="baton decode")
    return run_server(
        settings,
        role="decode",
        module="decode_server.connector",
        hooks=lambda secret: DecodeHooks(secret, settings.kv_load_failure_policy),
    )


if __name__ == "__main__":
    sys.exit(main())

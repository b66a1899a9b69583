"""`python -m decode_server`, also `baton decode`."""

import sys
from collections.abc import Sequence

from decode_server.server import DecodeHooks
from engine.serve import run_server
from protocol.settings.settings import DecodeSettings, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode server until it is told to end; returns the exit status."""
    settings = parse(DecodeSettings, argv, prog="baton decode")
    policy, is_of_machine = settings.kv_load_failure_policy, settings.cluster_secret is None
    return run_server(
        settings,
        role="decode",
        module="decode_server.connector",
        hooks=lambda secret: DecodeHooks(secret, policy, is_of_machine),
    )


if __name__ == "__main__":
    sys.exit(main())

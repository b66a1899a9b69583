"""`python -m decode_server`, also `baton decode`."""

import sys
from collections.abc import Sequence

from decode_server.server import serve
from protocol.settings.settings import DecodeSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode server until it is told to end; returns the exit status."""
    return serve(DecodeSettings, argv, prog="baton decode")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m prefill_server`, also `baton prefill`."""

import sys
from collections.abc import Sequence

from decode_server.server import serve
from protocol.settings.settings import PrefillSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill server until it is told to end; returns the exit status."""
    return serve(PrefillSettings, argv, prog="baton prefill")


if __name__ == "__main__":
    sys.exit(main())

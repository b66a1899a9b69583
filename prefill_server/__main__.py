"""`python -m prefill_server`, also `baton prefill`."""

import sys
from collections.abc import Sequence

from engine.serve import run_server
from prefill_server.server import PrefillHooks
from protocol.settings.settings import PrefillSettings, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill server until it is told to end; returns the exit status."""
    settings = parse(PrefillSettings, argv, prog="baton prefill")
    return run_server(
        settings, role="prefill", module="prefill_server.connector", hooks=PrefillHooks
    )


if __name__ == "__main__":
    sys.exit(main())

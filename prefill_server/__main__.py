"""`python -m prefill_server`, also `baton prefill`."""

import sys
from functools import partial

from decode_server.server import serve
from protocol.settings.settings import PrefillSettings

main = partial(serve, PrefillSettings, prog="baton prefill")

if __name__ == "__main__":
    sys.exit(main())

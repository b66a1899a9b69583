"""`python -m decode_server`, also `baton decode`."""

import sys
from functools import partial

from decode_server.server import serve
from protocol.settings.settings import DecodeSettings

main = partial(serve, DecodeSettings, prog="baton decode")

if __name__ == "__main__":
    sys.exit(main())

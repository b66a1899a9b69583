"""The program of `python -m prefill_server` and `baton prefill`."""

import os
import sys

# `python -m` puts the working directory first in sys.path. A model.py in that directory
# would hide Baton's own package `model`.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

from functools import partial

from engine.http.legs.either_leg import serve
from protocol.settings.settings import PrefillSettings

main = partial(serve, PrefillSettings, prog="baton prefill")

if __name__ == "__main__":
    sys.exit(main())

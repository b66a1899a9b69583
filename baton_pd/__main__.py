"""The program `baton`, which is also `python -m baton_pd`."""

import os
import sys

# `python -m` puts the working directory first in sys.path. A json.py in that directory
# would hide Python's own module.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

from importlib import import_module

from baton_pd import add_to_path


def main() -> int:
    """Runs the command line of this process. Returns the exit status."""
    add_to_path()
    status: int = import_module("deploy.cli").main()
    return status


if __name__ == "__main__":
    sys.exit(main())

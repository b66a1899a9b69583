"""Baton as it is installed: one package, with the packages of the repository inside.

In a checkout, Baton's packages (`protocol`, `engine`, `proxy` and so on) are folders of
the repository. An installed Baton has them inside `baton_pd`, so that it adds only one
top-level package to an environment. In both cases, the packages import each other as
top-level packages. `add_to_path` makes that possible in the processes of Baton.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# The folder that has Baton's packages: this package if installed, else the repository.
ROOT = _HERE if (_HERE / "protocol").is_dir() else _HERE.parent


def add_to_path() -> None:
    """Makes Baton's packages importable, with precedence over others of equal name."""
    root = str(ROOT)
    sys.path[:] = [root, *(path for path in sys.path if path != root)]

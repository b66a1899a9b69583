"""The program of `python -m engine.store` and `baton kv`."""

import sys

from engine.store.program import main

if __name__ == "__main__":
    sys.exit(main())

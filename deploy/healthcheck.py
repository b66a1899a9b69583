"""Asks this container's process for /health: exit status 0 when it answers 200.

python -m deploy.healthcheck        # at BATON_PORT of this machine
"""

import os
import sys
import urllib.request

TIMEOUT_S = 2.0


def main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('BATON_PORT', '8000')}/health"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Asks this container's process for /health: exit status 0 when it answers 200.

python -m deploy.healthcheck        # at BATON_HOST and BATON_PORT, of this machine
"""

import os
import sys

from deploy.local_http import get, url_host

TIMEOUT_S = 2.0


def main() -> int:
    host = url_host(os.environ.get("BATON_HOST", "127.0.0.1"))
    url = f"http://{host}:{os.environ.get('BATON_PORT', '8000')}/health"
    try:
        with get(url, TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""The client that end-to-end tests ask with: unlike httpx's own functions it prepares
no TLS.

That takes 34 ms of a core for each client, and httpx.get makes one for each request.
"""

import httpx

# No connection is kept: servers are killed and stopped between requests.
http = httpx.Client(
    verify=False,
    trust_env=False,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)

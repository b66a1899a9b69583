"""The HTTP client of end-to-end tests. Unlike httpx's functions, it prepares no TLS.

That preparation takes 34 ms of a core for each client, and httpx.get creates a client
for each request.
"""

import httpx

# No connection is reused, because servers are killed and stopped between requests.
http = httpx.Client(
    verify=False,
    trust_env=False,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)

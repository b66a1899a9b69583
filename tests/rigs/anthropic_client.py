"""Anthropic's client for a server of tests/rigs/http_server.py."""

from typing import Any

from tests.rigs.http_server import Server


def client_of(server: Server, **credentials: Any) -> Any:
    """Return a client that loads no TLS certificates, because loading takes a while.

    This function imports `anthropic` and `httpx2`. At the top of a file, their import
    would take 2 s in every process that collects tests.
    """
    import anthropic
    import httpx2

    return anthropic.AsyncAnthropic(
        base_url=str(server.http.base_url),
        max_retries=0,
        http_client=httpx2.AsyncClient(verify=False, trust_env=False),
        **(credentials or {"api_key": "-"}),
    )
